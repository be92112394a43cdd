"""The component: an inference asset in YAML."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster.components.core.component_tree import ComponentTreeException
from dagster.components.testing import create_defs_folder_sandbox

from sits_dagster import BatchInferenceComponent
from tests.assets.workspace import DAY, Outcome, Workspace, scores

# Dagster's own YAML reading calls it.
pytestmark = pytest.mark.filterwarnings("ignore:`parse_obj_as` is deprecated")


def _yaml(workspace: Workspace, **changes: Any) -> dict[str, Any]:
    attributes = {
        "asset_name": "scores",
        "model_path": "model.onnx",
        "source_path": "in/{partition_key}",
        "sink_path": "out/{partition_key}",
        "keep_columns": ["id"],
        "daily_from": "2026-01-01",
        "batch_rows": 5,
        "root": str(workspace.root),
    }
    return {"type": "sits_dagster.BatchInferenceComponent", "attributes": {**attributes, **changes}}


def _materialise(workspace: Workspace, definitions: dg.Definitions, name: str, key: str | None) -> Outcome:
    job = definitions.resolve_implicit_global_asset_job_def()
    result = job.execute_in_process(
        partition_key=key,
        asset_selection=[dg.AssetKey(name)],
        instance=workspace.instance,
        raise_on_error=False,
    )
    return Outcome(result, workspace.instance)


def test_yaml_gives_an_asset_that_runs(workspace: Workspace) -> None:
    """An asset declared in a project's `defs.yaml` is loaded by Dagster and materialises a day."""
    workspace.write(12)
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            BatchInferenceComponent, defs_path="nightly", defs_yaml_contents=_yaml(workspace)
        )
        with sandbox.load_component_and_build_defs(path) as (component, definitions):
            assert isinstance(component, BatchInferenceComponent)
            outcome = _materialise(workspace, definitions, "scores", DAY)
    assert outcome.result.success, outcome.error
    assert outcome.metadata()["sits/batches"] == 3
    assert workspace.output() == scores(range(12))


def test_two_components_live_in_one_project(workspace: Workspace) -> None:
    """Two components with settings of their own are loaded together, each keeping its own batch size."""
    workspace.write(12)
    with create_defs_folder_sandbox() as sandbox:
        for name, rows in (("first", 3), ("second", 6)):
            sandbox.scaffold_component(
                BatchInferenceComponent,
                defs_path=name,
                defs_yaml_contents=_yaml(
                    workspace, asset_name=name, batch_rows=rows, sink_path=f"out/{name}/{{partition_key}}"
                ),
            )
        with sandbox.build_all_defs() as definitions:
            dg.Definitions.validate_loadable(definitions)
            for name, batches in (("first", 4), ("second", 2)):
                outcome = _materialise(workspace, definitions, name, DAY)
                assert outcome.metadata()["sits/batches"] == batches


def test_component_without_partitions(workspace: Workspace) -> None:
    """Without `daily_from` the asset has no partitions and processes one folder."""
    workspace.write(4, key="all")
    component = BatchInferenceComponent(
        asset_name="scores",
        model_path="model.onnx",
        source_path="in/all",
        sink_path="out/all",
        root=str(workspace.root),
    )
    definitions = component.build_defs(dg.ComponentTree.for_test().load_context)
    outcome = _materialise(workspace, definitions, "scores", None)
    assert outcome.result.success, outcome.error
    assert [row["y"] for row in workspace.output("all")] == [0.0, 3.0, 6.0, 9.0]


@pytest.mark.parametrize(
    ("model_asset", "key"), [(True, "scores_model"), ("models/times", "models/times"), (False, None)]
)
def test_model_asset_in_the_yaml(workspace: Workspace, model_asset: bool | str, key: str | None) -> None:
    """`true` brings the model as an asset of its own, a key depends on another one, `false` on none."""
    with create_defs_folder_sandbox() as sandbox:
        sandbox.scaffold_component(
            BatchInferenceComponent,
            defs_path="nightly",
            defs_yaml_contents=_yaml(workspace, model_asset=model_asset),
        )
        with sandbox.build_all_defs() as definitions:
            dg.Definitions.validate_loadable(definitions)
            graph = definitions.resolve_asset_graph()
            parents = {k.to_user_string() for k in graph.get(dg.AssetKey("scores")).parent_keys}
            executable = {k.to_user_string() for k in graph.executable_asset_keys}
    assert parents == ({key} if key else set())
    assert executable == ({"scores", "scores_model"} if model_asset is True else {"scores"})


def test_model_asset_of_the_component_runs(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The component's model asset is profiled with the resources that the component brings."""
    monkeypatch.setenv("SITS_CACHE_DIR", str(tmp_path / "cache"))
    component = BatchInferenceComponent(
        asset_name="scores",
        model_path="model.onnx",
        source_path="in/all",
        sink_path="out/all",
        root=str(workspace.root),
        model_asset=True,
    )
    definitions = component.build_defs(dg.ComponentTree.for_test().load_context)
    outcome = _materialise(workspace, definitions, "scores_model", None)
    assert outcome.result.success, outcome.error
    assert outcome.metadata(None)["sits/parameters"] == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"batch_rows": 0}, "batch_rows"),
        ({"model": "model.onnx"}, "model"),
        ({"sink_path": "out"}, "partition_key"),
        ({"model_asset": ["a"]}, "model_asset"),
    ],
)
def test_mistake_in_the_yaml_is_named(workspace: Workspace, change: dict[str, Any], word: str) -> None:
    """A wrong value, an unknown attribute or a sink without a placeholder is an error that names it."""
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            BatchInferenceComponent, defs_path="nightly", defs_yaml_contents=_yaml(workspace, **change)
        )
        with pytest.raises(ComponentTreeException) as caught, sandbox.load_component_and_build_defs(path):
            pass
    assert word in str(caught.value.__cause__)


def test_dagster_finds_the_component() -> None:
    """`dg list components` finds it: the entry point names a module that has the component class."""
    [entry] = [e for e in entry_points(group="dagster_dg_cli.registry_modules") if e.name == "sits_dagster"]
    module = entry.load()
    assert module.BatchInferenceComponent is BatchInferenceComponent
    assert module.__all__ == ["BatchInferenceComponent"]


def test_component_is_described(tmp_path: Path) -> None:
    """Each attribute has a description, which is the help in Dagster's UI and `dg`."""
    spec = BatchInferenceComponent.get_spec()
    assert "ONNX" in (spec.description or "")
    fields = BatchInferenceComponent.model_fields
    assert [name for name, field in fields.items() if not field.description] == []


def test_scaffolding_writes_what_must_be_there(workspace: Workspace) -> None:
    """`dg scaffold defs` writes YAML that loads as it is."""
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(BatchInferenceComponent, defs_path="nightly")
        with sandbox.load_component_and_build_defs(path) as (component, definitions):
            assert isinstance(component, BatchInferenceComponent)
            assert component.sink_path == "scores/{partition_key}"
            assert definitions.resolve_assets_def("scores").partitions_def is not None
