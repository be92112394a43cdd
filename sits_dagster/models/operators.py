"""The table of operators: the arithmetic and the memory traffic of each, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from sits_dagster.models import formulas
from sits_dagster.models.call import Call
from sits_dagster.models.formulas import Formula, each, each_input, nothing
from sits_dagster.models.graph.structure import TensorType

__all__ = ["DOMAINS", "OPERATORS", "Operator", "find_operator"]

# ONNX's own domain and those of ONNX Runtime: contributed and fused operators, and its internal layouts.
DOMAINS = frozenset({"", "ai.onnx", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc"})


@dataclass(frozen=True, slots=True)
class Operator:
    """What one operator costs.

    Args:
        flops: Its arithmetic.
        bytes_moved: Its memory traffic, in bytes.
    """

    flops: Formula
    bytes_moved: Formula


def find_operator(domain: str, name: str) -> Operator | None:
    """Return the table's row of an operator, or nothing where there is none."""
    if domain not in DOMAINS:
        return None
    return OPERATORS.get(f"{domain}.{name}" if domain else name) or OPERATORS.get(name)


def everything(call: Call) -> int:
    """Bytes of all inputs, each read once, and all outputs, each written once."""
    return sum(tensor.bytes for tensor in _tensors(call, (*call.node.reads, *call.node.outputs)))


def produced(call: Call) -> int:
    """Bytes of what is produced, read and written, and of the other inputs: never the whole table."""
    others = call.node.inputs[1:]
    return 2 * _written(call) + sum(tensor.bytes for tensor in _tensors(call, others))


def embedded(call: Call) -> int:
    """Bytes of the rows of up to three tables, of their sum, and of the indices."""
    rows = call.type(call.node.outputs[0]).bytes if call.gives(0) else 0
    tables = 2 + int(call.has(4))
    return (tables + 1) * rows + sum(tensor.bytes for tensor in _tensors(call, call.node.inputs[:2]))


def as_far_as_known(call: Call) -> int:
    """Bytes of all inputs, and of those outputs whose length does not depend on the data."""
    known = (name for name in call.node.outputs if name in call.types and call.types[name].is_known)
    return sum(tensor.bytes for tensor in _tensors(call, (*call.node.reads, *known)))


def collected(call: Call) -> int:
    """Bytes of the inputs, read and written: what goes into a sequence is copied."""
    return 2 * sum(tensor.bytes for tensor in _tensors(call, call.node.reads))


def _written(call: Call) -> int:
    return sum(tensor.bytes for tensor in _tensors(call, call.node.outputs))


def _tensors(call: Call, names: Iterable[str]) -> Iterator[TensorType]:
    return (call.type(name) for name in dict.fromkeys(names) if name)


def _rows(names: str, flops: Formula, bytes_moved: Formula = everything) -> dict[str, Operator]:
    return dict.fromkeys(names.split(), Operator(flops, bytes_moved))


ALIASES = _rows(
    # Views, what is known without data, and what inference leaves out.
    """Constant Dropout ExpandDims Flatten Identity Optional OptionalGetElement OptionalHasElement Reshape
    SequenceEmpty SequenceLength Shape Size Squeeze Unsqueeze""",
    nothing,
    nothing,
)

MOVEMENT = {
    **_rows(
        """BitCast Cast CastLike Concat ConstantOfShape DepthToSpace Expand EyeLike MaxUnpool MemcpyFromHost
        MemcpyToHost OneHot Pad QLinearConcat QLinearWhere Range RemovePadding ReorderInput ReorderOutput
        RestorePadding ReverseSequence Scatter ScatterElements ScatterND SpaceToDepth Split StringConcat
        TensorScatter Tile Transpose Trilu UnfoldTensor Where""",
        nothing,
    ),
    **_rows(
        """CenterCropPad ConcatFromSequence Gather GatherElements GatherND
        SequenceAt Slice TorchEmbedding""",
        nothing,
        produced,
    ),
    **_rows("SequenceConstruct SequenceInsert SplitToSequence", nothing, collected),
    **_rows("GatherBlockQuantized", each(2), produced),
    **_rows("Compress", nothing, as_far_as_known),
    **_rows("NonZero", each_input(1), as_far_as_known),
    **_rows("Unique", each_input(1), as_far_as_known),
}

