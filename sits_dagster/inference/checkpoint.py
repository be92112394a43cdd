"""The record of a committed segment: written once, conditionally, and trusted only when it is whole.

A record holds offset, timestamp, digest of the outputs so far and what was committed (SITS 2026,
section 4.3), as zstd-compressed JSON with a checksum over its own contents.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any, cast

import zstandard

from sits_dagster.inference.shards import RowRange
from sits_dagster.inference.store import PartFile

__all__ = ["Commit", "Names", "chained_digest", "dump_json", "load_commit", "load_json"]

CONTROL_FOLDER = "_sits"
QUARANTINE_FOLDER = "_quarantine"
SUCCESS_FILE = "_SUCCESS"
RECORD_BYTES_MAX = 1 << 20
VISIBLE_FILE = re.compile(rf"(part|{QUARANTINE_FOLDER}/rows)-\d{{5}}-\d{{12}}-[0-9a-f]{{8}}-\d{{4}}\.\w+")


@dataclass(frozen=True, slots=True)
class Names:
    """Where things of one generation are, relative to the partition's folder."""

    generation: str

    @property
    def folder(self) -> str:
        """Everything of the generation but its visible parts."""
        return f"{CONTROL_FOLDER}/generations/{self.generation}"

    @property
    def plan(self) -> str:
        """The generation's fingerprint and shards."""
        return f"{self.folder}/generation.json"

    @property
    def outcome(self) -> str:
        """How the generation ended: the manifest of what was published, or that it was retired."""
        return f"{self.folder}/outcome.json"

    @property
    def commits(self) -> str:
        """The folder of commit records."""
        return f"{self.folder}/commits"

    @property
    def carried(self) -> str:
        """The folder of results that were computed ahead of the last commit of a stopped attempt."""
        return f"{self.folder}/carried"

    @property
    def progress(self) -> str:
        """The folder of the attempts' row counters."""
        return f"{self.folder}/progress"

    def commit(self, shard: int, row_start: int) -> str:
        """One segment's record."""
        return f"{self.commits}/{shard:05d}-{row_start:012d}.json.zst"

    def staged(self, epoch: int, path: str, mark: str = "") -> str:
        """Where a file waits until its commit; the folder is the writing process's own."""
        return f"{self.folder}/staging/{epoch:08d}-{mark}/{path}"

    @property
    def mark(self) -> str:
        """What tells its visible files from those of other generations.

        It comes behind the row in names: an output that was mended is in input order by name, too.
        """
        return f"{self.generation[:8]}-{self.generation[-4:]}"

    def part(self, shard: int, row_start: int, suffix: str) -> str:
        """A committed part, where plain readers see it."""
        return f"part-{shard:05d}-{row_start:012d}-{self.mark}{suffix}"

    def quarantine(self, shard: int, row_start: int, suffix: str) -> str:
        """A committed file of quarantined rows."""
        return f"{QUARANTINE_FOLDER}/rows-{shard:05d}-{row_start:012d}-{self.mark}{suffix}"

    @staticmethod
    def is_ours(path: str) -> bool:
        """Return whether a file of the partition's folder was written by this package."""
        return path.startswith(f"{CONTROL_FOLDER}/") or VISIBLE_FILE.fullmatch(path) is not None

    @staticmethod
    def epochs() -> str:
        """The folder in which attempts register."""
        return f"{CONTROL_FOLDER}/epochs"

    @staticmethod
    def epoch(number: int) -> str:
        """One attempt's registration."""
        return f"{Names.epochs()}/{number:08d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One committed segment.

    Args:
        shard: Index of its shard.
        row_start: First input row.
        row_end: The input row after its last one: the offset to go on from.
        part: The output rows, or `None` when every row was quarantined.
        quarantine: The quarantined rows, or `None`.
        epoch: The attempt that made it.
        writer: Which of the attempt's processes; names the folder in which the files were staged.
        timestamp: When, ISO 8601 with UTC offset.
        digest: SHA-256 over the previous segment's digest and this one's files.
        rows_predicted: Rows that went through a device.
        batches: Device calls of the segment.
        device_seconds: Time inside them.
    """

    shard: int
    row_start: int
    row_end: int
    part: PartFile | None
    quarantine: PartFile | None
    epoch: int
    timestamp: str
    digest: str
    rows_predicted: int
    batches: int
    device_seconds: float
    writer: str = ""

    @property
    def range(self) -> RowRange:
        """The input rows."""
        return RowRange(row_start=self.row_start, row_end=self.row_end)

    @property
    def files(self) -> tuple[PartFile, ...]:
        """The committed files."""
        return tuple(file for file in (self.part, self.quarantine) if file)

    @property
    def rows_written(self) -> int:
        """Rows of the output."""
        return self.part.rows if self.part else 0

    @property
    def rows_quarantined(self) -> int:
        """Rows that have no output."""
        return self.quarantine.rows if self.quarantine else 0

    def dump(self) -> bytes:
        """Return the record's bytes."""
        body = {
            "offset": self.row_end,
            "timestamp": self.timestamp,
            "digest": self.digest,
            "committed": {
                "shard": self.shard,
                "row_start": self.row_start,
                "part": asdict(self.part) if self.part else None,
                "quarantine": asdict(self.quarantine) if self.quarantine else None,
            },
            "epoch": self.epoch,
            "writer": self.writer,
            "rows_predicted": self.rows_predicted,
            "batches": self.batches,
            "device_seconds": self.device_seconds,
        }
        return zstandard.compress(dump_json(body))


def load_commit(data: bytes) -> Commit | None:
    """Return the record, or `None` when it is truncated, altered or not a record."""
    try:
        # A damaged header may claim any size, and that much memory would be asked for.
        if zstandard.frame_content_size(data) > RECORD_BYTES_MAX:
            return None
        body = load_json(zstandard.decompress(data, max_output_size=RECORD_BYTES_MAX))
        if body is None:
            return None
        committed = body["committed"]
        return Commit(
            shard=committed["shard"],
            row_start=committed["row_start"],
            row_end=body["offset"],
            part=PartFile(**committed["part"]) if committed["part"] else None,
            quarantine=PartFile(**committed["quarantine"]) if committed["quarantine"] else None,
            epoch=body["epoch"],
            writer=body["writer"],
            timestamp=body["timestamp"],
            digest=body["digest"],
            rows_predicted=body["rows_predicted"],
            batches=body["batches"],
            device_seconds=body["device_seconds"],
        )
    except (zstandard.ZstdError, KeyError, TypeError):
        return None


def chained_digest(previous: str, files: tuple[PartFile | None, ...]) -> str:
    """Return the digest of the outputs so far: the previous one and the new files' digests."""
    text = "|".join([previous, *(file.sha256 if file else "-" for file in files)])
    return hashlib.sha256(text.encode()).hexdigest()


def dump_json(body: dict[str, Any]) -> bytes:
    """Return JSON that carries a checksum of itself."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"checksum": checksum, **body}, sort_keys=True, separators=(",", ":")).encode()


def load_json(data: bytes) -> dict[str, Any] | None:
    """Return the contents of `dump_json`'s bytes, or `None` when they are damaged."""
    try:
        body = json.loads(data)
    except ValueError:
        return None
    if not isinstance(body, dict):
        return None
    found = cast("dict[str, Any]", body)
    checksum = found.pop("checksum", None)
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    return found if checksum == hashlib.sha256(text.encode()).hexdigest() else None
