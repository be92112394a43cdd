"""Which axis of an input holds the rows, and how long the others are: from the file, the user, or assumed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_dagster.errors import ConfigError, ModelError
from sits_dagster.models.graph.structure import Dimension, Graph, TensorType
from sits_dagster.models.inputs import IMAGE_SIZES, SEQUENCE_LENGTH, input_shapes
from sits_dagster.models.samples import INTEGER_LIMITS, attempts, is_mask, sample_batch, sample_rows

Shape = tuple[Dimension, ...] | None


def _graph(dtype: str = "float32", **inputs: Shape) -> Graph:
    types = {name: TensorType(dtype, shape) for name, shape in inputs.items()}
    return Graph(nodes=(), inputs=types, outputs={}, constants={})


@pytest.mark.parametrize(
    ("inputs", "axes"),
    [
        ({"x": ("N", 8)}, {"x": 0}),
        ({"x": (None, 8)}, {"x": 0}),
        ({"x": ("N", "S"), "mask": ("N", "S")}, {"x": 0, "mask": 0}),
        ({"x": ("N", 512), "state": (2, "N", 128), "rate": ()}, {"x": 0, "state": 1, "rate": None}),
        ({"x": (None, 512), "state": (2, None, 128)}, {"x": 0, "state": 1}),
        ({"x": ("N", 512), "state": (2, "M", 128)}, {"x": 0, "state": None}),
        ({"x": ("N", 512), "table": (10, 128)}, {"x": 0, "table": None}),
        ({"x": ("N", "S"), "w": (4, "S", "N")}, {"x": 0, "w": 2}),
        ({"x": (4, 8), "z": (4,)}, {"x": None, "z": None}),
        ({"x": (1, "S")}, {"x": None}),
        ({"x": ()}, {"x": None}),
    ],
)
def test_the_rows_are_guessed_by_names_and_places(
    inputs: dict[str, Shape], axes: Mapping[str, int | None]
) -> None:
    """A free first axis holds them; elsewhere one of its name does, or one without any."""
    assert input_shapes(_graph(**inputs)).axes == axes


@pytest.mark.parametrize(
    ("inputs", "rows"),
    [
        ({"x": (4, 8)}, 4),
        ({"x": (1, "S")}, 1),
        ({"x": (4, 8), "rate": ()}, 4),
        ({"x": (8, 3), "z": (2, 3)}, 8),
        ({"x": (16, 8), "state": (2, 16, 8)}, 16),
        ({"state": (2, 16, 8), "x": (16, 8)}, 16),
        ({"x": (8, 3), "z": (2, 4), "rate": ()}, 8),
        ({"x": ("N", 8)}, None),
        ({"x": ("N", 8), "table": (10, 128)}, None),
        ({"x": ()}, None),
    ],
)
def test_a_batch_is_fixed_where_no_input_is_free(inputs: dict[str, Shape], rows: int | None) -> None:
    """The first axes are the file's; where they disagree, one that all have counts, or the first."""
    assert input_shapes(_graph(**inputs)).rows_fixed == rows


@pytest.mark.parametrize(
    ("shape", "lengths", "assumed"),
    [
        (("N", 3, "H", "W"), (1, 3, 224, 224), {"H": 224, "W": 224}),
        (("N", 3, 48, "W"), (1, 3, 48, 224), {"W": 224}),
        (("N", "H", "W", 3), (1, 224, 224, 3), {"H": 224, "W": 224}),
        (("N", "C", "H", "W"), (1, 3, 224, 224), {"C": 3, "H": 224, "W": 224}),
        (("N", 3, None, None), (1, 3, 224, 224), {"x[2]": 224, "x[3]": 224}),
        (("N", "S"), (1, SEQUENCE_LENGTH), {"S": SEQUENCE_LENGTH}),
        (("N", None, 80), (1, SEQUENCE_LENGTH, 80), {"x[1]": SEQUENCE_LENGTH}),
        (("N", 80), (1, 80), {}),
    ],
)
def test_other_free_axes_are_assumed(
    shape: tuple[Dimension, ...], lengths: tuple[int, ...], assumed: Mapping[str, int]
) -> None:
    """As images where there are four axes, as text otherwise; what was assumed is said."""
    found = input_shapes(_graph(x=shape))
    assert found.lengths == {"x": lengths}
    assert found.assumed == assumed


