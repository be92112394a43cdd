"""What operator calls cost, by shapes that can be counted by hand."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_dagster.models import operators
from sits_dagster.models.cost import NodeCost, graph_costs, node_cost
from sits_dagster.models.graph.structure import Graph, Node, TensorType

Shape = tuple[int, ...]
MICROSOFT = "com.microsoft"
NCHWC = "com.microsoft.nchwc"


def cost(
    operator: str,
    inputs: list[Shape | None],
    outputs: list[Shape],
    *,
    domain: str = "",
    dtype: str = "float32",
    **attributes: Any,
) -> NodeCost:
    """Cost a call on tensors of these shapes; `None` is an input that is left out."""
    names = tuple("" if shape is None else f"in{index}" for index, shape in enumerate(inputs))
    results = tuple(f"out{index}" for index in range(len(outputs)))
    node = Node(operator=operator, domain=domain, inputs=names, outputs=results, attributes=attributes)
    shapes = [*zip(names, inputs, strict=True), *zip(results, outputs, strict=True)]
    return node_cost(node, {name: TensorType(dtype, shape) for name, shape in shapes if name})


def case(
    operator: str,
    inputs: list[Shape | None],
    output: Shape,
    flops: int,
    domain: str = "",
    **attributes: Any,
) -> Any:
    return pytest.param(operator, inputs, output, flops, domain, attributes, id=f"{domain}{operator}-{flops}")


X = (2, 3, 8, 8)  # 384 elements
WEIGHT = (5, 3, 3, 3)
Y = (2, 5, 6, 6)  # 360 elements

CONVOLUTIONS = [
    case("Conv", [X, WEIGHT], Y, 2 * 27 * 360),
    case("Conv", [X, WEIGHT, (5,)], Y, 2 * 27 * 360),  # the bias is the first term's addition
    case("FusedConv", [X, WEIGHT, (5,)], Y, 55 * 360, MICROSOFT, activation="Relu"),
    case("FusedConv", [X, WEIGHT, (5,), Y], Y, 56 * 360, MICROSOFT, activation="Relu"),
    case("Conv", [X, WEIGHT, None, Y], Y, 55 * 360, NCHWC),
    case("Conv", [(2, 8, 8, 3), (5, 3, 3, 3)], (2, 6, 6, 5), 54 * 360, "com.ms.internal.nhwc"),
    case("ConvInteger", [X, WEIGHT, (), ()], Y, 54 * 360),
    case("QLinearConv", [X, (), (), WEIGHT, (), (), (), ()], Y, 57 * 360),
    case("ConvTranspose", [(1, 4, 5, 5), (4, 2, 3, 3)], (1, 2, 7, 7), 2 * 100 * 18),
    case("DeformConv", [X, WEIGHT, (2, 18, 6, 6)], Y, 54 * 360 + 8 * 2 * 3 * 9 * 36),
]
PRODUCTS = [
    case("MatMul", [(4, 6), (6, 5)], (4, 5), 2 * 6 * 20),
    case("MatMul", [(7, 1, 4, 6), (3, 6, 5)], (7, 3, 4, 5), 2 * 6 * 420),
    case("MatMul", [(6,), (6, 5)], (5,), 60),
    case("MatMulInteger", [(4, 6), (6, 5)], (4, 5), 240),
    case("QLinearMatMul", [(4, 6), (), (), (6, 5), (), (), (), ()], (4, 5), 15 * 20),
    case("FusedMatMul", [(6, 4), (6, 5)], (4, 5), 240, MICROSOFT, transA=1),
    case("FusedMatMul", [(6, 3, 4), (3, 6, 5)], (3, 4, 5), 720, MICROSOFT, transA=1, transBatchA=1),
    case("MatMulIntegerToFloat", [(4, 6), (6, 5)], (4, 5), 14 * 20, MICROSOFT),
    case("DynamicQuantizeMatMul", [(4, 6), (6, 5), ()], (4, 5), 14 * 20 + 5 * 24, MICROSOFT),
    case("MatMulNBits", [(4, 32), (5, 1, 16)], (4, 5), 2 * 32 * 20 + 2 * 160, MICROSOFT, K=32, N=5),
    case("Gemm", [(4, 6), (6, 5), (5,)], (4, 5), 240),
    case("Gemm", [(6, 4), (5, 6)], (4, 5), 240, transA=1, transB=1),
    case("FusedGemm", [(4, 6), (6, 5)], (4, 5), 260, MICROSOFT, activation="Relu"),
    case("QGemm", [(4, 6), (), (), (6, 5), (), ()], (4, 5), 300, MICROSOFT),
    case("Einsum", [(4, 6), (6, 5)], (4, 5), 240, equation="ij,jk->ik"),
    case("Einsum", [(4, 6), (6, 5)], (4, 5), 240, equation="ij, jk"),
    case("Einsum", [(7, 4, 6), (7, 6, 5)], (7, 4, 5), 7 * 240, equation="...ij,...jk->...ik"),
    case("Einsum", [(7, 4, 6), (1, 6, 5)], (7, 4, 5), 7 * 240, equation="...ij,...jk"),
    case("Einsum", [(4, 6)], (6, 4), 0, equation="ij->ji"),
    case("Einsum", [(4, 6)], (4,), 24, equation="ij->i"),
    case("Einsum", [(4,), (6,)], (4, 6), 24, equation="i,j->ij"),
    # A sum over j, then one over k: never over all four labels at once.
    case("Einsum", [(4, 6), (6, 5), (5, 3)], (4, 3), 2 * 120 + 2 * 60, equation="ij,jk,kl->il"),
]
LAYERS = [
    # 7 steps of 2 rows, 3 features, 4 hidden units: gates times (input + state), and what joins them.
    case("LSTM", [(7, 2, 3), (1, 16, 3), (1, 16, 4)], (7, 1, 2, 4), 14 * (2 * 48 + 2 * 64 + 36)),
    case("LSTM", [(2, 7, 3), (2, 16, 3), (2, 16, 4)], (2, 7, 2, 4), 28 * 260, layout=1),
    case("DynamicQuantizeLSTM", [(7, 2, 3), (1, 3, 16), (1, 4, 16)], (7, 1, 2, 4), 14 * 260, MICROSOFT),
    case("GRU", [(7, 2, 3), (1, 12, 3), (1, 12, 4)], (7, 1, 2, 4), 14 * (2 * 36 + 2 * 48 + 32)),
    case("RNN", [(7, 2, 3), (1, 4, 3), (1, 4, 4)], (7, 1, 2, 4), 14 * (2 * 12 + 2 * 16 + 4)),
    # 2 rows, 5 positions, 8 columns in 2 heads: projection, scores and values, and 6 a score.
    case(
        "Attention",
        [(2, 5, 8), (8, 24), (24,)],
        (2, 5, 8),
        2 * 10 * 8 * 24 + 50 * (2 * 16 + 12),
        MICROSOFT,
        num_heads=2,
    ),
    case("MultiHeadAttention", [(2, 5, 8), (2, 9, 8), (2, 9, 8)], (2, 5, 8), 90 * 44, MICROSOFT, num_heads=2),
    case("MultiHeadAttention", [(2, 5, 2, 3, 4)], (2, 5, 8), 50 * 44, MICROSOFT, num_heads=2),
    case("Attention", [(2, 2, 5, 4), (2, 1, 9, 4), (2, 1, 9, 4)], (2, 2, 5, 4), 90 * 44),
    case("Attention", [(2, 5, 8), (2, 9, 4), (2, 9, 4)], (2, 5, 8), 90 * 44, q_num_heads=2, kv_num_heads=1),
    case(
        "GroupQueryAttention",
        [(2, 1, 8), (2, 1, 4), (2, 1, 4), (2, 1, 6, 4), (2, 1, 6, 4)],
        (2, 1, 8),
        2 * 7 * 44,
        MICROSOFT,
        num_heads=2,
        kv_num_heads=1,
    ),
]
NORMALIZATIONS = [
    case("BatchNormalization", [X, (3,), (3,), (3,), (3,)], X, 2 * 384),
    case("LayerNormalization", [(4, 6), (6,), (6,)], (4, 6), 7 * 24),
    case("SkipLayerNormalization", [(4, 6), (4, 6), (6,), (6,)], (4, 6), 8 * 24, MICROSOFT),
    case("SkipLayerNormalization", [(4, 6), (4, 6), (6,), (6,), (6,)], (4, 6), 9 * 24, MICROSOFT),
    case("InstanceNormalization", [X, (3,), (3,)], X, 7 * 384),
    case("GroupNorm", [X, (3,), (3,)], X, 7 * 384, MICROSOFT, groups=1),
    case("RMSNormalization", [(4, 6), (6,)], (4, 6), 96),
    case("LRN", [X], X, 9 * 384, size=5),
    case("Softmax", [(4, 6)], (4, 6), 120),
]
POOLS = [
    case("MaxPool", [X], (2, 3, 4, 4), 4 * 96, kernel_shape=(2, 2)),
    case("AveragePool", [X], (2, 3, 4, 4), 4 * 96, NCHWC, kernel_shape=(2, 2)),
    case("GlobalAveragePool", [X], (2, 3, 1, 1), 384),
    case("ReduceMean", [(4, 6)], (4,), 24),
    case("ReduceL2", [(4, 6)], (4,), 48),
    case("ArgMax", [(4, 6)], (4,), 24),
    case("CumSum", [(4, 6), ()], (4, 6), 24),
    case("TopK", [(4, 100), (1,)], (4, 8), 400 * 4),
    case("NonMaxSuppression", [(1, 64, 4), (1, 3, 64)], (5, 3), 192 * (6 + 12)),
]
SAMPLES = [
    case("Resize", [(1, 3, 4, 4)], (1, 3, 8, 8), 0),
    case("Resize", [(1, 3, 4, 4)], (1, 3, 8, 8), 8 * 192, mode="linear"),
    case("Resize", [(1, 3, 4, 4)], (1, 3, 8, 4), 4 * 96, mode="linear"),
    case("Resize", [(1, 3, 4, 4)], (1, 3, 8, 8), 32 * 192, mode="cubic"),
    case("Upsample", [(1, 3, 4, 4), (4,)], (1, 3, 8, 8), 0, mode="nearest"),
    case("GridSample", [(1, 3, 4, 4), (1, 5, 5, 2)], (1, 3, 5, 5), 8 * 75 + 4 * 50, mode="bilinear"),
    case("RoiAlign", [(1, 3, 9, 9), (2, 4), (2,)], (2, 3, 2, 2), 9 * 4 * 24, sampling_ratio=2),
    case("DFT", [(2, 8, 2)], (2, 8, 2), 2 * 5 * 8 * 3, axis=1),
    case("DFT", [(2, 8, 1), (), ()], (2, 8, 2), 5 * 8 * 3),
    case("STFT", [(2, 100, 1), (), (16,)], (2, 10, 9, 2), 20 * (16 + 5 * 16 * 4 // 2)),
    case("Det", [(2, 6, 6)], (2,), 2 * 2 * 216 // 3),
]
ELEMENTWISE = [
    *(case(operator, [X], X, 384) for operator in ("Relu", "Exp", "Erf", "Tanh", "Sqrt", "Sigmoid", "Not")),
    *(case(operator, [X, (3, 1, 1)], X, 384) for operator in ("Add", "Mul", "Div", "Pow", "Less", "Equal")),
    case("Sum", [X, X, X], X, 2 * 384),
    case("Mean", [X, X, X], X, 3 * 384),
    case("Gelu", [X], X, 5 * 384),
    case("BiasGelu", [X, (8,)], X, 6 * 384, MICROSOFT),
    case("FastGelu", [X, (8,)], X, 9 * 384, MICROSOFT),
    case("QuickGelu", [X], X, 3 * 384, MICROSOFT),
    case("QuickGelu", [X], X, 2 * 384, MICROSOFT, alpha=1.0),
    case("HardSwish", [X], X, 2 * 384),
    case("QuantizeLinear", [X, (), ()], X, 3 * 384),
    case("DequantizeLinear", [X, (), ()], X, 2 * 384),
    case("DynamicQuantizeLinear", [X], X, 5 * 384),
]
MOVEMENT = [
    *(case(operator, [X], (384,), 0) for operator in ("Transpose", "Cast", "Pad", "Slice", "Split", "Tile")),
    *(case(operator, [X], (384,), 0) for operator in ("Reshape", "Flatten", "Identity", "Dropout", "Shape")),
    case("Concat", [X, X], (4, 3, 8, 8), 0),
    case("Gather", [(1000, 8), (5,)], (5, 8), 0),
    case("Where", [X, X, X], X, 0),
    case("ReorderInput", [X], (2, 8, 8, 8), 0, NCHWC),
]


@pytest.mark.parametrize(
    ("operator", "inputs", "output", "flops", "domain", "attributes"),
    [
        *CONVOLUTIONS,
        *PRODUCTS,
        *LAYERS,
        *NORMALIZATIONS,
        *POOLS,
        *SAMPLES,
        *ELEMENTWISE,
        *MOVEMENT,
    ],
)
def test_flops_are_those_counted_by_hand(
    operator: str,
    inputs: list[Shape | None],
    output: Shape,
    flops: int,
    domain: str,
    attributes: Mapping[str, Any],
) -> None:
    """Each family by one small case."""
    found = cost(operator, inputs, [output], domain=domain, **attributes)
    assert (found.flops, found.is_known, found.reason) == (flops, True, "")


@pytest.mark.parametrize(
    ("fused", "domain", "attributes", "parts"),
    [
        ("Gelu", MICROSOFT, {}, ["Div", "Erf", "Add", "Mul", "Mul"]),
        ("QuickGelu", MICROSOFT, {"alpha": 1.702}, ["Mul", "Sigmoid", "Mul"]),
        ("QuickGelu", MICROSOFT, {"alpha": 1.0}, ["Sigmoid", "Mul"]),
        ("HardSwish", "", {}, ["HardSigmoid", "Mul"]),
        ("Softmax", "", {}, ["ReduceMax", "Sub", "Exp", "ReduceSum", "Div"]),
        ("LayerNormalization", "", {}, ["ReduceMean", "Sub", "Pow", "ReduceMean", "Div", "Mul", "Add"]),
        ("SkipLayerNormalization", MICROSOFT, {}, ["Add", "LayerNormalization"]),
        ("BatchNormalization", "", {}, ["Mul", "Add"]),
    ],
)
def test_a_fused_operator_counts_as_what_it_stands_for(
    fused: str, domain: str, attributes: Mapping[str, Any], parts: list[str]
) -> None:
    """So that a graph costs the same before and after the runtime fuses it."""
    whole = cost(fused, [X], [X], domain=domain, **attributes).flops
    assert whole == sum(cost(part, [X], [X]).flops for part in parts)


def test_attention_counts_the_keys_that_it_returns() -> None:
    """Where the cache is an output, its length is the number of keys."""
    found = cost(
        "GroupQueryAttention",
        [(1, 1, 8), None, None, (1, 1, 6, 4), (1, 1, 6, 4)],
        [(1, 1, 8), (1, 1, 7, 4), (1, 1, 7, 4)],
        domain=MICROSOFT,
        num_heads=2,
        kv_num_heads=1,
    )
    assert found.flops == 7 * 44


@pytest.mark.parametrize(
    ("operator", "inputs", "output", "moved"),
    [
        ("Conv", [X, WEIGHT], Y, 384 + 135 + 360),
        ("Add", [X, (3, 1, 1)], X, 384 + 3 + 384),
        ("Transpose", [X], X, 768),
        ("Expand", [(1, 8), (2,)], (4, 8), 8 + 2 + 32),
        # Only what is produced moves, whatever the size of the table; and the indices.
        ("Gather", [(10_000, 8), (5,)], (5, 8), 2 * 40 + 5),
        ("Slice", [(10_000, 8), (1,), (1,)], (5, 8), 2 * 40 + 2),
        ("EmbedLayerNormalization", [(2, 5), None, (10_000, 8), (512, 8)], (2, 5, 8), 3 * 80 + 10),
        # Views and what inference leaves out.
        ("Reshape", [X, (4,)], (384,), 0),
        ("Dropout", [X], X, 0),
        ("Shape", [X], (4,), 0),
    ],
)
def test_bytes_are_inputs_read_once_and_outputs_written_once(
    operator: str, inputs: list[Shape | None], output: Shape, moved: int
) -> None:
    """In elements of 4 bytes."""
    assert cost(operator, inputs, [output]).bytes_moved == 4 * moved


def test_an_input_used_twice_is_read_once() -> None:
    """A square reads its operand once."""
    node = Node(operator="Mul", inputs=("x", "x"), outputs=("y",))
    types = {"x": TensorType("float32", (10,)), "y": TensorType("float32", (10,))}
    assert node_cost(node, types) == NodeCost(flops=10, bytes_moved=80)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float64", 240), ("float16", 60), ("int8", 30), ("int4", 15)]
)
def test_bytes_follow_the_element_type(dtype: str, expected: int) -> None:
    """Small elements share bytes."""
    assert cost("Relu", [(15,)], [(15,)], dtype=dtype).bytes_moved == pytest.approx(expected, abs=1)


def test_weights_may_come_from_the_constants() -> None:
    """Types for given rows come first, weights fill what they lack."""
    node = Node(operator="MatMul", inputs=("x", "w"), outputs=("y",))
    types = {"x": TensorType("float32", (4, 6)), "y": TensorType("float32", (4, 5))}
    weights = {"w": TensorType("float32", (6, 5)), "x": TensorType("float32", (1, 1))}
    assert node_cost(node, types, weights).flops == 240
    assert not node_cost(node, types).is_known


sizes = st.integers(1, 9)


@given(rows=sizes, channels=sizes, filters=sizes, groups=sizes, kernel=st.integers(1, 4), length=sizes)
def test_a_grouped_convolution_is_that_part_of_a_dense_one(
    rows: int, channels: int, filters: int, groups: int, kernel: int, length: int
) -> None:
    """With g groups, each output sees one g-th of the channels."""
    inputs, outputs = channels * groups, filters * groups
    data, result = (rows, inputs, length, length), (rows, outputs, length, length)
    dense = cost("Conv", [data, (outputs, inputs, kernel, kernel)], [result])
    grouped = cost("Conv", [data, (outputs, channels, kernel, kernel)], [result], group=groups)
    assert grouped.flops * groups == dense.flops


@given(batch=st.lists(sizes, max_size=3).map(tuple), rows=sizes, inner=sizes, columns=sizes)
def test_a_broadcast_product_is_one_product_for_each_of_the_batch(
    batch: Shape, rows: int, inner: int, columns: int
) -> None:
    """Whichever side is repeated."""
    one = cost("MatMul", [(rows, inner), (inner, columns)], [(rows, columns)])
    many = cost("MatMul", [(*batch, rows, inner), (inner, columns)], [(*batch, rows, columns)])
    other = cost("MatMul", [(rows, inner), (*batch, inner, columns)], [(*batch, rows, columns)])
    assert many.flops == other.flops == math.prod(batch) * one.flops


@given(rows=sizes, factor=sizes)
def test_costs_grow_in_line_with_the_rows(rows: int, factor: int) -> None:
    """Twice the rows, twice the arithmetic; bytes grow by the rows' own, weights being read once."""
    for operator, weights, shape, attributes in [
        ("Conv", [(5, 3, 3, 3)], lambda n: ((n, 3, 8, 8), (n, 5, 6, 6)), {}),
        ("Gemm", [(6, 5), (5,)], lambda n: ((n, 6), (n, 5)), {}),
        ("LayerNormalization", [(6,), (6,)], lambda n: ((n, 6), (n, 6)), {}),
        ("MaxPool", [], lambda n: ((n, 3, 8, 8), (n, 3, 4, 4)), {"kernel_shape": (2, 2)}),
    ]:
        one, many = (
            cost(operator, [shape(n)[0], *weights], [shape(n)[1]], **attributes)
            for n in (rows, rows * factor)
        )
        fixed = 4 * sum(math.prod(weight) for weight in weights)
        assert many.flops == factor * one.flops
        assert many.bytes_moved - fixed == factor * (one.bytes_moved - fixed)


