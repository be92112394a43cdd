"""Effective bandwidth and roofline by hand; the time model finds synthetic devices from a few probes."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sits_dagster.errors import ConfigError
from sits_dagster.models.cost import KernelCost
from sits_dagster.models.hardware import DEVICES
from sits_dagster.models.linear import Linear
from sits_dagster.models.roofline import (
    BANDWIDTH_PRESETS,
    LAUNCH_GAP_NANOSECONDS_MIN,
    QUEUE_DEPTH_MAX,
    arithmetic_intensity,
    constraint_violations,
    effective_bandwidth,
    io_bound_ratio,
    roofline_bound,
    roofline_seconds,
)
from sits_dagster.models.timing import (
    PROBE_ROWS,
    KernelGroup,
    TimeModel,
    TimeProbe,
    bandwidth_contention,
    fit_time_model,
)

UNSEEN_ROWS = (3, 4, 6, 12, 16, 24)


def kernel(flops: float, moved: float, *, flops_fixed: float = 0.0, moved_fixed: float = 0.0) -> KernelCost:
    return KernelCost(
        operator="MatMul", flops=Linear(flops_fixed, flops), bytes_moved=Linear(moved_fixed, moved)
    )


def network(seed: int) -> list[KernelCost]:
    """Layers with weights and activations of unlike size, and small kernels between them."""
    draw = random.Random(seed)
    kernels: list[KernelCost] = []
    for _ in range(draw.randint(5, 60)):
        moved = 10 ** draw.uniform(4, 6.5)
        kernels += [
            kernel(moved * 10 ** draw.uniform(0, 2), moved, moved_fixed=10 ** draw.uniform(3, 6.5)),
            kernel(moved / 4, moved),
        ]
    return kernels


def probes(seconds_of, rows=PROBE_ROWS, noise: float = 0.0, seed: int = 0) -> list[TimeProbe]:
    draw = random.Random(seed)
    return [TimeProbe(rows=n, seconds=seconds_of(n) * (1 + draw.uniform(-noise, noise))) for n in rows]


def with_cache(kernels: list[KernelCost], *, slowdown: float, cache_bytes: float) -> TimeModel:
    """A device whose small kernels stay in a cache."""
    flat = fit_time_model(kernels, [TimeProbe(rows=1, seconds=1.0)])
    return replace(
        flat,
        launch_seconds=3e-6,
        flops_per_second=1e11,
        bandwidth_bytes_per_second=2e10 / slowdown,
        bandwidth_bytes_per_second_cached=2e10,
        cache_bytes=cache_bytes,
    )


# ---------------------------------------------------------------- effective bandwidth


def test_the_formula_by_hand() -> None:
    """2039·(1 − 0.2)/(1 + 0.87·2) = 595.3 GB/s."""
    preset = BANDWIDTH_PRESETS["a100-40gb"]
    found = effective_bandwidth(
        preset.bandwidth_bytes_per_second,
        contention=0.2,
        gap_sensitivity_per_nanosecond=preset.gap_sensitivity_per_nanosecond,
        gap_nanoseconds=2.0,
    )
    assert found == pytest.approx(595.328e9, rel=1e-5)
    assert effective_bandwidth(7.0) == 7.0


def test_the_preset_is_the_articles_and_the_data_sheet_differs() -> None:
    """The constants are kept as printed; the table of devices has the manufacturer's."""
    preset = BANDWIDTH_PRESETS["a100-40gb"]
    assert (preset.bandwidth_bytes_per_second, preset.gap_sensitivity_per_nanosecond) == (2039e9, 0.87)
    assert DEVICES["a100-40gb"].bandwidth_bytes_per_second == 1555e9
    assert DEVICES["a100-80gb"].bandwidth_bytes_per_second == preset.bandwidth_bytes_per_second
    at_shortest_gap = effective_bandwidth(
        1.0, gap_sensitivity_per_nanosecond=0.87, gap_nanoseconds=LAUNCH_GAP_NANOSECONDS_MIN
    )
    assert at_shortest_gap == pytest.approx(0.0874, abs=1e-4)


