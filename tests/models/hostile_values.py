"""Tensors of odd types and sizes, and operators whose numbers ask for the impossible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from tests.models.onnx_files import (
    FLOAT,
    Built,
    Cases,
    Expectation,
    constant,
    model,
    node,
    relu,
    tensor,
    value,
)

CASES = Cases()
INT64 = TensorProto.INT64
LARGEST = 2**63 - 1


def _of_dims(*dims: Any) -> Built:
    return relu(inputs=[value("x", FLOAT, dims)], outputs=[value("y", FLOAT, dims)])


_DIMS: dict[str, tuple[Expectation, tuple[Any, ...]]] = {
    "of_2_to_the_62": ("either", ("N", 2**62)),
    "of_the_largest_number": ("either", ("N", LARGEST)),
    "below_zero": ("either", ("N", -5)),
    "whose_product_overflows": ("either", ("N", 2**33, 2**33)),
    "of_zero": ("either", ("N", 0)),
    "that_are_nameless": ("profile", (None, 8)),
    "with_formulas_for_names": ("profile", ("N", "2*N+M//3", "8")),
    "of_one_name": ("profile", ("N", "N", "N")),
    "of_a_scalar": ("either", ()),
    "of_a_fixed_batch": ("profile", (1, 8)),
}
for _name, (_expectation, _dims) in _DIMS.items():
    CASES.put(f"dims_{_name}", _expectation, lambda _folder, dims=_dims: _of_dims(*dims))

CASES.put("dims_unknown", "either", lambda _folder: relu(inputs=[value("x", FLOAT, None)]))


@CASES.add("either")
def dims_of_100_000_axes(_folder: Path) -> Built:
    return _of_dims(*[1] * 100_000)


@CASES.add("profile")
def batch_axes_of_two_names(_folder: Path) -> Built:
    inputs = [value("x", FLOAT, ["N", 8]), value("z", FLOAT, ["M", 8])]
    return model([node("Add", ["x", "z"], ["y"])], inputs=inputs, outputs=[value("y", FLOAT, ["K", 8])])


CASES.put("output_of_a_wrong_shape", "either", lambda _folder: relu(outputs=[value("y", FLOAT, ["N", 99])]))
CASES.put("output_of_a_wrong_rank", "either", lambda _folder: relu(outputs=[value("y", FLOAT, [1] * 9)]))
CASES.put("output_of_a_wrong_type", "either", lambda _folder: relu(outputs=[value("y", INT64, ["N", 8])]))
CASES.put("input_of_type_0", "either", lambda _folder: relu(inputs=[value("x", 0, ["N", 8])]))
CASES.put("input_of_type_999", "either", lambda _folder: relu(inputs=[value("x", 999, ["N", 8])]))


@CASES.add("either")
def input_without_type(_folder: Path) -> Built:
    return relu(inputs=[onnx.ValueInfoProto(name="x")])


@CASES.add("either")
def operator_with_mixed_types(_folder: Path) -> Built:
    return model([node("Add", ["x", "w"], ["y"])], constants=[constant("w", range(8), "int64")])


# Constants


def _adding(weight: onnx.TensorProto, **options: Any) -> onnx.ModelProto:
    return model([node("Add", ["x", "w"], ["y"])], constants=[weight], **options)


for _title, _tensor in {
    "without_its_data": tensor("w", [2**20, 2**20]),
    "whose_size_overflows": tensor("w", [2**33, 2**33]),
    "of_negative_size": tensor("w", [-1]),
    "shorter_than_its_size": tensor("w", [8], raw_data=bytes(8)),
    "longer_than_its_size": tensor("w", [8], raw_data=bytes(800)),
    "given_twice": tensor("w", [8], raw_data=bytes(32), float_data=[1.0] * 8),
    "of_type_999": tensor("w", [8], 999, raw_data=bytes(32)),
    "of_no_type": TensorProto(name="w", dims=[8], raw_data=bytes(32)),
}.items():
    CASES.put(f"constant_{_title}", "either", lambda _folder, weight=_tensor: _adding(weight))

CASES.put("constant_of_zero_size", "either", lambda _folder: _adding(tensor("w", [0, 8], raw_data=b"")))


@CASES.add("profile")
def constant_that_is_not_a_number(_folder: Path) -> Built:
    return _adding(constant("w", [float("nan"), float("inf"), float("-inf"), 0, 1e-45, 3e38, -0.0, 1]))


def _sparse() -> onnx.SparseTensorProto:
    values = helper.make_tensor("w", FLOAT, [2], [1.0, 2.0])
    return helper.make_sparse_tensor(values, helper.make_tensor("i", INT64, [2], [1, 5]), [8])


@CASES.add("profile")
def sparse_constant(_folder: Path) -> Built:
    found = model([node("Add", ["x", "w"], ["y"])])
    found.graph.sparse_initializer.append(_sparse())
    return found


@CASES.add("profile")
def sparse_attribute(_folder: Path) -> Built:
    return model([node("Constant", [], ["w"], sparse_value=_sparse()), node("Add", ["x", "w"], ["y"])])


@CASES.add("either")
def sparse_constant_of_huge_size(_folder: Path) -> Built:
    found = model([node("Add", ["x", "w"], ["y"])])
    sparse = _sparse()
    sparse.dims[:] = [2**40]
    found.graph.sparse_initializer.append(sparse)
    return found


# Types


@CASES.add("profile")
def texts(_folder: Path) -> Built:
    inputs, outputs = ([value(name, TensorProto.STRING, ["N"])] for name in "xy")
    return model([node("Identity", ["x"], ["y"])], inputs, outputs)


@CASES.add("profile")
def half_precision(_folder: Path) -> Built:
    inputs, outputs = ([value(name, TensorProto.FLOAT16, ["N", 8])] for name in "xy")
    return relu(inputs=inputs, outputs=outputs)


def _through(kind: int) -> Built:
    return model([node("Cast", ["x"], ["a"], to=kind), node("Cast", ["a"], ["y"], to=FLOAT)])


CASES.put("bfloat16_inside", "profile", lambda _folder: _through(TensorProto.BFLOAT16))
CASES.put("float8_inside", "profile", lambda _folder: _through(TensorProto.FLOAT8E4M3FN))
CASES.put("cast_to_type_999", "either", lambda _folder: _through(999))


@CASES.add("either")
def bfloat16_outside(_folder: Path) -> Built:
    return relu(inputs=[value("x", TensorProto.BFLOAT16, ["N", 8])])


def _dequantized(kind: int) -> Built:
    weight = helper.make_tensor("w", kind, [8, 8], [1] * 64)
    nodes = [node("DequantizeLinear", ["w", "s"], ["f"]), node("MatMul", ["x", "f"], ["y"])]
    return model(nodes, constants=[weight, constant("s", 1)])


CASES.put("int4_weights", "profile", lambda _folder: _dequantized(TensorProto.INT4))
CASES.put("float8_weights", "profile", lambda _folder: _dequantized(TensorProto.FLOAT8E5M2))


@CASES.add("either")
def int4_input(_folder: Path) -> Built:
    inputs = [value("x", TensorProto.INT4, ["N", 8])]
    return model([node("DequantizeLinear", ["x", "s"], ["y"])], inputs, constants=[constant("s", 1)])


@CASES.add("either")
def sequence_output(_folder: Path) -> Built:
    outputs = [helper.make_tensor_sequence_value_info("y", FLOAT, None)]
    return model([node("SplitToSequence", ["x"], ["y"], axis=0)], outputs=outputs)


@CASES.add("either")
def sequence_inside(_folder: Path) -> Built:
    nodes = [
        node("SplitToSequence", ["x"], ["s"], axis=0),
        node("ConcatFromSequence", ["s"], ["y"], axis=0),
    ]
    return model(nodes)


@CASES.add("either")
def optional_output(_folder: Path) -> Built:
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, ["N", 8]))
    return model([node("Optional", ["x"], ["y"])], outputs=[helper.make_value_info("y", kind)])


@CASES.add("either")
def map_output(_folder: Path) -> Built:
    kind = helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, []))
    outputs = [helper.make_value_info("y", helper.make_sequence_type_proto(kind))]
    zipped = node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=list(range(8)))
    found = model([zipped], outputs=outputs)
    found.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    return found


# Recurrent operators, which abort the process on a batch without rows


def _recurrent(operator: str, gates: int) -> Built:
    constants = [constant("w", [[[0.1] * 8] * (4 * gates)]), constant("r", [[[0.1] * 4] * (4 * gates)])]
    step = node(operator, ["x", "w", "r"], ["", "y"], hidden_size=4)
    return model(
        [step], [value("x", FLOAT, [5, "N", 8])], [value("y", FLOAT, [1, "N", 4])], constants=constants
    )


CASES.put("long_short_term_memory", "profile", lambda _folder: _recurrent("LSTM", 4))
CASES.put("gated_recurrent_unit", "profile", lambda _folder: _recurrent("GRU", 3))


# Numbers that ask for the impossible


def _summed(maker: onnx.NodeProto, *constants: onnx.TensorProto) -> Built:
    """What the node makes as `c` is added up and joins every row."""
    nodes = [maker, node("ReduceSum", ["c"], ["s"], keepdims=0), node("Add", ["x", "s"], ["y"])]
    return model(nodes, constants=constants)


def _filled(count: int) -> Built:
    fill = helper.make_tensor("v", FLOAT, [1], [1.0])
    return _summed(node("ConstantOfShape", ["n"], ["c"], value=fill), constant("n", [count], "int64"))


CASES.put("constant_of_3_gigabytes", "either", lambda _folder: _filled(3 * 2**28))
CASES.put("constant_of_a_terabyte", "either", lambda _folder: _filled(2**38))
CASES.put("constant_that_overflows", "either", lambda _folder: _filled(2**62))
CASES.put("constant_of_less_than_nothing", "either", lambda _folder: _filled(-1))

_ASKING: dict[str, Built] = {
    "expand": _summed(node("Expand", ["x", "n"], ["c"]), constant("n", [2**38, 1, 8], "int64")),
    "tile": _summed(node("Tile", ["x", "n"], ["c"]), constant("n", [2**40, 2**20], "int64")),
    "range": _summed(
        node("Range", ["a", "b", "d"], ["c"]), constant("a", 0), constant("b", 1e30), constant("d", 1e-30)
    ),
    "range_by_zero": _summed(
        node("Range", ["a", "b", "d"], ["c"]), constant("a", 0), constant("b", 1), constant("d", 0)
    ),
    "reshape": _summed(node("Reshape", ["x", "n"], ["c"]), constant("n", [2**62, -1, 0], "int64")),
    "pad": _summed(node("Pad", ["x", "n"], ["c"]), constant("n", [0, 0, LARGEST, -LARGEST], "int64")),
    "resize": _summed(
        node("Resize", ["x", "", "n"], ["c"], mode="nearest"), constant("n", [float("nan"), 1e30])
    ),
    "gather": _summed(node("Gather", ["x", "n"], ["c"], axis=7), constant("n", [LARGEST], "int64")),
    "transpose": _summed(node("Transpose", ["x"], ["c"], perm=[0, 0, -3, LARGEST])),
    "split": _summed(node("Split", ["x"], ["c"], num_outputs=LARGEST)),
    "attribute_of_a_wrong_type": _summed(node("ReduceMax", ["x"], ["c"], keepdims="yes")),
}
for _title, _built in _ASKING.items():
    CASES.put(f"impossible_{_title}", "either", lambda _folder, built=_built: built)


@CASES.add("either")
def impossible_onehot(_folder: Path) -> Built:
    constants = [constant("i", [0, 1], "int64"), constant("n", 2**40, "int64"), constant("v", [0, 1])]
    return _summed(node("OneHot", ["i", "n", "v"], ["c"]), *constants)


def _convolution(**attributes: Any) -> Built:
    return model(
        [node("Conv", ["x", "w"], ["y"], **attributes)],
        [value("x", FLOAT, ["N", 3, 16, 16])],
        [value("y", FLOAT, ["N", 4, None, None])],
        [constant("w", [[[[0.1] * 3] * 3] * 3] * 4)],
    )


for _title, _attributes in {
    "stride_0": {"strides": [0, 0]},
    "negative_stride": {"strides": [-1, -1]},
    "huge_kernel": {"kernel_shape": [LARGEST, LARGEST]},
    "huge_padding": {"pads": [LARGEST] * 4},
    "huge_dilation": {"dilations": [LARGEST] * 2},
    "no_groups": {"group": 0},
    "too_many_groups": {"group": LARGEST},
    "lists_of_wrong_lengths": {"strides": [1] * 1000, "pads": [1], "dilations": [1]},
    "unknown_padding": {"auto_pad": "\x1b[31mSOMEHOW"},
}.items():
    CASES.put(
        f"convolution_with_{_title}",
        "either",
        lambda _folder, attributes=_attributes: _convolution(**attributes),
    )
CASES.put("convolution", "profile", lambda _folder: _convolution())