@given(labels=st.permutations("abcd"), lengths=st.tuples(sizes, sizes, sizes, sizes))
def test_an_einsum_of_two_counts_all_labels_once(labels: list[str], lengths: Shape) -> None:
    """A product of matrices, however its axes are called."""
    a, b, c, d = labels
    batch, rows, inner, columns = lengths
    shapes: list[Shape | None] = [(batch, rows, inner), (batch, inner, columns)]
    found = cost("Einsum", shapes, [(batch, rows, columns)], equation=f"{a}{b}{c},{a}{c}{d}->{a}{b}{d}")
    expected = cost("MatMul", shapes, [(batch, rows, columns)])
    assert found.flops == expected.flops


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("operator", "inputs", "output", "flops", "domain", "attributes"),
    [
        case("MatMul", [(HUGE, HUGE), (HUGE, HUGE)], (HUGE, HUGE), 2 * HUGE**3),
        case("Conv", [(1, HUGE, HUGE), (HUGE, HUGE, 3)], (1, HUGE, HUGE), 6 * HUGE**3),
        case("MaxPool", [(1, 1, HUGE)], (1, 1, HUGE), HUGE**2, kernel_shape=(HUGE,)),
        case("Resize", [(1,) * 64], (HUGE,) * 64, 2 * 4**64 * HUGE**64, mode="cubic"),
        case("TopK", [(HUGE,), (1,)], (HUGE,), HUGE * 63),
        case("NonMaxSuppression", [(1, HUGE, 4), (1, 1, HUGE)], (1, 3), HUGE * 74),
        case("DFT", [(1, HUGE, 2)], (1, HUGE, 2), 5 * HUGE * 62),
        case("Einsum", [(HUGE,), (HUGE,)], (), 2 * HUGE, equation="i,i"),
        case("MatMulNBits", [(1, HUGE), (1,)], (1, HUGE), 4 * HUGE**2, MICROSOFT, K=HUGE, N=HUGE),
        case("LRN", [(HUGE,)], (HUGE,), HUGE * (HUGE + 4), size=HUGE),
        case("LSTM", [(HUGE, 1, 1), (1, 4, 1), (1, 4, 1)], (HUGE, 1, 1, 1), HUGE * 25),
    ],
)
def test_hostile_lengths_are_counted_exactly_and_at_once(
    operator: str,
    inputs: list[Shape | None],
    output: Shape,
    flops: int,
    domain: str,
    attributes: Mapping[str, Any],
) -> None:
    """No overflow, and no loop over a dimension."""
    started = time.perf_counter()
    assert cost(operator, inputs, [output], domain=domain, **attributes).flops == flops
    assert time.perf_counter() - started < 0.5


