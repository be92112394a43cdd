"""A device as the pool knows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Device", "DeviceKind"]


class DeviceKind(StrEnum):
    """What computes."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device.

    Args:
        uuid: Its identity, the same in every process (`"GPU-…"`, `"CPU-0"`).
        kind: What computes.
        ordinal: Its index among the devices that this process sees; what ONNX Runtime is told.
        name: The model's name, as the vendor spells it.
        memory_bytes_total: Its memory; for the CPU stand-in the limit that was chosen.
        memory_bytes_limit: What runs may hold of it: the watermark's share.
        memory_bytes_used: What is in use now by anyone, or `None`.
    """

    uuid: str
    kind: DeviceKind
    ordinal: int
    name: str
    memory_bytes_total: int
    memory_bytes_limit: int
    memory_bytes_used: int | None = None
