"""Triton's model repositories on disk: the only reader of `config.pbtxt`."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

from sits_dagster.errors import ConfigError, ModelError
from sits_dagster.models.triton import (
    DynamicBatching,
    EnsembleStep,
    InstanceGroup,
    InstanceKind,
    TritonModel,
    TritonRepository,
    TritonTensor,
    TritonVersion,
    VersionPolicy,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = ["read_triton_repository"]

# Protobuf builds its messages while Python runs: their fields have no types.
Fields: TypeAlias = Any

CONFIG_NAME = "config.pbtxt"
ONNX_NAME = "model.onnx"
CONFIG_BYTES_MAX = 1 << 20
MODELS_MAX = 10_000
VERSIONS_MAX = 10_000  # of one model
FILENAME_CHARS_MAX = 1000
MESSAGE_CHARS_MAX = 300
VERSION_NUMBER_MAX = (1 << 63) - 1
FREE_LENGTH = -1

# Triton ignores numbers that begin with a zero.
VERSION_NAME = re.compile(r"[1-9][0-9]{0,18}", re.ASCII)

# Backend, platform and file name by which Triton knows a model, in the order in which it tries them.
KNOWN_BACKENDS = (
    ("tensorrt", "tensorrt_plan", "model.plan"),
    ("onnxruntime", "onnxruntime_onnx", ONNX_NAME),
    ("openvino", "", "model.xml"),
    ("pytorch", "pytorch_libtorch", "model.pt"),
    ("python", "", "model.py"),
)

NUMPY_NAMES = {
    "TYPE_INVALID": "",
    "TYPE_BOOL": "bool",
    "TYPE_UINT8": "uint8",
    "TYPE_UINT16": "uint16",
    "TYPE_UINT32": "uint32",
    "TYPE_UINT64": "uint64",
    "TYPE_INT8": "int8",
    "TYPE_INT16": "int16",
    "TYPE_INT32": "int32",
    "TYPE_INT64": "int64",
    "TYPE_FP16": "float16",
    "TYPE_FP32": "float32",
    "TYPE_FP64": "float64",
    "TYPE_STRING": "object",
    "TYPE_BF16": "bfloat16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Schema:
    """The protobuf message that a configuration is, and the names of its enumerations' values."""

    message: type[Message]
    dtypes: Mapping[int, str]
    kinds: Mapping[int, str]