@pytest.mark.parametrize(
    ("operator", "inputs", "output", "attributes", "reason"),
    [
        ("MaxPool", [(1, 4)], (1, 4), {"kernel_shape": (-3,)}, "'kernel_shape' of MaxPool"),
        ("MaxPool", [(1, 4)], (1, 4), {"kernel_shape": (HUGE,) * 100_000}, "'kernel_shape' of MaxPool"),
        ("Relu", [(HUGE,) * 100_000], (HUGE,) * 100_000, {}, "'out0' makes no sense"),
        ("Relu", [(-1, 4)], (-1, 4), {}, "'out0' makes no sense"),
        ("Conv", [(), ()], (), {}, "'in1' has 0 axes"),
        ("MatMul", [(), ()], (), {}, "'in0' has 0 axes"),
        ("Gemm", [(4,), (4,)], (4,), {}, "'in0' has 1 axes"),
        ("Conv", [(1, 4)], (1, 4), {}, "lacks its input 1"),
        ("TopK", [(4,), (1,)], (4,), {"axis": 7}, "axis 7"),
        ("DFT", [(1, 4, 2)], (1, 4, 2), {"axis": -9}, "axis -9"),
        ("Einsum", [(4,), (4,)], (), {"equation": "i"}, "'i' of Einsum does not fit"),
        ("Einsum", [(4, 4)], (), {"equation": "ijk->"}, "'ijk->' of Einsum does not fit"),
        ("Einsum", [(4,)], (4,), {}, "'' of Einsum does not fit"),
        ("Attention", [(1, 4, 8), (1, 4, 8), (1, 4, 8)], (1, 4, 8), {}, "Attention does not tell its heads"),
    ],
)
def test_nonsense_is_no_error_but_unknown(
    operator: str, inputs: list[Shape | None], output: Shape, attributes: Mapping[str, Any], reason: str
) -> None:
    """A hostile graph cannot stop the analysis."""
    found = cost(operator, inputs, [output], **attributes)
    assert not found.is_known
    assert reason in found.reason
    assert found.flops == 0


