"""A profile is a plain value that JSON carries, and tells how many rows fit into a device."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sits_dagster.errors import ModelError
from sits_dagster.models.arena import ArenaPolicy, ExtendStrategy
from sits_dagster.models.batching import Batching, BatchingReport
from sits_dagster.models.cost import KernelCost
from sits_dagster.models.inputs import InputShapes
from sits_dagster.models.linear import Linear
from sits_dagster.models.memory import ArenaUse, MemoryPlan
from sits_dagster.models.profile import SCHEMA, AxisGrowth, Calibration, ModelProfile, TensorProfile

MIB = 1 << 20
SHAPES = InputShapes(axes={"x": 0}, lengths={"x": (1, 8)}, assumed={}, rows_fixed=None, free={})


def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that an annotation allows, with every optional part of a dataclass now and then."""
    scalars = {
        int: st.integers(),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.sampled_from(["", "N", "7", "é", "null"]) | st.text(max_size=5),
        type(None): st.none(),
    }
    if hint in scalars:
        return scalars[hint]
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        names = [field.name for field in dataclasses.fields(hint) if field.name != "schema"]
        return st.builds(hint, **{name: _values(hints[name]) for name in names})
    return _several(get_origin(hint) or hint, get_args(hint))


def _several(kind: Any, arguments: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    if kind in {Union, types.UnionType}:
        return st.one_of(*map(_values, arguments))
    if kind is Mapping:
        return st.dictionaries(_values(arguments[0]), _values(arguments[1]), max_size=2)
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    if arguments[-1] is Ellipsis:
        return st.lists(_values(arguments[0]), max_size=2).map(tuple)
    return st.tuples(*map(_values, arguments))


def _profile(**changes: Any) -> ModelProfile:
    """Ten MiB of weights, and one buffer of 100 KiB a row."""
    return dataclasses.replace(
        ModelProfile(
            name="m",
            digest="0" * 64,
            inputs=(TensorProfile(name="x", dtype="float32", shape=("N", 8), batch_axis=0),),
            outputs=(TensorProfile(name="y", dtype="float32", shape=("N", 8), batch_axis=0),),
            lengths={},
            input_shapes=SHAPES,
            parameters=5,
            parameter_bytes=10 * MIB,
            parameter_bytes_by_type={"float32": 10 * MIB},
            kernels=(
                KernelCost(operator="Add", flops=Linear(1, 2), bytes_moved=Linear(3, 4)),
                KernelCost(operator="Neg", flops=Linear(10, 20), bytes_moved=Linear(30, 40)),
            ),
            memory_plan=MemoryPlan((Linear(0, 100 << 10),), (1,)),
            memory_source="optimized",
            batching=BatchingReport(verdict=Batching.INVARIANT),
        ),
        **changes,
    )


@settings(max_examples=60, deadline=None)
@given(profile=_values(ModelProfile))
def test_json_gives_an_equal_profile_back(profile: ModelProfile) -> None:
    """Whatever is in it: names that look like numbers, nothing, and all optional parts."""
    text = profile.to_json()
    assert ModelProfile.from_json(text) == profile
    assert ModelProfile.from_json(text.encode()) == profile
    assert ModelProfile.from_json(text).to_json() == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        _profile().to_json()[:-20],
        _profile().to_json().replace('"Add"', "5"),
        _profile().to_json().replace('"invariant"', '"perhaps"'),
        b"\xff\xfe\x00",
        "[" * 200_000,
    ],
    ids=["empty", "no fields", "list", "null", "cut", "wrong type", "wrong verdict", "no text", "too deep"],
)
def test_damaged_text_is_an_error_of_the_model(text: str | bytes) -> None:
    """Whatever is wrong with it; the remedy is to profile again."""
    with pytest.raises(ModelError, match=r"not a model profile.*Hint: profile the model again"):
        ModelProfile.from_json(text)


def test_another_schema_is_refused() -> None:
    """A profile that another version wrote is not guessed at."""
    data = json.loads(_profile().to_json())
    assert data["schema"] == SCHEMA
    data["schema"] = SCHEMA + 1
    with pytest.raises(ModelError, match=f"has schema {SCHEMA + 1}, this package reads {SCHEMA}"):
        ModelProfile.from_json(json.dumps(data))