def read_triton_repository(path: Path) -> TritonRepository:
    """Return the models of a repository, or the one model whose folder this is.

    Nothing outside of the folder is read, and no ONNX file is opened. A folder without `config.pbtxt`
    counts where Triton tells the backend from its files; other folders are left out with a note.

    Args:
        path: A folder of models, each with `config.pbtxt` and versions 1/, 2/, …; or one such model.

    Raises:
        ConfigError: The folder is missing or has more than `MODELS_MAX` models, or `tritonclient` is not
            installed.
        ModelError: A configuration cannot be read, or leads out of the folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        msg = f"Triton model repository {str(folder)!r} is not a folder on this machine."
        raise ConfigError(msg, hint="check the path; copy a remote repository to a local disk first.")
    schema = _load_schema()
    single = _is_model(folder)
    folders = [folder] if single else _folders(folder, limit=MODELS_MAX, what="models")
    root = folder.resolve()
    models: list[TritonModel] = []
    notes: list[str] = []
    for entry in folders:
        # "." and ".." have a name only when they are resolved.
        name = entry.name if entry.name.strip(".") else root.name
        model, found = _read_model(entry, name=name, root=root, schema=schema)
        notes += found
        if model is not None:
            models.append(model)
    return TritonRepository(path=folder, models=tuple(models), notes=tuple(notes))


def _load_schema() -> _Schema:
    try:
        from google.protobuf.message_factory import GetMessageClass  # noqa: PLC0415 - optional
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        msg = f"Reading config.pbtxt needs tritonclient: {error}."
        raise ConfigError(msg, hint='pip install "sits-dagster[triton]".') from error
    except Exception as error:  # grpc and protobuf raise their own types where versions do not fit
        msg = f"tritonclient cannot be loaded: {error}"
        hint = "install versions that fit: pip install --upgrade tritonclient grpcio protobuf."
        raise ConfigError(msg, hint=hint) from error
    file = model_config_pb2.DESCRIPTOR
    messages = file.message_types_by_name
    kinds = messages["ModelInstanceGroup"].enum_types_by_name["Kind"].values_by_number
    dtypes = file.enum_types_by_name["DataType"].values_by_number
    return _Schema(
        message=GetMessageClass(messages["ModelConfig"]),
        dtypes={number: NUMPY_NAMES.get(value.name, value.name) for number, value in dtypes.items()},
        kinds={number: value.name.removeprefix("KIND_").lower() for number, value in kinds.items()},
    )


def _is_model(folder: Path) -> bool:
    if os.path.lexists(folder / CONFIG_NAME):
        return True
    versions = _folders(folder, limit=MODELS_MAX, what="models")
    return any(VERSION_NAME.fullmatch(entry.name) and (entry / ONNX_NAME).exists() for entry in versions)


def _folders(folder: Path, *, limit: int, what: str) -> list[Path]:
    """Return the folders in a folder, sorted by name, without hidden ones."""
    found: list[Path] = []
    for name in _names(folder):
        if not name.startswith(".") and (folder / name).is_dir():
            found.append(folder / name)
        if len(found) > limit:
            msg = f"{str(folder)!r} holds more than {limit} {what}."
            raise ConfigError(msg, hint="read a part of it at a time.")
    return found


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        msg = f"{str(folder)!r} cannot be listed: {error}."
        raise ConfigError(msg, hint="let this user read the folder.") from error


def _read_model(
    folder: Path, *, name: str, root: Path, schema: _Schema
) -> tuple[TritonModel | None, list[str]]:
    _check_inside(folder, root)
    file = folder / CONFIG_NAME
    has_config = os.path.lexists(file)
    config, notes = _parse(file, root=root, schema=schema) if has_config else (schema.message(), [])
    numbers = _version_numbers(folder, root)
    model = _model(config, folder=name, schema=schema)
    model = _complete(model, _names(folder / str(numbers[0])) if numbers else ())
    if not has_config and not model.backend:
        return None, [f"{str(folder)!r} has neither {CONFIG_NAME} nor a known model file and is left out."]
    _check_filename(model.filename, file)
    served = tuple(
        TritonVersion(
            number=number,
            path=_onnx_file(folder / str(number), model.filename, root) if model.is_onnx else None,
        )
        for number in model.version_policy.choose(numbers)
    )
    return replace(model, version_numbers=tuple(numbers), versions=served), notes


def _version_numbers(folder: Path, root: Path) -> list[int]:
    versions = [
        entry
        for entry in _folders(folder, limit=VERSIONS_MAX, what="versions")
        if VERSION_NAME.fullmatch(entry.name) and int(entry.name) <= VERSION_NUMBER_MAX
    ]
    for version in versions:
        _check_inside(version, root)
    return sorted(int(version.name) for version in versions)


def _complete(model: TritonModel, names: Collection[str]) -> TritonModel:
    """Fill in the backend as Triton does: from what is declared, then from the files of a version."""
    if model.is_ensemble:
        return model
    is_silent = not (model.backend or model.platform or model.filename)
    for backend, platform, filename in KNOWN_BACKENDS:
        declared = model.backend == backend or (
            not model.backend and (model.platform == platform != "" or model.filename == filename)
        )
        if declared or (is_silent and filename in names):
            return replace(
                model,
                backend=backend,
                platform=model.platform or platform,
                filename=model.filename or filename,
            )
    return model


def _onnx_file(version: Path, filename: str, root: Path) -> Path | None:
    path = version / filename
    try:
        _check_inside(path, root)
        if path.is_dir():
            path /= ONNX_NAME
            _check_inside(path, root)
        return path if path.is_file() else None
    except OSError as error:
        msg = f"{str(path)!r} cannot be looked at: {error.strerror}."
        raise ModelError(msg, hint="check the name, and let this user read the folder.") from error


def _check_filename(filename: str, config: Path) -> None:
    relative = PurePosixPath(filename)
    if len(filename) > FILENAME_CHARS_MAX or "\0" in filename:
        msg = f"{str(config)!r} has no usable default_model_filename: {filename[:MESSAGE_CHARS_MAX]!r}."
        raise ModelError(msg, hint="name a file in the version folder.")
    if relative.is_absolute() or ".." in relative.parts:
        msg = f"{str(config)!r} leads out of its version folder: default_model_filename {filename!r}."
        raise ModelError(msg, hint="name a file in the version folder.")


def _check_inside(path: Path, root: Path) -> None:
    try:
        is_inside = path.resolve().is_relative_to(root)
    except (OSError, RuntimeError) as error:  # links in a circle
        msg = f"{str(path)!r} cannot be followed: {error}."
        raise ModelError(msg, hint="replace the link by the file.") from error
    if not is_inside:
        msg = f"{str(path)!r} leads out of the repository {str(root)!r}, to {str(path.resolve())!r}."
        raise ModelError(msg, hint="copy the file into the repository.")


def _read_text(file: Path, root: Path) -> str:
    _check_inside(file, root)
    if not file.is_file():
        msg = f"{str(file)!r} is not a file."
        raise ModelError(
            msg, hint=f"replace it by a text file, or remove it: {CONFIG_NAME} is optional for ONNX."
        )
    try:
        with file.open("rb") as stream:
            content = stream.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        msg = f"{str(file)!r} cannot be read: {error}."
        raise ModelError(msg, hint="let this user read the file.") from error
    if len(content) > CONFIG_BYTES_MAX:
        msg = f"{str(file)!r} is larger than {CONFIG_BYTES_MAX} bytes."
        raise ModelError(msg, hint="a configuration is a few kilobytes of text: is this the right file?")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        msg = f"{str(file)!r} is not UTF-8: byte {content[error.start]:#04x} in line {line}."
        raise ModelError(msg, hint="save it as UTF-8 text.") from error


def _parse(file: Path, *, root: Path, schema: _Schema) -> tuple[Fields, list[str]]:
    from google.protobuf import text_format  # noqa: PLC0415 - optional

    text = _read_text(file, root)
    message = schema.message()
    try:
        text_format.Parse(text, message, allow_unknown_field=True)
        unknown = sorted(set(_unknown_fields(text, message.DESCRIPTOR)))
    except text_format.ParseError as error:
        reason = re.sub(r"^\d+:\d+ : ", "", str(error))[:MESSAGE_CHARS_MAX]
        msg = f"{file}:{error.GetLine()}: not a model configuration: {reason}"
        raise ModelError(msg, hint="correct this line, or update tritonclient if Triton takes it.") from error
    except RecursionError as error:
        msg = f"{str(file)!r} is nested too deeply."
        raise ModelError(msg, hint="is this the right file?") from error
    if not unknown:
        return message, []
    return message, [
        f"{str(file)!r} has fields unknown to tritonclient, which are passed over: {', '.join(unknown)}."
    ]


def _unknown_fields(text: str, top: Fields) -> Iterator[str]:
    """Name the fields of a well-formed text that the schema lacks, nested ones as `outer.inner`."""
    from google.protobuf import text_format  # noqa: PLC0415 - optional

    tokens = text_format.Tokenizer(text.split("\n"))
    # What encloses the token: a message type and its dotted name; no type within an unknown field.
    outer: list[tuple[Fields, str]] = [(top, "")]
    field: tuple[Fields, str] = (None, "")
    while not tokens.AtEnd():
        token = tokens.token
        tokens.NextToken()
        if token in ("{", "<"):
            outer.append(field)
        elif token in ("}", ">"):
            # A list may hold several messages of the field that has just ended.
            field = outer.pop()
        elif token.isidentifier() and tokens.token in (":", "{", "<", "["):
            kind, prefix = outer[-1]
            known = kind.fields_by_name.get(token) if kind else None
            field = (known.message_type if known else None, f"{prefix}{token}.")
            if kind and not known:
                yield f"{prefix}{token}"


def _model(config: Fields, *, folder: str, schema: _Schema) -> TritonModel:
    is_onnx = config.backend == "onnxruntime" or config.platform == "onnxruntime_onnx"
    batching = config.dynamic_batching
    return TritonModel(
        name=config.name or folder,
        folder=folder,
        platform=config.platform,
        backend=config.backend,
        filename=config.default_model_filename,
        max_batch_size=config.max_batch_size,
        inputs=tuple(_tensor(item, schema, is_optional=item.optional) for item in config.input),
        outputs=tuple(_tensor(item, schema) for item in config.output),
        instance_groups=tuple(_group(item, schema, is_onnx=is_onnx) for item in config.instance_group),
        dynamic_batching=DynamicBatching(
            preferred_batch_sizes=tuple(batching.preferred_batch_size),
            max_queue_delay_microseconds=batching.max_queue_delay_microseconds,
        )
        if config.HasField("dynamic_batching")
        else None,
        sequence_batching=config.HasField("sequence_batching"),
        steps=tuple(_step(item) for item in config.ensemble_scheduling.step),
        version_policy=_policy(config.version_policy),
    )


def _tensor(item: Fields, schema: _Schema, *, is_optional: bool = False) -> TritonTensor:
    return TritonTensor(
        name=item.name,
        dtype=schema.dtypes[item.data_type],
        dims=_lengths(item.dims),
        reshape=_lengths(item.reshape.shape) if item.HasField("reshape") else None,
        optional=is_optional,
        is_shape_tensor=item.is_shape_tensor,
    )


def _lengths(shape: Fields) -> tuple[int | None, ...]:
    return tuple(None if length == FREE_LENGTH else length for length in shape)


def _group(item: Fields, schema: _Schema, *, is_onnx: bool) -> InstanceGroup:
    kind = InstanceKind(schema.kinds[item.kind])
    default = 2 if is_onnx and kind is InstanceKind.CPU else 1
    return InstanceGroup(
        kind=kind,
        count=item.count if item.count > 0 else default,
        gpus=tuple(item.gpus),
        name=item.name,
    )


def _step(item: Fields) -> EnsembleStep:
    return EnsembleStep(
        model=item.model_name,
        version=item.model_version if item.model_version > 0 else None,
        inputs=dict(item.input_map),
        outputs=dict(item.output_map),
    )


def _policy(item: Fields) -> VersionPolicy:
    match item.WhichOneof("policy_choice"):
        case "all":
            return VersionPolicy(newest=None)
        case "specific":
            return VersionPolicy(newest=0, numbers=tuple(item.specific.versions))
        case "latest":
            return VersionPolicy(newest=item.latest.num_versions)
        case _:
            return VersionPolicy()