ELEMENTWISE = {
    # One for each element that comes out, whether it is a sum, a comparison or an exponential.
    **_rows(
        """Abs Acos Acosh Add And Asin Asinh Atan Atanh BiasAdd BitShift BitwiseAnd BitwiseNot BitwiseOr
        BitwiseXor Bernoulli Ceil Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Greater
        GreaterOrEqual HardSigmoid IsInf IsNaN LeakyRelu Less LessOrEqual Log Mod Mul MulInteger Neg Not Or
        PRelu Pow QLinearAdd QLinearLeakyRelu QLinearMul QLinearSigmoid RandomNormal RandomNormalLike
        RandomUniform RandomUniformLike Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus
        Softsign Sqrt Sub Tan Tanh ThresholdedRelu Xor""",
        each(1),
    ),
    **_rows("Max Min Sum", formulas.each_operand(0)),
    **_rows("Mean", formulas.each_operand(1)),
    **_rows("HardSwish Swish", each(2)),
    **_rows("Mish SwiGLU RotaryEmbedding", each(3)),
    **_rows("QuickGelu", formulas.quick_gelu),
    **_rows("ComplexMul ComplexMulConj", each(3)),  # 6 for each pair of a real and an imaginary part
    **_rows("BlackmanWindow HammingWindow HannWindow", each(4)),
    **_rows("Gelu QOrderedGelu", each(5)),  # 0.5 · x · (1 + erf(x / √2))
    **_rows("BiasGelu", each(6)),
    **_rows("BiasSplitGelu", each(8)),  # the bias of both halves, and their product
    **_rows("FastGelu", each(9)),  # a cubic in the hyperbolic tangent, and the bias
    **_rows("AffineGrid", each(6)),
    **_rows("BiasDropout", each(2)),
    **_rows("QuantizeLinear", each(3)),  # divide, round, shift
    **_rows("DequantizeLinear", each(2)),
    **_rows("DynamicQuantizeLinear", each_input(5)),  # least, most, divide, round, shift
}

PRODUCTS = {
    **_rows("Conv FusedConv NhwcConv NhwcFusedConv", formulas.fused_convolution),
    **_rows("ConvInteger", formulas.convolution(1)),
    **_rows("QLinearConv", formulas.convolution(3, extra=3)),  # and scale, round, shift
    **_rows("ConvTranspose ConvTransposeWithDynamicPads", formulas.transposed_convolution(1)),
    **_rows("QLinearConvTranspose", formulas.transposed_convolution(3, extra=3)),
    **_rows("DeformConv", formulas.deformable_convolution),
    **_rows("MatMul MatMulInteger MatMulInteger16", formulas.matrix_product(0)),
    **_rows("MatMulIntegerToFloat", formulas.matrix_product(0, extra=2)),
    # The left side is quantised (5 an element) and the product scaled (2).
    **_rows("DynamicQuantizeMatMul", lambda call: formulas.matrix_product(0, 2)(call) + each_input(5)(call)),
    **_rows("QLinearMatMul", formulas.matrix_product(0, extra=3)),
    **_rows("FusedMatMul FusedMatMulActivation TransposeMatMul", formulas.fused_matrix_product),
    **_rows("MatMulNBits MatMulBnb4 MatMulFpQ4", formulas.packed_product),
    **_rows("Gemm FusedGemm GemmFloat8", formulas.general_product),
    **_rows("QGemm", lambda call: formulas.general_product(call) + each(3)(call)),
    **_rows("GemmFastGelu", formulas.matrix_product(0, 9)),
    **_rows("Einsum", formulas.einsum),
}