@given(contention=st.floats(0, 0.99), beta=st.floats(0, 10), gap=st.floats(0, 1e6))
def test_nothing_adds_bandwidth(contention: float, beta: float, gap: float) -> None:
    """More contention or longer gaps leave less, never none and never more than the peak."""

    def left(contention: float, gap: float) -> float:
        return effective_bandwidth(
            1e12, contention=contention, gap_sensitivity_per_nanosecond=beta, gap_nanoseconds=gap
        )

    assert 0 < left(contention, gap) <= 1e12
    assert left(contention, gap + 1) <= left(contention, gap)
    assert left((1 + contention) / 2, gap) < left(contention, gap)


@pytest.mark.parametrize(
    ("peak", "options"),
    [
        (0.0, {}),
        (1.0, {"contention": 1.0}),
        (1.0, {"contention": -0.1}),
        (1.0, {"contention": math.nan}),
        (1.0, {"gap_nanoseconds": -1.0}),
        (1.0, {"gap_sensitivity_per_nanosecond": -1.0}),
    ],
)
def test_an_argument_out_of_range_is_named(peak: float, options: dict[str, float]) -> None:
    """So that the deployment can be mended."""
    with pytest.raises(ConfigError, match=next(iter(options), "peak_bytes_per_second")):
        effective_bandwidth(peak, **options)


def test_constraints_hold_at_their_limits() -> None:
    """12 ns and 32 requests are allowed; each fault has its sentence."""
    assert (LAUNCH_GAP_NANOSECONDS_MIN, QUEUE_DEPTH_MAX) == (12, 32)
    assert constraint_violations(12.0, 32) == ()
    assert constraint_violations(1e9, 0) == ()
    short, deep = constraint_violations(8.0, 33)
    assert "8 ns, less than 12 ns" in short
    assert "33 requests" in deep
    assert "more than 32" in deep


@given(contention=st.floats(0, 0.99), beta=st.floats(0, 2), gap=st.floats(0, 100))
def test_the_contention_is_what_the_formula_had(contention: float, beta: float, gap: float) -> None:
    """A model that reached what contention leaves is told that contention."""
    reached = effective_bandwidth(
        2e12, contention=contention, gap_sensitivity_per_nanosecond=beta, gap_nanoseconds=gap
    )
    model = replace(fit_time_model(TWO, [TimeProbe(rows=1, seconds=1.0)]), bandwidth_bytes_per_second=reached)
    rates = {"peak_bytes_per_second": 2e12, "gap_sensitivity_per_nanosecond": beta}
    found = bandwidth_contention(model, **rates, gap_nanoseconds=gap)
    assert found is None or found == pytest.approx(contention, abs=1e-9)
    assert found is not None or contention < 1e-9, "only rounding leaves the range"


def test_no_contention_explains_more_than_the_gaps_leave() -> None:
    """The article's constants leave 8.7 % of the peak: whoever reaches more is not described by them."""
    model = fit_time_model(TWO, [TimeProbe(rows=1, seconds=1.0)])
    rates = {"peak_bytes_per_second": 2039e9, "gap_sensitivity_per_nanosecond": 0.87}
    fast = replace(model, bandwidth_bytes_per_second=1.4e12)
    assert bandwidth_contention(fast, **rates) is None
    slow = replace(model, bandwidth_bytes_per_second=0.5 * 2039e9 / 11.44)
    assert bandwidth_contention(slow, **rates) == pytest.approx(0.5)


# ---------------------------------------------------------------- roofline

TWO = [kernel(100.0, 1.0), kernel(1.0, 20.0, moved_fixed=80.0)]


def test_roofline_by_hand() -> None:
    """At 4 rows: max(400/100, 4/10) + max(4/100, 160/10) + 2 gaps of 0.5 = 4 + 16 + 1."""
    rates = {"flops_per_second": 100.0, "bandwidth_bytes_per_second": 10.0}
    assert roofline_seconds(TWO, 4, **rates, launch_seconds=0.5) == pytest.approx(21.0)
    assert io_bound_ratio(TWO, 4, **rates) == pytest.approx((0.4 + 16) / 20)
    assert io_bound_ratio(TWO, 4, **rates, launch_seconds=0.5) == pytest.approx((0.4 + 16) / 21)
    assert io_bound_ratio(TWO, 4, **rates, launch_seconds=500) < 0.02
    assert arithmetic_intensity(TWO, 4) == pytest.approx(404 / 164)
    assert roofline_bound(TWO, 4, **rates) == "memory"
    assert roofline_bound(TWO, 4, **rates, launch_seconds=9.0) == "launch"
    assert roofline_bound(TWO, 4, flops_per_second=1.0, bandwidth_bytes_per_second=10.0) == "compute"


