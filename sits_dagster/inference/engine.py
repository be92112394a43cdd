"""The seam between the pipeline and whatever computes: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "Arrays", "Engine", "MemorySample", "ModelSignature", "TensorSpec"]

Array: TypeAlias = NDArray[np.generic]
Arrays: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output of a model.

    Args:
        name: Its name in the graph.
        dtype: NumPy name of the element type (`"float32"`), or `"string"`.
        shape: One length an axis, `None` where it is free; axis 0 is the batch. `()` is a scalar.
        is_shared: Whether all rows share the tensor as it is: it has no axis for them.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    is_shared: bool = False

    @property
    def is_batched(self) -> bool:
        """Whether the tensor has a row for each row of the batch."""
        return bool(self.shape) and not self.is_shared

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """The element type of the arrays that carry it (`object` for strings)."""
        return np.dtype(object if self.dtype == "string" else self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSignature:
    """The inputs and outputs of a loaded model, in graph order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def batch_rows_fixed(self) -> int | None:
        """The only number of rows the model takes, or `None` where it is free.

        Where the inputs' first axes differ it is the one that all inputs have somewhere.
        """
        batched = [spec for spec in self.inputs if spec.is_batched]
        fixed = [spec.shape[0] for spec in batched]
        if not fixed or any(length is None for length in fixed):
            return None
        common = [length for length in fixed if all(length in spec.shape for spec in batched)]
        return (common or fixed)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """How full a device is at one moment; what it does not tell is `None`, never 0.

    Args:
        bytes_used: Bytes that this process holds on the device.
        bytes_limit: Bytes that this process may hold.
    """

    bytes_used: int | None
    bytes_limit: int | None


class Engine(Protocol):
    """A loaded model on one device. Called from one thread at a time, but for `interrupt`."""

    @property
    def signature(self) -> ModelSignature:
        """The model's inputs and outputs."""
        ...

    def predict(self, inputs: Arrays) -> Arrays:
        """Return every output for one batch, rows in the order of the inputs' rows.

        Raises:
            DeviceOutOfMemoryError: The batch does not fit; the engine stays usable.
            ModelError: The model refuses these arrays.
        """
        ...

    def memory(self) -> MemorySample:
        """Return how full the device is now."""
        ...

    def interrupt(self) -> None:
        """Make a call that is running fail with `ModelError` soon; called from another thread."""
        ...
