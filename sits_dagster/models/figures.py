"""Numbers, as people read them."""

from __future__ import annotations

__all__ = ["si"]

KILO = 1000
THOUSAND_ROUNDED = 999.5
PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def si(value: float, unit: str = "") -> str:
    """Return a number, >= 0, with three digits, a decimal prefix and its unit.

    Example:
        >>> si(999_960, "B"), si(1234), si(1.5)
        ('1 MB', '1.23 k', '1.5')
    """
    scaled, power = float(value), 0
    while scaled >= THOUSAND_ROUNDED and power < len(PREFIXES) - 1:
        scaled, power = scaled / KILO, power + 1
    return f"{scaled:.3g} {PREFIXES[power]}{unit}".strip()