def test_a_model_without_kernels_takes_no_time() -> None:
    """Sums over nothing are 0, and nothing moved has no intensity."""
    rates = {"flops_per_second": 1.0, "bandwidth_bytes_per_second": 1.0}
    assert roofline_seconds([], 4, **rates, launch_seconds=1.0) == 0.0
    assert io_bound_ratio([], 4, **rates) == 0.0
    assert arithmetic_intensity([], 4) == math.inf


@given(
    seed=st.integers(0, 1000),
    rows=st.floats(0, 1e4),
    flops_per_second=st.floats(1e9, 1e15),
    bandwidth_bytes_per_second=st.floats(1e9, 1e13),
)
def test_the_io_share_is_a_share(seed: int, rows: float, **rates: float) -> None:
    """Between 0 and 1, and the roofline is never faster than either of its limits."""
    kernels = network(seed)
    assert 0 <= io_bound_ratio(kernels, rows, **rates) <= 1
    seconds = roofline_seconds(kernels, rows, **rates)
    moved = sum(k.bytes_moved(rows) for k in kernels)
    assert seconds >= 0.999999 * moved / rates["bandwidth_bytes_per_second"]


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (-1, {}),
        (1, {"flops_per_second": 0.0}),
        (1, {"bandwidth_bytes_per_second": -1.0}),
        (1, {"launch_seconds": -1.0}),
    ],
)
def test_a_rate_out_of_range_is_named(rows: int, wrong: dict[str, float]) -> None:
    """Nothing is divided by nothing."""
    rates = {"flops_per_second": 1.0, "bandwidth_bytes_per_second": 1.0} | wrong
    for function in (roofline_seconds, roofline_bound):
        with pytest.raises(ConfigError, match=next(iter(wrong), "rows")):
            function(TWO, rows, **rates)


# ---------------------------------------------------------------- the fitted model


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    ridge=st.floats(4, 300),
    bandwidth=st.floats(1e10, 4e12),
    launch=st.floats(0, 2e-5),
)
def test_a_plain_device_is_found_from_its_probes(
    seed: int, ridge: float, bandwidth: float, launch: float
) -> None:
    """A GPU has a launch gap and a roofline, no cache to speak of: unseen batches are within 5 %."""
    kernels = network(seed)

    def seconds(rows: int) -> float:
        return roofline_seconds(
            kernels,
            rows,
            flops_per_second=ridge * bandwidth,
            bandwidth_bytes_per_second=bandwidth,
            launch_seconds=launch,
        )

    model = fit_time_model(kernels, probes(seconds))
    for rows in UNSEEN_ROWS:
        assert model.seconds(rows) == pytest.approx(seconds(rows), rel=0.05)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), slowdown=st.floats(1, 6), cache_bytes=st.floats(2e5, 2e7))
def test_a_device_with_a_cache_is_found_from_its_probes(
    seed: int, slowdown: float, cache_bytes: float
) -> None:
    """Where the caches overflow is told by four probes: unseen batches are within 10 %."""
    kernels = network(seed)
    device = with_cache(kernels, slowdown=slowdown, cache_bytes=cache_bytes)
    model = fit_time_model(kernels, probes(device.seconds))
    for rows in UNSEEN_ROWS:
        assert model.seconds(rows) == pytest.approx(device.seconds(rows), rel=0.1)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), slowdown=st.floats(1, 6), cache_bytes=st.floats(2e5, 2e7))