LAYERS = {
    # For each hidden unit: 4 gates, 2 products, a sum, tanh and the output; 3 gates and 5; 1.
    **_rows("LSTM DynamicQuantizeLSTM", formulas.recurrent(9)),
    **_rows("GRU", formulas.recurrent(8)),
    **_rows("RNN", formulas.recurrent(1)),
    **_rows("com.microsoft.Attention", formulas.attention_with_projection(past=4)),
    **_rows("QAttention", formulas.attention_with_projection(past=8)),
    **_rows("Attention", formulas.attention_of_heads(past=4, present=1, heads="q_num_heads")),
    **_rows("MultiHeadAttention", formulas.attention_of_heads(past=6, present=1, heads="num_heads")),
    **_rows("GroupQueryAttention", formulas.attention_of_heads(past=3, present=1, heads="num_heads")),
}

NORMALIZATIONS = {
    # Mean, deviation, square, variance, quotient, scale and shift; what is once a row is left out.
    **_rows(
        """GroupNorm GroupNormalization InstanceNormalization LayerNormalization
        QOrderedLayerNormalization""",
        each(7),
    ),
    **_rows("SkipGroupNorm", each(8)),
    **_rows(
        "SkipLayerNormalization",
        lambda call: (8 + int(call.has(4))) * each(1)(call),  # the skip and the bias
    ),
    **_rows("RMSNormalization SimplifiedLayerNormalization", each(4)),
    **_rows("SkipSimplifiedLayerNormalization", lambda call: (5 + int(call.has(3))) * each(1)(call)),
    **_rows("EmbedLayerNormalization", lambda call: (8 + int(call.has(4))) * each(1)(call), embedded),
    **_rows("MeanVarianceNormalization", each(5)),
    **_rows("BatchNormalization", each(2)),  # its statistics fold into one multiply-add
    **_rows("LpNormalization", each(3)),
    **_rows("LRN", formulas.local_response),
    **_rows("Softmax LogSoftmax QLinearSoftmax", each(5)),  # greatest, difference, exponential, sum, quotient
    **_rows("BiasSoftmax", each(6)),
    **_rows("Hardmax", each(2)),
}

REDUCTIONS = {
    **_rows(
        """ArgMax ArgMin CumProd CumSum QLinearReduceMean ReduceL1 ReduceLogSum ReduceMax ReduceMean ReduceMin
        ReduceProd ReduceSum ReduceSumInteger GlobalAveragePool GlobalMaxPool QLinearGlobalAveragePool""",
        each_input(1),
    ),
    **_rows("GlobalLpPool ReduceL2 ReduceLogSumExp ReduceSumSquare", each_input(2)),
    **_rows("AveragePool MaxPool MaxpoolWithMask NhwcMaxPool QLinearAveragePool", formulas.pool(1)),
    **_rows("LpPool", formulas.pool(2)),
    **_rows("TopK", formulas.top),
    **_rows("NonMaxSuppression", formulas.suppression, as_far_as_known),
}

SAMPLES = {
    **_rows("Resize Upsample", formulas.resize),
    **_rows("GridSample", formulas.grid_sample),
    **_rows("RoiAlign", formulas.region_samples, produced),
    **_rows("CropAndResize", each(8), produced),
    **_rows("Col2Im", each_input(1)),
    **_rows("DFT", formulas.fourier(-2)),
    **_rows("STFT", formulas.short_fourier),
    **_rows("Det", formulas.determinant),
    **_rows("Inverse", lambda call: 3 * formulas.determinant(call)),  # 2 n³
}

OPERATORS: Mapping[str, Operator] = {
    **ALIASES,
    **MOVEMENT,
    **ELEMENTWISE,
    **PRODUCTS,
    **LAYERS,
    **NORMALIZATIONS,
    **REDUCTIONS,
    **SAMPLES,
}
"""A row by operator name; a name with its domain comes first where two domains mean different things."""