def test_costs_are_sums_over_kernels() -> None:
    """Per row it is the slope; of a fixed batch, the batch divided."""
    profile = _profile()
    assert (profile.flops, profile.bytes_moved) == (Linear(11, 22), Linear(33, 44))
    assert (profile.flops_per_row, profile.bytes_per_row) == (22, 44)
    fixed = _profile(batch_rows_fixed=4)
    assert (fixed.flops_per_row, fixed.bytes_per_row) == ((11 + 88) / 4, (33 + 176) / 4)
    assert profile.memory_bytes == Linear(0, 100 << 10)
    assert _profile(kernels=()).flops_per_row == 0


def test_what_is_held_is_the_arenas() -> None:
    """By default that of the CPU engine, without a limit."""
    profile = _profile()
    assert profile.held(1) == MIB
    assert profile.held(100) == 16 * MIB
    assert profile.held(100, ArenaPolicy(strategy=ExtendStrategy.SAME_AS_REQUESTED)) == 100 * (100 << 10)
    assert profile.held(100, ArenaPolicy(bytes_limit=5 * MIB)) is None


@given(
    own=st.integers(0, 3 * MIB),
    row=st.integers(10 << 10, 2 * MIB),
    memory=st.integers(0, 60 * MIB),
    watermark=st.floats(0.1, 1),
)
def test_the_largest_batch_equals_brute_force(own: int, row: int, memory: int, watermark: float) -> None:
    """The most rows that, with the weights, stay below the watermark of the device's memory."""
    profile = _profile(memory_plan=MemoryPlan((Linear(own, row),), (1,)))
    room = int(memory * watermark) - profile.parameter_bytes
    fitting = [
        rows
        for rows in range(1, 60 * MIB // row + 2)
        if room > 0 and profile.held(rows, ArenaPolicy(bytes_limit=room)) is not None
    ]
    assert profile.batch_rows_max(memory, watermark=watermark) == max(fitting, default=0)


@pytest.mark.parametrize("memory", [0, 10 * MIB, 10 * MIB + 1])
def test_weights_that_fill_the_device_leave_no_rows(memory: int) -> None:
    """An arena that is smaller than its weights loses its limit in ONNX Runtime: never that."""
    assert _profile().batch_rows_max(memory, watermark=1.0) == 0


def test_rows_that_must_be_alone_are_alone() -> None:
    """However large the device is; and not even one where one does not fit."""
    alone = _profile(batching=BatchingReport(verdict=Batching.NOT_BATCHABLE))
    assert alone.batch_rows_max(1 << 40) == 1
    assert alone.batch_rows_max(10 * MIB) == 0
    assert _profile(batching=BatchingReport(verdict=Batching.MASK_REQUIRED)).batch_rows_max(1 << 40) > 1


def test_a_fixed_batch_fits_or_not() -> None:
    """All of its rows or none, whatever the verdict on batching."""
    for verdict in Batching:
        fixed = _profile(batch_rows_fixed=64, batching=BatchingReport(verdict=verdict))
        assert fixed.batch_rows_max(100 * MIB) == 64
        assert fixed.batch_rows_max(14 * MIB) == 0


def test_without_a_memory_plan_no_batch_is_promised() -> None:
    """An empty plan would fit any batch into any device."""
    unknown = _profile(memory_source="unknown", memory_plan=MemoryPlan((), ()))
    assert unknown.batch_rows_max(1 << 40) == 0
    assert unknown.held(1) is None
    assert unknown.use(1, ArenaPolicy()) is None


def test_a_batch_has_an_end() -> None:
    """A model without activations takes many rows, not infinitely many."""
    assert _profile(memory_plan=MemoryPlan((), ())).batch_rows_max(1 << 40) == 1 << 16


def _calibrated(a: float, b: float) -> ModelProfile:
    return _profile(calibration=Calibration(probes={1: MIB}, correction=Linear(a, b), device="cpu"))


def test_a_calibration_corrects_what_is_held() -> None:
    """What a device held beyond the replay counts, in both directions, and against the limit."""
    policy = ArenaPolicy(bytes_limit=17 * MIB)
    assert _calibrated(MIB, 0).use(100, policy) == ArenaUse(bytes_held=17 * MIB, bytes_peak=17 * MIB)
    assert _calibrated(MIB + 1, 0).use(100, policy) is None
    assert _calibrated(-2 * MIB, 0).held(100, policy) == 14 * MIB
    assert _calibrated(-99 * MIB, 0).held(100) == 0


@given(a=st.integers(0, 8 * MIB), b=st.integers(0, 1 << 19), memory=st.integers(MIB, 400 * MIB))
def test_a_calibrated_batch_fits_and_is_not_above_the_uncalibrated(a: int, b: int, memory: int) -> None:
    """More than the replay said means fewer rows, and what is promised fits as corrected."""
    corrected = _calibrated(a, b)
    rows = corrected.batch_rows_max(memory)
    assert rows <= _profile().batch_rows_max(memory)
    room = int(memory * 0.85) - corrected.parameter_bytes
    assert rows == 0 or corrected.held(rows, ArenaPolicy(bytes_limit=room)) is not None


def test_growth_is_a_ratio_to_the_profiles_length() -> None:
    """Twice the length of a square cost is four times the memory; no memory is no division by zero."""
    growth = AxisGrowth(axis="S", length=100, memory_bytes=(0, 0, 2), flops=(0, 1, 0))
    assert (growth.memory_ratio(200), growth.flops_ratio(200)) == (4, 2)
    nothing = AxisGrowth(axis="S", length=9, memory_bytes=(0, 0, 0), flops=(0, 0, 0))
    assert (nothing.memory_ratio(5), nothing.flops_ratio(5)) == (None, None)


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        ({"float64": 9, "float32": 1}, "float64"),
        ({"complex128": 9}, "float64"),
        ({"complex64": 9}, "float32"),
        ({"float16": 5, "float32": 5}, "float32"),
        ({"uint8": 4, "int8": 3, "float32": 5}, "int8"),
        ({}, "float32"),
    ],
)
def test_arithmetic_is_of_the_type_of_most_weights(weights: dict[str, int], dtype: str) -> None:
    """Without a rate for it float32's counts, and that is said."""
    profile = _profile(parameter_bytes_by_type=weights)
    rates = {"float64": 1.0, "float32": 2.0, "int8": 3.0}
    assert profile.arithmetic_dtype(rates) == dtype
    assert profile.rate_notes(rates) == ()
    assert profile.arithmetic_dtype({"float32": 1.0}) == "float32"
    notes = profile.rate_notes({"float32": 1.0})
    assert [dtype in note for note in notes] == ([] if dtype == "float32" else [True])


