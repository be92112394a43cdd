"""How much arithmetic one operator call does, from the shapes of what it reads and writes.

A multiply-add is 2 FLOPs (of whole numbers too), every elementary function of one element – `Add`, `Exp`,
`Erf`, `Sqrt`, a comparison – is 1, and a fused operator counts as the elementary ones that it stands for.
Padding, masks and causal halves are not subtracted. The bias of a product is the addition that its first
term does not need.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from sits_dagster.models.call import RANK_MAX, Call, UncostedError

__all__ = [
    "Formula",
    "attention_of_heads",
    "attention_with_projection",
    "convolution",
    "deformable_convolution",
    "determinant",
    "each",
    "each_input",
    "each_operand",
    "einsum",
    "fourier",
    "fused_convolution",
    "fused_matrix_product",
    "general_product",
    "grid_sample",
    "local_response",
    "logarithm",
    "matrix_product",
    "nothing",
    "packed_product",
    "pool",
    "quick_gelu",
    "recurrent",
    "region_samples",
    "resize",
    "short_fourier",
    "suppression",
    "top",
    "transposed_convolution",
]

OVERLAP_FLOPS = 12  # of two boxes: 4 comparisons, 4 subtractions, 2 products, their union and the ratio
SPLIT_RANK, PACKED_RANK = 4, 5  # of queries by heads, and of queries, keys and values in one
SAMPLES_ADAPTIVE = 2  # points an axis where RoiAlign chooses by the region's size: what Mask R-CNN uses


Formula: TypeAlias = Callable[[Call], int]


def nothing(call: Call) -> int:
    """Arithmetic of a call that computes nothing: 0."""
    del call
    return 0


def each(flops: int) -> Formula:
    """Arithmetic of `flops` for each element of the output."""
    return lambda call: flops * math.prod(call.output())


def each_input(flops: int) -> Formula:
    """Arithmetic of `flops` for each element of the first input."""
    return lambda call: flops * math.prod(call.input(0))


def each_operand(extra: int) -> Formula:
    """`Sum`, `Max`, …: one less than the operands for each element of the output, and `extra`."""
    return lambda call: (max(0, len(call.node.inputs) - 1) + extra) * math.prod(call.output())


def quick_gelu(call: Call) -> int:
    """`x · sigmoid(α · x)`: 3 for each element, 2 where α is 1 (SiLU)."""
    return (2 if call.node.attributes.get("alpha") == 1 else 3) * math.prod(call.output())


def logarithm(number: int) -> int:
    """Return log₂, rounded up."""
    return max(0, number - 1).bit_length()


# Convolutions


def convolution(weight: int, extra: int = 0) -> Formula:
    """`2 × output × C/group × kernel`, and `extra` an output element, whatever the layout of the data.

    Weights are `[C_out, C/group, *kernel]`, and `[C_out, *kernel, C/group]` in the NHWC domains.
    """
    return lambda call: (2 * math.prod(call.input(weight, 1)[1:]) + extra) * math.prod(call.output())


def fused_convolution(call: Call) -> int:
    """A convolution, the sum with its 4th input, and an activation, where there are such."""
    extra = int(call.has(3)) + int("activation" in call.node.attributes)
    return convolution(1, extra)(call)


def transposed_convolution(weight: int, extra: int = 0) -> Formula:
    """`2 × input × C_out/group × kernel`: weights are `[C, C_out/group, *kernel]`."""
    return lambda call: (
        2 * math.prod(call.input(weight, 1)[1:]) * math.prod(call.input(0)) + extra * math.prod(call.output())
    )


def deformable_convolution(call: Call) -> int:
    """A convolution whose every input is sampled between 4 neighbours and scaled by a mask."""
    weight, data, output = call.input(1, 2), call.input(0, 2), call.output(0, 2)
    sampled = data[0] * data[1] * math.prod(weight[2:]) * math.prod(output[2:])
    return convolution(1)(call) + (8 + int(call.has(4))) * sampled


# Products of matrices


def matrix_product(left: int, extra: int = 0) -> Formula:
    """`2 × output × K`, K being the last axis of the left side, and `extra` an output element."""
    return lambda call: (2 * call.input(left, 1)[-1] + extra) * math.prod(call.output())


def fused_matrix_product(call: Call) -> int:
    """A product whose left side may be transposed, with or without its batch axes."""
    shape = call.input(0, 1)
    is_transposed = call.node.integer("transA", 0) != 0 and len(shape) > 1
    axis = (0 if call.node.integer("transBatchA", 0) else -2) if is_transposed else -1
    extra = int("activation" in call.node.attributes)
    return (2 * shape[axis] + extra) * math.prod(call.output())


def general_product(call: Call) -> int:
    """`Gemm`: `2 × output × K`; C is the bias."""
    left = call.input(0, 2)
    inner = left[0] if call.node.integer("transA", 0) else left[1]
    return (2 * inner + int("activation" in call.node.attributes)) * math.prod(call.output())


def packed_product(call: Call) -> int:
    """A product with few-bit weights: `2 × output × K`, and 2 to unpack each of the `K × N` weights."""
    inner, columns = call.node.integer("K", 0), call.node.integer("N", 0)
    return 2 * inner * math.prod(call.output()) + 2 * inner * columns


def einsum(call: Call) -> int:
    """Two operands after the other, each pair over all labels that it has: as ONNX Runtime contracts them.

    A label is summed as soon as neither the output nor a later operand has it.
    """
    operands, result, lengths = _einsum_labels(call)
    later = [result]  # from the last operand on, the labels still needed
    for labels in reversed(operands[1:]):
        later.append(later[-1] | labels)
    total, held = 0, operands[0]
    for index, needed in enumerate(reversed(later)):
        if index:
            held = held | operands[index]
        flops = int(index > 0) + int(not held <= needed)
        total += flops * math.prod(lengths[label] for label in held)
        held &= needed
    return total


def _einsum_labels(call: Call) -> tuple[list[frozenset[str]], frozenset[str], dict[str, int]]:
    """Return the labels of each operand and of the output, and their lengths; `...` becomes `.1`, `.2`, ….

    Without an arrow, the output has the labels that occur once.
    """
    equation = str(call.node.attributes.get("equation", "")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(call.node.inputs):
        msg = f"the equation {equation[:80]!r} of Einsum does not fit its {len(call.node.inputs)} inputs"
        raise UncostedError(msg)
    lengths: dict[str, int] = {}
    operands: list[frozenset[str]] = []
    for index, term in enumerate(terms):
        shape = call.input(index)
        dots = len(shape) - len(term.replace("...", ""))
        labels = _spelled(term, dots)
        if len(labels) != len(shape):
            msg = f"the equation {equation[:80]!r} of Einsum does not fit the shape of its input {index}"
            raise UncostedError(msg)
        for label, length in zip(labels, shape, strict=True):
            lengths[label] = max(length, lengths.get(label, 0))
        operands.append(frozenset(labels))
    dotted = [label for label in lengths if label.startswith(".")]
    once = [label for label in lengths if left.count(label) == 1]
    result = _spelled(right, len(dotted)) if arrow else [*dotted, *once]
    return operands, frozenset(result) & frozenset(lengths), lengths


def _spelled(term: str, dots: int) -> list[str]:
    """Return a term's labels; axes behind `...` are numbered from the last, as broadcasting aligns them."""
    before, dotted, after = term.partition("...")
    return [*before, *(f".{axis}" for axis in range(dots, 0, -1) if dotted), *after]


