"""Hand-over between the pipeline's threads: bounded by bytes, never waiting without a limit."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

from sits_dagster.errors import StallError

__all__ = ["ITEMS_MAX", "ByteQueue", "QueueClosed"]

T = TypeVar("T")
WAIT_SECONDS = 0.1
ITEMS_MAX = 4096


class QueueClosed(Exception):  # noqa: N818 - a signal between threads, not an error
    """The queue was closed: nothing more will come, or nothing more is taken."""


class ByteQueue(Generic[T]):
    """A first-in first-out queue with a limit in bytes.

    One item may always be inside, however large. A wait longer than `wait_seconds_max` raises
    `StallError`, so that a stage that hangs ends the run with a sentence.

    Args:
        name: What the queue carries, for messages.
        bytes_max: Bytes that may wait, >= 1.
        wait_seconds_max: Longest wait of one `put` or `get`.
        items_max: Items that may wait, >= 1.
    """

    def __init__(
        self, name: str, *, bytes_max: int, wait_seconds_max: float, items_max: int = ITEMS_MAX
    ) -> None:
        self.name = name
        self.bytes_waiting = 0
        self._bytes_max = bytes_max
        self._items_max = items_max
        self._wait_seconds_max = wait_seconds_max
        self._items: deque[tuple[T, int]] = deque()
        self._changed = threading.Condition()
        self._is_ended = False
        self._is_closed = False

    def put(self, item: T, size_bytes: int) -> None:
        """Add an item once there is room.

        Raises:
            QueueClosed: The queue was closed.
            StallError: There was no room for `wait_seconds_max`.
        """
        with self._changed:
            waited_since = time.monotonic()
            while self._is_full(size_bytes) and not self._is_closed:
                self._wait(waited_since, "take from")
            if self._is_closed or self._is_ended:
                raise QueueClosed(self.name)
            self._items.append((item, size_bytes))
            self.bytes_waiting += size_bytes
            self._changed.notify_all()

    def get(self, seconds_max: float | None = None) -> T | None:
        """Return the oldest item; `None` when `seconds_max` passed without one.

        Raises:
            QueueClosed: It was closed, or it was ended and is empty.
            StallError: Nothing came for `wait_seconds_max`.
        """
        with self._changed:
            waited_since = time.monotonic()
            while not self._items and not self._is_closed:
                if self._is_ended:
                    raise QueueClosed(self.name)
                if seconds_max is not None and time.monotonic() - waited_since >= seconds_max:
                    return None
                self._wait(waited_since, "fill")
            if self._is_closed:
                raise QueueClosed(self.name)
            item, size_bytes = self._items.popleft()
            self.bytes_waiting -= size_bytes
            self._changed.notify_all()
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
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Throw away what waits and wake both sides with `QueueClosed`."""
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self.bytes_waiting = 0
            self._changed.notify_all()

    def _is_full(self, size_bytes: int) -> bool:
        has_no_room = self.bytes_waiting + size_bytes > self._bytes_max or len(self._items) >= self._items_max
        return bool(self._items) and has_no_room

    def _wait(self, since: float, verb: str) -> None:
        self._changed.wait(WAIT_SECONDS)
        if time.monotonic() - since > self._wait_seconds_max:
            msg = f"No stage came to {verb} the queue of {self.name} for {self._wait_seconds_max:g} s."
            raise StallError(
                msg, hint="look for a hanging encode, decode or storage call, or raise stall_seconds_max."
            )
