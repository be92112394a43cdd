"""Parameters and multiply-adds of well-known networks agree with what others published."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import onnx
import pytest

from sits_dagster.models.cost import GraphCost, graph_costs
from sits_dagster.models.graph.shapes import GraphFile
from sits_dagster.models.graph.structure import Graph, TensorType

# The networks of ONNX's own tests: real graphs, with weights that ConstantOfShape makes up.
FOLDER = Path(onnx.__file__).parent / "backend/test/data/light"
PRODUCTS = {"Conv", "Gemm", "MatMul"}
TORCHVISION = "https://pytorch.org/vision/stable/models/generated/torchvision.models."


@cache
def light(name: str) -> GraphFile:
    return GraphFile(FOLDER / f"light_{name}.onnx")


def costs(name: str, shapes: Mapping[str, tuple[int, ...]] | None = None) -> GraphCost:
    file = light(name)
    return graph_costs(file.graph, file.types(shapes or {}).types)


def multiply_adds(cost: GraphCost) -> int:
    return sum(node.cost.flops for node in cost.nodes if node.operator in PRODUCTS) // 2


def parameters(graph: Graph, types: Mapping[str, TensorType], leave_out: set[str]) -> int:
    """Floats that are known before the first row, each counted once."""
    folded = graph.folded()
    running = [node for node in graph.nodes if any(name not in folded for name in node.outputs)]
    weights = {name for node in running for name in node.reads if name in folded} - leave_out
    return sum(types[name].elements for name in weights if types[name].dtype == "float32")


def normalizing(graph: Graph, *inputs: int) -> set[str]:
    """Names of these inputs of all BatchNormalizations: 1 scale, 2 bias, 3 mean, 4 variance."""
    return {
        node.inputs[index]
        for node in graph.nodes
        if node.operator == "BatchNormalization"
        for index in inputs
    }


# Learnable numbers: PyTorch does not count running means and variances. Caffe's BatchNorm has no scale and no
# bias: they are in a Scale layer after it (Mul and Add here), and those of BatchNormalization are dummies.
@pytest.mark.parametrize(
    ("name", "leave_out", "published"),
    [
        ("resnet50", (3, 4), 25_557_032),  # TORCHVISION resnet50: num_params
        ("vgg19", (), 143_667_240),  # TORCHVISION vgg19
        ("squeezenet", (), 1_235_496),  # TORCHVISION squeezenet1_1
        ("densenet121", (1, 2, 3, 4), 7_978_856),  # TORCHVISION densenet121
    ],
)
def test_parameters_are_those_of_torchvision(name: str, leave_out: tuple[int, ...], published: int) -> None:
    """To the last number."""
    file = light(name)
    assert parameters(file.graph, file.types({}).types, normalizing(file.graph, *leave_out)) == published


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # https://github.com/KamelAbdelouahab/CNN-Workload counts Caffe's weights.
        ("bvlc_alexnet", 61.0e6),
        ("inception_v1", 6.99e6),
        # The size of the real file, of which 4 bytes a weight: the README of each in
        # https://github.com/onnx/models (349 and 45 MB), and
        # https://huggingface.co/onnxmodelzoo/legacy_models/tree/main/validated/vision/classification/shufflenet/model
        ("zfnet512", 349e6 / 4),
        ("inception_v2", 45e6 / 4),
        ("shufflenet", 5.72e6 / 4),
    ],
)
def test_parameters_are_within_1_percent(name: str, published: float) -> None:
    """All numbers in the file, those of BatchNormalization too."""
    file = light(name)
    assert parameters(file.graph, file.types({}).types, set()) == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # Their "GFLOPS" are multiply-adds. ResNet-50 is the variant with the stride in the 3x3 convolution
        # ("v1.5", as in Caffe2); with the stride in the 1x1 convolution it would be 3.86.
        ("resnet50", 4.09e9),
        ("vgg19", 19.63e9),
        ("squeezenet", 0.349e9),  # printed as 0.35
        ("densenet121", 2.83e9),
    ],
)
def test_multiply_adds_are_those_of_torchvision(name: str, published: float) -> None:
    """TORCHVISION + name: GFLOPS."""
    cost = costs(name)
    assert cost.uncosted == {}
    assert multiply_adds(cost) == pytest.approx(published, rel=0.01)


def test_alexnet_has_724_million_multiply_adds() -> None:
    """CNN-Workload (above): 724 M for Caffe's crop of 227 pixels; this file declares 224, 10 % less."""
    cost = costs("bvlc_alexnet", {"data_0": (1, 3, 227, 227)})
    assert multiply_adds(cost) == pytest.approx(724e6, rel=0.01)
    assert multiply_adds(costs("bvlc_alexnet")) == pytest.approx(655e6, rel=0.01)


