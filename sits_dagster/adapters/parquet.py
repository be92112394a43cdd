"""Parquet files: what a partition has, its rows in chunks, and part files that are written durably."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from sits_dagster.adapters.object_store import in_folder, storage_errors
from sits_dagster.errors import ConfigError, DataError, StorageError
from sits_dagster.inference.dataset import Chunk, InputFile, PartitionInput, unify_types
from sits_dagster.inference.store import PartFile

__all__ = ["ParquetFormat", "ParquetReader", "check_separate", "rows_of", "scan_partition"]

FOOTER_THREADS = 8
BUFFER_BYTES = 1 << 20
MAGIC = "*?["
READ_ROWS_MAX = 65_536
READ_ERRORS = (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError)


def scan_partition(path: str, columns: Sequence[str] | None) -> PartitionInput:
    """Return the files of a partition and the one schema that all their rows are read as.

    Args:
        path: A folder (all files below it that are not hidden), a file, or a glob pattern.
        columns: The columns to read, or `None` for all.

    Raises:
        DataError: The folder is missing, a file is no whole Parquet file, a column is missing, or two
            files clash in a column's type.
    """
    paths = _data_files(path)
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        scanned = list(pool.map(_scan_file, paths))
    schema, notes = _unify([file.path for file, _ in scanned], [schema for _, schema in scanned], columns)
    if not paths:
        notes = (*notes, f"{path!r} has no data files: the partition is empty.")
    return PartitionInput(files=tuple(file for file, _ in scanned), schema=schema, notes=notes)


class ParquetReader:
    """Reads row ranges of a partition, each file opened once a range, only the row groups that are needed.

    Args:
        partition: What `scan_partition` returned.
    """

    def __init__(self, partition: PartitionInput) -> None:
        self._partition = partition

    def read(self, row_start: int, row_end: int, *, rows_max: int, bytes_max: int) -> Iterator[Chunk]:
        """Yield the rows in order, in chunks of at most `rows_max` rows and about `bytes_max` bytes.

        Raises:
            DataError: A file has changed since it was scanned, or is damaged.
        """
        file_start = 0
        for file in self._partition.files:
            file_end = file_start + file.rows
            first, last = max(row_start, file_start), min(row_end, file_end)
            if first < last:
                row = first
                for batch in self._read_file(file, first - file_start, last - file_start, bytes_max):
                    for chunk in _cut(batch, row, rows_max, bytes_max):
                        yield chunk
                        row = chunk.row_end
            file_start = file_end

    def _read_file(self, file: InputFile, first: int, last: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
        groups, group_start, skip = [], 0, None
        for index, rows in enumerate(file.row_group_rows):
            if group_start + rows > first and group_start < last:
                skip = first - group_start if skip is None else skip
                groups.append(index)
            group_start += rows
        left = last - first
        names = self._partition.schema.names
        try:
            _check_unchanged(file)
            # Buffered reading bounds the memory of a huge row group to the pages at hand.
            with pq.ParquetFile(file.path, buffer_size=BUFFER_BYTES, pre_buffer=False) as parquet:
                rows_max = _rows_within(bytes_max, parquet.metadata, groups)
                for batch in parquet.iter_batches(
                    rows_max, row_groups=groups, columns=names, use_threads=False
                ):
                    if skip:
                        dropped = min(skip, batch.num_rows)
                        skip -= dropped
                        batch = batch.slice(dropped)  # noqa: PLW2901 - the rest of the batch
                    batch = batch.slice(0, left)  # noqa: PLW2901 - the range ends inside
                    left -= batch.num_rows
                    if batch.num_rows:
                        yield self._conform(batch)
            _check_unchanged(file)
        except READ_ERRORS as error:
            msg = f"{file.path!r} cannot be read: {error}"
            raise DataError(msg, hint="write the file again, or take it out of the partition.") from error
        if left:
            msg = f"{file.path!r} ended {left} rows early: it changed while it was read."
            raise DataError(msg, hint="do not write into a partition while it is processed; run again.")

    def _conform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        schema = self._partition.schema
        if batch.schema.equals(schema):
            return batch
        arrays = [_cast(batch.column(field.name), field.type) for field in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


class ParquetFormat:
    """Writes and reads part files below a folder.

    Args:
        root: The partition's output folder.
        compression: Parquet codec of the columns.
    """

    suffix = ".parquet"

    def __init__(self, root: str | Path, *, compression: str = "zstd") -> None:
        self._root = Path(root)
        self._compression = compression

    def open(self, path: str, schema: pa.Schema) -> ParquetPartWriter:
        """Begin a file."""
        return ParquetPartWriter(self._root, path, schema, self._compression)

    def read(self, path: str) -> pa.Table:
        """Return all rows of a file."""
        try:
            with pq.ParquetFile(self._root / path) as parquet:
                return parquet.read()
        except READ_ERRORS as error:
            msg = f"{str(self._root / path)!r} cannot be read: {error}"
            raise StorageError(msg) from error


class ParquetPartWriter:
    """Writes one part file, digesting its bytes as they go by."""

    def __init__(self, root: Path, path: str, schema: pa.Schema, compression: str) -> None:
        self._path = path
        self._target = root / path
        self._rows = 0
        with storage_errors("create", self._target):
            self._file = in_folder(self._target.parent, lambda: _DigestingFile(self._target))
        self._writer = pq.ParquetWriter(self._file, schema, compression=compression)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows as one row group."""
        with storage_errors("write", self._target), _format_errors(self._target):
            self._writer.write_batch(batch)
        self._rows += batch.num_rows

    def close(self) -> PartFile:
        """Finish the file, synchronise it to disk and describe it."""
        with storage_errors("write", self._target), _format_errors(self._target):
            self._writer.close()
            size_bytes = self._file.finish()
        return PartFile(path=self._path, rows=self._rows, size_bytes=size_bytes, sha256=self._file.digest)

    def abort(self) -> None:
        """Remove the unfinished file."""
        self._file.discard()
        self._target.unlink(missing_ok=True)