def test_a_negative_attribute_is_unknown() -> None:
    """K and N are attributes, not lengths."""
    found = cost("MatMulNBits", [(4, 8), (4,)], [(4, 5)], domain=MICROSOFT, K=-8, N=5)
    assert not found.is_known
    assert "com.microsoft.MatMulNBits" in found.reason


def test_an_unknown_operator_is_named_with_its_domain() -> None:
    """Its bytes are still counted."""
    found = cost("Sparkle", [(4,)], [(4,)], domain="my.company")
    assert found == NodeCost(
        flops=0,
        bytes_moved=32,
        is_known=False,
        reason="the operator 'my.company.Sparkle' is not in the cost table",
    )


def test_a_known_name_in_a_strange_domain_is_unknown() -> None:
    """Somebody else's Conv may do anything."""
    assert not cost("Conv", [X, WEIGHT], [Y], domain="my.company").is_known


@pytest.mark.parametrize("shape", [None, ("rows", 4), (None, 4)])
def test_a_missing_length_is_unknown(shape: Any) -> None:
    """The tensor is named."""
    node = Node(operator="Relu", inputs=("x",), outputs=("y",))
    types = {"x": TensorType("float32", (2, 4)), "y": TensorType("float32", shape)}
    assert "'y' is not known" in node_cost(node, types).reason


