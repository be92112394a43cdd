"""The pipeline's named limits, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sits_dagster.errors import ConfigError

__all__ = ["PipelinePolicy"]

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePolicy:
    """Every limit of the data plane.

    Args:
        batch_rows: Rows of a batch where nothing else decides, >= 1.
        chunk_rows: Rows that are encoded together, >= 1.
        chunk_bytes: Input bytes that are encoded together.
        queue_bytes: Bytes that may wait between two stages.
        batches_ahead: Batches that may wait for the device, >= 1; a segment ends that much early.
        pending_bytes: Result bytes that may wait for older rows before partial batches are sent.
        window_rows: Rows of look-ahead within which rows of like shape are found, >= 1.
        encode_workers: Threads that encode, >= 1.
        decode_workers: Threads that decode, >= 1.
        segment_seconds: A segment is committed after about this long: what a killed run loses.
        segment_rows: And after at most this many rows, >= 1.
        flush_bytes: Finished rows are written to the part file once this many bytes wait.
        rows_quarantined_max: More failed rows than this fail the partition, >= 0.
        stall_seconds_max: A stage that waits longer than this ends the run.
        shard_seconds_min: Least predicted device seconds of a shard.
        shards_max: Most shards of a partition, >= 1.
    """

    batch_rows: int = 8
    chunk_rows: int = 64
    chunk_bytes: int = 8 * MEBIBYTE
    queue_bytes: int = 64 * MEBIBYTE
    batches_ahead: int = 8
    pending_bytes: int = 64 * MEBIBYTE
    window_rows: int = 1024
    encode_workers: int = 2
    decode_workers: int = 1
    segment_seconds: float = 20.0
    segment_rows: int = 1_000_000
    flush_bytes: int = 16 * MEBIBYTE
    rows_quarantined_max: int = 100
    stall_seconds_max: float = 900.0
    shard_seconds_min: float = 30.0
    shards_max: int = 8

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name in {"rows_quarantined_max", "segment_seconds", "shard_seconds_min"} else 1
            if value < least and not (item.name == "stall_seconds_max" and value > 0):
                msg = f"{item.name} must be >= {least}, got {value!r}."
                raise ConfigError(msg)