def test_inception_v1_has_1_58_billion_multiply_adds() -> None:
    """CNN-Workload (above) with Caffe's pooling, which rounds up.

    The export lost that and rounds down: windows of 55, 27, 13 and 6 pixels instead of 56, 28, 14 and 7. With
    Caffe's shapes in the same graph, the count is Caffe's.
    """
    file = light("inception_v1")
    types = dict(file.types({}).types)
    lengths = {55: 56, 27: 28, 13: 14, 6: 7}
    for name, kind in types.items():
        if len(kind.lengths) == 4 and kind.lengths[2] in lengths and name not in file.graph.folded():
            length = lengths[kind.lengths[2]]
            types[name] = replace(kind, shape=(*kind.lengths[:2], length, length))
    assert multiply_adds(graph_costs(file.graph, types)) == pytest.approx(1.58e9, rel=0.01)


def test_inception_v2_is_bn_inception_with_two_narrower_blocks() -> None:
    """https://github.com/osmr/imgclsmob: BN-Inception has 11,295,240 parameters and 2,048.06 M multiply-adds.

    In this file the pools of blocks 4c and 4d are projected to 96 channels instead of the 128 of Ioffe and
    Szegedy (2015), and convolutions before a normalization have no bias. The published multiply-adds contain
    those of the normalizations.
    """
    file = light("inception_v2")
    types = file.types({}).types
    large = 576 + (96 + 128 + 160 + 96) + 608 + (128 + 192)  # weights a channel more: 4c, 4d twice, 4e
    small = 352 + 192 + 160 + 128  # 5a
    convolutions = [types[node.inputs[1]].lengths[0] for node in file.graph.nodes if node.operator == "Conv"]
    biases = sum(convolutions) + 2 * 32
    scales = 2 * 2 * 32
    count = parameters(file.graph, types, normalizing(file.graph, 1, 2, 3, 4))
    assert count + 32 * (large + small) + scales + biases == 11_295_240
    wider = multiply_adds(graph_costs(file.graph, types)) + 32 * (large * 14**2 + small * 7**2)
    assert wider == pytest.approx(2_048.06e6, rel=0.01)


def test_shufflenet_units_have_the_multiply_adds_of_the_paper() -> None:
    """Zhang et al. (2017), 3.2: a unit of c channels with m in the middle takes `hw(2cm/g + 9m)`.

    The file is none of the paper's networks: it has the channels of "ShuffleNet 0.5x, g = 4", but m = c where
    the paper has m = c/4. So the units are compared, those that keep the length.
    """
    file = light("shufflenet")
    types = file.types({}).types
    cost = graph_costs(file.graph, types)
    found = 0
    for node in cost.nodes:
        if node.operator == "Conv":
            found += node.cost.flops // 2
    expected = 0
    units = {(136, 28): 3, (272, 14): 7, (544, 7): 3}
    for (channels, length), number in units.items():
        expected += number * length**2 * (2 * channels**2 // 4 + 9 * channels)
    # The other layers: the first convolution, and the 3 units that halve the length and append to a pool.
    expected += 112**2 * 24 * 27
    for before, middle, after, length in [(24, 112, 112, 28), (136, 136, 136, 14), (272, 272, 272, 7)]:
        expected += (2 * length) ** 2 * before * middle // 4 + length**2 * (9 * middle + middle * after // 4)
    assert found == expected


def test_zfnet_has_the_multiply_adds_of_its_layers() -> None:
    """No figure is published for this variant: these are its layers, counted by hand.

    Zeiler and Fergus (2013) with 512 maps in the 4th layer, as https://github.com/onnx/models says.
    """
    layers = [(109, 96, 3 * 7**2), (25, 256, 96 * 5**2), (12, 512, 256 * 3**2)]
    layers += [(12, 512, 512 * 3**2)] * 2 + [(1, 4096, 512 * 6**2), (1, 1024, 4096), (1, 1000, 1024)]
    expected = sum(length**2 * channels * inner for length, channels, inner in layers)
    assert multiply_adds(costs("zfnet512")) == expected


@pytest.mark.parametrize("name", [path.stem.removeprefix("light_") for path in sorted(FOLDER.glob("*.onnx"))])
def test_what_is_no_product_is_little(name: str) -> None:
    """Published figures leave it out, which is why they are compared with the products alone."""
    cost = costs(name)
    assert cost.uncosted == {}
    assert cost.warnings == ()
    assert 2 * multiply_adds(cost) < cost.flops < 2.12 * multiply_adds(cost)


@pytest.mark.parametrize("name", ["resnet50", "vgg19"])
def test_bytes_moved_hold_every_weight(name: str) -> None:
    """Weights are read once, whatever else moves."""
    file = light(name)
    types = file.types({}).types
    weights = 4 * parameters(file.graph, types, set())
    outputs = sum(math.prod(kind.lengths) * 4 for kind in file.graph.outputs.values())
    assert graph_costs(file.graph, types).bytes_moved > weights + outputs