def test_lengths_that_depend_on_the_data_leave_the_cost_known() -> None:
    """NonZero, NonMaxSuppression, …: nobody knows how much they return."""
    node = Node(operator="NonZero", inputs=("x",), outputs=("y",))
    types = {"x": TensorType("float32", (10,)), "y": TensorType("int64", (1, None))}
    assert node_cost(node, types) == NodeCost(flops=10, bytes_moved=40)


def test_no_operator_is_in_two_groups() -> None:
    """One row each."""
    groups = [
        operators.ALIASES,
        operators.MOVEMENT,
        operators.ELEMENTWISE,
        operators.PRODUCTS,
        operators.LAYERS,
        operators.NORMALIZATIONS,
        operators.REDUCTIONS,
        operators.SAMPLES,
    ]
    assert sum(map(len, groups)) == len(operators.OPERATORS)


def test_the_table_has_all_of_onnx_but_these() -> None:
    """What is new in ONNX shows up here."""
    import onnx

    names = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    left_out = {
        # They run other graphs: see graph_costs.
        *("If", "Loop", "Scan", "SequenceMap"),
        # Texts, pictures and features.
        *("ImageDecoder", "RegexFullMatch", "StringNormalizer", "StringSplit", "TfIdfVectorizer"),
        "MelWeightMatrix",
        # Losses.
        *("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"),
        # Left out for now.
        *("CausalConvWithState", "LinearAttention", "MaxRoiPool", "Multinomial", "SequenceErase"),
    }
    assert names - operators.OPERATORS.keys() == left_out & names, "an older onnx has fewer"


