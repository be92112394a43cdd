"""The data plane's limits as a user sets them."""

import dagster as dg
from pydantic import ConfigDict, Field

from sits_dagster.inference.policy import PipelinePolicy

__all__ = ["InferenceResource"]

DEFAULTS = PipelinePolicy()


class InferenceResource(dg.ConfigurableResource[None]):
    """Batches, segments, threads and limits of every inference asset that uses it."""

    model_config = ConfigDict(extra="forbid")  # a misspelt setting is an error

    batch_rows: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Rows of a batch. Without it each model's own are found: the smallest batch that is nearly the "
            "fastest on the device, measured once with the first rows of a run."
        ),
    )
    batch_rows_max: int = Field(
        default=1024, ge=1, description="Never more rows in a batch than this, where none are given."
    )
    measuring_seconds_max: float = Field(
        default=5.0, gt=0, description="How long batches of unlike sizes are measured, where none are given."
    )
    segment_seconds: float = Field(
        default=DEFAULTS.segment_seconds,
        ge=0,
        description="Results are committed after about this many seconds: the most that a killed run loses.",
    )
    segment_rows: int = Field(
        default=DEFAULTS.segment_rows, ge=1, description="Results are committed after at most this many rows."
    )
    encode_workers: int = Field(
        default=DEFAULTS.encode_workers, ge=1, description="Threads that encode rows."
    )
    decode_workers: int = Field(
        default=DEFAULTS.decode_workers, ge=1, description="Threads that decode outputs."
    )
    chunk_rows: int = Field(default=DEFAULTS.chunk_rows, ge=1, description="Rows that are encoded together.")
    window_rows: int = Field(
        default=DEFAULTS.window_rows,
        ge=1,
        description="Rows of look-ahead within which rows of like shape are batched together.",
    )
    queue_bytes: int = Field(
        default=DEFAULTS.queue_bytes, ge=1, description="Bytes that may wait between two stages."
    )
    rows_quarantined_max: int = Field(
        default=DEFAULTS.rows_quarantined_max,
        ge=0,
        description="More failed rows than this in a partition fail the run.",
    )
    shard_seconds_min: float = Field(
        default=DEFAULTS.shard_seconds_min, ge=0, description="Least predicted device seconds of a shard."
    )
    shards_max: int = Field(default=DEFAULTS.shards_max, ge=1, description="Most shards of a partition.")
    stall_seconds_max: float = Field(
        default=DEFAULTS.stall_seconds_max,
        gt=0,
        description="A stage that waits longer than this ends the run with an error.",
    )
    progress_seconds: float = Field(
        default=15.0, gt=0, description="Seconds between two progress observations in Dagster."
    )
    retries_max: int = Field(
        default=3, ge=0, description="How often a step is tried again after a passing fault."
    )

    def policy(self) -> PipelinePolicy:
        """Return the limits as the data plane takes them."""
        own = {
            "batch_rows",
            "batch_rows_max",
            "measuring_seconds_max",
            "progress_seconds",
            "retries_max",
        }
        return PipelinePolicy(
            batch_rows=self.batch_rows or DEFAULTS.batch_rows,
            **{name: getattr(self, name) for name in type(self).model_fields if name not in own},
        )
