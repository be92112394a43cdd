"""Live progress: an observation and a log line at intervals, from a thread of its own."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

import dagster as dg

from sits_dagster.inference.stats import Progress
from sits_dagster.metadata import progress_metadata

__all__ = ["reports_progress"]

JOIN_SECONDS_MAX = 30.0


@contextmanager
def reports_progress(
    context: dg.OpExecutionContext,
    progress: Progress,
    *,
    asset_key: dg.AssetKey,
    partition: str | None,
    seconds: float,
) -> Generator[None]:
    """Log an observation every `seconds` while inside; a report that fails is only logged."""
    is_over = threading.Event()

    def report() -> None:
        while not is_over.wait(seconds):
            try:
                _report(context, progress, asset_key, partition)
            except Exception as error:  # noqa: BLE001 - progress is not worth a run
                context.log.warning(f"Progress was not reported: {error}")

    thread = threading.Thread(target=report, name="sits-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(JOIN_SECONDS_MAX)


def _report(
    context: dg.OpExecutionContext, progress: Progress, asset_key: dg.AssetKey, partition: str | None
) -> None:
    metadata = progress_metadata(progress)
    context.log_event(dg.AssetObservation(asset_key=asset_key, partition=partition, metadata=metadata))
    # The same numbers as in the observation: the counters go on meanwhile.
    values = {name: value.value for name, value in metadata.items()}
    speed, left = values.get("sits/rows_per_second"), values.get("sits/seconds_left")
    context.log.info(
        f"{partition or 'all rows'}: {values['sits/rows_done']} of {values['sits/rows_total']} rows"
        + (f", {speed:.1f} rows/s" if speed else "")
        + (f", about {left:.0f} s left" if left else "")
    )
