"""Whether rows may share a batch is found by running them, whatever names and shapes suggest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_dagster.errors import DeviceOutOfMemoryError
from sits_dagster.models.batching import Batching, probe_batching, probe_fixed_batch, probe_padding

Arrays = Mapping[str, Any]
Function = Callable[[Any], Any]


def _rows(*shape: int, count: int = 3, dtype: str = "float32") -> list[dict[str, Any]]:
    random = np.random.default_rng(7)
    return [{"x": (random.standard_normal(shape) * (row + 1) * 3).astype(dtype)} for row in range(count)]


def _run(function: Function) -> Callable[[Arrays], Arrays]:
    return lambda feeds: {"y": np.asarray(function(feeds["x"]))}


def _verdict(function: Function, *shape: int, axis: int = 0) -> Batching:
    return probe_batching(_run(function), _rows(*shape), {"x": axis}).verdict


@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.tanh(x) @ np.ones((8, 3), np.float32),
        lambda x: x.mean(axis=(1, 2)),
        lambda x: np.argmax(x, axis=2),
        lambda x: x.astype(str).astype(object),
        lambda x: np.where(x > 0, x, np.nan),
        lambda x: np.where(x > 0, x, np.inf),
        lambda x: np.zeros((len(x), 0, 4), np.float32),
        lambda x: (x > 0).astype(bool),
    ],
    ids=["numbers", "one a row", "whole numbers", "texts", "not a number", "infinite", "empty", "flags"],
)
def test_rows_that_keep_to_themselves_may_share_a_batch(function: Function) -> None:
    """Whatever comes out of them, if it is the same alone and together."""
    report = probe_batching(_run(function), _rows(1, 5, 8), {"x": 0})
    assert report.verdict is Batching.INVARIANT, report.evidence
    assert report.output_axes == {"y": 0}
    assert report.input_axes == {"x": 0}
    assert report.evidence == ("batches of 2 and 3 rows give what each row gives alone",)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / np.abs(x).max(),
        lambda x: np.round(x * (127 / np.abs(x).max())).astype(np.int8),
        lambda x: x - x.mean(axis=0),
        lambda x: x[::-1],
        lambda x: np.where(x > 0, x, np.nan) if len(x) == 1 else x,
        lambda x: x + (len(x) > 2) * 0.01,
    ],
    ids=["scale of all", "quantised by all", "mean of all", "another order", "nan alone", "three unlike two"],
)
def test_rows_that_feel_each_other_may_not(function: Function) -> None:
    """The evidence names a row, the batch and the output."""
    report = probe_batching(_run(function), _rows(1, 5, 8), {"x": 0})
    assert report.verdict is Batching.NOT_BATCHABLE
    assert "of a batch of" in report.evidence[0]
    assert "'y'" in report.evidence[0]


def test_noise_of_another_kernel_is_no_difference() -> None:
    """Sums in another order differ in the last digits of the largest value; a thousandth is no noise."""
    assert _verdict(lambda x: x * (1 + 2e-6 * len(x)), 1, 8) is Batching.INVARIANT
    assert _verdict(lambda x: x * (1 + 2e-3 * len(x)), 1, 8) is Batching.NOT_BATCHABLE
    half = [{"x": row["x"].astype(np.float16)} for row in _rows(1, 8)]
    noisy = _run(lambda x: x * np.float16(1 + 2e-3 * (len(x) > 1)))
    assert probe_batching(noisy, half, {"x": 0}).verdict is Batching.INVARIANT


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_axis_of_the_rows_is_found_in_each_output(axis: int) -> None:
    """Rows along any axis, of inputs as of outputs; only axes other than the first are worth a word."""
    shape = [4, 5, 6]
    shape[axis] = 1
    report = probe_batching(
        lambda feeds: {"y": feeds["x"] * 2, "z": np.moveaxis(feeds["x"], axis, 0)}, _rows(*shape), {"x": axis}
    )
    assert report.verdict is Batching.INVARIANT
    assert report.output_axes == {"y": axis, "z": 0}
    assert any(f"output 'y' lie along axis {axis}" in found for found in report.evidence) == (axis > 0)


def test_several_cells_a_row_are_still_rows() -> None:
    """An output with three cells a row along the first axis is cut in three-cell pieces."""
    report = probe_batching(_run(lambda x: np.repeat(x, 3, axis=0)), _rows(1, 8), {"x": 0})
    assert report.verdict is Batching.INVARIANT
    assert report.output_axes == {"y": 0}


def test_a_time_axis_is_no_batch() -> None:
    """A recurrence along the joined axis changes what a later row gives, however alike the shapes are."""
    report = probe_batching(_run(lambda x: np.cumsum(x, axis=0)), _rows(1, 8), {"x": 0})
    assert report.verdict is Batching.NOT_BATCHABLE
    assert report.evidence[0].startswith("row 1 of a batch of 2 differs by")


def test_rows_mixed_into_one_axis_are_found() -> None:
    """A detector with a fixed batch in its Reshape: `[B, k, c]` becomes `[1, B·k, c]`, cell by cell."""
    report = probe_batching(
        _run(lambda x: np.swapaxes(x, 0, 1).reshape(1, -1, x.shape[2])), _rows(1, 5, 8), {"x": 0}
    )
    assert report.verdict is Batching.NOT_BATCHABLE
    assert report.output_axes == {"y": 1}, "of its length it could have been"


def test_rows_one_behind_the_other_in_another_axis_are_rows() -> None:
    """`[1, B·k, c]` in row order can be cut: it is as good as a batch axis."""
    report = probe_batching(_run(lambda x: x.reshape(1, -1, x.shape[2])), _rows(1, 5, 8), {"x": 0})
    assert (report.verdict, report.output_axes) == (Batching.INVARIANT, {"y": 1})


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(),
        lambda x: x.sum(axis=0),
        lambda x: x @ x.T,
        lambda x: x[:1],
        lambda x: x[x > 0],
    ],
)
def test_an_output_without_an_axis_of_rows_may_not_share(function: Function) -> None:
    """One number for all, a matrix of all pairs, a length that depends on the values."""
    report = probe_batching(_run(function), _rows(1, 8), {"x": 0})
    assert report.verdict is Batching.NOT_BATCHABLE
    assert "no axis of output 'y' holds the rows" in report.evidence[0]


def test_an_output_that_is_always_the_same_says_nothing() -> None:
    """A list of labels is given with every batch: it has no rows, and keeps none apart."""
    report = probe_batching(
        lambda feeds: {"y": feeds["x"] * 2, "labels": np.arange(3)}, _rows(1, 8), {"x": 0}
    )
    assert (report.verdict, report.output_axes) == (Batching.INVARIANT, {"y": 0})


def test_a_batch_that_fails_is_the_evidence() -> None:
    """A Reshape with the one row written into it: the engine's words are kept, in one line."""

    def run(feeds: Arrays) -> Arrays:
        if len(feeds["x"]) > 1:
            msg = "cannot\n  reshape " + "x" * 1000
            raise RuntimeError(msg)
        return {"y": feeds["x"]}

    report = probe_batching(run, _rows(1, 8), {"x": 0})
    assert report.verdict is Batching.NOT_BATCHABLE
    assert report.evidence[0].startswith("a batch of 2 rows fails: cannot reshape xxx")
    assert len(report.evidence[0]) < 600
    assert report.output_axes == {"y": 0}


