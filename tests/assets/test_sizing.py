"""Nobody has to choose a batch size: it is measured once, with a partition's own rows."""

from pathlib import Path

import numpy as np
import pytest

from tests.assets.workspace import DAY, Workspace

NEXT_DAY = "2026-01-02"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITS_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("fan_out", [False, True], ids=["one step", "fan-out"])
def test_the_batch_is_measured_once(workspace: Workspace, calls: list[int], fan_out: bool) -> None:
    """The first run measures and says what it saw; the next partition starts with the same batch at once."""
    workspace.write(40, key=DAY)
    workspace.write(40, key=NEXT_DAY)
    asset = workspace.asset(fan_out=fan_out)
    first = workspace.run(asset, batch_rows=None, batch_rows_max=16)
    assert first.result.success, first.error
    assert "rows a second by batch 1:" in first.log
    computed = first.metadata()["sits/batches"]
    assert -(-40 // 16) <= computed <= 40
    tried = len(calls) - computed
    assert tried >= 2 * 2
    calls.clear()
    second = workspace.run(asset, key=NEXT_DAY, batch_rows=None, batch_rows_max=16)
    assert second.result.success, second.error
    assert "rows a second by batch" not in second.log
    assert len(calls) == second.metadata(NEXT_DAY)["sits/batches"], "nothing is tried again"


def test_the_result_does_not_depend_on_the_batch_that_was_found(workspace: Workspace) -> None:
    """G7: a pinned batch of one gives the same rows."""
    workspace.write(40, key=DAY)
    workspace.run(batch_rows=None)
    found = workspace.output(DAY)
    workspace.run(batch_rows=1, recompute=True)
    assert workspace.output(DAY) == found


def test_a_pinned_batch_is_not_measured(workspace: Workspace, calls: list[int]) -> None:
    """Whoever gives a number gets it."""
    workspace.write(40, key=DAY)
    outcome = workspace.run(batch_rows=10)
    assert outcome.metadata()["sits/batches"] == 4
    assert max(calls) == 10
    assert np.count_nonzero(np.array(calls) == 10) == 4
