"""Where relative paths start."""

from pathlib import Path

import dagster as dg
import pytest

from sits_dagster import StorageResource


def test_relative_path_is_below_the_root(tmp_path: Path) -> None:
    """A relative path of a model, source or sink starts from the root."""
    storage = StorageResource(root=str(tmp_path))
    assert storage.resolve("models/a.onnx") == str(tmp_path / "models" / "a.onnx")


def test_absolute_path_stays(tmp_path: Path) -> None:
    """An absolute path is used as it is, whatever the root."""
    assert StorageResource(root=str(tmp_path)).resolve("/data/in") == "/data/in"


def test_relative_root_starts_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative root, such as the default, is made absolute: steps may run elsewhere later."""
    monkeypatch.chdir(tmp_path)
    assert StorageResource().resolve("in") == str(tmp_path / "in")
    assert StorageResource(root="data").resolve("in") == str(tmp_path / "data" / "in")


def test_root_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root may come from an environment variable, read when the run starts."""
    monkeypatch.setenv("LAKE_ROOT", str(tmp_path))
    seen: list[str] = []

    @dg.asset
    def path(storage: StorageResource) -> None:
        seen.append(storage.resolve("in"))

    assert dg.materialize([path], resources={"storage": StorageResource(root=dg.EnvVar("LAKE_ROOT"))}).success
    assert seen == [str(tmp_path / "in")]


def test_fields_are_described() -> None:
    """Each field has a description, which is the help in Dagster's UI."""
    assert [name for name, field in StorageResource.model_fields.items() if not field.description] == []
