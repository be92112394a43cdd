"""Parquet folders as partitions: what is in them, any range of their rows, and part files that are whole."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sits_dagster.adapters.object_store import LocalStore
from sits_dagster.adapters.parquet import ParquetFormat, ParquetReader, check_separate, scan_partition
from sits_dagster.errors import ConfigError, DataError, StorageError
from sits_dagster.inference.dataset import PartitionInput
from sits_dagster.inference.engine import ModelSignature, TensorSpec
from sits_dagster.inference.generation import current_generation, read_generations
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.testing import MemoryRows, Trial, visible_files


def _write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


def _read(
    partition: PartitionInput,
    start: int = 0,
    end: int | None = None,
    *,
    rows_max: int = 1000,
    bytes_max: int = 1 << 20,
) -> list[tuple[int, pa.RecordBatch]]:
    chunks = ParquetReader(partition).read(
        start, partition.rows if end is None else end, rows_max=rows_max, bytes_max=bytes_max
    )
    return [(chunk.row_start, chunk.rows) for chunk in chunks]


def _values(partition: PartitionInput, name: str) -> list[object]:
    return [value for _, rows in _read(partition) for value in rows.column(name).to_pylist()]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> PartitionInput:
    """Three files, one of them without rows, with row groups of 1 to 4 rows; n counts through."""
    folder, start = tmp_path_factory.mktemp("uneven"), 0
    for name, rows, group in (("a", 9, 4), ("b", 0, 4), ("c/d", 7, 3), ("e", 5, 1)):
        columns = {
            "n": pa.array(range(start, start + rows), pa.int64()),
            "text": pa.array([f"row {n}" * (n % 4) for n in range(start, start + rows)], pa.string()),
        }
        _write(folder / f"{name}.parquet", columns, row_group_size=group)
        start += rows
    return scan_partition(str(folder), None)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bounds=st.tuples(st.integers(0, 21), st.integers(0, 21)).map(sorted),
    rows_max=st.integers(1, 12),
    bytes_max=st.sampled_from([1, 60, 1 << 20]),
)
def test_any_range_is_that_slice_of_the_whole(
    uneven: PartitionInput, bounds: list[int], rows_max: int, bytes_max: int
) -> None:
    """A resumed run reads exactly its rows, in order, over files and row groups, in small chunks."""
    start, end = bounds
    chunks = _read(uneven, start, end, rows_max=rows_max, bytes_max=bytes_max)
    row = start
    for row_start, rows in chunks:
        assert row_start == row
        assert 1 <= rows.num_rows <= rows_max
        assert rows.schema == uneven.schema
        assert rows.column("n").to_pylist() == list(range(row, row + rows.num_rows))
        numbers = range(row, row + rows.num_rows)
        assert rows.column("text").to_pylist() == [f"row {n}" * (n % 4) for n in numbers]
        row += rows.num_rows
    assert row == end
    if bytes_max == 1:
        assert all(rows.num_rows == 1 for _, rows in chunks)


def test_a_partition_knows_its_files_and_row_groups(uneven: PartitionInput) -> None:
    """Shards are planned from the footers, without reading a row; files are in path order."""
    assert uneven.rows == 21
    assert [file.row_group_rows for file in uneven.files] == [(4, 4, 1), (0,), (3, 3, 1), (1,) * 5]
    names = [Path(file.path).name for file in uneven.files]
    assert names == ["a.parquet", "b.parquet", "d.parquet", "e.parquet"]


def test_only_the_asked_columns_are_read_in_that_order(uneven: PartitionInput) -> None:
    """A wide table costs what is needed of it."""
    folder = Path(uneven.files[0].path).parent
    partition = scan_partition(str(folder), ["text"])
    assert partition.schema.names == ["text"]
    assert scan_partition(str(folder), ["text", "n"]).schema.names == ["text", "n"]
    assert _read(partition, 3, 4)[0][1].to_pylist() == [{"text": "row 3" * 3}]


def test_a_large_row_group_is_read_in_small_chunks(tmp_path: Path) -> None:
    """Memory follows the chunk limit, not the size of a row group."""
    _write(tmp_path / "a.parquet", {"x": [bytes(10_000)] * 200}, use_dictionary=False, compression="none")
    chunks = _read(scan_partition(str(tmp_path), None), bytes_max=50_000)
    assert max(rows.num_rows for _, rows in chunks) <= 5
    assert sum(rows.num_rows for _, rows in chunks) == 200


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "(0 bytes) is not a whole Parquet file"),
        (b"PAR1", "is not a whole Parquet file"),
        (b"id,text\n1,a\n", "(12 bytes) is not a whole Parquet file"),
    ],
    ids=["empty", "magic alone", "text"],
)
def test_a_file_that_is_no_parquet_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    """A broken upload ends the run before anything is computed, with the file's name."""
    _write(tmp_path / "a.parquet", {"x": [1]})
    (tmp_path / "broken.parquet").write_bytes(content)
    with pytest.raises(DataError) as caught:
        scan_partition(str(tmp_path), None)
    assert words in str(caught.value)
    assert "broken.parquet" in str(caught.value)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_truncated_file_is_named(tmp_path: Path, share: float) -> None:
    """A file that was cut at any place is noticed by its missing footer."""
    path = _write(tmp_path / "a.parquet", {"x": list(range(1000))})
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(DataError, match="not a whole Parquet file"):
        scan_partition(str(tmp_path), None)


