"""The seam to storage: what a checkpoint needs of a folder, wherever it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

__all__ = ["Counter", "PartFile", "PartFormat", "PartWriter", "Store"]


class Store(Protocol):
    """A folder of objects, named by relative paths with `/`.

    Every method raises `StorageError` naming the object when the storage fails.
    """

    def list(self, prefix: str) -> Mapping[str, int]:
        """Return path and size in bytes of every object below the folder `prefix` (`""` for all)."""
        ...

    def read(self, path: str) -> bytes:
        """Return an object's bytes."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Create an object wholly and durably, or return `False` where one is there already.

        Of several callers with the same path exactly one gets `True`.
        """
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Write an object wholly and durably, over an older one if there is one."""
        ...

    def move(self, source: str, target: str) -> bool:
        """Make `source` appear as `target` in one step; `False` where `source` is gone."""
        ...

    def delete(self, path: str) -> None:
        """Remove an object; it may be absent."""
        ...

    def counter(self, path: str) -> Counter:
        """Begin a number that outlives the process; it need not survive the machine."""
        ...


class Counter(Protocol):
    """A number at a path of the store, eight bytes little-endian."""

    def set(self, value: int) -> None:
        """Overwrite the number; cheap enough to be called for each batch."""
        ...

    def close(self) -> None:
        """Release it; the number stays."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """A finished file of rows.

    Args:
        path: Relative to the partition's folder.
        rows: Its rows.
        size_bytes: Its size.
        sha256: Digest of its bytes.
    """

    path: str
    rows: int
    size_bytes: int
    sha256: str


class PartWriter(Protocol):
    """Writes one file of rows."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows.

        Raises:
            StorageError: There is no room, or the storage fails.
        """
        ...

    def close(self) -> PartFile:
        """Finish the file durably and describe it."""
        ...

    def abort(self) -> None:
        """Remove the unfinished file."""
        ...


class PartFormat(Protocol):
    """A file format for rows."""

    suffix: str

    def open(self, path: str, schema: pa.Schema) -> PartWriter:
        """Begin a file at a path of the store."""
        ...

    def read(self, path: str) -> pa.Table:
        """Return all rows of a file.

        Raises:
            StorageError: The file is missing or damaged.
        """
        ...
