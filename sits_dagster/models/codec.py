"""Frozen values to JSON and back, by their annotations."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["dump", "load"]

Value = TypeVar("Value")


def dump(value: object) -> Any:  # noqa: ANN401 - JSON
    """Return a dataclass as JSON values."""
    return _adapter(type(value)).dump_python(value, mode="json")


def load(kind: type[Value], data: Any) -> Value:  # noqa: ANN401 - JSON
    """Return the value that `dump` wrote.

    Raises:
        ValueError: The data do not fit the class.
    """
    return _adapter(kind).validate_python(data)


@lru_cache(maxsize=16)
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - only those who write or read JSON pay for it

    return TypeAdapter(kind)
