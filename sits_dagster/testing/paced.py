"""A device that keeps its own time: it computes nothing, so that it tells the truth about overlap.

Inference on the CPU hides what the pipeline costs, since both want the same cores. A paced device
leaves the cores alone, as a GPU does; time that it spends waiting was lost by the pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from sits_dagster.errors import ConfigError, DeviceOutOfMemoryError, ModelError
from sits_dagster.inference.engine import Array, Arrays, MemorySample, ModelSignature

__all__ = ["OutputsFunction", "PacedEngine", "PreparedOutputs", "measure_wake_seconds"]

WAKE_TRIES = 15

OutputsFunction: TypeAlias = Callable[[Arrays], Arrays]
"""A batch's inputs to the outputs of all its rows, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedOutputs:
    """Outputs are views of arrays made beforehand, cut to the batch: they cost no time.

    Args:
        arrays: For each output an array [rows, …] or [rows, steps, …], at least as large as any batch
            needs. Every batch gets the first rows and steps of it.
        input: The input whose axis 0 is the batch's rows, and whose last axis is its length.
        cells_per_step: Cells of the input's last axis that make one step of the outputs' axis 1,
            rounded up, >= 1; 0 keeps every step.

    Example:
        >>> import numpy as np
        >>> labels = PreparedOutputs(arrays={"label": np.arange(64)}, input="x")
        >>> labels({"x": np.zeros((3, 8), np.float32)})["label"].tolist()
        [0, 1, 2]
    """

    arrays: Mapping[str, Array]
    input: str
    cells_per_step: int = 0

    def __call__(self, inputs: Arrays) -> Arrays:
        """Return the outputs of one batch.

        Raises:
            ConfigError: The batch has more rows or steps than were prepared.
        """
        shape = inputs[self.input].shape
        wanted = shape[:1]
        if self.cells_per_step:
            wanted = (shape[0], -(-shape[-1] // self.cells_per_step))
        for name, array in self.arrays.items():
            if any(have < want for have, want in zip(array.shape, wanted, strict=False)):
                msg = f"Output {name!r} was prepared as {array.shape}, a batch needs {wanted}."
                raise ConfigError(msg, hint="prepare as many rows and steps as the largest batch has.")
        cut = tuple(slice(length) for length in wanted)
        return {name: array[cut] for name, array in self.arrays.items()}


class PacedEngine:
    """An engine whose calls last `seconds_per_call + rows * seconds_per_row`, without using the CPU.

    A call sleeps until the moment at which it has to end, counted from its start; making the outputs
    is part of that time, and only makes the call longer where it takes more. A system wakes sleepers
    late, by a tenth of a millisecond or more: with `seconds_watched` the call wakes earlier and watches
    the clock for the rest. A call that does not fit into the memory fails at once and takes no device time.

    The engine keeps account of the time that its calls should have taken. `busy_fraction` therefore
    counts as lost what the caller's own clock would take for work: late wake-ups and waiting for the
    interpreter inside the call.

    Args:
        signature: The inputs and outputs that it claims to have; batched inputs give the rows.
        outputs: Makes the outputs, such as `PreparedOutputs`.
        seconds_per_call: Seconds that every call takes, >= 0.
        seconds_per_row: Seconds that each row adds, >= 0.
        bytes_fixed: Memory that is held in any case, >= 0.
        bytes_per_row: Memory that each row of a batch adds, >= 0; kept, as by an arena, for later calls.
        memory_bytes_limit: A batch that needs more fails, > `bytes_fixed`; `None` is without a limit.
        seconds_watched: The end of each call that is not slept but watched, >= 0; what
            `measure_wake_seconds` returns makes calls of some milliseconds exact.

    Raises:
        ConfigError: A number is out of its range.

    Example:
        >>> import numpy as np
        >>> from sits_dagster.inference.engine import TensorSpec
        >>> x = TensorSpec(name="x", dtype="float32", shape=(None, 8))
        >>> label = TensorSpec(name="label", dtype="int64", shape=(None,))
        >>> engine = PacedEngine(
        ...     ModelSignature(inputs=(x,), outputs=(label,)),
        ...     PreparedOutputs(arrays={"label": np.arange(64)}, input="x"),
        ...     seconds_per_call=0.002,
        ...     seconds_per_row=0.001,
        ... )
        >>> engine.predict({"x": np.zeros((4, 8), np.float32)})["label"].tolist()
        [0, 1, 2, 3]
        >>> round(engine.seconds_nominal, 6)
        0.006
    """

    def __init__(
        self,
        signature: ModelSignature,
        outputs: OutputsFunction,
        *,
        seconds_per_call: float,
        seconds_per_row: float,
        bytes_fixed: int = 0,
        bytes_per_row: int = 0,
        memory_bytes_limit: int | None = None,
        seconds_watched: float = 0.0,
    ) -> None:
        numbers = (seconds_per_call, seconds_per_row, bytes_fixed, bytes_per_row, seconds_watched)
        if min(numbers) < 0 or (memory_bytes_limit is not None and memory_bytes_limit <= bytes_fixed):
            msg = f"A paced device cannot have {numbers} with a memory limit of {memory_bytes_limit}."
            raise ConfigError(msg, hint="give seconds and bytes >= 0, and a limit above bytes_fixed.")
        self.signature = signature
        self.calls = 0
        self.rows = 0
        self.seconds_nominal = 0.0
        self.first_started_at: float | None = None
        self.last_ended_at: float | None = None
        self._outputs = outputs
        self._seconds_per_call = seconds_per_call
        self._seconds_per_row = seconds_per_row
        self._seconds_watched = seconds_watched
        self._bytes_fixed = bytes_fixed
        self._bytes_per_row = bytes_per_row
        self._bytes_limit = memory_bytes_limit
        self._bytes_held = bytes_fixed
        self._input = next((spec.name for spec in signature.inputs if spec.is_batched), None)

    @property
    def wall_seconds(self) -> float:
        """Seconds from the first call's start to the last one's end; 0 before the first call."""
        if self.first_started_at is None or self.last_ended_at is None:
            return 0.0
        return self.last_ended_at - self.first_started_at

    @property
    def busy_fraction(self) -> float | None:
        """Share of that time that the calls should have taken, 0 to 1; `None` before the first call."""
        return self.seconds_nominal / self.wall_seconds if self.wall_seconds > 0 else None

    def predict(self, inputs: Arrays) -> Arrays:
        """Return the outputs of one batch, once its time has passed.

        Raises:
            DeviceOutOfMemoryError: The batch needs more than the memory; the engine stays usable.
            ModelError: The batch has no row.
        """
        started = time.perf_counter()
        rows = len(inputs[self._input]) if self._input is not None else 1
        if rows == 0:
            msg = "A batch needs at least one row."
            raise ModelError(msg)
        self._allocate(rows)
        seconds = self._seconds_per_call + rows * self._seconds_per_row
        outputs = self._outputs(inputs)
        _wait_until(started + seconds, self._seconds_watched)
        if self.first_started_at is None:
            self.first_started_at = started
        self.calls += 1
        self.rows += rows
        self.seconds_nominal += seconds
        self.last_ended_at = time.perf_counter()
        return outputs

    def interrupt(self) -> None:
        """Do nothing: the calls end by themselves."""

    def memory(self) -> MemorySample:
        """Return the most that any call needed, as an arena holds it; `None` where nothing is counted."""
        is_counted = self._bytes_fixed or self._bytes_per_row
        return MemorySample(
            bytes_used=self._bytes_held if is_counted else None, bytes_limit=self._bytes_limit
        )

    def _allocate(self, rows: int) -> None:
        needed = self._bytes_fixed + rows * self._bytes_per_row
        if self._bytes_limit is not None and needed > self._bytes_limit:
            msg = f"{rows} rows need {needed} bytes; the paced device has {self._bytes_limit}."
            raise DeviceOutOfMemoryError(msg, batch_rows=rows, hint="use smaller batches.")
        self._bytes_held = max(self._bytes_held, needed)


def measure_wake_seconds() -> float:
    """Return how late this machine wakes a sleeping thread now, in seconds: a high value, not the mean."""
    late: list[float] = []
    for _ in range(WAKE_TRIES):
        deadline = time.perf_counter() + 0.002
        _wait_until(deadline, 0.0)
        late.append(time.perf_counter() - deadline)
    # The second highest: one wake-up may meet another process's turn.
    return sorted(late)[-2]


def _wait_until(deadline: float, seconds_watched: float) -> None:
    # Once is the rule; a sleep may end a little early where the clocks differ.
    while (seconds := deadline - seconds_watched - time.perf_counter()) > 0:
        time.sleep(seconds)
    while time.perf_counter() < deadline:
        pass
