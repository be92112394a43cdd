"""The three checks: complete, unique, no orphan files."""

import shutil
from operator import itemgetter

import dagster as dg
import pyarrow.parquet as pq

from sits_dagster.adapters.object_store import LocalStore
from sits_dagster.adapters.parquet import rows_of
from sits_dagster.assets.checks import check_results
from sits_dagster.inference.inspection import inspect_output
from tests.assets.workspace import DAY, Workspace, scores


def _check(workspace: Workspace, key: str = DAY) -> dict[str, tuple[bool, str]]:
    """Return what the checks say of a folder as it is, without a run that would mend it first."""
    folder = workspace.out(key)
    found = inspect_output(LocalStore(folder), rows_of=lambda path: rows_of(str(folder / path)))
    results = check_results(dg.AssetKey("scores"), [found])
    return {result.check_name: (result.passed, result.description) for result in results}


def test_sound_output_passes(workspace: Workspace) -> None:
    """All checks pass on an output with quarantined rows, and count rows, written and quarantined ones."""
    workspace.write_table({"id": [0, 1, 2], "x": [1.0, None, 2.0]})
    outcome = workspace.run()
    assert outcome.checks == {"complete": True, "unique": True, "no_orphan_files": True}
    [event, *_] = [e for e in outcome.result.all_events if e.event_type_value == "ASSET_CHECK_EVALUATION"]
    metadata = event.event_specific_data.metadata
    assert {name: value.value for name, value in metadata.items()} == {
        "rows": 3,
        "rows_written": 2,
        "rows_quarantined": 1,
        "faults": 0,
    }


def test_deleted_part_fails_complete_and_the_next_run_mends_it(workspace: Workspace) -> None:
    """A part that somebody deleted fails `complete` by name, and the next run computes just its rows."""
    workspace.write(20)
    workspace.run(segment_seconds=0)
    lost = workspace.parts()[1]
    rows = pq.read_metadata(lost).num_rows
    lost.unlink()
    passed, sentence = _check(workspace)["complete"]
    assert not passed
    assert sentence == f"{lost.name} is missing."
    outcome = workspace.run(segment_seconds=0)
    assert outcome.metadata()["sits/resumed_from_row"] == str(20 - rows)
    assert outcome.checks["complete"]
    assert sorted(workspace.output(), key=itemgetter("id")) == scores(range(20))


def test_foreign_file_fails_no_orphan_files(workspace: Workspace) -> None:
    """A Parquet file of somebody else in the output folder fails the check in the run; it is not removed."""
    workspace.write(5)
    workspace.out().mkdir(parents=True)
    foreign = workspace.out() / "notes.parquet"
    shutil.copy(workspace.write(1, key="elsewhere"), foreign)
    outcome = workspace.run()
    assert outcome.result.success
    assert outcome.checks == {"complete": True, "unique": True, "no_orphan_files": False}
    assert _check(workspace)["no_orphan_files"] == (False, "notes.parquet")
    assert foreign.exists()


def test_hidden_files_of_others_are_no_orphans(workspace: Workspace) -> None:
    """Files that no reader takes for data, such as a checksum or a note, do not fail a check."""
    workspace.write(5)
    workspace.out().mkdir(parents=True)
    for name in (".part.crc", "_metadata", "README.txt"):
        (workspace.out() / name).write_text("mine")
    assert workspace.run().checks["no_orphan_files"]


def test_duplicated_part_fails_a_check(workspace: Workspace) -> None:
    """A copy of a part, whose rows a plain reader sees twice, fails the check and is named."""
    workspace.write(8)
    workspace.run()
    [part] = workspace.parts()
    copy = part.with_name("part-copy.parquet")
    shutil.copy(part, copy)
    assert len(workspace.output()) == 16
    assert _check(workspace)["no_orphan_files"] == (False, "part-copy.parquet")


def test_part_with_other_rows_fails(workspace: Workspace) -> None:
    """A part that was replaced by one of other rows fails a check that names the file."""
    workspace.write(8)
    workspace.run()
    [part] = workspace.parts()
    pq.write_table(pq.read_table(part).slice(0, 3), part)
    passed, sentence = _check(workspace)["complete"]
    assert not passed
    assert part.name in sentence


def test_altered_part_of_the_same_size_fails_without_a_crash(workspace: Workspace) -> None:
    """A part whose footer was overwritten fails a check that names the file; checking does not crash."""
    workspace.write(8)
    workspace.run()
    [part] = workspace.parts()
    part.write_bytes(part.read_bytes()[:-8] + b"\0" * 8)
    found = _check(workspace)
    assert any(not passed and part.name in sentence for passed, sentence in found.values())


def test_range_of_partitions_is_checked_together(workspace: Workspace) -> None:
    """A run over a range gives one result a check; a fault in one partition fails it."""
    workspace.write(5)
    workspace.write(5, key="2026-01-02")
    workspace.out("2026-01-02").mkdir(parents=True)
    shutil.copy(workspace.write(1, key="elsewhere"), workspace.out("2026-01-02") / "notes.parquet")
    outcome = workspace.run(end="2026-01-02")
    assert outcome.checks == {"complete": True, "unique": True, "no_orphan_files": False}
