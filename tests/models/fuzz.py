"""Models damaged at random: the same bytes and seed always give the same damage.

Most damages keep the file readable and are done to its nodes, shapes, types and names, because a reader
refuses broken bytes early and then is not tested any further.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, MutableSequence, Sequence

import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import AttributeProto, helper

__all__ = ["mutate"]

STRUCTURED_SHARE = 0.8
DAMAGES_MAX = 4
FLIPS_MAX = 16
BLOCK_BYTES_MAX = 4096
COPIES_MAX = 100
COPIED_BYTES_MAX = 2**16
NESTING_MAX = 24

Random = random.Random
Structured = Callable[[onnx.ModelProto, Random], None]
Damage = Callable[[bytes, Random], bytes]

INTEGERS = (0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1e-45, 1e38, -1e38, float("inf"), float("-inf"), float("nan"))
NAMES = ("", "x", "a\nb", "\x1b[31m", "\u202e", "../w", "n" * 10_000)
LENGTHS = (0, 1, -1, 3, 2**31, 2**62, 2**63 - 1, -(2**63))
ATTRIBUTE_TYPES = (
    *(AttributeProto.UNDEFINED, AttributeProto.INT, AttributeProto.FLOATS, AttributeProto.STRINGS),
    *(AttributeProto.TENSOR, AttributeProto.GRAPH, AttributeProto.TYPE_PROTO),
)
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "nobody.knows")
OPERATORS = (
    *("Add", "Cast", "Concat", "ConstantOfShape", "Conv", "Expand", "Gather", "Gemm", "If", "LSTM", "Loop"),
    *(
        "MatMul",
        "NonZero",
        "Pad",
        "Range",
        "ReduceSum",
        "Reshape",
        "Resize",
        "Scan",
        "Shape",
        "Slice",
        "Split",
    ),
    *("Squeeze", "Tile", "TopK", "Transpose", "Unsqueeze", "Where", "Frobnicate"),
)


def mutate(data: bytes, seed: int) -> bytes:
    """Return a model's file with one to four damages; never the same bytes.

    Args:
        data: A model's file; what is no model is damaged byte by byte.
        seed: Which damages; about four of five seeds leave a file that protobuf can read.
    """
    chance = Random(seed)
    is_structured = chance.random() < STRUCTURED_SHARE
    mutated = _mutate_structure(data, chance) if is_structured else data
    while mutated == data:
        for _ in range(chance.randint(1, DAMAGES_MAX)):
            mutated = chance.choice(BYTE_DAMAGES)(mutated, chance)
    return mutated


def _mutate_structure(data: bytes, chance: Random) -> bytes:
    """Return the damaged file; the same bytes where nothing could be damaged so."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
        whole = model.SerializeToString(deterministic=True)
        for _ in range(chance.randint(1, DAMAGES_MAX)):
            chance.choice(STRUCTURE_DAMAGES)(model, chance)
        damaged = model.SerializeToString(deterministic=True)
    # Copying what is nested too deeply fails in protobuf, and shows only in the call that comes next.
    except (DecodeError, EncodeError, SystemError):
        return data
    return data if damaged == whole else damaged


# Bytes


