"""A model as an asset: what it shows, and what it makes stale."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest
from onnx import TensorProto, helper

from sits_dagster import OnnxModel, ProfileOptions, build_model_asset
from sits_dagster.errors import ConfigError
from sits_dagster.models.model import model_digest
from tests.assets.workspace import DAY, Outcome, Workspace, save_model, save_times, scores

FRESH, STALE, MISSING = StaleStatus.FRESH, StaleStatus.STALE, StaleStatus.MISSING
FAN_OUT = pytest.mark.parametrize("fan_out", [False, True], ids=["one step", "fan-out"])
NEXT_DAY = "2026-01-02"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITS_CACHE_DIR", str(tmp_path / "cache"))


def _model_asset(**options: Any) -> dg.AssetsDefinition:
    return build_model_asset(OnnxModel("model.onnx"), **{"name": "times", **options})


def _profile(workspace: Workspace, asset: dg.AssetsDefinition) -> Outcome:
    """Materialise the model's asset with the storage resource alone: it needs no device."""
    resources = {"storage": workspace.resources()["storage"]}
    result = dg.materialize([asset], instance=workspace.instance, resources=resources, raise_on_error=False)
    return Outcome(result, workspace.instance)


class _Lineage:
    """The assets `times` (the model) and `scores` (its rows), and what Dagster says of them."""

    def __init__(self, workspace: Workspace, **options: Any) -> None:
        self.workspace = workspace
        self.times = _model_asset()
        self.scores = workspace.asset(model_asset=self.times, backfill_policy=None, **options)
        self._defs = dg.Definitions(assets=[self.times, self.scores], resources=workspace.resources())

    def run(self, key: str | None = DAY) -> Outcome:
        """Materialise a partition, or the model's asset when there is no key."""
        result = self._defs.resolve_implicit_global_asset_job_def().execute_in_process(
            partition_key=key,
            asset_selection=[(self.times if key is None else self.scores).key],
            instance=self.workspace.instance,
        )
        return Outcome(result, self.workspace.instance)

    def status(self, key: str | None = DAY) -> StaleStatus:
        return self._resolver().get_status((self.times if key is None else self.scores).key, key)

    def causes(self, key: str = DAY) -> list[tuple[str, str]]:
        """Return why a partition is stale, with the asset at fault, as Dagster's UI shows it."""
        causes = self._resolver().get_stale_causes(self.scores.key, key)
        return [(c.reason, c.dependency_asset_key.to_user_string()) for c in causes]

    def _resolver(self) -> CachingStaleStatusResolver:
        instance = self.workspace.instance
        graph = self._defs.resolve_asset_graph()
        return CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))


@FAN_OUT
def test_another_model_makes_what_it_computed_stale(workspace: Workspace, fan_out: bool) -> None:
    """Dagster calls a partition stale once its model's bytes have changed, until it is computed again."""
    workspace.write(5)
    lineage = _Lineage(workspace, fan_out=fan_out)
    assert (lineage.status(None), lineage.status()) == (MISSING, MISSING)
    lineage.run(None)
    lineage.run()
    assert (lineage.status(None), lineage.status()) == (FRESH, FRESH)

    save_times(workspace.model, 5.0)
    lineage.run(None)
    assert (lineage.status(None), lineage.status()) == (FRESH, STALE)
    assert lineage.causes() == [("has a new dependency data version", "times")]

    lineage.run()
    assert lineage.status() is FRESH
    assert workspace.output() == scores(range(5), factor=5.0)


@FAN_OUT
def test_same_model_makes_nothing_stale(workspace: Workspace, fan_out: bool) -> None:
    """Materialised again with the same bytes, even written anew, a model leaves its rows fresh."""
    workspace.write(5)
    lineage = _Lineage(workspace, fan_out=fan_out)
    lineage.run(None)
    lineage.run()
    for _ in range(2):
        save_times(workspace.model)
        lineage.run(None)
        assert (lineage.status(None), lineage.status(), lineage.causes()) == (FRESH, FRESH, [])


def test_only_partitions_of_the_old_model_are_stale(workspace: Workspace) -> None:
    """A partition that the new model computed is fresh beside the stale one; a third is missing."""
    workspace.write(5)
    workspace.write(5, key=NEXT_DAY)
    lineage = _Lineage(workspace)
    lineage.run(None)
    lineage.run(DAY)
    save_times(workspace.model, 5.0)
    lineage.run(None)
    lineage.run(NEXT_DAY)
    found = [lineage.status(key) for key in (DAY, NEXT_DAY, "2026-01-03")]
    assert found == [STALE, FRESH, MISSING]


