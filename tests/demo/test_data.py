"""The generated dataset: its layout, its raggedness, and that it can be made again."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("PIL", reason="the extra `demo` is not installed")

from sits_dagster.demo.data import DEFAULT_PARTITIONS, generate

DAY = DEFAULT_PARTITIONS[0]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset") / "new"
    generate(folder)
    return folder


def read_lines(folder: Path, partition: str = DAY) -> pa.Table:
    return pa.concat_tables(pq.read_table(file) for file in sorted((folder / "lines" / partition).iterdir()))


def read_truth(folder: Path, partition: str = DAY) -> dict[int, str]:
    table = pq.read_table(folder / "truth" / f"{partition}.parquet").to_pydict()
    return dict(zip(table["line_id"], table["text"], strict=True))


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def image_sizes(lines: pa.Table) -> list[tuple[int, int]]:
    from PIL import Image

    images = [image for image in lines["image"].to_pylist() if image and image.startswith(b"\x89PNG")]
    return [Image.open(io.BytesIO(image)).size for image in images if len(image) > 40]


class TestLayout:
    def test_each_partition_has_five_uneven_files_of_several_row_groups(self, dataset: Path) -> None:
        """Five parts a partition, of different lengths, and most of them in more than one row group."""
        for partition in DEFAULT_PARTITIONS:
            files = sorted((dataset / "lines" / partition).iterdir())
            assert [file.name for file in files] == [f"part-{number}.parquet" for number in range(5)]
            footers = [pq.read_metadata(file) for file in files]
            assert len({footer.num_rows for footer in footers}) >= 4
            assert sum(footer.num_row_groups > 1 for footer in footers) >= 4

    def test_a_partition_has_at_least_400_rows(self, dataset: Path) -> None:
        """The default is large enough for a run to be interrupted and resumed."""
        assert all(read_lines(dataset, partition).num_rows >= 400 for partition in DEFAULT_PARTITIONS)

    def test_columns_are_an_id_and_an_image(self, dataset: Path) -> None:
        """Every part has the same schema."""
        assert read_lines(dataset).schema == pa.schema({"line_id": pa.int64(), "image": pa.binary()})

    def test_ids_are_unique_over_all_partitions(self, dataset: Path) -> None:
        """An id names one row of the whole dataset."""
        ids = [i for p in DEFAULT_PARTITIONS for i in read_lines(dataset, p)["line_id"].to_pylist()]
        assert len(set(ids)) == len(ids)

    def test_nothing_else_is_left_behind(self, dataset: Path) -> None:
        """No scratch folder survives."""
        assert sorted(path.name for path in dataset.iterdir()) == ["lines", "truth"]


class TestRows:
    def test_images_are_48_high_and_of_very_different_widths(self, dataset: Path) -> None:
        """From a few characters to a whole line."""
        sizes = image_sizes(read_lines(dataset))
        widths = [width for width, _ in sizes]
        assert {height for _, height in sizes} == {48}
        assert min(widths) < 80
        assert max(widths) > 1200

    def test_four_rows_a_partition_are_broken(self, dataset: Path) -> None:
        """Two null images and two that are no image, and these four alone have no truth."""
        for partition in DEFAULT_PARTITIONS:
            lines = read_lines(dataset, partition)
            assert lines["image"].null_count == 2
            assert len(image_sizes(lines)) == lines.num_rows - 4
            missing = set(lines["line_id"].to_pylist()) - set(read_truth(dataset, partition))
            assert len(missing) == 4

    def test_texts_are_printable_and_single_spaced(self, dataset: Path) -> None:
        """ASCII, at least three characters, no space doubled or at an end."""
        for text in read_truth(dataset).values():
            assert text.isascii()
            assert text.isprintable()
            assert len(text) >= 3
            assert text == " ".join(text.split())


class TestRepeat:
    def make(self, folder: Path, **overrides: Any) -> dict[str, str]:
        generate(folder, **{"rows_per_partition": 60, "partitions": ["a", "b"], **overrides})
        return digests(folder)

    def test_a_seed_gives_the_same_bytes(self, tmp_path: Path) -> None:
        """Two generations are equal file by file; another seed is not."""
        first = self.make(tmp_path / "first")
        assert first == self.make(tmp_path / "second")
        assert not set(first.values()) & set(self.make(tmp_path / "third", seed=1).values())

    def test_a_partition_does_not_depend_on_the_others(self, tmp_path: Path) -> None:
        """Made alone or with others, later or first, a partition has the same bytes."""
        both = self.make(tmp_path / "both")
        self.make(tmp_path / "grown", partitions=["b"])
        assert self.make(tmp_path / "grown") == both

    def test_what_is_there_is_kept(self, tmp_path: Path) -> None:
        """A complete partition is not written again."""
        before = self.make(tmp_path)
        assert self.make(tmp_path, seed=5) == before

    @pytest.mark.parametrize("rows", [0, 39, 2**20 + 1])
    def test_row_counts_out_of_range_are_refused(self, tmp_path: Path, rows: int) -> None:
        """Nothing is written for a count that cannot be met."""
        with pytest.raises(ValueError, match="rows_per_partition"):
            generate(tmp_path, rows_per_partition=rows)
        assert list(tmp_path.iterdir()) == []

    def test_a_failure_leaves_no_partition(self, tmp_path: Path) -> None:
        """When the truth cannot be put in its place, the lines do not appear either."""
        (tmp_path / "truth" / "a.parquet").mkdir(parents=True)
        with pytest.raises(OSError, match="directory"):
            self.make(tmp_path, partitions=["a"])
        assert not (tmp_path / "lines" / "a").exists()
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