@pytest.mark.parametrize(
    ("shape", "expected"), [(("N", 3, "H", "W"), (1, 3, 48, 320)), (("N", "H", "W", 1), (1, 48, 320, 1))]
)
def test_an_image_size_is_height_and_width(shape: tuple[Dimension, ...], expected: tuple[int, ...]) -> None:
    """Whether channels come first or last."""
    assert input_shapes(_graph(x=shape), image_size=(48, 320)).lengths["x"] == expected


def test_what_the_user_gives_is_not_assumed() -> None:
    """A given length stands; a given name is where the rows are."""
    graph = _graph(x=("A", "B", 8))
    shapes = input_shapes(graph, {"x": (5, "N", 8)})
    assert shapes.axes == {"x": 1}
    assert shapes.shapes(7) == {"x": (5, 7, 8)}
    assert shapes.assumed == {}
    assert shapes.free == {"A": (("x", 0),)}


def test_a_given_length_holds_for_every_axis_of_its_name() -> None:
    """Whoever gives the length of the ids gives that of the mask too; the rows' axis stays out of it."""
    graph = _graph(mask=("N", "S"), ids=("N", "S"), other=("N", "T"))
    shapes = input_shapes(graph, {"ids": (1, 64)})
    assert shapes.shapes(2) == {"mask": (2, 64), "ids": (2, 64), "other": (2, SEQUENCE_LENGTH)}
    assert shapes.assumed == {"T": SEQUENCE_LENGTH}
    unlike = input_shapes(graph, {"ids": ("N", 64), "mask": ("N", 32)})
    assert unlike.shapes(1) == {"mask": (1, 32), "ids": (1, 64), "other": (1, SEQUENCE_LENGTH)}


@pytest.mark.parametrize("names", [("p", "m"), ("m", "p")])
def test_an_assumed_length_is_one_for_each_name(names: tuple[str, str]) -> None:
    """A detector's pictures and their mask are of one size: that of the pictures."""
    inputs: dict[str, Shape] = {"p": ("N", 3, "height", "width"), "m": ("N", "height", "width")}
    shapes = input_shapes(_graph(**{name: inputs[name] for name in names}), image_size=(48, 320))
    assert shapes.shapes(2) == {"p": (2, 3, 48, 320), "m": (2, 48, 320)}
    assert shapes.assumed == {"height": 48, "width": 320}
    unnamed = input_shapes(_graph(p=("N", 3, None, None), m=("N", None, None)))
    assert unnamed.shapes(2)["m"] == (2, SEQUENCE_LENGTH, SEQUENCE_LENGTH), "without a name they are not one"


def test_numbers_alone_leave_the_first_axis_to_the_rows() -> None:
    """Whoever gives only lengths gives those of one batch: its first axis stays free."""
    shapes = input_shapes(_graph(x=("N", "S")), {"x": (1, 64)})
    assert (shapes.axes, shapes.shapes(3), shapes.rows_fixed) == ({"x": 0}, {"x": (3, 64)}, None)


def test_a_shape_may_be_given_where_the_file_has_none() -> None:
    """Of an input without any shape nothing is known but what the user says."""
    assert input_shapes(_graph(x=None), {"x": ("N", 64)}).shapes(3) == {"x": (3, 64)}
    with pytest.raises(ConfigError, match=r"how many axes input 'x'.*--shape x="):
        input_shapes(_graph(x=None))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"z": ("N", 8)}, r"no input 'z'; it has 'x'"),
        ({"x": ("N",)}, r"has 1 axes; the file's has 2"),
        ({"x": ("N", 9)}, r"Axis 1 of input 'x' is fixed at 8 in the file, not 9"),
        ({"x": (4, "N")}, r"Axis 1 of input 'x' is fixed at 8 in the file, so it cannot hold the rows"),
    ],
)
def test_a_shape_that_contradicts_the_file_is_refused(
    given: dict[str, tuple[int | str, ...]], words: str
) -> None:
    """The message names the input, and both sides."""
    with pytest.raises(ConfigError, match=words):
        input_shapes(_graph(x=("N", 8)), given)


def test_an_axis_of_one_name_is_stretched_everywhere() -> None:
    """Ids and mask grow together; the rows' axis and others stay."""
    shapes = input_shapes(_graph(ids=("N", "S"), mask=("N", "S"), table=("N", 7)))
    assert shapes.free == {"S": (("ids", 1), ("mask", 1))}
    longer = shapes.stretched("S", 300)
    assert longer.length("S") == 300
    assert longer.shapes(2) == {"ids": (2, 300), "mask": (2, 300), "table": (2, 7)}
    assert shapes.length("S") == SEQUENCE_LENGTH, "the first one is as it was"


lengths = st.one_of(st.integers(1, 9), st.sampled_from(["N", "S", "T"]), st.none())