# Layers with a state, and attention


def recurrent(flops: int) -> Formula:
    """`2 × steps × rows × (W + R)` elements, and `flops` a step for each hidden unit.

    Steps times rows is the same in both layouts, and so are the weights' elements, transposed or not.
    """

    def count(call: Call) -> int:
        data, weights, states = call.input(0, 3), call.input(1, 3), call.input(2, 3)
        hidden = states[0] * min(states[1:3])
        return data[0] * data[1] * (2 * math.prod(weights) + 2 * math.prod(states) + flops * hidden)

    return count


def _attention(call: Call, *, pairs: int, width: int, heads: int) -> int:
    """`2 × pairs × width` for scores and values; scale and softmax are 6 for each pair and head.

    Args:
        call: The call.
        pairs: Queries times keys, times the batch's rows.
        width: Columns of all heads' queries, and of their values.
        heads: Of queries.
    """
    if heads < 1:
        msg = f"{call.node.operator} does not tell its heads"
        raise UncostedError(msg)
    return pairs * (2 * width + 6 * heads)


def attention_with_projection(past: int) -> Formula:
    """`Attention` of ONNX Runtime: `[B, S, D]` times `[D, Q + K + V]`, then attention over `past` too."""

    def count(call: Call) -> int:
        rows, queries, width = call.input(0, 3)[:3]
        columns, values = call.input(1, 2)[1], call.output(0, 1)[-1]
        keys = queries + (call.input(past, 5)[3] if call.has(past) else 0)
        projection = 2 * rows * queries * width * columns
        shared = (columns - values) // 2 + values  # as many columns of queries as of keys
        heads = call.node.integer("num_heads", 0)
        return projection + _attention(call, pairs=rows * queries * keys, width=shared, heads=heads)

    return count