def test_noise_of_3_percent_is_not_amplified(seed: int, slowdown: float, cache_bytes: float) -> None:
    """With probes 3 % off, unseen batches are within 10 % at the median and never wildly off."""
    kernels = network(seed)
    device = with_cache(kernels, slowdown=slowdown, cache_bytes=cache_bytes)
    model = fit_time_model(kernels, probes(device.seconds, noise=0.03, seed=seed))
    errors = [abs(model.seconds(rows) / device.seconds(rows) - 1) for rows in UNSEEN_ROWS]
    assert np.median(errors) < 0.1
    assert max(errors) < 0.2


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    measured=st.dictionaries(st.integers(1, 64), st.floats(1e-6, 10), min_size=1, max_size=5),
)
def test_whatever_was_measured_time_is_positive_and_never_falls(
    seed: int, measured: dict[int, float]
) -> None:
    """Even of probes that contradict each other, or any theory."""
    model = fit_time_model(network(seed), [TimeProbe(rows=n, seconds=s) for n, s in measured.items()])
    seconds = [model.seconds(rows) for rows in (0, *range(1, 70), 128, 1000, 10**6)]
    assert all(np.isfinite(seconds))
    assert seconds[0] >= 0
    assert seconds[1] > 0
    assert all(b >= a * (1 - 1e-9) for a, b in pairwise(seconds))


def test_one_probe_scales_the_roofline() -> None:
    """The measured batch is met; others follow the model's shape."""
    model = fit_time_model(TWO, [TimeProbe(rows=4, seconds=0.02)])
    assert model.seconds(4) == pytest.approx(0.02)
    assert model.launch_seconds == 0
    assert model.cache_bytes == 0
    assert 0.02 < model.seconds(8) <= 0.04


def test_two_probes_are_met_and_find_the_launch_gap() -> None:
    """A constant and a part for each row is all that they can tell."""
    kernels = [kernel(1e9, 1e3)] * 10
    model = fit_time_model(kernels, probes(lambda rows: 0.01 + 0.002 * rows, (2, 16)))
    assert model.seconds(2) == pytest.approx(0.014, rel=1e-3)
    assert model.seconds(100) == pytest.approx(0.21, rel=1e-2)
    assert model.launch_seconds == pytest.approx(0.001, rel=1e-2)


@pytest.mark.parametrize("kernels", [[], [kernel(0, 0)] * 3], ids=["none", "free"])
def test_without_costs_time_is_a_constant_and_a_part_for_each_row(kernels: list[KernelCost]) -> None:
    """A graph that could not be analysed still gets a model."""
    model = fit_time_model(kernels, probes(lambda rows: 0.01 + 0.002 * rows))
    assert model.seconds(100) == pytest.approx(0.21, rel=1e-3)


def test_costs_that_are_no_lines_still_give_a_model() -> None:
    """Attention over the rows costs their square: the line through two batches starts below nothing."""
    square = kernel(1e6, 1e4, flops_fixed=-3e6, moved_fixed=-3e4)
    model = fit_time_model([square], probes(lambda rows: 0.01 + 0.002 * rows))
    assert model.seconds(4) == pytest.approx(0.018, rel=0.02)
    with pytest.raises(ConfigError, match="rows must be >= 0"):
        model.seconds(-1)


def test_a_batch_whose_time_does_not_depend_on_rows() -> None:
    """Rates without a limit are large, not infinite: the model stays JSON."""
    model = fit_time_model(TWO, probes(lambda _: 0.25))
    assert model.seconds(64) == pytest.approx(0.25, rel=1e-2)
    json.dumps(asdict(model), allow_nan=False)


def test_repeated_probes_of_one_batch_count_as_one() -> None:
    """Three runs of 8 rows say nothing about launch gaps or caches."""
    model = fit_time_model(TWO, [TimeProbe(rows=8, seconds=s) for s in (0.09, 0.1, 0.11)])
    assert model.rows_measured == (8,)
    assert model.launch_seconds == 0
    assert model.seconds(8) == pytest.approx(0.1, rel=0.02)


