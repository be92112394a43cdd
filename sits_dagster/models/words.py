"""Names out of files, as messages may hold them."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["cut", "listed", "one_line", "shown"]

NAME_CHARACTERS_MAX = 80
NAMES_MAX = 8
LINE_CHARACTERS_MAX = 500


def cut(name: str) -> str:
    """Return a name of at most 80 characters; a longer one ends in `…`."""
    return name if len(name) <= NAME_CHARACTERS_MAX else f"{name[: NAME_CHARACTERS_MAX - 1]}…"


def shown(name: str) -> str:
    """Return a name in quotes, cut, with everything written out that a terminal would not print.

    Example:
        >>> shown("x" * 1000) == "'" + "x" * 79 + "…'"
        True
    """
    return repr(cut(name))


def listed(names: Iterable[str]) -> str:
    """Return the first eight names as `shown` does, and `…` for the others."""
    found: list[str] = []
    for name in names:
        if len(found) == NAMES_MAX:
            return f"{', '.join(found)}, …"
        found.append(shown(name))
    return ", ".join(found)


def one_line(error: BaseException) -> str:
    """Return what a library says, on one line of at most 500 characters: it may quote a file."""
    # The first part alone is split: a library may quote megabytes.
    text = " ".join(str(error)[: 2 * LINE_CHARACTERS_MAX].split())
    return text if len(text) <= LINE_CHARACTERS_MAX else f"{text[: LINE_CHARACTERS_MAX - 1]}…"