def test_a_batch_that_does_not_fit_says_nothing_of_the_model() -> None:
    """A smaller device would otherwise forbid what a larger one can do."""

    def run(feeds: Arrays) -> Arrays:
        if len(feeds["x"]) > 2:
            msg = "no room"
            raise DeviceOutOfMemoryError(msg, batch_rows=3)
        return {"y": feeds["x"]}

    report = probe_batching(run, _rows(1, 8), {"x": 0})
    assert report.verdict is Batching.UNPROBED
    assert report.evidence == ("a batch of 3 rows does not fit into memory",)
    assert (report.input_axes, report.output_axes) == ({"x": 0}, {"y": 0})


@pytest.mark.parametrize("row", [np.full((1, 8), np.nan, np.float32), np.array([["a"]], object)])
def test_rows_that_are_the_same_say_nothing(row: Any) -> None:
    """Whatever mixes them gives the same; a batch that differs from its only row is evidence still."""
    rows = [{"x": row.copy(), "rate": np.array(at)} for at in (1, 1, 1)]
    report = probe_batching(_run(lambda x: np.repeat(x[::-1], 2, axis=1)), rows, {"x": 0, "rate": None})
    assert report.verdict is Batching.UNPROBED
    assert "no two unlike rows of equal shape" in report.evidence[0]
    assert report.output_axes == {"y": 0}
    longer = probe_batching(_run(lambda x: np.repeat(x, len(x), axis=1)), rows, {"x": 0, "rate": None})
    assert longer.verdict is Batching.NOT_BATCHABLE
    unlike = [*rows[:2], _rows(1, 8)[0] | {"rate": np.array(1)}]
    if row.dtype != object:
        found = probe_batching(_run(lambda x: x * 2), unlike, {"x": 0, "rate": None})
        assert found.verdict is Batching.INVARIANT