def test_a_damaged_page_is_a_data_error(tmp_path: Path) -> None:
    """A file with a whole footer and broken contents is named when it is read."""
    path = _write(tmp_path / "a.parquet", {"x": list(range(5000))}, compression="zstd")
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[20:2000] = bytes(1980)
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(DataError, match=r"a\.parquet"):
        _read(scan_partition(str(tmp_path), None))


@pytest.mark.parametrize("path", ["missing", "missing/*.parquet"])
def test_a_missing_folder_is_a_data_error(tmp_path: Path, path: str) -> None:
    """A partition that was never written is not an empty one."""
    with pytest.raises(DataError, match="does not exist"):
        scan_partition(str(tmp_path / path), None)


def test_an_empty_folder_is_an_empty_partition_with_a_note(tmp_path: Path) -> None:
    """A day without data is fine, and the log says so."""
    (tmp_path / "_SUCCESS").touch()
    partition = scan_partition(str(tmp_path), ["x"])
    assert partition.rows == 0
    assert "has no data files" in partition.notes[0]


def test_hidden_files_and_markers_are_no_data(tmp_path: Path) -> None:
    """Spark's markers, checksums and temporary folders do not disturb."""
    _write(tmp_path / "a.parquet", {"x": [1]})
    for name in ("_SUCCESS", ".a.parquet.crc", "_temporary/0/b.parquet", ".hidden/c.parquet", "_metadata"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert [Path(f.path).name for f in scan_partition(str(tmp_path), None).files] == ["a.parquet"]


def test_a_file_and_a_pattern_are_partitions_as_well(tmp_path: Path) -> None:
    """The source may name one file or a pattern; hidden files stay hidden."""
    for name in ("a-1", "a-2", "b-1", "_a-3"):
        _write(tmp_path / f"{name}.parquet", {"x": [1]})
    assert scan_partition(str(tmp_path / "a-1.parquet"), None).rows == 1
    assert scan_partition(str(tmp_path / "*a-*.parquet"), None).rows == 2


def test_a_missing_column_is_named_with_its_file(tmp_path: Path) -> None:
    """The message has the column, the file and what there is."""
    _write(tmp_path / "a.parquet", {"x": [1], "y": [1]})
    _write(tmp_path / "b.parquet", {"x": [1], "z": [1]})
    with pytest.raises(DataError, match=r"Column 'y' is missing in .*b\.parquet.*\['x', 'z'\]"):
        scan_partition(str(tmp_path), ["x", "y"])


def test_encodings_of_a_column_are_unified_without_a_note(tmp_path: Path) -> None:
    """Dictionary, large and plain text, and nullability are one type for the user."""
    kinds = (pa.dictionary(pa.int8(), pa.string()), pa.large_string(), pa.string())
    for index, kind in enumerate(kinds):
        field = pa.field("x", kind, nullable=index % 2 == 0)
        table = pa.Table.from_arrays([pa.array([f"{index}", "b"], kind)], schema=pa.schema([field]))
        pq.write_table(table, tmp_path / f"{index}.parquet")
    partition = scan_partition(str(tmp_path), None)
    assert partition.notes == ()
    assert _values(partition, "x") == ["0", "b", "1", "b", "2", "b"]
    assert {str(rows.schema) for _, rows in _read(partition)} == {str(partition.schema)}


def test_integers_of_several_widths_are_widened_with_a_note(tmp_path: Path) -> None:
    """A column that grew keeps all its values, and the log says as what it is read."""
    _write(tmp_path / "a.parquet", {"x": pa.array([1, None, -5], pa.int32())})
    _write(tmp_path / "b.parquet", {"x": pa.array([2**40], pa.int64())})
    partition = scan_partition(str(tmp_path), None)
    assert "'x' has several widths" in partition.notes[0]
    assert "int64" in partition.notes[0]
    assert _values(partition, "x") == [1, None, -5, 2**40]


def test_types_that_clash_are_refused_with_both_files(tmp_path: Path) -> None:
    """An identifier that is a number in one file and text in another is never guessed."""
    _write(tmp_path / "a.parquet", {"x": pa.array([1], pa.int32())})
    _write(tmp_path / "b.parquet", {"x": pa.array(["1"])})
    with pytest.raises(DataError, match=r"'x' is int32 in .*a\.parquet.* but string in .*b\.parquet"):
        scan_partition(str(tmp_path), None)


def _rewrite(path: Path, rows: int) -> None:
    _write(path, {"x": list(range(100, 100 + rows))})


@pytest.mark.parametrize("rows", [1, 5, 50])
def test_a_file_that_was_rewritten_since_the_scan_is_refused(tmp_path: Path, rows: int) -> None:
    """Rows of two versions never mix in one output, even where their number is the same."""
    path = _write(tmp_path / "a.parquet", {"x": list(range(5))})
    partition = scan_partition(str(tmp_path), None)
    _rewrite(path, rows)
    with pytest.raises(DataError, match=r"a\.parquet.*changed"):
        _read(partition)


def test_a_file_that_vanished_since_the_scan_is_a_data_error(tmp_path: Path) -> None:
    """A file that was deleted is named."""
    path = _write(tmp_path / "a.parquet", {"x": [1]})
    partition = scan_partition(str(tmp_path), None)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.parquet"):
        _read(partition)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """A rewrite under way is noticed at the end of the file at the latest."""
    path = _write(tmp_path / "a.parquet", {"x": list(range(5))}, row_group_size=1)
    partition = scan_partition(str(tmp_path), None)
    chunks = ParquetReader(partition).read(0, 5, rows_max=1, bytes_max=1)
    next(chunks)
    path.write_bytes(path.read_bytes())
    with pytest.raises(DataError, match="changed"):
        list(chunks)


def test_a_part_file_is_described_as_it_lies_on_disk(tmp_path: Path) -> None:
    """Size and digest are those of the bytes, so that a manifest can be checked with sha256sum."""
    files = ParquetFormat(tmp_path)
    batch = pa.RecordBatch.from_pydict({"x": np.arange(1000), "y": ["a"] * 1000})
    writer = files.open("sub/part.parquet", batch.schema)
    writer.write(batch)
    writer.write(batch.slice(0, 10))
    part = writer.close()
    data = (tmp_path / "sub/part.parquet").read_bytes()
    assert (part.path, part.rows, part.size_bytes) == ("sub/part.parquet", 1010, len(data))
    assert part.sha256 == hashlib.sha256(data).hexdigest()
    assert files.read("sub/part.parquet").to_batches()[0].slice(0, 1000).equals(batch)


def test_an_aborted_part_file_is_gone(tmp_path: Path) -> None:
    """What was given up leaves nothing behind, and can be begun again."""
    files = ParquetFormat(tmp_path)
    batch = pa.RecordBatch.from_pydict({"x": [1]})
    writer = files.open("p.parquet", batch.schema)
    writer.write(batch)
    writer.abort()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match=r"p\.parquet"):
        files.read("p.parquet")


