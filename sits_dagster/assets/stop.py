"""When a run should end: an interrupt of its process, or its status in Dagster."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

import dagster as dg
from dagster._core.errors import DagsterExecutionInterruptedError
from dagster._utils.interrupts import capture_interrupts, check_captured_interrupt

__all__ = ["StopSignal", "ends_politely"]

POLL_SECONDS = 5.0
JOIN_SECONDS_MAX = 30.0
ENDED = {
    dg.DagsterRunStatus.CANCELING,
    dg.DagsterRunStatus.CANCELED,
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.SUCCESS,
}


class StopSignal:
    """Says whether the run should end, and why.

    Args:
        instance: Asked for the run's status, since some executors lose the interrupt.
        run_id: The run.
    """

    def __init__(self, instance: dg.DagsterInstance, run_id: str) -> None:
        self.reason = ""
        self._instance = instance
        self._run_id = run_id
        self._is_over = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="sits-run-status", daemon=True)

    def __call__(self) -> bool:
        """Return whether the run should end; called between batches, so it only reads flags."""
        if not self.reason and check_captured_interrupt():
            self.reason = "the process was interrupted"
        return bool(self.reason)

    def start(self) -> None:
        """Begin to watch the run's status."""
        self._poller.start()

    def finish(self) -> None:
        """Stop watching."""
        self._is_over.set()
        self._poller.join(JOIN_SECONDS_MAX)

    def _poll(self) -> None:
        while not self._is_over.wait(POLL_SECONDS):
            try:
                run = self._instance.get_run_by_id(self._run_id)
            except Exception:  # noqa: BLE001, S112 - a database that is away must not end the work
                continue
            if run is not None and run.status in ENDED:
                self.reason = f"the run is {run.status.value}"
                return


@contextmanager
def ends_politely(instance: dg.DagsterInstance, run_id: str) -> Generator[StopSignal]:
    """Hold back interrupts inside, so that the batch at hand is finished and committed.

    Raises:
        DagsterExecutionInterruptedError: At the end, when there was a reason to stop.
    """
    signal = StopSignal(instance, run_id)
    with capture_interrupts():
        signal.start()
        try:
            yield signal
        finally:
            signal.finish()
            signal()
    if signal.reason:
        raise DagsterExecutionInterruptedError