@given(
    shapes=st.dictionaries(
        st.sampled_from("abc"), st.lists(lengths, max_size=4).map(tuple), min_size=1, max_size=3
    ),
    rows=st.integers(1, 20),
)
def test_any_file_gives_whole_shapes(shapes: dict[str, tuple[Dimension, ...]], rows: int) -> None:
    """Every axis has a length, those of the file stand, and rows are where the axis says."""
    found = input_shapes(_graph(**shapes))
    for name, concrete in found.shapes(rows).items():
        assert len(concrete) == len(shapes[name])
        for axis, (length, declared) in enumerate(zip(concrete, shapes[name], strict=True)):
            if found.axes[name] == axis:
                assert length == rows
                assert not isinstance(declared, int), "rows never lie along a fixed axis"
            elif isinstance(declared, int):
                assert length == declared
    is_any_free = any(axis is not None for axis in found.axes.values())
    assert (found.rows_fixed is None) or not is_any_free


TYPES = {
    "x": TensorType("float32", ("N", 4)),
    "ids": TensorType("int64", ("N", 3)),
    "attention_mask": TensorType("int64", ("N", 3)),
    "flag": TensorType("bool", ("N",)),
    "text": TensorType("string", ("N",)),
    "table": TensorType("float32", (5, 2)),
    "rate": TensorType("int64", ()),
}
SHAPES = input_shapes(Graph(nodes=(), inputs=TYPES, outputs={}, constants={}))


def test_made_up_rows_are_unlike_and_harmless() -> None:
    """Numbers differ between rows and in scale, ids stay below the limit, masks say that all is data."""
    rows = sample_rows(TYPES, SHAPES, count=3, integer_limit=2)
    assert len(rows) == 3
    assert all(found["x"].shape == (1, 4) and found["x"].dtype == np.float32 for found in rows)
    assert len({found["x"].tobytes() for found in rows}) == 3
    assert all(found["ids"].max() < 2 and found["ids"].min() >= 0 for found in rows)
    assert all((found["attention_mask"] == 1).all() and found["flag"].all() for found in rows)
    assert [found["text"].tolist() for found in rows] == [["row 1"], ["row 2"], ["row 3"]]
    assert all(found["table"] is rows[0]["table"] for found in rows), "what all rows share is one array"
    assert rows[0]["rate"] == 1


def test_made_up_batches_of_a_fixed_size_are_unlike() -> None:
    """Their inputs have no free axis of rows, and yet no two batches share them."""
    types = {"x": TensorType("float32", (4, 8)), "ids": TensorType("int64", (4, 8))}
    shapes = input_shapes(Graph(nodes=(), inputs=types, outputs={}, constants={}))
    batches = sample_rows(types, shapes, count=3, integer_limit=100)
    for name in types:
        assert {found[name].shape for found in batches} == {(4, 8)}
        assert len({found[name].tobytes() for found in batches}) == 3


def test_a_made_up_batch_has_its_rows_along_their_axes() -> None:
    """Values that the user knows fill their input instead."""
    batch = sample_batch(TYPES, SHAPES, 6, integer_limit=2, values={"rate": 16000, "x": 0.5})
    assert {name: array.shape for name, array in batch.items()} == SHAPES.shapes(6)
    assert batch["rate"] == 16000
    assert (batch["x"] == 0.5).all()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (TensorType("float8e4m3fn", ("N", 4)), "'x' is of type float8e4m3fn, which NumPy cannot hold"),
        (TensorType("float32", ("N", 1 << 20, 1 << 20)), "too many to try"),
    ],
)
def test_what_cannot_be_made_up_is_named(kind: TensorType, words: str) -> None:
    """A type without a NumPy one, and a shape that would fill the memory."""
    shapes = input_shapes(Graph(nodes=(), inputs={"x": kind}, outputs={}, constants={}))
    with pytest.raises(ModelError, match=words):
        sample_rows({"x": kind}, shapes, count=1, integer_limit=1)


def test_the_likeliest_is_tried_first() -> None:
    """Every size with every limit, once."""
    tried = list(attempts(IMAGE_SIZES))
    assert tried[0] == ((224, 224), 100)
    assert len(set(tried)) == len(tried) == len(IMAGE_SIZES) * len(INTEGER_LIMITS)


@pytest.mark.parametrize(("name", "found"), [("attention_mask", True), ("Mask.1", True), ("ids", False)])
def test_a_mask_says_so_by_its_name(name: str, found: object) -> None:
    """Whatever its case."""
    assert is_mask(name) is found