# Graphs


def typed(**shapes: Shape) -> dict[str, TensorType]:
    return {name: TensorType("float32", shape) for name, shape in shapes.items()}


def graph(*nodes: Node, constants: Mapping[str, TensorType] | None = None, **inputs: Shape) -> Graph:
    return Graph(nodes=nodes, inputs=typed(**inputs), outputs={}, constants=constants or {})


def relu(before: str, after: str, name: str = "") -> Node:
    return Node(operator="Relu", inputs=(before,), outputs=(after,), name=name)


def product(before: str, after: str) -> Node:
    return Node(operator="MatMul", inputs=(before, before), outputs=(after,), name="product")


def test_a_graph_costs_the_sum_of_its_calls() -> None:
    """Each with its name."""
    found = graph_costs(graph(relu("x", "y", "first"), relu("y", "z"), x=(3,)), typed(x=(3,), y=(3,), z=(3,)))
    assert [(node.operator, node.name) for node in found.nodes] == [("Relu", "first"), ("Relu", "Relu")]
    assert (found.flops, found.bytes_moved) == (6, 48)
    assert (found.uncosted, found.warnings) == ({}, ())


def test_what_is_folded_costs_nothing() -> None:
    """A call on constants runs once, before the first row."""
    weights = typed(w=(3,))
    nodes = (relu("w", "v"), Node(operator="Add", inputs=("x", "v"), outputs=("y",)))
    found = graph_costs(graph(*nodes, constants=weights, x=(3,)), typed(x=(3,), v=(3,), y=(3,)))
    assert [node.operator for node in found.nodes] == ["Add"]


