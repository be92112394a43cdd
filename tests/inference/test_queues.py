"""The hand-over between stages: bounded, in order, and never waiting for ever."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from sits_dagster.errors import StallError
from sits_dagster.inference.queues import ByteQueue, QueueClosed
from sits_dagster.inference.workers import WorkerPool

ROOT = Path(__file__).resolve().parents[2]


def _queue(bytes_max: int = 100, seconds: float = 5.0) -> ByteQueue[int]:
    return ByteQueue("numbers", bytes_max=bytes_max, wait_seconds_max=seconds)


def test_bytes_in_the_queue_stay_below_the_limit() -> None:
    """A quick producer waits for a slow consumer: memory does not grow with the partition."""
    queue, most = _queue(bytes_max=30), 0

    def produce() -> None:
        for number in range(50):
            queue.put(number, 10)
        queue.end()

    thread = threading.Thread(target=produce)
    thread.start()
    found: list[int | None] = []
    for _ in range(50):
        most = max(most, queue.bytes_waiting)
        found.append(queue.get())
    with pytest.raises(QueueClosed):
        queue.get()
    thread.join()
    assert found == list(range(50))
    assert 0 < most <= 30


def test_one_item_larger_than_the_limit_passes() -> None:
    """A huge row is slow, not stuck."""
    queue = _queue(bytes_max=1)
    queue.put(1, 1000)
    assert queue.get() == 1


def test_a_wait_has_an_end() -> None:
    """A stage that hangs is named on both sides of the queue."""
    queue = _queue(bytes_max=1, seconds=0.2)
    with pytest.raises(StallError, match="to fill the queue of numbers"):
        queue.get()
    queue.put(1, 1)
    with pytest.raises(StallError, match="to take from the queue of numbers"):
        queue.put(2, 1)


def test_a_poll_returns_without_an_item() -> None:
    """The device loop looks for a stop while nothing comes."""
    assert _queue().get(0.01) is None


def test_a_closed_queue_wakes_everybody() -> None:
    """After an error nobody waits, whatever is still inside."""
    queue = _queue(bytes_max=1)
    queue.put(1, 1)
    outcomes: list[str] = []

    def put() -> None:
        try:
            queue.put(2, 1)
        except QueueClosed:
            outcomes.append("closed")

    thread = threading.Thread(target=put)
    thread.start()
    time.sleep(0.05)
    queue.close()
    thread.join(2)
    assert outcomes == ["closed"]
    assert queue.bytes_waiting == 0
    with pytest.raises(QueueClosed):
        queue.get()


def test_an_ended_queue_takes_nothing_more() -> None:
    """What was put before the end is still taken; nothing can be put behind it."""
    queue = _queue()
    queue.put(1, 1)
    queue.end()
    with pytest.raises(QueueClosed):
        queue.put(2, 1)
    assert queue.get() == 1
    with pytest.raises(QueueClosed):
        queue.get()


def test_workers_keep_order_and_hand_on_errors() -> None:
    """Futures come back in the order of submission, each with its result or its own error."""
    pool: WorkerPool[int] = WorkerPool("test-worker", workers=3)
    futures = [pool.submit(lambda n=n: 10 // n) for n in (1, 2, 0, 5)]
    assert [f.result(5) for f in futures if f is not futures[2]] == [10, 5, 2]
    with pytest.raises(ZeroDivisionError):
        futures[2].result(5)
    pool.close()


def test_closed_workers_cancel_what_waits_and_what_comes() -> None:
    """After a stop nothing more is begun, and nobody waits for a result that never comes."""
    pool: WorkerPool[int] = WorkerPool("test-worker", workers=1)
    started, release = threading.Event(), threading.Event()

    def work() -> int:
        started.set()
        release.wait(5)
        return 1

    running, waiting = pool.submit(work), pool.submit(lambda: 2)
    assert started.wait(5)
    pool.close()
    with pytest.raises(CancelledError):
        waiting.result(5)
    with pytest.raises(CancelledError):
        pool.submit(lambda: 3).result(5)
    release.set()
    assert running.result(5) == 1


def test_a_hanging_encode_does_not_keep_the_process() -> None:
    """After StallError the process ends, although the user's function never returns."""
    code = (
        "import threading, pyarrow as pa\n"
        "from sits_dagster.inference.engine import ModelSignature, TensorSpec\n"
        "from sits_dagster.inference.policy import PipelinePolicy\n"
        "from sits_dagster.testing import MemoryRows, MemoryStore, Trial\n"
        "x = TensorSpec(name='x', dtype='float32', shape=(None,))\n"
        "rows = MemoryRows(pa.RecordBatch.from_pydict({'x': [1.0]}))\n"
        "Trial(source=rows, signature=ModelSignature(inputs=(x,), outputs=(x,)), function=lambda i: i,\n"
        "      encode=lambda _: threading.Event().wait(),\n"
        "      policy=PipelinePolicy(stall_seconds_max=0.3)).run(MemoryStore())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode == 1
    assert "StallError" in result.stderr
