"""Files that are no models, and models whose data is elsewhere."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import onnx

from tests.models.onnx_files import (
    Built,
    Cases,
    Expectation,
    constant,
    external,
    field,
    model,
    node,
    relu,
    value,
)

CASES = Cases()
WEIGHT_BYTES = 32  # eight numbers
SPARSE_TENSORS = 12
SPARSE_NUMBERS = 48 * 2**20


def _truncate(percent: int) -> Built:
    data = model([node("Add", ["x", "w"], ["y"])], constants=[constant("w", range(8))]).SerializeToString()
    return data[: len(data) * percent // 100]


for _percent in (10, 50, 90):
    CASES.put(f"truncated_{_percent}", "error", lambda _folder, percent=_percent: _truncate(percent))


@CASES.add("error")
def empty_file(_folder: Path) -> Built:
    return b""


@CASES.add("error")
def pointer_to_large_file_storage(_folder: Path) -> Built:
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:12ab\nsize 999\n"


@CASES.add("error")
def zip_file(_folder: Path) -> Built:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("model.onnx", relu().SerializeToString())
    return data.getvalue()


@CASES.add("error")
def picture(_folder: Path) -> Built:
    return b"\x89PNG\r\n\x1a\n" + bytes(range(256))


@CASES.add("error")
def web_page(_folder: Path) -> Built:
    return b"<!DOCTYPE html><html><title>404 Not Found</title></html>"


@CASES.add("error")
def graph_missing(_folder: Path) -> Built:
    return onnx.ModelProto(ir_version=10, opset_import=[onnx.OperatorSetIdProto(version=21)])


@CASES.add("error")
def folder_with_the_name_of_a_model(folder: Path) -> Built:
    path = folder / "model.onnx"
    path.mkdir()
    return path


@CASES.add("error")
def file_missing(folder: Path) -> Built:
    return folder / "model.onnx"


@CASES.add("error")
def link_to_nothing(folder: Path) -> Built:
    path = folder / "model.onnx"
    path.symlink_to("nothing.onnx")
    return path


@CASES.add("error")
def link_to_itself(folder: Path) -> Built:
    path = folder / "model.onnx"
    path.symlink_to("model.onnx")
    return path


@CASES.add("error")
def pipe_that_nobody_writes(folder: Path) -> Built:
    path = folder / "model.onnx"
    os.mkfifo(path)
    return path


@CASES.add("error")
def device_without_end(folder: Path) -> Built:
    path = folder / "model.onnx"
    path.symlink_to("/dev/zero")
    return path


@CASES.add("error")
def file_of_zeros_over_the_limit_of_protobuf(folder: Path) -> Built:
    path = folder / "model.onnx"
    path.touch()
    os.truncate(path, 3 * 2**30)
    return path


@CASES.add("error")
def length_beyond_the_file(_folder: Path) -> Built:
    return b"\x3a" + b"\xff" * 9 + b"\x01" + b"graph"


@CASES.add("either")
def unknown_fields(_folder: Path) -> Built:
    return relu().SerializeToString() + field(2**28, b"later versions" * 1000)


@CASES.add("profile")
def model_reached_by_a_link(folder: Path) -> Built:
    (folder / "real.onnx").write_bytes(relu().SerializeToString())
    path = folder / "model.onnx"
    path.symlink_to("real.onnx")
    return path


@CASES.add("profile")
def large_notes(_folder: Path) -> Built:
    found = relu(doc_string="note " * 2_000_000)
    found.metadata_props.add(key="\x1b[31mkey", value="\n" * 100_000)
    return found


def _adding(weight: onnx.TensorProto) -> onnx.ModelProto:
    return model([node("Add", ["x", "w"], ["y"])], constants=[weight])


def _external(**entries: str | int) -> onnx.ModelProto:
    return _adding(external("w", [8], **entries))


def _outside(folder: Path) -> Path:
    """A file beside the model's folder, as large as the weights."""
    path = folder.parent / f"{folder.name}.secret"
    path.write_bytes(bytes(WEIGHT_BYTES))
    return path


@CASES.add("profile")
def external_data(folder: Path) -> Built:
    (folder / "w.bin").write_bytes(bytes(WEIGHT_BYTES))
    return _external(location="w.bin")