def test_names_of_outputs_are_cut() -> None:
    """A file may name them as long as it likes."""
    name = "y" * 1000
    report = probe_batching(lambda feeds: {name: feeds["x"].sum()}, _rows(1, 8), {"x": 0})
    assert len(report.evidence[0]) < 300
    fixed = probe_fixed_batch(lambda feeds: {name: feeds["x"].sum()}, _rows(4, 8), 4)
    assert len(fixed.evidence[0]) < 300


def test_a_row_that_fails_alone_is_the_callers_matter() -> None:
    """What does not run at all has no verdict."""

    def run(feeds: Arrays) -> Arrays:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        probe_batching(run, _rows(1, 8), {"x": 0})


def test_inputs_that_all_rows_share_are_not_joined() -> None:
    """A threshold or a sample rate is given once."""
    rows = [{**row, "rate": np.array(16000)} for row in _rows(1, 8)]

    def run(feeds: Arrays) -> Arrays:
        assert feeds["rate"].shape == ()
        return {"y": feeds["x"] * feeds["rate"]}

    assert probe_batching(run, rows, {"x": 0, "rate": None}).verdict is Batching.INVARIANT


@given(rows=st.integers(2, 4), mixing=st.floats(0.01, 1), axis=st.integers(0, 2))
def test_any_mixing_along_any_axis_is_found(rows: int, mixing: float, axis: int) -> None:
    """A part of a neighbour in a row, be it a hundredth, is never taken for noise."""
    shape = [3, 4, 5]
    shape[axis] = 1
    run = _run(lambda x: x + mixing * np.roll(x, 1, axis=axis))
    feeds = _rows(*shape, count=rows)
    assert probe_batching(run, feeds, {"x": axis}).verdict is Batching.NOT_BATCHABLE
    assert probe_batching(_run(lambda x: x * mixing), feeds, {"x": axis}).verdict is Batching.INVARIANT


def test_a_fixed_batch_is_tried_with_other_batch_mates() -> None:
    """The first row of two batches is the same, the others are not: only its own result counts."""
    batches = _rows(4, 8)
    kept = probe_fixed_batch(_run(np.tanh), batches, 4)
    assert (kept.verdict, kept.output_axes) == (Batching.INVARIANT, {"y": 0})
    mixed = probe_fixed_batch(_run(lambda x: x / np.abs(x).max()), batches, 4)
    assert mixed.verdict is Batching.NOT_BATCHABLE
    assert "batch-mates" in mixed.evidence[0]
    lost = probe_fixed_batch(_run(lambda x: x.sum(axis=0)), batches, 4)
    assert lost.verdict is Batching.NOT_BATCHABLE


@pytest.mark.parametrize("rows", [2, 3, 5])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.cumsum(x, axis=0),
        lambda x: np.cumsum(x[::-1], axis=0)[::-1],
        lambda x: x - x.mean(axis=0),
        lambda x: x[::-1],
        lambda x: x[: 1 + (x[-1, 0] > 0) * (len(x) - 1)],
    ],
    ids=["before", "behind", "mean of all", "another order", "another length"],
)
def test_whatever_a_fixed_batch_mixes_is_found(function: Function, rows: int) -> None:
    """Be it from rows before or behind: neither shows in the first row alone."""
    report = probe_fixed_batch(_run(function), _rows(rows, 8), rows)
    assert report.verdict is Batching.NOT_BATCHABLE, report.evidence
    assert "batch-mates" in report.evidence[0]