def test_the_model_is_plain_data() -> None:
    """It goes through JSON and predicts the same."""
    model = fit_time_model(network(1), probes(with_cache(network(1), slowdown=3, cache_bytes=1e6).seconds))
    values = json.loads(json.dumps(asdict(model)))
    values["kernels"] = tuple(KernelGroup(**group) for group in values["kernels"])
    values["rows_measured"] = tuple(values["rows_measured"])
    assert TimeModel(**values) == model
    assert hash(model) == hash(TimeModel(**values))


def test_kernels_of_like_cost_are_one_group_and_keep_their_totals() -> None:
    """A hundred thousand kernels are fitted in a moment, by a model of a few hundred groups."""
    draw = random.Random(0)
    kernels = [
        kernel(10 ** draw.uniform(0, 9), 10 ** draw.uniform(0, 7), moved_fixed=10 ** draw.uniform(0, 7))
        for _ in range(100_000)
    ]
    begin = time.process_time()
    model = fit_time_model(kernels, probes(lambda rows: 1.0 + rows))
    assert time.process_time() - begin < 5
    assert len(model.kernels) <= 256
    assert sum(group.kernels for group in model.kernels) == 100_000
    moved = sum(group.kernels * group.bytes_moved_per_row for group in model.kernels)
    assert moved == pytest.approx(sum(k.bytes_moved.b for k in kernels))


# ---------------------------------------------------------------- the smallest good batch


def test_a_launch_bound_model_wants_large_batches() -> None:
    """t = 19 + rows: 95 % of the throughput of 1,000 rows is reached by 262 of them, by hand."""
    model = fit_time_model([kernel(1e6, 1.0)], probes(lambda rows: 19.0 + rows, (1, 8, 64)))
    assert model.batch_rows_flat(rows_max=1000) == pytest.approx(262, abs=2)
    assert model.batch_rows_flat(1.0, rows_max=1000) == 1000
    assert model.batch_rows_flat(rows_max=1) == 1


def test_where_caches_overflow_small_batches_are_best() -> None:
    """Throughput rises, then falls: the answer is on the near side of the hill, not the largest batch."""
    kernels = [kernel(1e6, 1e5, moved_fixed=1e5)] * 20
    device = with_cache(kernels, slowdown=6, cache_bytes=1e6)
    rates = {rows: rows / device.seconds(rows) for rows in range(1, 129)}
    flat = device.batch_rows_flat(rows_max=128)
    assert flat == min(rows for rows, rate in rates.items() if rate >= 0.95 * max(rates.values()))
    assert flat < 10
    assert rates[128] < 0.8 * rates[flat]


def test_rows_beyond_the_exact_range_are_found_to_a_hundredth() -> None:
    """t = 10,000 + rows: the nearest steps, not every number, are tried above 4,096."""
    model = fit_time_model([kernel(1e6, 1.0)], probes(lambda rows: 1e4 + rows, (100, 1000, 10_000)))
    rates = np.arange(1, 100_001) / (1e4 + np.arange(1, 100_001))
    exact = int(np.argmax(rates >= 0.95 * rates.max())) + 1
    assert model.batch_rows_flat(rows_max=100_000) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(("share", "rows_max"), [(0.0, 8), (1.1, 8), (0.95, 0)])
def test_a_share_or_limit_out_of_range_is_an_error(share: float, rows_max: int) -> None:
    """Before anything is predicted."""
    model = fit_time_model(TWO, [TimeProbe(rows=1, seconds=1.0)])
    with pytest.raises(ConfigError, match="must be"):
        model.batch_rows_flat(share, rows_max=rows_max)


@pytest.mark.parametrize(
    ("measured", "options"),
    [
        ([], {}),
        ([TimeProbe(rows=0, seconds=1.0)], {}),
        ([TimeProbe(rows=1, seconds=0.0)], {}),
        ([TimeProbe(rows=1, seconds=math.inf)], {}),
        ([TimeProbe(rows=1, seconds=math.nan)], {}),
        ([TimeProbe(rows=1, seconds=1.0)], {"ridge_flops_per_byte": 0.0}),
    ],
)
def test_probes_that_say_nothing_are_errors(measured: list[TimeProbe], options: dict[str, float]) -> None:
    """No probe, no rows, no time."""
    with pytest.raises(ConfigError, match="must be"):
        fit_time_model(TWO, measured, **options)
