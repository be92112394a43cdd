"""The smallest batch that is nearly the fastest, found by measuring powers of two."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from sits_dagster.errors import ConfigError, DeviceOutOfMemoryError

__all__ = ["Climb", "ClimbEnd", "Trial", "climb"]

# "Biggest that fits" is wrong on a CPU, where many nets are fastest at 2 to 4 rows and lose up to half of
# that at 128; a GPU rises to a plateau. A batch beyond the knee only costs memory and a longer tail.
THROUGHPUT_SHARE = 0.95
GAIN_MIN = 0.05
GAINS_MISSED_MAX = 2


class ClimbEnd(StrEnum):
    """Why the climb went no further."""

    FLAT = "throughput no longer rises"
    LIMIT = "no larger batch is allowed"
    OUT_OF_MEMORY = "a larger batch did not fit"
    TIME = "the time for measuring is over"


@dataclass(frozen=True, slots=True)
class Trial:
    """One measured batch size.

    Args:
        rows: Rows of the batch.
        seconds: How long a call took, > 0.
    """

    rows: int
    seconds: float

    @property
    def rows_per_second(self) -> float:
        """The throughput at this size."""
        return self.rows / self.seconds


@dataclass(frozen=True, slots=True)
class Climb:
    """What a climb found.

    Args:
        rows: The smallest measured batch within the share of the best throughput.
        trials: Every size that was measured, ascending.
        end: Why it went no further.
    """

    rows: int
    trials: tuple[Trial, ...]
    end: ClimbEnd


def climb(
    measure: Callable[[int], float],
    *,
    rows_max: int,
    share: float = THROUGHPUT_SHARE,
    gain_min: float = GAIN_MIN,
    gains_missed_max: int = GAINS_MISSED_MAX,
    seconds_max: float = math.inf,
) -> Climb:
    """Return the batch to use, after measuring 1, 2, 4, … rows until more of them gain little.

    Throughput need not rise evenly: the climb ends only when the best of all sizes so far was beaten by less
    than `gain_min` for `gains_missed_max` sizes in a row.

    Args:
        measure: Runs a batch of so many rows and returns its seconds.
        rows_max: Never more rows than this, >= 1.
        share: Of the best throughput that is enough, in (0, 1].
        gain_min: A smaller relative gain does not count.
        gains_missed_max: After so many sizes without a gain it is over, >= 1.
        seconds_max: No size is tried that is expected to end later than this after the start.

    Raises:
        ConfigError: `rows_max` is below 1.
        DeviceOutOfMemoryError: Not even one row fits.
    """
    if rows_max < 1:
        msg = f"rows_max must be >= 1, got {rows_max}."
        raise ConfigError(msg)
    trials: list[Trial] = []
    best, spent, missed, rows, end = 0.0, 0.0, 0, 1, ClimbEnd.LIMIT
    while rows <= rows_max:
        try:
            trials.append(Trial(rows, measure(rows)))
        except DeviceOutOfMemoryError:
            if not trials:
                raise
            end = ClimbEnd.OUT_OF_MEMORY
            break
        reached = trials[-1].rows_per_second
        missed = 0 if reached > best * (1 + gain_min) else missed + 1
        best = max(best, reached)
        if missed >= gains_missed_max:
            end = ClimbEnd.FLAT
            break
        # The limit itself is measured too: it may lie between two powers.
        following = rows_max if rows < rows_max < 2 * rows else 2 * rows
        spent += trials[-1].seconds
        if following <= rows_max and spent + trials[-1].seconds * following / rows > seconds_max:
            end = ClimbEnd.TIME
            break
        rows = following
    chosen = min(trial.rows for trial in trials if trial.rows_per_second >= share * best)
    return Climb(chosen, tuple(trials), end)
