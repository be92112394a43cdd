"""A Triton model repository as plain values, and what does not fit together in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

__all__ = [
    "DynamicBatching",
    "EnsembleStep",
    "InstanceGroup",
    "InstanceKind",
    "TritonModel",
    "TritonRepository",
    "TritonTensor",
    "TritonVersion",
    "VersionPolicy",
    "repository_warnings",
]

ENSEMBLE_PLATFORM = "ensemble"
ONNX_BACKEND = "onnxruntime"


class InstanceKind(StrEnum):
    """Where the instances of a group run."""

    AUTO = "auto"
    GPU = "gpu"
    CPU = "cpu"
    MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonTensor:
    """An input or an output as requests see it.

    Args:
        name: Its name, which is also its name in the ONNX graph.
        dtype: The name of its numpy type: `"object"` for strings, `"bfloat16"` for BF16, `""` where the
            configuration leaves it out.
        dims: Lengths of the axes without the batch axis; `None` is any length.
        reshape: What the model is given instead of `dims`, in the same form; `None`: `dims` as they are.
        optional: Whether a request may leave it out.
        is_shape_tensor: Whether its values are a shape, for TensorRT.
    """

    name: str
    dtype: str
    dims: tuple[int | None, ...]
    reshape: tuple[int | None, ...] | None = None
    optional: bool = False
    is_shape_tensor: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """Copies of a model that run side by side.

    Args:
        kind: Where they run; `AUTO` is a GPU where there is one.
        count: Copies on each GPU of the group, or in all on the CPU, >= 1.
        gpus: Ordinals of the GPUs; empty for every GPU.
        name: The group's name, or `""`.
    """

    kind: InstanceKind
    count: int
    gpus: tuple[int, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicBatching:
    """How Triton puts requests together.

    Args:
        preferred_batch_sizes: Rows at which a batch is sent off at once; empty for the largest one.
        max_queue_delay_microseconds: How long a request may wait for others, in microseconds, >= 0.
    """

    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleStep:
    """One model of an ensemble and how it is wired.

    Args:
        model: Name of the model.
        version: Its version; `None` for the newest one that is served.
        inputs: Tensor of the ensemble by input of the model.
        outputs: Tensor of the ensemble by output of the model.
    """

    model: str
    version: int | None
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPolicy:
    """Which versions of a model are served; by default the newest one.

    Args:
        newest: How many of the newest; `None` for all of them. Not used with `numbers`.
        numbers: These and no others.
    """

    newest: int | None = 1
    numbers: tuple[int, ...] = ()

    def choose(self, found: Collection[int]) -> tuple[int, ...]:
        """Return the versions to serve of those that were found, in ascending order."""
        ordered = sorted(found)
        if self.numbers:
            return tuple(number for number in ordered if number in self.numbers)
        return tuple(
            ordered if self.newest is None else ordered[len(ordered) - min(self.newest, len(ordered)) :]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonVersion:
    """A version that is served.

    Args:
        number: The name of its folder, >= 1.
        path: Its `.onnx` file; `None` where the backend is not ONNX Runtime or the file is missing.
    """

    number: int
    path: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonModel:
    """A model as its configuration declares it, with what Triton fills in before it loads anything.

    Args:
        name: Its name in the configuration, or its folder's.
        folder: Name of its folder.
        platform: Such as `"onnxruntime_onnx"` or `"ensemble"`; may be `""`.
        backend: Such as `"onnxruntime"` or `"python"`; `""` for an ensemble.
        filename: Name of the model's file or folder in each version, or `""` where it is unknown.
        max_batch_size: Rows of a batch at most. Above 0 Triton puts a batch axis in front of all `dims`; at
            0 they are whole shapes.
        inputs: In the order of the configuration; empty where it leaves them to the backend.
        outputs: Likewise.
        instance_groups: Empty for one instance on each GPU, or on the CPU where there is none.
        dynamic_batching: `None` where requests are not put together.
        sequence_batching: Whether requests of one sequence go to the same instance.
        steps: Those of an ensemble.
        version_policy: Which versions are served.
        version_numbers: All versions that have a folder, ascending.
        versions: Those that are served, ascending.
    """

    name: str
    folder: str
    platform: str
    backend: str
    filename: str = ""
    max_batch_size: int = 0
    inputs: tuple[TritonTensor, ...] = ()
    outputs: tuple[TritonTensor, ...] = ()
    instance_groups: tuple[InstanceGroup, ...] = ()
    dynamic_batching: DynamicBatching | None = None
    sequence_batching: bool = False
    steps: tuple[EnsembleStep, ...] = ()
    version_policy: VersionPolicy = VersionPolicy()
    version_numbers: tuple[int, ...] = ()
    versions: tuple[TritonVersion, ...] = ()

    @property
    def is_onnx(self) -> bool:
        """Whether ONNX Runtime runs it."""
        return self.backend == ONNX_BACKEND

    @property
    def is_ensemble(self) -> bool:
        """Whether it only passes tensors between other models."""
        return self.platform == ENSEMBLE_PLATFORM or bool(self.steps)

    @property
    def is_completed(self) -> bool:
        """Whether Triton's ONNX backend takes tensors and batch size from the file.

        Where all first axes of the file are free and `max_batch_size` is 0, it then sets its default, 4
        rows unless the server is told otherwise, and batches dynamically.
        """
        return self.is_onnx and not (self.inputs and self.outputs)

    def graph_shape(self, tensor: TritonTensor) -> tuple[int | None, ...]:
        """Return the shape in which the model itself meets a tensor, batch axis included.

        Args:
            tensor: One of `inputs` or `outputs`. A shape tensor has no batch axis but one more value.
        """
        shape = tensor.dims if tensor.reshape is None else tensor.reshape
        if self.max_batch_size <= 0:
            return shape
        if tensor.is_shape_tensor:
            return tuple(None if length is None else length + 1 for length in shape)
        return (None, *shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonRepository:
    """The models of a folder.

    Args:
        path: The folder that was read.
        models: In the order of their folders' names.
        notes: A sentence for each thing that was passed over.
    """

    path: Path
    models: tuple[TritonModel, ...]
    notes: tuple[str, ...] = ()

    def find(self, name: str) -> TritonModel | None:
        """Return the model of that name, or `None`."""
        return next((model for model in self.models if model.name == name), None)


def repository_warnings(
    repository: TritonRepository, *, gpus: Collection[int] | None = None
) -> tuple[str, ...]:
    """Return a sentence for each thing that Triton refuses or that costs more than it seems.

    Args:
        repository: What was read.
        gpus: Ordinals of the GPUs that the models are meant for; `None` leaves them unchecked.
    """
    models = {model.name: model for model in repository.models}
    found = [
        f"Model {model.name!r} {text}"
        for model in repository.models
        for text in (
            *_of_versions(model),
            *_of_batches(model),
            *_of_instances(model, gpus),
            *_of_ensemble(model, models),
        )
    ]
    return (*found, *_cycle(models))


def _of_versions(model: TritonModel) -> Iterator[str]:
    if model.name != model.folder:
        yield f"lies in the folder {model.folder!r}: Triton wants one name for both."
    if not model.version_numbers:
        yield "has no numeric version folder: Triton needs one, such as '1', even for an ensemble."
    elif missing := sorted(set(model.version_policy.numbers) - set(model.version_numbers)):
        yield f"asks for the versions {missing}, of which there are no folders."
    elif not model.versions:
        yield "serves no version: its version policy leaves none."
    if not model.is_ensemble and not model.backend:
        yield "names no backend that is known, so Triton cannot load it."
    for version in model.versions:
        if model.is_onnx and version.path is None:
            yield f"has no file {model.filename!r} in version {version.number}."


def _of_batches(model: TritonModel) -> Iterator[str]:
    rows = model.max_batch_size
    if rows < 0:
        yield f"has max_batch_size {rows}, but it must be >= 0."
    batching = model.dynamic_batching
    if batching is not None and (rows > 0 or not model.is_completed):
        if rows == 0:
            yield "asks for dynamic batching, but max_batch_size 0 means that it has no batch axis."
        for preferred in batching.preferred_batch_sizes:
            if not 0 < preferred <= max(rows, 0):
                yield f"prefers batches of {preferred} rows, but they must be 1 to max_batch_size {rows}."
    if model.sequence_batching:
        yield "keeps state between requests: its rows depend on each other and on their order."
    for tensor in (*model.inputs, *model.outputs):
        if any(length is not None and length < 1 for length in tensor.dims):
            yield f"declares {tensor.name!r} with the dims {tensor.dims}, but each must be >= 1 or -1."


def _of_instances(model: TritonModel, gpus: Collection[int] | None) -> Iterator[str]:
    if model.is_ensemble and model.instance_groups:
        yield "is an ensemble with instance groups: they belong to the models that it names."
        return
    sessions: Counter[int] = Counter()
    everywhere = 0
    for group in model.instance_groups:
        if group.kind in (InstanceKind.CPU, InstanceKind.MODEL):
            if group.gpus:
                yield f"names GPUs for instances of kind {group.kind.value}: Triton refuses that."
            continue
        if absent := sorted(set(group.gpus) - set(group.gpus if gpus is None else gpus)):
            yield f"wants the GPUs {absent}, which are not there."
        sessions.update(dict.fromkeys(group.gpus, group.count))
        everywhere += 0 if group.gpus else group.count
    cost = "each is a session with its own weights and memory arena, so that memory multiplies."
    if everywhere > 1:
        yield f"runs {everywhere} instances on every GPU: {cost}"
    for gpu, count in sorted(sessions.items()):
        if count + everywhere > 1:
            yield f"runs {count + everywhere} instances on GPU {gpu}: {cost}"


def _of_ensemble(model: TritonModel, models: Mapping[str, TritonModel]) -> Iterator[str]:
    if not model.is_ensemble:
        return
    if not model.steps:
        yield "is an ensemble without steps."
    if model.platform != ENSEMBLE_PLATFORM or model.backend:
        yield "has ensemble steps: its platform must be 'ensemble' and its backend empty."
    made = Counter(name for step in model.steps for name in step.outputs.values())
    made.update(tensor.name for tensor in model.inputs)
    yield from (f"makes the tensor {name!r} more than once." for name, count in made.items() if count > 1)
    for number, step in enumerate(model.steps, start=1):
        where = f"in step {number} ({step.model!r})"
        yield from (f"{where} {text}" for text in _of_step(step, model, models.get(step.model)))
        lost = sorted(set(step.inputs.values()) - set(made))
        yield from (f"{where} reads the tensor {name!r}, which nothing makes." for name in lost)
    lost = [tensor.name for tensor in model.outputs if tensor.name not in made]
    yield from (f"returns the tensor {name!r}, which nothing makes." for name in lost)


def _of_step(step: EnsembleStep, ensemble: TritonModel, model: TritonModel | None) -> Iterator[str]:
    if model is None:
        yield "names a model that is not in the repository."
        return
    if step.version is not None and step.version not in {version.number for version in model.versions}:
        yield f"names version {step.version}, which is not served."
    if ensemble.max_batch_size > model.max_batch_size and not model.is_completed:
        yield f"takes {model.max_batch_size} rows at most, the ensemble {ensemble.max_batch_size}."
    inputs = {tensor.name: tensor for tensor in model.inputs}
    outputs = {tensor.name for tensor in model.outputs}
    if inputs:
        yield from (
            f"fills the input {name!r}, which it lacks." for name in step.inputs if name not in inputs
        )
        for name, tensor in inputs.items():
            if name not in step.inputs and not tensor.optional:
                yield f"leaves the input {name!r} empty."
    if outputs:
        yield from (
            f"takes the output {name!r}, which it lacks." for name in step.outputs if name not in outputs
        )


def _cycle(models: Mapping[str, TritonModel]) -> Iterator[str]:
    needs = {name: {step.model for step in model.steps} for name, model in models.items()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        names: list[str] = error.args[1]  # each is needed by the next
        yield f"Ensembles need each other in a circle, so none can be loaded: {' > '.join(reversed(names))}."