@contextmanager
def _format_errors(path: Path) -> Generator[None]:
    try:
        yield
    except pa.ArrowException as error:
        msg = f"{str(path)!r} cannot be written as Parquet: {error}"
        raise ConfigError(msg, hint="let decode return columns of types that Parquet has.") from error


class _DigestingFile:
    """A write-only binary file that knows the SHA-256 of what went through it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._sha256 = hashlib.sha256()
        self._size_bytes = 0
        self._is_discarded = False
        self.closed = False

    @property
    def digest(self) -> str:
        return self._sha256.hexdigest()

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        if self._is_discarded:  # Parquet's writer sends a footer when it is destroyed
            return view.nbytes
        self._sha256.update(view)
        self._size_bytes += view.nbytes
        return self._file.write(view)

    def tell(self) -> int:
        return self._size_bytes

    def flush(self) -> None:
        self._file.flush()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Leave closing to `finish`, which synchronises first."""

    def finish(self) -> int:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.closed = True
        return self._size_bytes

    def discard(self) -> None:
        self._is_discarded = True
        with suppress(OSError):  # the disk may be full; the file is removed anyway
            self._file.close()


def _data_files(path: str) -> list[str]:
    if any(character in path for character in MAGIC):
        return _matching_files(path)
    root = Path(path)
    if root.is_file():
        return [path]
    if not root.is_dir():
        msg = f"Input folder {path!r} does not exist."
        raise DataError(msg, hint="check the source's path and the partition key.")
    return sorted(str(found) for found in root.rglob("*") if _is_data(found, root))


def _matching_files(pattern: str) -> list[str]:
    parts = Path(pattern).parts
    first = next(index for index, part in enumerate(parts) if any(character in part for character in MAGIC))
    folder = Path(*parts[:first]) if first else Path()
    if not folder.is_dir():
        msg = f"Input folder {str(folder)!r} of the pattern {pattern!r} does not exist."
        raise DataError(msg, hint="check the source's path and the partition key.")
    return sorted(str(found) for found in folder.glob(str(Path(*parts[first:]))) if _is_data(found, folder))


def _is_data(path: Path, root: Path) -> bool:
    return path.is_file() and not any(part.startswith(("_", ".")) for part in path.relative_to(root).parts)


