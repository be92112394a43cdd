"""Exclusive leases of devices among the processes of one host, held by the kernel.

A slot of a device is a file, and a lease is an exclusive lock on it: when the process ends, however it
ends, the kernel frees the slot. What the file says is for messages only.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from sits_dagster.devices.device import Device
from sits_dagster.errors import ConfigError, TransientError

__all__ = ["LeaseCancelled", "LeaseHolder", "lease_device"]

POLL_SECONDS = 0.2
RETRY_AFTER_SECONDS = 30.0
# A choice takes microseconds: a process that holds the guard for longer was stopped in the middle.
GUARD_SECONDS_MAX = 1.0
GUARD_POLL_SECONDS = 0.005
GUARD_FILE = "choice.lock"
HOLDER_BYTES_MAX = 4096
HOLDERS_SHOWN_MAX = 8

_held: set[int] = set()


class LeaseCancelled(Exception):  # noqa: N818 - a signal to stop, not a fault
    """The caller was told to stop while it waited for a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolder:
    """Who holds a slot.

    Args:
        owner: The name that the holder gave itself.
        pid: Its process, as numbered where it runs.
        since: When the lease began, ISO 8601 in UTC.
    """

    owner: str
    pid: int
    since: str

    def to_json(self) -> str:
        """Return the text that a slot's file holds."""
        return json.dumps({"owner": self.owner, "pid": self.pid, "since": self.since})

    @classmethod
    def from_json(cls, text: str) -> Self | None:
        """Return the holder, or `None` where the text is not one."""
        try:
            found = json.loads(text)
            return cls(owner=str(found["owner"]), pid=int(found["pid"]), since=str(found["since"]))
        except (ValueError, TypeError, KeyError):
            return None

    def __str__(self) -> str:
        return f"{self.owner} (pid {self.pid}) since {self.since}"


@contextmanager
def lease_device(
    devices: Sequence[Device],
    *,
    folder: str | Path,
    slots_per_device: int,
    owner: str,
    wait_seconds_max: float,
    should_stop: Callable[[], bool] = lambda: False,
    on_wait: Callable[[str], None] = lambda _message: None,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[Device]:
    """Hold one slot of one device while the `with` block runs.

    No other process or thread that names the same folder holds the slot meanwhile; it is free again
    when the block or the process ends, even by SIGKILL. The device with the fewest slots held is
    taken, the first of equals. Those who wait are served in no order.

    Args:
        devices: The devices to choose from.
        folder: Where the locks are: on a local disk, and the same for all who share the devices.
        slots_per_device: How many may hold a device together, >= 1; the same for all who share it.
        owner: Who asks, for the messages of the others.
        wait_seconds_max: How long to wait for a slot; 0 tries once.
        should_stop: Asked every `POLL_SECONDS` while waiting; true ends the wait.
        on_wait: Called once with a sentence if there is a wait, when it begins.
        clock: A monotonic clock in seconds.

    Raises:
        LeaseCancelled: `should_stop` was true.
        TransientError: No slot became free in time; the message names the holders.
        ConfigError: There is no device, or the folder cannot hold locks.
    """
    if not devices:
        msg = "There is no device to lease."
        raise ConfigError(msg, hint="give the run a GPU, or choose the CPU as the pool's provider.")
    if slots_per_device < 1:
        msg = f"slots_per_device is {slots_per_device}."
        raise ConfigError(msg, hint="a device needs one slot at least.")
    slots = _Slots(devices=tuple(devices), folder=Path(folder), count=slots_per_device)
    deadline = clock() + wait_seconds_max
    is_waiting = False
    while (taken := slots.take(owner)) is None:
        now = clock()
        if should_stop():
            msg = f"{owner} was told to stop while it waited for a device."
            raise LeaseCancelled(msg)
        if now >= deadline:
            msg = f"No device became free within {wait_seconds_max:g} seconds: {slots.describe()}."
            hint = "wait longer (lease_seconds_max), run fewer at a time, or end a holder."
            raise TransientError(msg, retry_after_seconds=RETRY_AFTER_SECONDS, hint=hint)
        if not is_waiting:
            is_waiting = True
            on_wait(f"Waiting up to {wait_seconds_max:g} seconds for a device: {slots.describe()}.")
        time.sleep(min(POLL_SECONDS, deadline - now))
    device, descriptor = taken
    try:
        yield device
    finally:
        _release(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slots:
    devices: tuple[Device, ...]
    folder: Path
    count: int

    def take(self, owner: str) -> tuple[Device, int] | None:
        """Lock a slot of the emptiest device; `None` where all are held."""
        with _lock_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with _guard(self.folder / GUARD_FILE) as is_alone:
                return self._choose(owner) if is_alone else None

    def describe(self) -> str:
        """Return who holds what, as far as the holders told."""
        holders: list[str] = []
        for device in self.devices:
            for slot in range(self.count):
                text = ""
                with suppress(OSError):
                    text = self._path(device, slot).read_bytes()[:HOLDER_BYTES_MAX].decode(errors="replace")
                holder = LeaseHolder.from_json(text)
                holders.append(f"{device.uuid} slot {slot}: {holder or 'held by an unknown process'}")
        more = len(holders) - HOLDERS_SHOWN_MAX
        return "; ".join([*holders[:HOLDERS_SHOWN_MAX], *([f"and {more} more"] if more > 0 else [])])

    def _choose(self, owner: str) -> tuple[Device, int] | None:
        # Under the guard nobody else tries, so that slots may be locked only to be counted.
        free: list[list[int]] = []
        taken: int | None = None
        try:
            for device in self.devices:
                free.append([])
                for slot in range(self.count):
                    descriptor = _try_lock(self._path(device, slot))
                    if descriptor is not None:
                        free[-1].append(descriptor)
            best = max(range(len(free)), key=lambda index: len(free[index]))
            if not free[best]:
                return None
            taken = free[best][0]
            _write_holder(taken, owner)
            return self.devices[best], taken
        finally:
            for counted in itertools.chain.from_iterable(free):
                if counted != taken:
                    _release(counted, should_clear=False)

    def _path(self, device: Device, slot: int) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', device.uuid)}.{slot}.lock"


@contextmanager
def _guard(path: Path) -> Generator[bool]:
    """Be the only one who chooses; yields false where another one would not finish."""
    tries_max = round(GUARD_SECONDS_MAX / GUARD_POLL_SECONDS)
    descriptor = _try_lock(path)
    for _ in range(tries_max):
        if descriptor is not None:
            break
        time.sleep(GUARD_POLL_SECONDS)
        descriptor = _try_lock(path)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            _release(descriptor, should_clear=False)


@contextmanager
def _lock_errors(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        msg = f"Cannot keep leases in {str(folder)!r}: {error.strerror or error}."
        hint = "set lease_folder to a folder on a local disk that this user may write."
        raise ConfigError(msg, hint=hint) from error


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    _held.add(descriptor)
    return descriptor


def _write_holder(descriptor: int, owner: str) -> None:
    since = datetime.now(tz=UTC).isoformat(timespec="seconds")
    holder = LeaseHolder(owner=owner, pid=os.getpid(), since=since)
    # The lock counts, not the text: a full disk must not cost the lease.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.to_json().encode(), 0)


def _release(descriptor: int, *, should_clear: bool = True) -> None:
    if descriptor not in _held:  # a forked child: the lease is its parent's
        return
    _held.discard(descriptor)
    if should_clear:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
    # Closing alone would not do: a child that was forked at this moment has the file open too.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _forget_leases() -> None:
    # A lock lives as long as any process has the file open: a forked child must not outlive the lease.
    while _held:
        with suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_leases)
