"""What `import sits_dagster` promises: names that exist, are documented, and cost nothing until used."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sits_dagster

ROOT = Path(__file__).resolve().parents[1]
NAMES = [name for name in sits_dagster.__all__ if not name.startswith("__")]
HEAVY = {"dagster", "kubernetes", "numpy", "onnx", "onnxruntime", "pandas", "pyarrow", "s3fs"}


def test_all_is_sorted_and_has_no_twins() -> None:
    assert list(sits_dagster.__all__) == sorted(set(sits_dagster.__all__))


def test_dir_lists_every_public_name() -> None:
    assert set(sits_dagster.__all__) <= set(dir(sits_dagster))


@pytest.mark.parametrize("name", NAMES)
def test_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(sits_dagster, name)
    if not (inspect.ismodule(value) or inspect.isclass(value) or callable(value)):
        return  # a constant is documented where it is defined
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__  # not an inherited text
    assert own, f"{name} has no docstring"
    assert not own.startswith(f"{name}("), f"{name} has only the docstring that dataclass made"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sits_dagster.no_such_name


def test_import_is_light() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "import sits_dagster"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    imported = {line.rsplit("|", 1)[1].strip() for line in result.stderr.splitlines() if "|" in line}
    assert "sits_dagster" in imported
    assert {name for name in imported if name.split(".")[0] in HEAVY} == set()


def test_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert re.fullmatch(r"\d+\.\d+\.\d+", sits_dagster.__version__)
    assert version("sits-dagster") == sits_dagster.__version__


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_lock_names_no_place_to_download_from(name: str) -> None:
    """Where packages come from is the machine's business: a lock holds versions and hashes only."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line[:1].isalnum()]
    assert pins
    assert all("==" in line and "://" not in line and "@" not in line for line in pins)
    assert not [line for line in lines if line.startswith("--")]
