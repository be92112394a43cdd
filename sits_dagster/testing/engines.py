"""An engine without a model: a NumPy function, a memory limit, and errors when they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sits_dagster.errors import DeviceOutOfMemoryError
from sits_dagster.inference.engine import Arrays, MemorySample, ModelSignature

__all__ = ["FakeEngine"]


class FakeEngine:
    """Computes a function of each batch, and remembers what it was given.

    Args:
        signature: The inputs and outputs that it claims to have.
        function: Inputs to outputs, row by row.
        rows_max: More rows than this run out of memory.
        bytes_max: So do inputs of more bytes than this.
        errors: Errors by the number of the call, from 1; the call computes nothing.

    Example:
        >>> import numpy as np
        >>> from sits_dagster.inference.engine import ModelSignature, TensorSpec
        >>> x = TensorSpec(name="x", dtype="float32", shape=(None,))
        >>> y = TensorSpec(name="y", dtype="float32", shape=(None,))
        >>> engine = FakeEngine(
        ...     ModelSignature(inputs=(x,), outputs=(y,)), lambda inputs: {"y": inputs["x"] * 2}
        ... )
        >>> engine.predict({"x": np.ones(2, np.float32)})["y"].tolist()
        [2.0, 2.0]
    """

    def __init__(
        self,
        signature: ModelSignature,
        function: Callable[[Arrays], Arrays],
        *,
        rows_max: int | None = None,
        bytes_max: int | None = None,
        errors: Mapping[int, BaseException] | None = None,
    ) -> None:
        self.signature = signature
        self.batches: list[Arrays] = []
        """The inputs of every call that returned, in order."""
        self.calls = 0
        """Calls so far, failed ones included."""
        self._function = function
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._errors = dict(errors or {})
        self._batched = [spec.name for spec in signature.inputs if spec.is_batched]

    def predict(self, inputs: Arrays) -> Arrays:
        """Return the function's outputs for one batch.

        Raises:
            DeviceOutOfMemoryError: There are more rows or bytes than the limits allow.
        """
        self.calls += 1
        if self.calls in self._errors:
            raise self._errors[self.calls]
        rows = len(inputs[self._batched[0]]) if self._batched else 1
        size_bytes = self._size_bytes(inputs)
        if (self._rows_max is not None and rows > self._rows_max) or (
            self._bytes_max is not None and size_bytes > self._bytes_max
        ):
            msg = f"{rows} rows of {size_bytes} bytes do not fit."
            raise DeviceOutOfMemoryError(msg, batch_rows=rows)
        outputs = self._function(inputs)
        self.batches.append(dict(inputs))
        return outputs

    def interrupt(self) -> None:
        """Do nothing: the calls end by themselves."""

    def memory(self) -> MemorySample:
        """Return the bytes of the last batch, and the limit."""
        used = self._size_bytes(self.batches[-1]) if self.batches else 0
        return MemorySample(bytes_used=used, bytes_limit=self._bytes_max)

    def rows_of(self, name: str) -> list[float]:
        """Return the values of a scalar input that it saw, in order over all calls."""
        return [float(value) for batch in self.batches for value in batch[name]]  # type: ignore[arg-type]

    @staticmethod
    def _size_bytes(inputs: Arrays) -> int:
        return sum(array.nbytes for array in inputs.values())