def attention_of_heads(past: int, present: int, heads: str) -> Formula:
    """Attention over separate or packed queries, keys and values.

    Args:
        past: The input of earlier keys, `[B, heads, P, head]`.
        present: The output of all keys, which tells how many there are.
        heads: The attribute with the number of queries' heads.
    """

    def count(call: Call) -> int:
        query = call.input(0, 3)
        rows, queries, width, number = _unpacked(query, call.node.integer(heads, 0))
        values = _unpacked(call.output(0, 3), number)[2]
        is_packed = len(query) == PACKED_RANK or not call.has(1)
        if call.gives(present):
            keys = call.output(present, 4)[2]
        else:
            keys = queries if is_packed else _unpacked(call.input(1, 3), number)[1]
            keys += call.input(past, 4)[2] if call.has(past) else 0
        columns = values if is_packed else width
        return _attention(call, pairs=rows * queries * keys, width=columns + values, heads=number)

    return count


def _unpacked(shape: tuple[int, ...], heads: int) -> tuple[int, int, int, int]:
    """Return the batch's rows, the positions, the columns of all heads, and the heads.

    Shapes are `[B, S, columns]`, `[B, heads, S, head]` or `[B, S, heads, 2 or 3, head]`.
    """
    if len(shape) == SPLIT_RANK:
        return shape[0], shape[2], shape[1] * shape[3], shape[1]
    if len(shape) == PACKED_RANK:
        return shape[0], shape[1], shape[2] * shape[4], shape[2]
    return shape[0], shape[1], shape[2], heads


# Windows, samples and transforms


def pool(flops: int) -> Formula:
    """`flops` for each element of the window, for each element of the output."""
    return lambda call: flops * call.product("kernel_shape") * math.prod(call.output())


def local_response(call: Call) -> int:
    """`LRN`: a square, a sum over `size` neighbours, and 5 more, for each element."""
    return (max(1, call.node.integer("size", 1)) + 4) * math.prod(call.output())


def _taps(mode: str, axes: int) -> int:
    """Return how many neighbours a sample is made of."""
    return 0 if mode == "nearest" else (4 if "cubic" in mode else 2) ** axes


def resize(call: Call) -> int:
    """A multiply-add for each neighbour of a sample, in the axes that change; the nearest is copied."""
    source, target = call.input(0), call.output()
    axes = sum(before != after for before, after in zip(source, target, strict=False))
    return 2 * _taps(str(call.node.attributes.get("mode", "nearest")), axes) * math.prod(target)


def grid_sample(call: Call) -> int:
    """A multiply-add for each neighbour of a sample, and 4 for each coordinate of the grid."""
    grid = call.input(1, 2)
    taps = _taps(str(call.node.attributes.get("mode", "linear")), min(grid[-1], RANK_MAX))
    return 2 * taps * math.prod(call.output()) + 4 * math.prod(grid)


def region_samples(call: Call) -> int:
    """`RoiAlign`: 4 neighbours for each point of each cell, and their mean; an estimate where adaptive."""
    points = max(0, call.node.integer("sampling_ratio", 0)) or SAMPLES_ADAPTIVE
    return (2 * 4 + 1) * points**2 * math.prod(call.output())


def fourier(axis: int) -> Formula:
    """`5 × n log₂ n` for each transform of n complex points (Cooley and Tukey), half where they are real.

    The axis is the attribute's, or `axis`: since opset 20 a run-time input tells it.
    """

    def count(call: Call) -> int:
        data, output = call.input(0, 2), call.output(0, 2)
        where = call.node.integer("axis", axis)
        points = max(call.length(data, where), call.length(output, where))
        transforms = math.prod(data[:-1]) // max(1, call.length(data, where))
        return 5 * transforms * points * logarithm(points) // (2 if data[-1] == 1 else 1)

    return count


def short_fourier(call: Call) -> int:
    """`STFT`: the window and one transform for each frame; the output is `[B, frames, bins, 2]`."""
    rows, frames, bins = call.output(0, 3)[:3]
    points = 2 * (bins - 1) if call.node.integer("onesided", 1) else bins
    return rows * frames * (points + 5 * points * logarithm(points) // 2)


# Choices


def top(call: Call) -> int:
    """`TopK`: each element is compared with a heap of k: an estimate."""
    kept = call.length(call.output(), call.node.integer("axis", -1))
    return math.prod(call.input(0)) * (1 + logarithm(kept))


def suppression(call: Call) -> int:
    """`NonMaxSuppression`: sorts each class's boxes and compares each with one kept box: an estimate."""
    scores = call.input(1, 3)
    return math.prod(scores) * (logarithm(scores[-1]) + OVERLAP_FLOPS)


def determinant(call: Call) -> int:
    """`2/3 × n³` for each matrix, by elimination."""
    shape = call.input(0, 2)
    return 2 * math.prod(shape) * shape[-1] // 3