def test_what_is_not_known_is_listed_by_operator() -> None:
    """With its share of all calls and the first reason."""
    strange = Node(operator="Sparkle", domain="my.company", inputs=("x",), outputs=("s",))
    nodes = (strange, strange, relu("x", "y"), relu("x", "lost"))
    found = graph_costs(graph(*nodes, x=(3,)), typed(x=(3,), y=(3,), s=(3,)))
    assert found.uncosted.keys() == {"my.company.Sparkle", "Relu"}
    sparkle = found.uncosted["my.company.Sparkle"]
    assert (sparkle.count, sparkle.share) == (2, 0.5)
    assert found.uncosted["Relu"].count == 1
    assert "'lost'" in found.uncosted["Relu"].reason


def test_an_if_costs_its_dearest_branch() -> None:
    """Nobody knows which one is taken."""
    branches = {"then_branch": graph(relu("x", "a", "cheap")), "else_branch": graph(product("x", "b"))}
    node = Node(operator="If", name="which", inputs=("c",), outputs=("y",), bodies=branches, captured=("x",))
    found = graph_costs(graph(node, x=(4, 4), c=()), typed(x=(4, 4), a=(4, 4), b=(4, 4)))
    assert [(inner.name, inner.cost.flops) for inner in found.nodes] == [("which/product", 2 * 4**3)]
    assert found.warnings == ()


