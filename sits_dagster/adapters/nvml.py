"""NVIDIA's management library as the source of GPUs: the only importer of it."""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pynvml

from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.errors import ConfigError

__all__ = ["NvmlReading", "Visibility", "is_available", "read_devices", "resolve_visible"]

UUID_PREFIXES = ("GPU-", "MIG-")
# "Not available" is told as a number near 2^64; no device is near this.
MEMORY_BYTES_MAX = 1 << 50
UNKNOWN_TO_GPU = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
DRIVER_HINTS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "install NVIDIA's driver, give the container GPUs, or choose the CPU as provider."
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load NVIDIA's driver, or choose the CPU as provider.",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was updated under way: restart the host.",
    pynvml.NVML_ERROR_NO_PERMISSION: "let this user open /dev/nvidia*.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlReading:
    """The GPUs that answered, and what was wrong with the others.

    Args:
        devices: In the order of their ordinals.
        notes: A sentence for each GPU or setting that was left out.
    """

    devices: tuple[Device, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """Which GPUs CUDA shows to a process.

    Args:
        indexes: Indexes in the order of the PCI bus; the position in this tuple is the CUDA ordinal.
        note: Why there are fewer than the setting names, or `""`.
    """

    indexes: tuple[int, ...]
    note: str = ""


def is_available() -> bool:
    """Return whether the driver answers; it may still have no GPU."""
    try:
        with _session():
            return True
    except ConfigError:
        return False


def read_devices(*, watermark: float, visible: str | None) -> NvmlReading:
    """Return every GPU that answers and that CUDA shows to this process.

    Ordinals are those of CUDA with `CUDA_DEVICE_ORDER=PCI_BUS_ID`. A GPU that fails keeps its ordinal
    but is left out. One in MIG mode is left out too: CUDA shows an instance of it, not the whole.

    Args:
        watermark: The share of a GPU's memory that runs may hold, > 0 and <= 1.
        visible: The value of `CUDA_VISIBLE_DEVICES`; `None` where it is not set.

    Raises:
        ConfigError: The library is missing or the driver does not answer.
    """
    with _session():
        count = _count()
        uuids: list[str | None] = []
        faults: dict[int, str] = {}
        for index in range(count):
            try:
                uuids.append(_text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))))
            except (pynvml.NVMLError, UnicodeDecodeError) as error:
                uuids.append(None)
                faults[index] = f"GPU {index} does not answer and is left out: {error}."
        visibility = resolve_visible(visible, uuids)
        devices: list[Device] = []
        notes = [visibility.note] if visibility.note else []
        for ordinal, index in enumerate(visibility.indexes):
            uuid = uuids[index]
            if uuid is None:
                notes.append(faults[index])
                continue
            try:
                found = _read_device(index, uuid, ordinal=ordinal, watermark=watermark)
            except (pynvml.NVMLError, UnicodeDecodeError) as error:
                found = f"GPU {index} ({uuid}) does not answer and is left out: {error}."
            if isinstance(found, Device):
                devices.append(found)
            else:
                notes.append(found)
    return NvmlReading(devices=tuple(devices), notes=tuple(notes))


def resolve_visible(visible: str | None, uuids: Sequence[str | None]) -> Visibility:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` shows, read as CUDA reads it.

    The first entry decides whether all are indexes or all are UUIDs, of which unique beginnings will
    do. The first invalid entry ends the list; an entry named twice empties it.

    Args:
        visible: The setting; `None` shows every GPU.
        uuids: The UUID of each GPU in the order of the PCI bus; `None` where it does not answer.
    """
    if visible is None:
        return Visibility(indexes=tuple(range(len(uuids))))
    setting = f"CUDA_VISIBLE_DEVICES={visible!r}"
    by_uuid = visible.strip().startswith(UUID_PREFIXES)
    indexes: list[int] = []
    for entry in visible.split(","):
        index = _index_of_uuid(entry.strip(), uuids) if by_uuid else _index_of_number(entry, len(uuids))
        if index is None:
            if not indexes:
                return Visibility(indexes=(), note=f"{setting} hides every GPU.")
            note = f"{setting}: no GPU is meant by {entry!r}, so this entry and all after it are ignored."
            return Visibility(indexes=tuple(indexes), note=note)
        if index in indexes:
            return Visibility(indexes=(), note=f"{setting} names GPU {index} twice, which hides every GPU.")
        indexes.append(index)
    return Visibility(indexes=tuple(indexes))


def _index_of_number(entry: str, count: int) -> int | None:
    # CUDA reads the number that an entry begins with.
    match = re.match(r"\s*\+?(\d+)", entry)
    index = int(match[1]) if match else count
    return index if index < count else None


def _index_of_uuid(entry: str, uuids: Sequence[str | None]) -> int | None:
    if not entry.startswith(UUID_PREFIXES):
        return None
    found = [index for index, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _read_device(index: int, uuid: str, *, ordinal: int, watermark: float) -> Device | str:
    """Return the device, or a sentence that says why there is none."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    if _is_split(handle):
        return f"GPU {index} ({uuid}) is split into MIG instances and is left out."
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    total, used = int(memory.total), int(memory.used)
    if not 0 < total <= MEMORY_BYTES_MAX:
        return f"GPU {index} ({uuid}) reports {total} bytes of memory, which cannot be, and is left out."
    return Device(
        uuid=uuid,
        kind=DeviceKind.CUDA,
        ordinal=ordinal,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes_total=total,
        memory_bytes_limit=math.floor(watermark * total),
        memory_bytes_used=used if used <= total else None,
    )


def _is_split(handle: object) -> bool:
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError as error:
        if _code(error) in UNKNOWN_TO_GPU:
            return False
        raise
    return current == pynvml.NVML_DEVICE_MIG_ENABLE


def _code(error: pynvml.NVMLError) -> int:
    return getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _count() -> int:
    try:
        return pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        raise _config_error(error) from error


@contextmanager
def _session() -> Generator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _config_error(error) from error
    try:
        yield
    finally:
        # What was read is read: a library that will not close changes nothing about it.
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _config_error(error: pynvml.NVMLError) -> ConfigError:
    hint = DRIVER_HINTS.get(_code(error), "look at what nvidia-smi says on this host.")
    return ConfigError(f"NVIDIA's management library does not answer: {error}.", hint=hint)