def test_a_damaged_part_file_is_a_storage_error(tmp_path: Path) -> None:
    """A carried file that is not whole is not believed."""
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    with pytest.raises(StorageError, match=r"p\.parquet"):
        ParquetFormat(tmp_path).read("p.parquet")


@pytest.fixture
def trial() -> Trial:
    """Rows that make some hundred kilobytes of output, in segments."""
    rng = np.random.default_rng(1)
    rows = pa.RecordBatch.from_pydict({"id": np.arange(400), "x": rng.random(400)})
    spec = TensorSpec(name="x", dtype="float64", shape=(None,))
    wide = TensorSpec(name="y", dtype="float64", shape=(None, 128))
    noise = rng.random((400, 128))
    return Trial(
        source=MemoryRows(rows),
        signature=ModelSignature(inputs=(spec,), outputs=(wide,)),
        function=lambda inputs: {"y": inputs["x"][:, None] + noise[: len(inputs["x"])]},
        columns_kept=("id",),
        policy=PipelinePolicy(segment_rows=50, segment_seconds=3600, chunk_rows=50, flush_bytes=20_000),
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk of its own with 300 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def _fail_then_resume(trial: Trial, folder: Path, words: str, make_room: Callable[[], None]) -> None:
    store, files = LocalStore(folder), ParquetFormat(folder)
    with pytest.raises(StorageError, match=words):
        trial.run(store, part_format=files)
    committed = Trial.output(store, files)
    make_room()
    engine = trial.engine()
    stats = trial.run(store, part_format=files, engine=engine)
    assert stats.rows_resumed == len(committed)
    assert engine.rows_of("x") == trial.source.rows.column("x").to_pylist()[len(committed) :]
    assert [row["id"] for row in Trial.output(store, files)] == list(range(400))


def test_a_run_on_a_full_disk_ends_with_a_sentence_and_is_resumed(trial: Trial, small_disk: Path) -> None:
    """No room is no disaster: what was committed stays, and with room the run goes on from there."""

    def make_room() -> None:
        subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)

    _fail_then_resume(trial, small_disk, "the disk is full", make_room)


