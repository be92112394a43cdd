"""What a model costs, before it runs: the value that everything else reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from sits_dagster.errors import ModelError
from sits_dagster.models.arena import ArenaPolicy, ExtendStrategy
from sits_dagster.models.batching import Batching, BatchingReport
from sits_dagster.models.codec import dump, load
from sits_dagster.models.cost import KernelCost, Uncosted
from sits_dagster.models.inputs import InputShapes
from sits_dagster.models.linear import Linear
from sits_dagster.models.memory import ArenaUse, MemoryPlan, largest_batch
from sits_dagster.models.timing import TimeModel

__all__ = ["SCHEMA", "AxisGrowth", "Calibration", "ModelProfile", "RuntimeKey", "TensorProfile"]

SCHEMA = 2
UNKNOWN = "unknown"
WATERMARK = 0.85
BATCH_ROWS_MAX = 1 << 16
PLAIN_TYPE = "float32"
ARITHMETIC_TYPES = {
    "float64": ("float64", "complex128"),
    "float16": ("float16",),
    "bfloat16": ("bfloat16",),
    "int8": ("int8", "uint8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorProfile:
    """One input or output.

    Args:
        name: Its name.
        dtype: NumPy name of its element type, or an ONNX one that NumPy lacks.
        shape: Lengths; the name of a free axis; `None` where the file tells nothing.
        batch_axis: The axis of the rows, `None` where it has none.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    batch_axis: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisGrowth:
    """How the cost of a row grows with another free axis: `c0 + c1·length + c2·length²`.

    Args:
        axis: The axis' name, or `input[axis]`.
        length: The length at which the profile's own figures hold.
        memory_bytes: Coefficients of the activations' bytes a row.
        flops: Coefficients of the operations a row.
    """

    axis: str
    length: int
    memory_bytes: tuple[float, float, float]
    flops: tuple[float, float, float]

    def memory_ratio(self, length: int) -> float | None:
        """Return the memory of a row at another length ÷ that at the profile's; `None` if it takes none."""
        return self._ratio(self.memory_bytes, length)

    def flops_ratio(self, length: int) -> float | None:
        """Return the operations of a row at another length ÷ those at the profile's; `None` if none."""
        return self._ratio(self.flops, length)

    def _ratio(self, coefficients: tuple[float, float, float], length: int) -> float | None:
        now = _polynomial(coefficients, self.length)
        return _polynomial(coefficients, length) / now if now > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeKey:
    """What an optimised graph and its measurements hold for.

    Args:
        version: ONNX Runtime's version.
        provider: Such as `"CPUExecutionProvider"`.
        options: Everything else that changes a plan, in words.
    """

    version: str
    provider: str
    options: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What probes on a real device added.

    Args:
        probes: Held bytes by the rows of the probe.
        correction: What the arena held beyond the replay, for a batch of given rows.
        device: Where it was measured.
        strategy: How that device's arena grew while it was probed; the correction holds for this one only.
    """

    probes: Mapping[int, int]
    correction: Linear
    device: str
    strategy: ExtendStrategy = ExtendStrategy.NEXT_POWER_OF_TWO


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """What a model costs; a plain value that JSON carries.

    Args:
        name: The file's name without its suffix.
        digest: SHA-256 of the model's bytes and its external data.
        file_bytes: The size of the model's files, external data included; 0 where nobody looked.
        inputs: What a caller gives.
        outputs: What a caller gets.
        lengths: Lengths assumed for free axes other than the rows', by axis.
        input_shapes: The shapes of all inputs that the figures hold for.
        integer_limit: Whole numbers below this were accepted by the model when it was tried; 0 if it was not.
        parameters: How many weights there are.
        parameter_bytes: Bytes of all constants that are held while the model runs.
        parameter_bytes_by_type: The same by element type.
        kernels: The cost of each operator call of the file's graph.
        kernels_optimized: The same of ONNX Runtime's optimised graph, where the model was run.
        memory_plan: The allocations of one call.
        memory_source: `"graph"` (the file's own graph: 20–30 % off is usual), `"optimized"`
            (ONNX Runtime's) or `"unknown"` (no shapes).
        memory_bytes_resident: Bytes in the arena before the first call, beyond the weights.
        runtime: What the optimised graph holds for, where there is one.
        growth: How a row grows with the other free axes.
        batch_rows_fixed: The only number of rows that the file allows, or `None`.
        batching: Whether rows may share a batch.
        uncosted: Calls whose cost is not known, by operator.
        calibration: What probes on a device added.
        time_model: How long a batch takes on the device of the calibration.
        warnings: What a user should know.
    """

    name: str
    digest: str
    file_bytes: int = 0
    inputs: tuple[TensorProfile, ...]
    outputs: tuple[TensorProfile, ...]
    lengths: Mapping[str, int]
    input_shapes: InputShapes
    integer_limit: int = 0
    parameters: int
    parameter_bytes: int
    parameter_bytes_by_type: Mapping[str, int]
    kernels: tuple[KernelCost, ...]
    kernels_optimized: tuple[KernelCost, ...] = ()
    memory_plan: MemoryPlan
    memory_source: str
    memory_bytes_resident: int = 0
    runtime: RuntimeKey | None = None
    growth: tuple[AxisGrowth, ...] = ()
    batch_rows_fixed: int | None = None
    batching: BatchingReport = field(default_factory=BatchingReport)
    uncosted: Mapping[str, Uncosted] = field(default_factory=dict[str, Uncosted])
    calibration: Calibration | None = None
    time_model: TimeModel | None = None
    warnings: tuple[str, ...] = ()
    schema: int = SCHEMA

    @cached_property
    def flops(self) -> Linear:
        """Operations of a batch; a multiply-add counts as two."""
        return sum((kernel.flops for kernel in self.kernels), Linear(0, 0))

    @cached_property
    def bytes_moved(self) -> Linear:
        """Bytes that a batch's kernels read and write, weights too."""
        return sum((kernel.bytes_moved for kernel in self.kernels), Linear(0, 0))

    @cached_property
    def memory_bytes(self) -> Linear:
        """The peak of a batch's activations."""
        return self.memory_plan.peak()

    @property
    def flops_per_row(self) -> float:
        """Operations that one more row costs; of a fixed batch, those of the batch ÷ its rows."""
        return self.per_row(self.flops)

    @property
    def bytes_per_row(self) -> float:
        """Bytes that one more row moves; of a fixed batch, those of the batch ÷ its rows."""
        return self.per_row(self.bytes_moved)

    def per_row(self, quantity: Linear) -> float:
        """Return what one more row adds; of a fixed batch, the quantity of the batch ÷ its rows."""
        if self.batch_rows_fixed is not None:
            return quantity(self.batch_rows_fixed) / self.batch_rows_fixed
        return quantity.b

    @property
    def weights_dtype(self) -> str:
        """The type of number of most weights, as data sheets name it; `"float32"` where no type has most."""
        total = sum(self.parameter_bytes_by_type.values())
        for dtype, names in ARITHMETIC_TYPES.items():
            if 2 * sum(self.parameter_bytes_by_type.get(name, 0) for name in names) > total:
                return dtype
        return PLAIN_TYPE

    def arithmetic_dtype(self, rates: Mapping[str, float]) -> str:
        """Return the type of number whose rate counts: that of most weights where the card has one for it.

        Args:
            rates: A card's operations a second by type; `"float32"` among them.
        """
        return self.weights_dtype if self.weights_dtype in rates else PLAIN_TYPE

    def rate_notes(self, rates: Mapping[str, float]) -> tuple[str, ...]:
        """Return a sentence where the card has no rate for the type of most weights.

        Args:
            rates: A card's operations a second by type.
        """
        wanted = self.weights_dtype
        if wanted in rates:
            return ()
        side = "short" if wanted == "float64" else "long"
        rate = f"arithmetic counts at that of {PLAIN_TYPE}, so times may be too {side}"
        return (f"the card's maker states no rate for {wanted}: {rate}",)

    def held(self, rows: int, policy: ArenaPolicy | None = None) -> int | None:
        """Return what a fresh arena holds after a batch, without weights; `None` if unknown or too much.

        Args:
            rows: Rows of the batch, >= 1.
            policy: How the arena grows and how far; as the CPU engine's, unlimited, if left out.
        """
        use = self.use(rows, policy or ArenaPolicy())
        return None if use is None else use.bytes_held

    def use(self, rows: int, policy: ArenaPolicy) -> ArenaUse | None:
        """Return what a batch needs on a fresh arena; `None` if that is not known, or does not fit.

        What a calibration found beyond the replay counts where the arena grows as it did there.
        """
        if self.memory_source == UNKNOWN:
            return None
        use = self.memory_plan.use(rows, policy)
        if use is None or self.calibration is None or self.calibration.strategy != policy.strategy:
            return use
        extra = round(self.calibration.correction(rows))
        held = max(0, use.bytes_held + extra)
        if policy.bytes_limit is not None and held > policy.bytes_limit:
            return None
        return ArenaUse(bytes_held=held, bytes_peak=max(0, use.bytes_peak + max(0, extra)))

    def batch_rows_max(
        self,
        memory_bytes: int,
        *,
        watermark: float = WATERMARK,
        strategy: ExtendStrategy = ExtendStrategy.NEXT_POWER_OF_TWO,
    ) -> int:
        """Return the most rows of a batch that fit into a device's memory under the watermark; 0 for none.

        Args:
            memory_bytes: What the device has for this model, weights included.
            watermark: The share of it that may be used, in (0, 1].
            strategy: How the device's arena grows; as the CPU engine's if left out. The engine gives a GPU
                `arena.CARD_STRATEGY`.
        """
        room = int(memory_bytes * watermark) - self.parameter_bytes
        if room <= 0 or self.memory_source == UNKNOWN:
            return 0
        policy = ArenaPolicy(strategy=strategy, bytes_limit=room)
        if self.batch_rows_fixed is not None:
            return self.batch_rows_fixed if self.use(self.batch_rows_fixed, policy) is not None else 0
        rows_max = 1 if self.batching.verdict is Batching.NOT_BATCHABLE else BATCH_ROWS_MAX
        most = largest_batch(self.memory_plan, policy, rows_max=rows_max)
        while most > 0 and self.use(most, policy) is None:
            most -= max(1, most // 64)
        return most

    def to_json(self) -> str:
        """Return the profile as JSON text; `from_json` gives an equal one back."""
        return json.dumps(dump(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelProfile:
        """Return the profile that `to_json` wrote.

        Raises:
            ModelError: The text is damaged, or of another version of this package.
        """
        try:
            profile = load(cls, json.loads(text))
        except (ValueError, RecursionError) as error:
            msg = f"The text is not a model profile: {' '.join(str(error).split())[:300]}"
            raise ModelError(msg, hint="profile the model again.") from error
        if profile.schema != SCHEMA:
            msg = f"The model profile has schema {profile.schema}, this package reads {SCHEMA}."
            raise ModelError(msg, hint="profile the model again.")
        return profile


def _polynomial(coefficients: tuple[float, float, float], at: float) -> float:
    return coefficients[0] + coefficients[1] * at + coefficients[2] * at * at