def test_a_gpus_arena_takes_what_is_asked_for() -> None:
    """Its limit is met by other batches than that of an arena that doubles."""
    plan = MemoryPlan((Linear(0, 100 << 10), Linear(0, 100 << 10), Linear(0, 300 << 10)), (1, 2, -1, -2, 3))
    profile = _profile(memory_plan=plan)
    for strategy in ExtendStrategy:
        most = profile.batch_rows_max(70 * MIB, watermark=1.0, strategy=strategy)
        policy = ArenaPolicy(strategy=strategy, bytes_limit=60 * MIB)
        assert profile.held(most, policy) is not None
        assert profile.held(most + 1, policy) is None
    doubling, same = (
        profile.batch_rows_max(70 * MIB, watermark=1.0, strategy=strategy) for strategy in ExtendStrategy
    )
    assert same == 60 * MIB // (500 << 10)
    assert doubling != same
    assert profile.batch_rows_max(70 * MIB, watermark=1.0) == doubling


@pytest.mark.parametrize("measured", ExtendStrategy)
def test_a_calibration_holds_for_the_strategy_it_was_measured_with(measured: ExtendStrategy) -> None:
    """An arena that grows otherwise holds other than what was measured."""
    found = Calibration(probes={8: MIB}, correction=Linear(5 * MIB, 0), device="d", strategy=measured)
    plain, corrected = _profile(), _profile(calibration=found)
    for strategy in ExtendStrategy:
        policy = ArenaPolicy(strategy=strategy)
        before, after = plain.held(100, policy), corrected.held(100, policy)
        assert before is not None
        assert after == before + (5 * MIB if strategy is measured else 0)