def test_a_run_under_a_file_size_limit_ends_with_a_sentence(trial: Trial, tmp_path: Path) -> None:
    """A file that may not grow is named, and the next run goes on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        _fail_then_resume(
            trial,
            tmp_path,
            "the file is too large",
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_whole_plane_on_a_real_disk(trial: Trial, tmp_path: Path) -> None:
    """A stopped and resumed run leaves exactly the files of the manifest, with the digests it says."""
    store, files = LocalStore(tmp_path), ParquetFormat(tmp_path)
    engine, second = trial.engine(), trial.engine()
    trial.run(store, part_format=files, engine=engine, should_stop=lambda: engine.calls >= 20)
    trial.run(store, part_format=files, engine=second)
    assert sorted(engine.rows_of("x") + second.rows_of("x")) == sorted(
        trial.source.rows.column("x").to_pylist()
    )
    published = current_generation(read_generations(store))
    assert published is not None
    manifest = {file.path: file.sha256 for commit in published.commits for file in commit.files}
    assert manifest == {
        path: hashlib.sha256((tmp_path / path).read_bytes()).hexdigest() for path in visible_files(store)
    }
    assert pq.read_table(tmp_path).column("id").to_pylist() == list(range(400)), "a plain reader"


@pytest.mark.parametrize(
    ("source", "sink"), [("/d/in", "/d/in"), ("/d/in", "/d/in/out"), ("/d/in/*.parquet", "/d/in/out")]
)
def test_an_output_inside_of_the_input_is_refused(source: str, sink: str) -> None:
    """The next run would take the output for input."""
    with pytest.raises(ConfigError, match="lies inside"):
        check_separate(source, sink)


@pytest.mark.parametrize(
    ("source", "sink"),
    [("/d/in", "/d/out"), ("/d/in", "/d/input"), ("/d/in/x", "/d/in"), ("/d/a*/in", "/d/b")],
)
def test_an_output_beside_the_input_is_fine(source: str, sink: str) -> None:
    """Folders that only look alike are told apart."""
    check_separate(source, sink)
