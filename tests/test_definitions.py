"""The reference deployment loads, and names what the demo and the documents name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest


@pytest.fixture(scope="module")
def defs() -> dg.Definitions:
    from sits_dagster.definitions import defs

    return defs


def test_everything_resolves(defs: dg.Definitions) -> None:
    """Dagster can load the deployment: assets, job, schedule, checks and resources fit together."""
    dg.Definitions.validate_loadable(defs)
    keys = {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}
    assert keys == {"text_lines", "text_recogniser", "ocr_texts"}


def test_texts_depend_on_lines_and_model(defs: dg.Definitions) -> None:
    """The lineage in the UI shows what the texts are made from."""
    graph = defs.resolve_asset_graph()
    parents = graph.get(dg.AssetKey("ocr_texts")).parent_keys
    assert {key.to_user_string() for key in parents} == {"text_lines", "text_recogniser"}
    names = {key.name for key in graph.asset_check_keys if key.asset_key == dg.AssetKey("ocr_texts")}
    assert names == {"complete", "unique", "no_orphan_files"}


def test_recogniser_is_a_model_asset(defs: dg.Definitions) -> None:
    """The demo's model is shown as a model: of the kind `onnx`, with the path that the texts run."""
    [spec] = [s for s in defs.resolve_all_asset_specs() if s.key == dg.AssetKey("text_recogniser")]
    assert spec.kinds == {"onnx"}
    assert spec.metadata["sits/model_path"] == "ppocrv5_rec_argmax.onnx"


def test_three_days(defs: dg.Definitions) -> None:
    """The demo has the three days for which it generates data."""
    from sits_dagster.demo.data import DEFAULT_PARTITIONS

    asset = defs.resolve_assets_def("ocr_texts")
    assert asset.partitions_def is not None
    assert asset.partitions_def.get_partition_keys() == list(DEFAULT_PARTITIONS)


def test_nightly_schedule(defs: dg.Definitions) -> None:
    """The nightly schedule runs at 02:00 UTC and is off until it is switched on."""
    schedule = defs.resolve_schedule_def("nightly")
    assert schedule.cron_schedule == "0 2 * * *"
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED


def test_home_comes_from_the_environment_and_loading_writes_nothing(tmp_path: Path) -> None:
    """`SITS_DEMO_HOME` says where everything lies; loading the definitions does not create it."""
    home = tmp_path / "home"
    code = (
        "from sits_dagster.definitions import DEMO_HOME, defs\n"
        "print(DEMO_HOME, defs.resources['storage'].resolve('x'))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SITS_DEMO_HOME": str(home)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert result.stdout.split() == [str(home), str(home / "x")]
    assert list(tmp_path.iterdir()) == []
