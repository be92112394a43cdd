"""The replayed arena rounds, fits, splits, joins and grows as ONNX Runtime's own does."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_dagster.models.arena import Arena, ArenaFullError, ArenaPolicy, ExtendStrategy, rounded

MIB = 1 << 20
SAME = ArenaPolicy(strategy=ExtendStrategy.SAME_AS_REQUESTED)
DOUBLING = ArenaPolicy()


def _arena(region: int) -> Arena:
    """An arena that holds one free region of so many bytes."""
    arena = Arena(SAME)
    arena.allocate(0, region)
    arena.release(0)
    return arena


@pytest.mark.parametrize(
    ("size", "taken"), [(0, 0), (1, 256), (256, 256), (257, 512), (2**40 + 1, 2**40 + 256)]
)
def test_requests_are_rounded_up(size: int, taken: int) -> None:
    """Memory is set apart in pieces of 256 bytes."""
    assert rounded(size) == taken


def test_nothing_is_asked_for_nothing() -> None:
    """An empty tensor takes no memory, and giving it back is no error."""
    arena = Arena(DOUBLING)
    arena.allocate(1, 0)
    arena.release(1)
    assert (arena.bytes_held, arena.bytes_used, arena.bytes_used_peak) == (0, 0, 0)


def test_the_smallest_chunk_that_fits_is_taken() -> None:
    """Of free chunks of three sizes the middle one holds what the small one cannot."""
    arena = Arena(SAME)
    for key, size in enumerate((4 * MIB, 1 * MIB, 2 * MIB)):
        arena.allocate(key, size)
    for key in range(3):
        arena.release(key)
    arena.allocate(10, 2 * MIB - 256)
    assert arena.bytes_used == 2 * MIB
    arena.allocate(11, 4 * MIB)
    arena.allocate(12, 1 * MIB)
    assert arena.bytes_held == 7 * MIB


@pytest.mark.parametrize(
    ("region", "size", "taken"),
    [
        (1024, 512, 512),  # twice as large: split
        (1024, 768, 1024),  # less than that: taken whole
        (1024, 513, 1024),  # 768 after rounding
        (384 * MIB, 256 * MIB, 256 * MIB),  # 128 MiB to spare: split
        (384 * MIB - 256, 256 * MIB, 384 * MIB - 256),
    ],
)
def test_a_chunk_is_split_when_too_much_would_be_wasted(region: int, size: int, taken: int) -> None:
    """Twice the size, or 128 MiB to spare, is too much to give away."""
    arena = _arena(region)
    arena.allocate(1, size)
    assert arena.bytes_used == taken
    assert arena.bytes_held == region


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (2, 0, 1), (1, 0, 2), (1, 2, 0)])
def test_neighbours_are_joined_on_both_sides(order: tuple[int, ...]) -> None:
    """Four pieces of one region are one again, in whatever order they are given back."""
    arena = _arena(4096)
    for key in (0, 1, 2, 3):
        arena.allocate(key, 1024)
    assert arena.bytes_used == 4096
    for key in order:
        arena.release(key)
    arena.allocate(4, 3072)
    assert arena.bytes_held == 4096, "the three freed neighbours hold it"


def test_regions_are_never_joined() -> None:
    """Two regions that are free hold no request of both their sizes."""
    arena = Arena(SAME)
    arena.allocate(0, 1024)
    arena.allocate(1, 1024)
    arena.release(0)
    arena.release(1)
    arena.allocate(2, 2048)
    assert arena.bytes_held == 4096


def test_growth_doubles() -> None:
    """Each region is twice the one before, whatever little is asked for."""
    arena = Arena(DOUBLING)
    held: list[int] = []
    for key in range(7):
        arena.allocate(key, MIB)
        held.append(arena.bytes_held // MIB)
    assert held == [1, 3, 3, 7, 7, 7, 7]


def test_a_large_request_raises_the_step() -> None:
    """The step is doubled until the request fits, and is then taken once more for the next region."""
    arena = Arena(DOUBLING)
    arena.allocate(0, 5 * MIB)
    assert arena.bytes_held == 8 * MIB
    arena.allocate(1, 8 * MIB)
    assert arena.bytes_held == 16 * MIB
    arena.allocate(2, MIB)
    assert arena.bytes_held == 32 * MIB, "5 MiB were given 8, whole: their rest is not to be had"


def test_steps_end_at_one_gibibyte() -> None:
    """Beyond 1 GiB a region grows no more unless one request is larger."""
    arena = Arena(DOUBLING)
    arena.allocate(0, 1024 * MIB)
    arena.allocate(1, 1024 * MIB)
    arena.allocate(2, 1024 * MIB)
    assert arena.bytes_held == 3 * 1024 * MIB
    arena.allocate(3, 1500 * MIB)
    assert arena.bytes_held == 5 * 1024 * MIB


def test_a_step_beyond_one_gibibyte_is_taken_once_more_and_falls_back() -> None:
    """As ONNX Runtime 1.32 was seen to hold 2,049, 4,097 and 5,121 MiB for these requests."""
    arena = Arena(DOUBLING)
    arena.allocate(0, 8)
    held: list[int] = []
    for key, size in enumerate((1100, 2000, 1000), start=1):
        arena.allocate(key, size * MIB)
        held.append(arena.bytes_held // MIB)
    assert held == [2049, 4097, 5121]


def test_the_last_region_is_what_the_limit_leaves() -> None:
    """A step beyond the limit is cut to what is left, as long as the request fits."""
    arena = Arena(ArenaPolicy(bytes_limit=5 * MIB))
    arena.allocate(0, 3 * MIB)
    assert arena.bytes_held == 4 * MIB
    arena.allocate(1, MIB // 2)
    assert arena.bytes_held == 5 * MIB
    with pytest.raises(ArenaFullError):
        arena.allocate(2, MIB)
    assert arena.bytes_held == 5 * MIB


@pytest.mark.parametrize("strategy", ExtendStrategy)
def test_a_limit_holds_to_the_byte(strategy: ExtendStrategy) -> None:
    """What is rounded beyond the limit does not fit; what equals it does."""
    Arena(ArenaPolicy(strategy=strategy, bytes_limit=1024)).allocate(0, 1024)
    with pytest.raises(ArenaFullError):
        Arena(ArenaPolicy(strategy=strategy, bytes_limit=1023)).allocate(0, 1023)


def test_same_as_requested_takes_no_more_than_that() -> None:
    """Without doubling the arena holds the rounded requests."""
    arena = Arena(SAME)
    for key, size in enumerate((1, 1000, 70_000)):
        arena.allocate(key, size)
    assert arena.bytes_held == arena.bytes_used == 256 + 1024 + 70_144


operations = st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 6 * MIB)), max_size=60)
policies = st.builds(
    ArenaPolicy,
    strategy=st.sampled_from(ExtendStrategy),
    bytes_limit=st.none() | st.integers(MIB, 40 * MIB),
)


def _regions(arena: Arena) -> list[list[tuple[int, bool]]]:
    """The (size, is free) of all chunks, by region in order of memory."""
    found: list[list[tuple[int, bool]]] = []
    for chunk in arena._chunks.values():
        if chunk.before is None:
            found.append([])
            at = chunk
            while at is not None:
                assert at.after is None or at.after.before is at
                found[-1].append((at.size, at.is_free))
                at = at.after
    return found


@given(policy=policies, steps=operations)
def test_any_use_keeps_the_books(policy: ArenaPolicy, steps: list[tuple[bool, int, int]]) -> None:
    """Chunks fill their regions without overlap, free neighbours are one, and all comes back in the end."""
    arena = Arena(policy)
    live: dict[int, int] = {}
    peak = 0
    for is_request, key, size in steps:
        if is_request and key not in live:
            try:
                arena.allocate(key, size)
            except ArenaFullError:
                assert policy.bytes_limit is not None
                assert arena.bytes_held + rounded(size) > policy.bytes_limit
                continue
            live[key] = size
        elif not is_request:
            arena.release(key)
            live.pop(key, None)
        chunks = [chunk for region in _regions(arena) for chunk in region]
        peak = max(peak, arena.bytes_used)
        assert sum(size for size, _ in chunks) == arena.bytes_held
        assert sum(size for size, is_free in chunks if not is_free) == arena.bytes_used
        assert sum(rounded(size) for size in live.values()) <= arena.bytes_used <= arena.bytes_held
        assert policy.bytes_limit is None or arena.bytes_held <= policy.bytes_limit
        for region in _regions(arena):
            frees = [is_free for _, is_free in region]
            assert not any(one and other for one, other in itertools.pairwise(frees))
    assert arena.bytes_used_peak == peak
    for key in live:
        arena.release(key)
    assert arena.bytes_used == 0
    assert all(len(region) == 1 and region[0][1] for region in _regions(arena))