def _flip(data: bytes, chance: Random) -> bytes:
    flipped = bytearray(data or b"\0")
    for _ in range(chance.randint(1, FLIPS_MAX)):
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def _truncate(data: bytes, chance: Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _block(data: bytes, chance: Random) -> tuple[int, int]:
    start = chance.randrange(len(data) + 1)
    return start, min(len(data), start + chance.randint(1, BLOCK_BYTES_MAX))


def _delete_block(data: bytes, chance: Random) -> bytes:
    start, end = _block(data, chance)
    return data[:start] + data[end:]


def _repeat_block(data: bytes, chance: Random) -> bytes:
    start, end = _block(data, chance)
    return data[:end] + data[start:end] * chance.randint(1, 8) + data[end:]


def _insert_noise(data: bytes, chance: Random) -> bytes:
    start, _ = _block(data, chance)
    return data[:start] + chance.randbytes(chance.randint(1, 64)) + data[start:]


# Structure


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _graph(model: onnx.ModelProto, chance: Random) -> onnx.GraphProto:
    return chance.choice(list(_graphs(model.graph)))


def _node(model: onnx.ModelProto, chance: Random) -> onnx.NodeProto:
    """Return one of the nodes; a stray one where there is none."""
    nodes = _graph(model, chance).node
    return chance.choice(nodes) if nodes else onnx.NodeProto(output=["y"])


def _names(model: onnx.ModelProto) -> Sequence[str]:
    graph = model.graph
    found = [value.name for value in graph.input] + [tensor.name for tensor in graph.initializer]
    return [*found, *(name for node in graph.node for name in node.output), *NAMES]


def _drop_node(model: onnx.ModelProto, chance: Random) -> None:
    nodes = _graph(model, chance).node
    if nodes:
        del nodes[chance.randrange(len(nodes))]


def _repeat_node(model: onnx.ModelProto, chance: Random) -> None:
    graph = _graph(model, chance)
    if graph.node:
        node = onnx.NodeProto()
        node.CopyFrom(chance.choice(graph.node))
        copies = chance.choice((1, 2, COPIES_MAX))
        graph.node.extend([node] * (copies if node.ByteSize() < COPIED_BYTES_MAX else 1))


def _shuffle_nodes(model: onnx.ModelProto, chance: Random) -> None:
    nodes = _graph(model, chance).node
    shuffled = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    chance.shuffle(shuffled)
    del nodes[:]
    nodes.extend(shuffled)


def _rename_node(model: onnx.ModelProto, chance: Random) -> None:
    _node(model, chance).name = chance.choice(_names(model))


def _rename_output(model: onnx.ModelProto, chance: Random) -> None:
    outputs = _node(model, chance).output
    if outputs:
        outputs[chance.randrange(len(outputs))] = chance.choice(_names(model))


def _redirect_input(model: onnx.ModelProto, chance: Random) -> None:
    inputs = _node(model, chance).input
    if inputs:
        inputs[chance.randrange(len(inputs))] = chance.choice(_names(model))


def _change_input_count(model: onnx.ModelProto, chance: Random) -> None:
    inputs = _node(model, chance).input
    if inputs and chance.random() < 0.5:
        del inputs[chance.randrange(len(inputs)) :]
    else:
        inputs.extend(chance.choices(_names(model), k=chance.choice((1, 2, COPIES_MAX))))


def _swap_inputs(model: onnx.ModelProto, chance: Random) -> None:
    one, other = _node(model, chance).input, _node(model, chance).input
    if one and other:
        first, second = chance.randrange(len(one)), chance.randrange(len(other))
        one[first], other[second] = other[second], one[first]


def _change_operator(model: onnx.ModelProto, chance: Random) -> None:
    _node(model, chance).op_type = chance.choice(OPERATORS)


def _change_domain(model: onnx.ModelProto, chance: Random) -> None:
    _node(model, chance).domain = chance.choice(DOMAINS)


def _change_attribute(model: onnx.ModelProto, chance: Random) -> None:
    attributes = _node(model, chance).attribute
    if not attributes:
        return
    attribute = chance.choice(attributes)
    match attribute.type:
        case AttributeProto.INT:
            attribute.i = chance.choice(INTEGERS)
        case AttributeProto.INTS:
            _change_integers(attribute.ints, chance, INTEGERS)
        case AttributeProto.FLOAT:
            attribute.f = chance.choice(FLOATS)
        case AttributeProto.STRING:
            attribute.s = chance.choice(NAMES).encode()
        case _:
            attribute.type = chance.choice(ATTRIBUTE_TYPES)


def _change_integers(numbers: MutableSequence[int], chance: Random, extremes: Sequence[int]) -> None:
    """Change, take away or add one of a list."""
    if numbers and chance.random() < 0.7:
        numbers[chance.randrange(len(numbers))] = chance.choice(extremes)
    elif numbers and chance.random() < 0.5:
        del numbers[chance.randrange(len(numbers))]
    else:
        numbers.append(chance.choice(extremes))


def _drop_attribute(model: onnx.ModelProto, chance: Random) -> None:
    attributes = _node(model, chance).attribute
    if attributes:
        del attributes[chance.randrange(len(attributes))]


def _rename_attribute(model: onnx.ModelProto, chance: Random) -> None:
    attributes = _node(model, chance).attribute
    if attributes:
        chance.choice(attributes).name = chance.choice((*NAMES, "axis", "axes", "value", "body", "to"))


def _change_shape(model: onnx.ModelProto, chance: Random) -> None:
    graph = _graph(model, chance)
    values = [*graph.input, *graph.output, *graph.value_info]
    if not values:
        return
    shape = chance.choice(values).type.tensor_type.shape
    if shape.dim and chance.random() < 0.7:
        _change_dimension(chance.choice(shape.dim), chance)
    elif shape.dim and chance.random() < 0.5:
        del shape.dim[chance.randrange(len(shape.dim))]
    else:
        _change_dimension(shape.dim.add(), chance)


def _change_dimension(dimension: onnx.TensorShapeProto.Dimension, chance: Random) -> None:
    if chance.random() < 0.6:
        dimension.dim_value = chance.choice(LENGTHS)
    else:
        dimension.dim_param = chance.choice(NAMES)


def _change_type(model: onnx.ModelProto, chance: Random) -> None:
    graph = _graph(model, chance)
    kind = chance.choice((*onnx.TensorProto.DataType.values(), 999))
    values = [*graph.input, *graph.output, *graph.value_info]
    if graph.initializer and (not values or chance.random() < 0.5):
        chance.choice(graph.initializer).data_type = kind
    elif values:
        chance.choice(values).type.tensor_type.elem_type = kind


def _drop_constant(model: onnx.ModelProto, chance: Random) -> None:
    constants = _graph(model, chance).initializer
    if constants:
        del constants[chance.randrange(len(constants))]


def _resize_constant(model: onnx.ModelProto, chance: Random) -> None:
    constants = _graph(model, chance).initializer
    if constants:
        _change_integers(chance.choice(constants).dims, chance, LENGTHS)


def _change_constant(model: onnx.ModelProto, chance: Random) -> None:
    """Change bytes of a small constant: of those are shapes, axes and numbers of repetitions."""
    constants = [tensor for tensor in _graph(model, chance).initializer if 0 < len(tensor.raw_data) <= 64]
    if constants:
        tensor = chance.choice(constants)
        tensor.raw_data = _flip(tensor.raw_data, chance)


def _move_constant(model: onnx.ModelProto, chance: Random) -> None:
    """Say that a constant is in another file."""
    constants = _graph(model, chance).initializer
    if constants:
        tensor = chance.choice(constants)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        location = chance.choice(("w.bin", "../w.bin", "/etc/passwd", "", ".", "a\0b"))
        tensor.external_data.add(key="location", value=location)


def _change_ends(model: onnx.ModelProto, chance: Random) -> None:
    """Take away or repeat an input or an output of the model."""
    ends = chance.choice((model.graph.input, model.graph.output))
    if ends and chance.random() < 0.5:
        del ends[chance.randrange(len(ends))]
    elif ends:
        ends.append(chance.choice(ends))


def _change_versions(model: onnx.ModelProto, chance: Random) -> None:
    if chance.random() < 0.3:
        model.ir_version = chance.choice(INTEGERS)
    elif model.opset_import and chance.random() < 0.7:
        chance.choice(model.opset_import).version = chance.choice((0, 1, 7, 13, 18, 22, 99, -1, 2**62))
    else:
        model.opset_import.add(domain=chance.choice(DOMAINS), version=1)


def _nest(model: onnx.ModelProto, chance: Random) -> None:
    """Put the nodes into a branch of a choice, a number of times."""
    graph = model.graph
    results = [value.name for value in graph.output]
    for level in range(chance.choice((1, 2, NESTING_MAX))):
        body = onnx.GraphProto(name=f"nest{level}")
        body.node.MergeFrom(graph.node)
        body.output.MergeFrom(graph.output)
        del graph.node[:]
        choose = helper.make_node("If", [chance.choice(_names(model))], results)
        for branch in ("then_branch", "else_branch")[: chance.randint(1, 2) if level == 0 else 1]:
            choose.attribute.append(helper.make_attribute(branch, body))
        graph.node.append(choose)


BYTE_DAMAGES: tuple[Damage, ...] = (_flip, _truncate, _delete_block, _repeat_block, _insert_noise)
STRUCTURE_DAMAGES: tuple[Structured, ...] = (
    *(_drop_node, _repeat_node, _shuffle_nodes, _rename_node, _rename_output),
    *(_redirect_input, _change_input_count, _swap_inputs, _change_operator, _change_domain),
    *(_change_attribute, _change_attribute, _drop_attribute, _rename_attribute),
    *(_change_shape, _change_shape, _change_type, _change_ends, _change_versions, _nest),
    *(_drop_constant, _resize_constant, _change_constant, _move_constant),
)
