"""The plan of one call, replayed for any batch: what it needs, its peak as a line, the largest that fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_dagster.models.arena import ArenaPolicy, ExtendStrategy
from sits_dagster.models.buffers import BufferPlan, BufferStep
from sits_dagster.models.linear import Linear
from sits_dagster.models.memory import ArenaUse, MemoryPlan, largest_batch, memory_plan

KIB, MIB = 1 << 10, 1 << 20
SAME = ArenaPolicy(strategy=ExtendStrategy.SAME_AS_REQUESTED)


def _step(node: str, allocated: str = "", released: str = "") -> BufferStep:
    return BufferStep(node, "Op", tuple(allocated.split()), tuple(released.split()))


def _row(size: float) -> Linear:
    return Linear(0.0, size)


@st.composite
def plans(draw: st.DrawFn) -> MemoryPlan:
    """Buffers that come and go in any order, each with a part of its own and one a row."""
    sizes = draw(
        st.lists(
            st.builds(Linear, st.integers(0, 3 * MIB).map(float), st.integers(0, 200 * KIB).map(float)),
            min_size=1,
            max_size=8,
        )
    )
    events: list[int] = []
    live: list[int] = []
    for number in range(1, len(sizes) + 1):
        events.append(number)
        live.append(number)
        while live and draw(st.booleans()):
            events.append(-live.pop(draw(st.integers(0, len(live) - 1))))
    return MemoryPlan(tuple(sizes), tuple(events))


def test_a_plan_is_what_happens_in_order() -> None:
    """What loading left comes first, a workspace between its node's outputs and what the node releases."""
    buffers = BufferPlan((_step("n1", "a"), _step("n2", "b c", "a"), _step("n3", "d", "b gone")), ("d",))
    sizes = {"a": _row(1), "b": _row(2), "d": _row(3)}
    plan = memory_plan(buffers, sizes, {"n2": (_row(10), _row(20))}, resident=256)
    assert plan.sizes == (Linear(256, 0), _row(1), _row(2), _row(10), _row(20), _row(3))
    assert plan.events == (1, 2, 3, 4, 5, -4, -5, -2, 6, -3)


def test_a_tensor_without_a_size_takes_none() -> None:
    """An unknown shape is no memory here: it is counted elsewhere."""
    assert memory_plan(BufferPlan((_step("n", "a", "a"),), ()), {}, {}) == MemoryPlan((), ())


def test_use_is_what_the_arena_says() -> None:
    """The peak of what lives, and what was taken for it, both in the arena's own units."""
    plan = MemoryPlan((_row(100 * KIB), _row(50 * KIB)), (1, 2, -1, -2))
    assert plan.use(8, SAME) == ArenaUse(bytes_held=1200 * KIB, bytes_peak=1200 * KIB)
    assert plan.use(8, ArenaPolicy()) == ArenaUse(bytes_held=3 * MIB, bytes_peak=MIB + 400 * KIB)
    assert plan.use(8, ArenaPolicy(bytes_limit=2 * MIB)) == ArenaUse(
        bytes_held=2 * MIB, bytes_peak=MIB + 400 * KIB
    )
    assert plan.use(8, ArenaPolicy(bytes_limit=MIB)) is None


def test_sizes_are_replayed_for_the_rows_asked() -> None:
    """The same plan needs more for more rows."""
    plan = MemoryPlan((Linear(1000.0, 24.0),), (1,))
    uses = [plan.use(rows, SAME) for rows in (1, 2, 1000)]
    assert [use.bytes_held for use in uses if use is not None] == [1024, 1280, 25088]


def test_the_line_of_the_peak_is_exact_where_one_moment_is_always_the_largest() -> None:
    """A chain whose largest pair is the same for every batch has a straight peak."""
    plan = MemoryPlan((_row(100), _row(300), Linear(50, 200)), (1, 2, -1, 3, -2, -3))
    assert plan.peak() == Linear(50, 500)


def _live(plan: MemoryPlan, rows: int) -> float:
    now, seen = 0.0, [0.0]
    for event in plan.events:
        now += plan.sizes[abs(event) - 1](rows) * (1 if event > 0 else -1)
        seen.append(now)
    return max(seen)


@given(plan=plans(), rows=st.integers(1, 64))
def test_the_peak_is_never_below_the_truth(plan: MemoryPlan, rows: int) -> None:
    """From 1 to 64 rows the line lies on or above what lives at the worst moment; at both ends on it."""
    line = plan.peak()
    assert line(rows) >= _live(plan, rows) - 1e-6
    for end in (1, 64):
        assert line(end) == pytest.approx(_live(plan, end))


@given(
    plan=plans(),
    strategy=st.sampled_from(ExtendStrategy),
    limit=st.integers(MIB, 24 * MIB),
    rows_max=st.integers(1, 40),
)
def test_the_largest_batch_fits_and_one_more_does_not(
    plan: MemoryPlan, strategy: ExtendStrategy, limit: int, rows_max: int
) -> None:
    """Found by halving, it is a batch that fits, at the edge: its successor fails or is not allowed."""
    policy = ArenaPolicy(strategy=strategy, bytes_limit=limit)
    found = largest_batch(plan, policy, rows_max=rows_max)
    fits = {rows: plan.use(rows, policy) is not None for rows in range(1, rows_max + 1)}
    assert found == 0 or fits[found]
    assert found == rows_max or not fits[found + 1]


@given(size=st.integers(1, MIB), limit=st.integers(1, 64 * MIB), rows_max=st.integers(1, 500))
def test_the_largest_batch_equals_brute_force_where_one_buffer_grows(
    size: int, limit: int, rows_max: int
) -> None:
    """With one buffer what fits has no gaps: the answer is the only one."""
    plan = MemoryPlan((_row(size),), (1,))
    policy = ArenaPolicy(bytes_limit=limit)
    fitting = [rows for rows in range(1, rows_max + 1) if plan.use(rows, policy) is not None]
    assert largest_batch(plan, policy, rows_max=rows_max) == max(fitting, default=0)


def test_without_a_limit_the_largest_batch_is_what_is_allowed() -> None:
    """Nothing but `rows_max` ends the search."""
    assert largest_batch(MemoryPlan((_row(5),), (1,)), ArenaPolicy(), rows_max=1000) == 1000
