"""Hand-over between the pipeline's threads: bounded by bytes, never waiting without a limit."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

from sits_dagster.errors import StallError

__all__ = ["ITEMS_MAX", "ByteQueue", "Heartbeat", "QueueClosed", "QueueEnded"]

T = TypeVar("T")
WAIT_SECONDS = 0.1
ITEMS_MAX = 4096
ITEMS_FEW = 2


class Heartbeat:
    """When any stage last handed something on; shared by the queues of one pipeline."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def beat(self) -> None:
        """Say that something moves."""
        self.at = time.monotonic()


class QueueClosed(Exception):  # noqa: N818 - a signal between threads, not an error
    """The queue was closed: nothing more will come, or nothing more is taken."""


class QueueEnded(QueueClosed):
    """The queue was ended and everything in it was taken: the work is done."""


class ByteQueue(Generic[T]):
    """A first-in first-out queue with a limit in bytes.

    One item may always be inside, however large. A wait longer than `wait_seconds_max` raises
    `StallError`, so that a stage that hangs ends the run with a sentence.

    Args:
        name: What the queue carries, for messages.
        bytes_max: Bytes that may wait, >= 1.
        wait_seconds_max: Longest wait of one `put` or `get`.
        items_max: Items that may wait, >= 1.
        heartbeat: A wait counts from the last time that anything moved in the queues that share it.
    """

    def __init__(
        self,
        name: str,
        *,
        bytes_max: int,
        wait_seconds_max: float,
        items_max: int = ITEMS_MAX,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._heartbeat = heartbeat or Heartbeat()
        self.name = name
        self.bytes_waiting = 0
        self._bytes_max = bytes_max
        self._items_max = items_max
        self._wait_seconds_max = wait_seconds_max
        self._items: deque[tuple[T, int]] = deque()
        # Two conditions over one lock: who takes does not wake others that take.
        self._lock = threading.Lock()
        self._has_item = threading.Condition(self._lock)
        self._has_room = threading.Condition(self._lock)
        self._is_awaited = False
        self._is_ended = False
        self._is_closed = False

    def put(self, item: T, size_bytes: int) -> None:
        """Add an item once there is room.

        Raises:
            QueueClosed: The queue was closed.
            StallError: There was no room for `wait_seconds_max`.
        """
        with self._lock:
            waited_since = time.monotonic()
            while self._is_full(size_bytes) and not self._is_closed:
                self._is_awaited = True
                self._wait(self._has_room, waited_since, "take from")
            if self._is_closed or self._is_ended:
                raise QueueClosed(self.name)
            self._items.append((item, size_bytes))
            self.bytes_waiting += size_bytes
            self._heartbeat.beat()
            self._has_item.notify()

    def get(self, seconds_max: float | None = None) -> T | None:
        """Return the oldest item; `None` when `seconds_max` passed without one.

        Raises:
            QueueClosed: It was closed.
            QueueEnded: It was ended and is empty.
            StallError: Nothing came for `wait_seconds_max`.
        """
        with self._lock:
            waited_since = time.monotonic()
            while not self._items and not self._is_closed:
                if self._is_ended:
                    raise QueueEnded(self.name)
                if seconds_max is not None and time.monotonic() - waited_since >= seconds_max:
                    return None
                self._wait(self._has_item, waited_since, "fill")
            if self._is_closed:
                raise QueueClosed(self.name)
            item, size_bytes = self._items.popleft()
            self.bytes_waiting -= size_bytes
            self._heartbeat.beat()
            # Not for every item: who is woken takes the interpreter from who took the item.
            if self._is_awaited and self._is_half_empty():
                self._is_awaited = False
                self._has_room.notify_all()
            return item

    def check_open(self) -> None:
        """Return unless the queue was closed.

        Raises:
            QueueClosed: It was.
        """
        if self._is_closed:
            raise QueueClosed(self.name)

    def end(self) -> None:
        """Say that nothing more will be put; what waits can still be taken."""
        with self._lock:
            self._is_ended = True
            self._wake_all()

    def close(self) -> None:
        """Throw away what waits and wake both sides with `QueueClosed`."""
        with self._lock:
            self._is_closed = True
            self._items.clear()
            self.bytes_waiting = 0
            self._wake_all()

    def _is_full(self, size_bytes: int) -> bool:
        has_no_room = self.bytes_waiting + size_bytes > self._bytes_max or len(self._items) >= self._items_max
        return bool(self._items) and has_no_room

    def _is_half_empty(self) -> bool:
        is_light = 2 * self.bytes_waiting <= self._bytes_max and 2 * len(self._items) <= self._items_max
        return is_light or len(self._items) <= ITEMS_FEW

    def _wake_all(self) -> None:
        self._has_item.notify_all()
        self._has_room.notify_all()

    def _wait(self, condition: threading.Condition, since: float, verb: str) -> None:
        condition.wait(WAIT_SECONDS)
        if time.monotonic() - max(since, self._heartbeat.at) > self._wait_seconds_max:
            msg = f"No stage came to {verb} the queue of {self.name} for {self._wait_seconds_max:g} s."
            raise StallError(
                msg, hint="look for a hanging encode, decode or storage call, or raise stall_seconds_max."
            )