def test_old_bytes_back_make_fresh_again(workspace: Workspace) -> None:
    """A model that is rolled back makes what it computed before fresh again."""
    workspace.write(5)
    lineage = _Lineage(workspace)
    lineage.run(None)
    lineage.run()
    for factor, expected in ((5.0, STALE), (3.0, FRESH)):
        save_times(workspace.model, factor)
        lineage.run(None)
        assert lineage.status() is expected


def test_range_run_is_fresh(workspace: Workspace) -> None:
    """Partitions of one run over a range know their model too."""
    workspace.write(5)
    workspace.write(5, key=NEXT_DAY)
    lineage = _Lineage(workspace)
    lineage.run(None)
    resources = workspace.resources()
    tags = {"dagster/asset_partition_range_start": DAY, "dagster/asset_partition_range_end": NEXT_DAY}
    asset = workspace.asset(model_asset=lineage.times)
    assert dg.materialize([asset], tags=tags, instance=workspace.instance, resources=resources).success
    lineage.run(None)
    assert [lineage.status(key) for key in (DAY, NEXT_DAY)] == [FRESH, FRESH]
    save_times(workspace.model, 5.0)
    lineage.run(None)
    assert [lineage.status(key) for key in (DAY, NEXT_DAY)] == [STALE, STALE]


def test_model_and_rows_in_one_run(workspace: Workspace) -> None:
    """Materialised together, the model comes first and its rows are fresh after it."""
    workspace.write(5)
    lineage = _Lineage(workspace)
    result = dg.materialize(
        [lineage.scores, lineage.times],
        partition_key=DAY,
        instance=workspace.instance,
        resources=workspace.resources(),
    )
    assert result.success
    assert (lineage.status(None), lineage.status()) == (FRESH, FRESH)


@FAN_OUT
@pytest.mark.parametrize(
    "reference",
    [lambda asset: asset, lambda asset: asset.key, lambda _: "times", lambda _: ["times"]],
    ids=["asset", "key", "text", "list"],
)
def test_rows_depend_on_the_model(
    workspace: Workspace, fan_out: bool, reference: Callable[[dg.AssetsDefinition], Any]
) -> None:
    """The lineage leads from the model to its rows, beside what else they depend on."""
    for deps in (["raw"], ["raw", "times"]):
        asset = workspace.asset(model_asset=reference(_model_asset()), deps=deps, fan_out=fan_out)
        found = [dep.asset_key for dep in asset.get_asset_spec(asset.key).deps]
        assert sorted(found) == [dg.AssetKey("raw"), dg.AssetKey("times")]


def test_asset_of_another_model_is_refused(workspace: Workspace) -> None:
    """A model asset that is not of the model that runs is a mistake, named when the asset is built."""
    other = build_model_asset(OnnxModel("other.onnx"))
    with pytest.raises(ConfigError, match=r"runs model 'model\.onnx'.*is that of 'other\.onnx'"):
        workspace.asset(model_asset=other)


def test_own_asset_may_stand_for_the_model(workspace: Workspace) -> None:
    """An asset of the user's own that makes the model serves as well."""

    @dg.asset
    def training() -> None: ...

    asset = workspace.asset(model_asset=training)
    assert [dep.asset_key for dep in asset.get_asset_spec(asset.key).deps] == [training.key]


def test_what_a_model_shows(workspace: Workspace) -> None:
    """A materialisation shows size, cost, batching, inputs and outputs, and the digest as data version."""
    save_model(
        workspace.model,
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        {"x": (TensorProto.FLOAT, ["rows", 8])},
        {"y": (TensorProto.FLOAT, ["rows", 4])},
        {"w": np.ones((8, 4), np.float32)},
    )
    outcome = _profile(workspace, _model_asset())
    assert outcome.result.success, outcome.error
    found = outcome.metadata(None)
    assert found["sits/model_path"] == str(workspace.model)
    assert found["sits/model_digest"] == model_digest(workspace.model)
    assert (found["sits/parameters"], found["sits/parameter_bytes"]) == (32, 128)
    assert found["sits/flops_per_row"] == 2 * 8 * 4 + 4
    assert found["sits/batching"] == "invariant"
    assert found["sits/batch_rows_max"] > 1000
    assert 0 < found["sits/io_bound_ratio"] <= 1
    assert "| MatMul | 1 |" in found["sits/operators"]
    [x] = found["sits/inputs"].columns
    assert (x.name, x.type, x.description) == ("x", "float32 [rows, 8]", "rows along axis 0")
    [event] = outcome._of("ASSET_MATERIALIZATION")
    tags = event.event_specific_data.materialization.tags
    assert tags["dagster/data_version"] == model_digest(workspace.model)
    assert tags["dagster/data_version_is_user_provided"] == "true"


