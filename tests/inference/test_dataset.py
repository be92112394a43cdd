"""Where a partition's files are, what type its columns have, and what names its contents."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sits_dagster.errors import ConfigError
from sits_dagster.inference.dataset import InputFile, PartitionInput, partition_path, unify_types

keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(key=keys)
@example(key="..")
@example(key=".")
@example(key="/etc/passwd")
@example(key="../../x")
@example(key="_SUCCESS")
@example(key=".hidden")
@example(key=" ")
@example(key="a\x00b\n")
@example(key="日本 語")
@example(key="a[1]*?")
def test_a_key_is_one_visible_component_of_the_path(key: str) -> None:
    """Whatever a partition is called, its folder lies in the template's folder and readers see it."""
    path = Path(partition_path("/data/{partition_key}/x", key))
    assert len(path.parts) == 4
    assert path.parts[:2] == ("/", "data")
    component = path.parts[2]
    assert component.isascii()
    assert component.isprintable()
    assert component not in {".", ".."}
    assert not component.startswith((".", "_"))
    assert not set(component) & set("*?[]"), "a scan would take it for a pattern"


@given(left=keys, right=keys)
@example(left="a/b", right="a%2Fb")
@example(left=".a", right="%2Ea")
@example(left="_a", right="%5Fa")
def test_two_keys_never_share_a_folder(left: str, right: str) -> None:
    """One partition's output never overwrites another's."""
    same = partition_path("{partition_key}", left) == partition_path("{partition_key}", right)
    assert same == (left == right)


@pytest.mark.parametrize("key", ["", "x" * 300, "é" * 100])
def test_a_key_that_makes_no_file_name_is_refused(key: str) -> None:
    """An empty or overlong key ends with a sentence, not with the file system's error."""
    with pytest.raises(ConfigError, match="Partition key"):
        partition_path("{partition_key}", key)


def test_every_dimension_can_be_named() -> None:
    """A multi-partitioned asset names its dimensions in the template."""
    assert partition_path("{date}/{site}", "2026|a", {"date": "2026", "site": "a/b"}) == "2026/a%2Fb"


@pytest.mark.parametrize(
    "template", ["{nothing}", "{}", "{partition_key", "{partition_key.x}", "{partition_key[x]}"]
)
def test_a_bad_template_says_what_is_available(template: str) -> None:
    """A typing error in the path is a configuration error that lists the names."""
    with pytest.raises(ConfigError, match="partition_key"):
        partition_path(template, "k")


def test_a_template_without_partitions_says_so() -> None:
    """An unpartitioned asset with a placeholder gets the reason."""
    with pytest.raises(ConfigError, match="no partitions"):
        partition_path("{partition_key}", None)


TYPES = [
    (pa.int32(), pa.int64(), (pa.int64(), True)),
    (pa.int8(), pa.int16(), (pa.int16(), True)),
    (pa.uint8(), pa.uint32(), (pa.uint32(), True)),
    (pa.float32(), pa.float64(), (pa.float64(), True)),
    (pa.float16(), pa.float32(), (pa.float32(), True)),
    (pa.int32(), pa.int32(), (pa.int32(), False)),
    (pa.string(), pa.large_string(), (pa.large_string(), False)),
    (pa.binary(), pa.large_binary(), (pa.large_binary(), False)),
    (pa.dictionary(pa.int8(), pa.string()), pa.string(), (pa.string(), False)),
    (pa.dictionary(pa.int8(), pa.int32()), pa.int64(), (pa.int64(), True)),
    (pa.null(), pa.int64(), (pa.int64(), False)),
    (pa.null(), pa.null(), (pa.null(), False)),
    (pa.list_(pa.float32()), pa.list_(pa.float64()), (pa.list_(pa.float64()), True)),
    (pa.list_(pa.int8()), pa.large_list(pa.int8()), (pa.large_list(pa.int8()), False)),
    (pa.list_(pa.int8()), pa.list_(pa.string()), None),
    (pa.int32(), pa.uint32(), None),
    (pa.int32(), pa.float64(), None),
    (pa.int32(), pa.string(), None),
    (pa.bool_(), pa.int8(), None),
    (pa.timestamp("s"), pa.timestamp("ms"), None),
    (pa.string(), pa.binary(), None),
]


@pytest.mark.parametrize(("left", "right", "unified"), TYPES, ids=lambda t: str(t).replace(" ", ""))
def test_types_unify_without_loss_or_clash(
    left: pa.DataType, right: pa.DataType, unified: tuple[pa.DataType, bool] | None
) -> None:
    """Files of one partition may differ where no value is lost; the order of the files does not matter."""
    assert unify_types(left, right) == unified
    assert unify_types(right, left) == unified


def _file(path: str, *rows: int) -> InputFile:
    return InputFile(path=path, size_bytes=10, version="1", row_group_rows=rows)


def test_a_row_is_traced_to_its_file() -> None:
    """The quarantine names the file and the row in it, also beside empty files."""
    files = (_file("a", 2, 1), _file("empty"), _file("b", 2), _file("empty2", 0))
    partition = PartitionInput(files=files, schema=pa.schema([]))
    assert partition.rows == 5
    assert partition.row_group_rows == (2, 1, 2, 0)
    assert partition.locate([0, 2, 3, 4]) == (["a", "a", "b", "b"], [0, 2, 0, 1])
    assert partition.locate([]) == ([], [])


@pytest.mark.parametrize(
    "change", [{"path": "other"}, {"size_bytes": 11}, {"version": "2"}, {"row_group_rows": (2, 1)}]
)
def test_the_digest_changes_with_each_fact_of_a_file(change: dict[str, object]) -> None:
    """Input that changed in any way is computed anew."""
    schema = pa.schema([("x", pa.int64())])
    before = PartitionInput(files=(_file("a", 3),), schema=schema)
    after = PartitionInput(files=(dataclasses.replace(_file("a", 3), **change),), schema=schema)
    assert before.digest() != after.digest()


def test_the_digest_is_that_of_the_contents_alone() -> None:
    """The same files with other notes are the same input; another schema is not."""
    schema = pa.schema([("x", pa.int64())])
    before = PartitionInput(files=(_file("a", 3),), schema=schema)
    assert dataclasses.replace(before, notes=("seen",)).digest() == before.digest()
    assert dataclasses.replace(before, schema=pa.schema([("x", pa.int32())])).digest() != before.digest()