@CASES.add("profile")
def external_data_in_a_folder_below(folder: Path) -> Built:
    (folder / "below").mkdir()
    (folder / "below" / "w.bin").write_bytes(bytes(64 + WEIGHT_BYTES))
    return _external(location="below/w.bin", offset=64, length=WEIGHT_BYTES)


@CASES.add("error")
def external_data_missing(_folder: Path) -> Built:
    return _external(location="nowhere.bin")


@CASES.add("error")
def external_data_absolute(folder: Path) -> Built:
    return _external(location=str(_outside(folder)))


@CASES.add("error")
def external_data_of_the_system(_folder: Path) -> Built:
    return _external(location="/etc/passwd", length=WEIGHT_BYTES)


@CASES.add("error")
def external_data_in_a_folder_above(folder: Path) -> Built:
    return _external(location=f"../{_outside(folder).name}")


@CASES.add("error")
def external_data_by_a_link_outside(folder: Path) -> Built:
    (folder / "w.bin").symlink_to(_outside(folder))
    return _external(location="w.bin")


@CASES.add("error")
def external_data_by_a_linked_folder(folder: Path) -> Built:
    (folder / "below").symlink_to(_outside(folder).parent)
    return _external(location=f"below/{folder.name}.secret")


@CASES.add("error")
def external_data_by_a_link_to_itself(folder: Path) -> Built:
    (folder / "w.bin").symlink_to("w.bin")
    return _external(location="w.bin")


@CASES.add("error")
def external_data_that_is_a_pipe(folder: Path) -> Built:
    os.mkfifo(folder / "w.bin")
    return _external(location="w.bin")


# What a case says of its data, in a folder where `w.bin` has eight numbers.
_ODD_EXTERNALS: dict[str, tuple[Expectation, dict[str, str | int]]] = {
    "too_short": ("either", {"length": 2 * WEIGHT_BYTES}),
    "beyond_its_end": ("either", {"offset": 10**12}),
    "before_its_start": ("either", {"offset": -8}),
    "of_another_length": ("either", {"length": 8}),
    "with_words_for_numbers": ("either", {"offset": "many", "length": "1e3"}),
    "with_a_huge_number": ("either", {"offset": "9" * 5000}),
    "that_is_the_folder": ("error", {"location": "."}),
    "without_a_name": ("error", {"location": ""}),
    "with_a_null_in_its_name": ("error", {"location": "w.bin\0.txt"}),
    "with_a_very_long_name": ("error", {"location": "w" * 100_000}),
    "that_is_the_model": ("either", {"location": "model.onnx"}),
}


def _odd_external(folder: Path, entries: dict[str, str | int]) -> Built:
    (folder / "w.bin").write_bytes(bytes(WEIGHT_BYTES))
    return _external(**{"location": "w.bin", **entries})


for _name, (_expectation, _entries) in _ODD_EXTERNALS.items():
    CASES.put(
        f"external_data_{_name}",
        _expectation,
        lambda folder, entries=_entries: _odd_external(folder, entries),
    )


@CASES.add("error")
def external_data_without_any_place(_folder: Path) -> Built:
    return _external()


@CASES.add("error")
def external_data_of_an_attribute_missing(_folder: Path) -> Built:
    nodes = [
        node("Constant", [], ["w"], value=external("w", [8], location="../nowhere.bin")),
        node("Add", ["x", "w"], ["y"]),
    ]
    return model(nodes)


@CASES.add("profile")
def external_data_of_two_gigabytes(folder: Path) -> Built:
    """Weights of 2.25 GB which take no room on the disk."""
    (folder / "w.bin").touch()
    os.truncate(folder / "w.bin", SPARSE_TENSORS * SPARSE_NUMBERS * 4)
    weights = [
        external(
            f"w{index}",
            [8, SPARSE_NUMBERS // 8],
            location="w.bin",
            offset=index * SPARSE_NUMBERS * 4,
            length=SPARSE_NUMBERS * 4,
        )
        for index in range(SPARSE_TENSORS)
    ]
    nodes = []
    for index in range(SPARSE_TENSORS):
        nodes += [
            node("Gather", [f"w{index}", "zero"], [f"g{index}"], axis=1),
            node("Add", [f"a{index}" if index else "x", f"g{index}"], [f"a{index + 1}"]),
        ]
    outputs = [value(f"a{SPARSE_TENSORS}", onnx.TensorProto.FLOAT, ["N", 8])]
    return model(nodes, outputs=outputs, constants=[*weights, constant("zero", 0, "int64")])