def test_warnings_are_in_the_log(workspace: Workspace) -> None:
    """What was assumed about a model is said in the log as well as in the metadata."""
    save_model(
        workspace.model,
        [helper.make_node("Relu", ["x"], ["y"])],
        {"x": (TensorProto.FLOAT, ["rows", "length"])},
        {"y": (TensorProto.FLOAT, ["rows", "length"])},
    )
    outcome = _profile(workspace, _model_asset())
    assert "'length' is free" in outcome.log
    assert ".." not in outcome.log
    assert "- axis 'length' is free" in outcome.metadata(None)["sits/warnings"]
    told = _model_asset(options=ProfileOptions(shapes={"x": ("rows", 16)}))
    outcome = _profile(workspace, told)
    assert outcome.log == ""
    assert "sits/warnings" not in outcome.metadata(None)
    assert outcome.metadata(None)["sits/flops_per_row"] == 16


def test_prepare_makes_the_file(workspace: Workspace) -> None:
    """`prepare` is given the absolute path and may make the file before it is profiled."""
    workspace.model.unlink()
    asset = _model_asset(prepare=lambda path: save_times(path, 7.0))
    outcome = _profile(workspace, asset)
    assert outcome.result.success, outcome.error
    assert workspace.model.is_file()


def test_missing_model_fails_with_its_path(workspace: Workspace) -> None:
    """A file that is not there fails the run, with the path and what to check."""
    workspace.model.unlink()
    outcome = _profile(workspace, _model_asset())
    assert f"ModelError: Model file '{workspace.model}' does not exist" in outcome.error
    assert "Hint: check the path" in outcome.error


def test_broken_model_fails_and_makes_nothing_stale(workspace: Workspace) -> None:
    """A file that is no model is not materialised, so that nothing is called stale because of it."""
    workspace.write(5)
    lineage = _Lineage(workspace)
    lineage.run(None)
    lineage.run()
    workspace.model.write_bytes(b"no model")
    outcome = _profile(workspace, lineage.times)
    assert "ModelError" in outcome.error
    assert lineage.status() is FRESH


def test_options_reach_dagster() -> None:
    """Group, owners, tags, key prefix, description, dependencies and metadata show in Dagster as given."""
    asset = _model_asset(
        group_name="models",
        owners=["team:ml"],
        tags={"tier": "gold"},
        key_prefix="lake",
        description="Times three.",
        deps=["training"],
        metadata={"licence": "MIT"},
    )
    spec = asset.get_asset_spec(asset.key)
    assert asset.key == dg.AssetKey(["lake", "times"])
    assert (spec.group_name, spec.owners, spec.tags["tier"]) == ("models", ["team:ml"], "gold")
    assert (spec.description, spec.kinds) == ("Times three.", {"onnx"})
    assert [dep.asset_key for dep in spec.deps] == [dg.AssetKey("training")]
    assert (spec.metadata["licence"], spec.metadata["sits/model_path"]) == ("MIT", "model.onnx")
    assert asset.partitions_def is None


def test_name_comes_from_the_file() -> None:
    """Without a name the file's is taken, made into one that Dagster allows; a key replaces it."""
    assert build_model_asset(OnnxModel("models/ocr-v5.1.onnx")).key == dg.AssetKey("ocr_v5_1")
    assert build_model_asset(OnnxModel("m.onnx"), key=["a", "b"]).key == dg.AssetKey(["a", "b"])


def test_unknown_card_is_refused() -> None:
    """A card that nobody knows is named when the asset is built, with those spelled alike."""
    with pytest.raises(ConfigError, match=r"'a1000'.*did you mean a10"):
        _model_asset(card="a1000")