def _scan_file(path: str) -> tuple[InputFile, pa.Schema]:
    try:
        stat = os.stat(path)  # noqa: PTH116 - of the string path, once a file
        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
    except READ_ERRORS as error:
        size = Path(path).stat().st_size if Path(path).exists() else 0
        msg = f"{path!r} ({size} bytes) is not a whole Parquet file: {error}"
        raise DataError(msg, hint="write the file again, or take it out of the partition.") from error
    rows = tuple(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
    file = InputFile(path=path, size_bytes=stat.st_size, version=str(stat.st_mtime_ns), row_group_rows=rows)
    return file, schema


def _check_unchanged(file: InputFile) -> None:
    stat = os.stat(file.path)  # noqa: PTH116 - of the string path, once a file
    if (stat.st_size, str(stat.st_mtime_ns)) != (file.size_bytes, file.version):
        msg = f"{file.path!r} has changed since the partition was scanned."
        raise DataError(msg, hint="do not write into a partition while it is processed; run again.")


def _unify(
    paths: Sequence[str], schemas: Sequence[pa.Schema], columns: Sequence[str] | None
) -> tuple[pa.Schema, tuple[str, ...]]:
    if not schemas:
        return pa.schema([]), ()
    names = list(columns) if columns is not None else schemas[0].names
    kinds: dict[str, tuple[pa.DataType, str]] = {}
    notes: dict[str, str] = {}
    for path, schema in zip(paths, schemas, strict=True):
        for name in names:
            if name not in schema.names:
                msg = f"Column {name!r} is missing in {path!r}; it has {schema.names}."
                raise DataError(msg, hint="check the source's columns, or write the file again.")
            kind, first_path = kinds.get(name, (schema.field(name).type, path))
            unified = unify_types(kind, schema.field(name).type)
            if unified is None:
                msg = (
                    f"Column {name!r} is {kind} in {first_path!r} but {schema.field(name).type} in {path!r}."
                )
                raise DataError(msg, hint="write the files with one type for the column.")
            kinds[name] = (unified[0], first_path)
            if unified[1]:
                notes[name] = (
                    f"Column {name!r} has several widths over the files; it is read as {unified[0]}."
                )
    return pa.schema([pa.field(name, kinds[name][0]) for name in names]), tuple(notes.values())


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = cast("pa.DictionaryArray", column).dictionary_decode()
    return column if column.type == kind else column.cast(kind)


def _rows_within(bytes_max: int, metadata: pq.FileMetaData, groups: Sequence[int]) -> int:
    found = [metadata.row_group(index) for index in groups]
    bytes_per_row = sum(group.total_byte_size for group in found) / max(
        1, sum(group.num_rows for group in found)
    )
    return int(min(READ_ROWS_MAX, max(1, bytes_max / max(1.0, bytes_per_row))))


def _cut(batch: pa.RecordBatch, row_start: int, rows_max: int, bytes_max: int) -> Iterator[Chunk]:
    bytes_per_row = max(1, batch.nbytes // batch.num_rows)
    step = max(1, min(rows_max, bytes_max // bytes_per_row))
    for start in range(0, batch.num_rows, step):
        yield Chunk(row_start=row_start + start, rows=batch.slice(start, step))


def check_separate(source: str, sink: str) -> None:
    """Return when the output folder is not inside the input and is not the input.

    Raises:
        ConfigError: It is: the next run would take the output for input.
    """
    folder = Path(source.split("*", maxsplit=1)[0].split("?", maxsplit=1)[0]).resolve()
    output = Path(sink).resolve()
    if output == folder or output.is_relative_to(folder):
        msg = f"The output {str(output)!r} lies inside of the input {str(folder)!r}."
        raise ConfigError(msg, hint="choose an output folder beside the input.")


def rows_of(path: str) -> int:
    """Return the rows that a file's footer tells."""
    try:
        return cast("int", pq.read_metadata(path).num_rows)
    except READ_ERRORS as error:
        msg = f"{path!r} cannot be read: {error}"
        raise StorageError(msg) from error