def test_rows_between_the_first_and_the_last_of_a_fixed_batch_count() -> None:
    """A model may spare both ends."""

    def middle(x: Any) -> Any:
        return np.concatenate([x[:1], x[1:-1] + x[-1:], x[-1:]])

    assert probe_fixed_batch(_run(middle), _rows(4, 8), 4).verdict is Batching.NOT_BATCHABLE


def test_fixed_batches_that_are_the_same_say_nothing() -> None:
    """Inputs filled with a number that the user gives."""
    batches = [{"x": np.full((4, 8), 0.5, np.float32)} for _ in range(3)]
    report = probe_fixed_batch(_run(lambda x: np.cumsum(x, axis=0) * 0 + x), batches, 4)
    assert report.verdict is Batching.UNPROBED
    assert "are the same" in report.evidence[0]
    assert (report.input_axes, report.output_axes) == ({"x": 0}, {"y": 0})


def test_only_inputs_of_the_fixed_length_hold_its_rows() -> None:
    """A number for all, and a table, have none."""
    batches = [{**batch, "rate": np.array(2), "table": np.ones((3, 4))} for batch in _rows(4, 8)]
    report = probe_fixed_batch(lambda feeds: {"y": feeds["x"] * feeds["rate"]}, batches, 4)
    assert report.verdict is Batching.INVARIANT
    assert report.input_axes == {"x": 0, "rate": None, "table": None}


def test_a_fixed_batch_of_one_shares_nothing() -> None:
    """Rows go one by one, and nothing more needs to be run."""
    calls: list[Any] = []

    def run(feeds: Arrays) -> Arrays:
        calls.append(feeds)
        return {"y": feeds["x"]}

    assert probe_fixed_batch(run, _rows(1, 8), 1).verdict is Batching.NOT_BATCHABLE
    assert len(calls) == 1


def _row_with_mask() -> dict[str, Any]:
    return {"x": _rows(1, 6, 4)[2]["x"], "mask": np.ones((1, 6), np.int64)}


def _pad(function: Callable[[Any, Any], Any], *, has_mask: bool = True) -> tuple[bool, bool]:
    row = _row_with_mask() if has_mask else {"x": _row_with_mask()["x"]}
    masks = ["mask"] if has_mask else []
    axes = dict.fromkeys(row, 1)
    return probe_padding(
        lambda feeds: {"y": function(feeds["x"], feeds.get("mask"))}, row, axes, masks, length=5
    )


def test_padding_that_changes_nothing_needs_no_mask() -> None:
    """Cells behind the row have results of their own, which are cut away."""
    assert _pad(lambda x, mask: np.tanh(x)) == (True, True)
    assert _pad(lambda x, mask: np.tanh(x), has_mask=False) == (True, True)


def test_padding_that_a_mask_covers_is_told_apart() -> None:
    """A sum over the mask's cells is right with it, and counts padding without it."""

    def masked_mean(x: Any, mask: Any) -> Any:
        return ((x + 1) * mask[:, :, None]).sum(axis=1) / mask.sum()

    assert _pad(masked_mean) == (False, True)


def test_padding_in_spite_of_a_mask_is_told_too() -> None:
    """A mean over all cells is wrong either way."""
    assert _pad(lambda x, mask: x.mean(axis=1)) == (False, False)
    assert _pad(lambda x, mask: x.mean(axis=1), has_mask=False) == (False, False)


def test_outputs_that_shrink_under_padding_hold_no_start() -> None:
    """Other axes, or shorter ones, cannot be cut to what was there before."""
    assert _pad(lambda x, mask: x[:, : 11 - x.shape[1]]) == (False, False)
    assert _pad(lambda x, mask: x if x.shape[1] == 6 else x[0]) == (False, False)
