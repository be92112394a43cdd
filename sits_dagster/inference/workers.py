"""Threads that run functions and never keep a process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["WorkerPool"]

T = TypeVar("T")


class WorkerPool(Generic[T]):
    """Runs functions in order of submission.

    Its threads are daemons: a process whose function hangs can still end, which it cannot with a
    `ThreadPoolExecutor`.

    Args:
        name: Name of the threads.
        workers: How many, >= 1.
    """

    def __init__(self, name: str, *, workers: int) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = queue.SimpleQueue()
        self._workers = workers
        self._lock = threading.Lock()
        self._is_closed = False
        for _ in range(workers):
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Return the future result of a function; after `close` it is cancelled."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                future.cancel()
            else:
                self._tasks.put((future, function))
        return future

    def close(self) -> None:
        """Let the threads end after what they are at; what waits is cancelled."""
        with self._lock, suppress(queue.Empty):
            self._is_closed = True
            while True:
                task = self._tasks.get_nowait()
                if task:
                    task[0].cancel()
        for _ in range(self._workers):
            self._tasks.put(None)

    def _work(self) -> None:
        while task := self._tasks.get():
            future, function = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - raised again where the result is taken
                future.set_exception(error)
            else:
                future.set_result(result)