def test_an_if_takes_the_same_branch_for_every_number_of_rows() -> None:
    """Two batches are compared call by call, though another branch may be the dearer one of the second."""
    branches = {"then_branch": graph(relu("x", "a"), relu("a", "d")), "else_branch": graph(relu("z", "b"))}
    node = Node(operator="If", inputs=("c",), outputs=("y",), bodies=branches, captured=("x", "z"))
    whole, taken = graph(node, x=(2,), z=(9,), c=()), dict[int, int]()
    few, many = (typed(x=(rows,), a=(rows,), d=(rows,), z=(9,), b=(9,)) for rows in (2, 20))
    assert graph_costs(whole, few, taken).flops == 9
    assert [graph_costs(whole, many, taken).flops, graph_costs(whole, many).flops] == [9, 40]


def test_an_if_warns_of_a_branch_that_is_not_known() -> None:
    """It could be the dearer one."""
    strange = Node(operator="Sparkle", inputs=("x",), outputs=("a",))
    branches = {"then_branch": graph(strange), "else_branch": graph(product("x", "b"))}
    node = Node(operator="If", name="which", inputs=("c",), outputs=("y",), bodies=branches, captured=("x",))
    found = graph_costs(graph(node, x=(4, 4), c=()), typed(x=(4, 4), a=(4, 4), b=(4, 4)))
    assert found.flops == 2 * 4**3
    assert [warning for warning in found.warnings if "'which'" in warning and "Sparkle" in warning]


def scan(**attributes: Any) -> Graph:
    body = graph(Node(operator="Add", inputs=("state", "slice"), outputs=("next",)))
    node = Node(
        operator="Scan",
        name="scan",
        inputs=("start", "xs"),
        outputs=("end",),
        attributes={"num_scan_inputs": 1, **attributes},
        bodies={"body": body},
    )
    return graph(node, start=(4,), xs=(7, 4))


def test_a_scan_costs_its_body_for_each_step() -> None:
    """The scanned input has one slice a step."""
    types = typed(start=(4,), state=(4,), slice=(4,), next=(4,), xs=(7, 4), end=(4,))
    found = graph_costs(scan(), types)
    assert (found.flops, found.bytes_moved, found.warnings) == (7 * 4, 7 * 48, ())
    assert graph_costs(scan(scan_input_axes=(1,)), types).flops == 4 * 4
    assert graph_costs(scan(scan_input_axes=(9,)), types).warnings != ()


def loop(*, is_collected: bool) -> Graph:
    body = graph(relu("state", "next"))
    outputs = ("end", "all") if is_collected else ("end",)
    node = Node(
        operator="Loop",
        name="loop",
        inputs=("count", "condition", "start"),
        outputs=outputs,
        bodies={"body": body},
    )
    return graph(node, start=(4,), count=(), condition=())


def test_a_loop_costs_its_body_for_each_step_that_it_collects() -> None:
    """Its collected output has one slice a step; else one step is assumed, with a warning."""
    types = typed(start=(4,), state=(4,), next=(4,), end=(4,))
    counted = graph_costs(loop(is_collected=True), {**types, **typed(all=(5, 4))})
    assert (counted.flops, counted.warnings) == (20, ())
    assumed = graph_costs(loop(is_collected=False), types)
    assert assumed.flops == 4
    assert [warning for warning in assumed.warnings if "'loop'" in warning]
    unknown = {**types, "all": TensorType("float32", (None, 4))}
    assert graph_costs(loop(is_collected=True), unknown).warnings != ()


def test_a_hostile_number_of_steps_is_counted_at_once() -> None:
    """Steps are multiplied, not run."""
    types = typed(start=(4,), state=(4,), next=(4,), end=(4,), all=(HUGE, 4))
    assert graph_costs(loop(is_collected=True), types).flops == 4 * HUGE


def test_types_for_given_rows_come_before_what_the_file_declares() -> None:
    """The file says one row, the caller binds five."""
    model = Graph(
        nodes=(relu("x", "y"),), inputs=typed(x=(1, 3)), outputs=typed(y=(1, 3)), constants={}, types={}
    )
    assert graph_costs(model, typed(x=(5, 3), y=(5, 3))).flops == 15
    assert graph_costs(model, {}).flops == 3
