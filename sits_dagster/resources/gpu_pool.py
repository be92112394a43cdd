"""The pool of devices as a user sets it, and the lease of one of them."""

import math
import os
import platform
import socket
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import dagster as dg
from pydantic import ConfigDict, Field

from sits_dagster.adapters.leases import lease_device
from sits_dagster.adapters.nvml import NvmlReading, read_devices
from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.errors import ConfigError

__all__ = ["GpuPoolResource", "usable_cores"]

GIB = 1 << 30
CUDA_DEVICE_ORDER = "CUDA_DEVICE_ORDER"
BUS_ORDER = "PCI_BUS_ID"


def usable_cores() -> int:
    """Return how many cores this process may use, >= 1."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


class GpuPoolResource(dg.ConfigurableResource[None]):
    """The devices of the host on which a run executes, and how they are shared."""

    model_config = ConfigDict(extra="forbid")  # a misspelt setting is an error

    provider: Literal["auto", "nvml", "cpu"] = Field(
        default="auto",
        description=(
            "Where the devices come from. `nvml`: NVIDIA's GPUs. `cpu`: one stand-in that computes on the "
            "CPU within a memory limit. `auto`: the GPUs if the driver has any, else the stand-in."
        ),
    )
    cpu_memory_bytes: int = Field(
        default=2 * GIB,
        gt=0,
        description=(
            "Memory of the CPU stand-in, in bytes; times the watermark it is the limit of ONNX Runtime's CPU "
            "arena. The arena is shared by the sessions of a process."
        ),
    )
    watermark: float = Field(
        default=0.85,
        gt=0,
        le=1,
        description=(
            "The share of a device's memory that runs may hold. What is left is for CUDA's contexts and "
            "libraries, which lie outside ONNX Runtime's limit."
        ),
    )
    slots_per_device: int = Field(
        default=1,
        ge=1,
        description="How many runs may hold a device at a time. The same for all who share `lease_folder`.",
    )
    threads: int = Field(
        default_factory=usable_cores,
        ge=1,
        description=(
            "CPU threads of one call of the model on the CPU stand-in. "
            "By default the cores that the run's process may use."
        ),
    )
    lease_seconds_max: float = Field(
        default=3600.0,
        ge=0,
        allow_inf_nan=False,
        description="How long a run waits for a free device before it fails and may be tried again.",
    )
    lease_folder: str = Field(
        default="",
        description=(
            "Folder of the files that are locked while a device is held, on a local disk. Containers that "
            "share a device must share it. By default `sits-leases-<uid>` in the folder for temporary files."
        ),
    )

    def devices(self) -> tuple[Device, ...]:
        """Return the devices of this host, one at least.

        With GPUs among them `CUDA_DEVICE_ORDER` is set for this process where it was not, so that CUDA
        counts as NVML does; that holds if CUDA has not been used before.

        Raises:
            ConfigError: The provider is `nvml` and there is no GPU, or CUDA is told to count otherwise.
        """
        if self.provider == "cpu":
            return (self._cpu_device(),)
        try:
            reading = read_devices(watermark=self.watermark, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
        except ConfigError:
            if self.provider == "nvml":
                raise
            return (self._cpu_device(),)
        self._log(reading)
        if reading.devices:
            _count_by_bus()
            return tuple(self._share(device) for device in reading.devices)
        if self.provider == "auto":
            return (self._cpu_device(),)
        msg = " ".join(["There is no GPU that could be used.", *reading.notes])
        raise ConfigError(msg, hint="give the run a GPU, or choose `auto` or `cpu` as the pool's provider.")

    def lease(
        self, *, owner: str, should_stop: Callable[[], bool], on_wait: Callable[[str], None]
    ) -> AbstractContextManager[Device]:
        """Return a context that holds one device; its memory in use is as read before the wait.

        Args:
            owner: Who asks, for the messages of the others.
            should_stop: Asked while waiting; true ends the wait.
            on_wait: Called once with a sentence if there is a wait, when it begins.

        Raises:
            LeaseCancelled: On entering: `should_stop` was true.
            TransientError: On entering: no device became free within `lease_seconds_max`.
            ConfigError: There is no device, or the folder cannot hold locks.
        """
        return lease_device(
            self.devices(),
            folder=self.lease_folder or _default_folder(),
            slots_per_device=self.slots_per_device,
            owner=owner,
            wait_seconds_max=self.lease_seconds_max,
            should_stop=should_stop,
            on_wait=on_wait,
        )

    def _cpu_device(self) -> Device:
        return Device(
            uuid=f"CPU-{socket.gethostname()}",
            kind=DeviceKind.CPU,
            ordinal=0,
            name=_cpu_name(),
            memory_bytes_total=self.cpu_memory_bytes,
            memory_bytes_limit=math.floor(self.watermark * self.cpu_memory_bytes) // self.slots_per_device,
        )

    def _share(self, device: Device) -> Device:
        """Return the device with the memory of one slot: together they stay below the watermark."""
        return replace(device, memory_bytes_limit=device.memory_bytes_limit // self.slots_per_device)

    def _log(self, reading: NvmlReading) -> None:
        for note in reading.notes:
            dg.get_dagster_logger().warning(note)


def _count_by_bus() -> None:
    order = os.environ.setdefault(CUDA_DEVICE_ORDER, BUS_ORDER)
    if order != BUS_ORDER:
        msg = f"{CUDA_DEVICE_ORDER} is {order!r}: CUDA would count the GPUs in another order than the leases."
        raise ConfigError(msg, hint=f"unset it, or set it to {BUS_ORDER}.")


def _default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"sits-leases-{os.getuid()}"


def _cpu_name() -> str:
    """Return the CPU's name as the vendor spells it, or the architecture where nobody tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine() or "CPU"
