"""A model as the user declares it, and the digest that names its contents."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sits_dagster.errors import ConfigError, ModelError

__all__ = ["FindFiles", "OnnxModel", "Padding", "files_bytes", "files_digest", "model_digest", "model_files"]

FindFiles = Callable[[Path], Sequence[Path]]
"""Returns the external data files of a model, sorted by name."""

READ_BYTES = 1 << 20
MODEL_BYTES_MAX = (1 << 31) - 1  # a message of protobuf; weights may be in other files


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """One axis of one input is padded up to a bucket that depends on the row alone.

    Args:
        input: Name of the model input.
        axis: Axis of a *row* (the batch axis is not counted); negative counts from the end.
        multiple: Pad up to the next multiple of this length, >= 1.
        edges: Or pad up to the first of these ascending lengths; a longer row is padded to the
            next multiple of the last one.
        value: What the padding is filled with.

    Raises:
        ConfigError: Neither or both of `multiple` and `edges` are given, or they are not ascending.
    """

    input: str
    axis: int = -1
    multiple: int = 0
    edges: tuple[int, ...] = ()
    value: float = 0.0

    def __post_init__(self) -> None:
        if bool(self.multiple) == bool(self.edges) or self.multiple < 0:
            msg = f"Padding of input {self.input!r} needs either multiple >= 1 or edges, got {self!r}."
            raise ConfigError(msg)
        if list(self.edges) != sorted(set(self.edges)) or any(edge < 1 for edge in self.edges):
            msg = f"Padding edges of input {self.input!r} must be ascending and >= 1, got {self.edges!r}."
            raise ConfigError(msg)

    def length(self, length: int) -> int:
        """Return the padded length of an axis of `length` cells."""
        for edge in self.edges:
            if length <= edge:
                return edge
        step = self.multiple or self.edges[-1]
        return max(step, -(-length // step) * step)


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """An ONNX file and how rows of unlike shape may be padded for it.

    Args:
        path: Path of the `.onnx` file, absolute or below the storage resource's root. Files with
            external data are found through it.
        padding: Axes that may be padded. Rows of unlike shape never share a batch otherwise.
        is_batchable: Whether rows of equal shape may share a batch: `True` and `False` are taken as they
            are, `None` lets each run try it with its first rows.

    Example:
        >>> OnnxModel("recogniser.onnx", padding=(Padding(input="x", multiple=160),)).name
        'recogniser'
    """

    path: str
    padding: tuple[Padding, ...] = ()
    is_batchable: bool | None = None

    def __post_init__(self) -> None:
        if not self.path:
            msg = "OnnxModel needs the path of an .onnx file."
            raise ConfigError(msg)

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return Path(self.path).stem


def model_digest(path: str | Path) -> str:
    """Return the SHA-256 of a model's bytes and, in name order, of its external data files.

    The model file's own name does not count: a model that is only renamed is the same one.

    Raises:
        ModelError: The file, or a file it refers to, is missing or empty.
    """
    return files_digest(model_files(path))


def files_digest(files: Sequence[Path]) -> str:
    """Return the SHA-256 of the bytes of files in their order, as `model_digest` does.

    Raises:
        ModelError: One of them cannot be read.
    """
    digest = hashlib.sha256()
    for part in files:
        try:
            with part.open("rb") as file:
                while block := file.read(READ_BYTES):
                    digest.update(block)
        except OSError as error:
            raise _unreadable(part, error) from error
    return digest.hexdigest()


def files_bytes(files: Sequence[Path]) -> int:
    """Return the size of files together.

    Raises:
        ModelError: One of them is gone.
    """
    total = 0
    for part in files:
        try:
            total += part.stat().st_size
        except OSError as error:
            raise _unreadable(part, error) from error
    return total


def model_files(path: str | Path, find: FindFiles | None = None) -> tuple[Path, ...]:
    """Return a model file and, in name order, its external data files.

    Args:
        path: The `.onnx` file.
        find: Returns the external data files of a model that may have some, wherever it reads the file; it
            is not trusted. The file is read in this process if left out.

    Raises:
        ModelError: The file, or a file it refers to, is missing, empty, too large or cannot be read.
    """
    model = Path(path)
    try:
        size = model.stat().st_size if model.is_file() else None
    except (OSError, ValueError) as error:
        raise _unreadable(model, error) from error
    if size is None:
        msg = f"Model file {str(model)!r} does not exist, or is no plain file."
        raise ModelError(msg, hint="check the path, and where a relative one starts.")
    if size == 0:
        msg = f"Model file {str(model)!r} is empty."
        raise ModelError(msg, hint="export or copy the model again.")
    if size > MODEL_BYTES_MAX:
        msg = f"Model file {str(model)!r} has {size} bytes; a model has at most {MODEL_BYTES_MAX}."
        raise ModelError(msg, hint="export the model with its weights as external data.")
    if not _may_refer_to_files(model):
        return (model,)
    if find is not None:
        return (model, *_inside(model, find(model)))
    from sits_dagster.models.graph.files import external_data_files  # noqa: PLC0415 - heavy

    return (model, *external_data_files(model))


def _unreadable(path: Path, error: Exception) -> ModelError:
    msg = f"Model file {str(path)!r} cannot be read: {error}"
    return ModelError(msg, hint="check the path and its permissions.")


def _may_refer_to_files(model: Path) -> bool:
    # Every external tensor carries the key "location"; without it the graph need not be parsed.
    try:
        with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return view.find(b"location") >= 0
    except (OSError, ValueError) as error:
        raise _unreadable(model, error) from error


def _inside(model: Path, found: Sequence[Path]) -> Sequence[Path]:
    """Return what was found, if all of it is plain files in the model's folder."""
    try:
        folder = model.resolve().parent
        wrong = [part for part in found if not (part.resolve().is_relative_to(folder) and part.is_file())]
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a null, a name too long
        raise _unreadable(model, error) from error
    if wrong:
        msg = f"Model {str(model)!r} refers to external data that is no plain file in its folder: {wrong[0]}."
        raise ModelError(msg, hint="keep the data file beside the model.")
    return found
