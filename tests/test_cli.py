"""The command line: what it prints, its exit codes, and that errors are sentences, not tracebacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sits_dagster import __version__
from sits_dagster.cli import main
from tests.assets.workspace import Workspace

SITS = Path(sys.executable).with_name("sits")
DAYS = ("2026-01-01", "2026-01-02")
LINES_PER_DAY = 12


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the outputs of two days; tests copy it before they damage it."""
    with dg.DagsterInstance.ephemeral() as instance:
        workspace = Workspace(tmp_path_factory.mktemp("outputs"), instance)
        for key in DAYS:
            workspace.write_table({"id": range(8), "x": [0.0, None, *range(2, 8)]}, key=key)
            assert workspace.run(key=key, segment_seconds=0).result.success
        return workspace.root / "out"


@pytest.fixture
def folder(outputs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(outputs, tmp_path / "out"))


def _sits(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int | str | None:
    """Run the command in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["sits", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        sys.exit(main())
    return caught.value.code


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.rglob("part-*.parquet"))


def test_help_is_short_and_names_the_verbs() -> None:
    """The installed command explains itself, quickly, and without Dagster."""
    result = subprocess.run([SITS, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "demo" in result.stdout
    assert "inspect" in result.stdout
    assert "profile" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("verb", ["demo", "inspect", "profile"])
def test_each_verb_has_help_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """Every verb has a help text and `--json`."""
    assert _sits(monkeypatch, verb, "-h") in {0, None}
    assert "--json" in capsys.readouterr().out


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` tells the package's version."""
    assert _sits(monkeypatch, "--version") in {0, None}
    assert capsys.readouterr().out.strip() == f"sits, version {__version__}"


@pytest.mark.parametrize("arguments", [["no-such-verb"], ["inspect"], ["inspect", ".", "--no-such-option"]])
def test_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """A wrong verb, a missing argument or an unknown option exits with 2 and one line on what is wrong."""
    assert _sits(monkeypatch, *arguments) == 2
    errors = capsys.readouterr().err
    assert "Error: " in errors
    assert "Traceback" not in errors


def test_sound_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], outputs: Path
) -> None:
    """Sound outputs are listed with their rows, and the exit code is 0."""
    assert _sits(monkeypatch, "inspect", outputs) == 0
    printed = capsys.readouterr().out
    for key in DAYS:
        [line] = [line for line in printed.splitlines() if key in line]
        assert line.split() == [key, "complete", "8", "7", "1", "1", "2"]


def test_sound_output_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], outputs: Path
) -> None:
    """`--json` prints one object with the fingerprint, the shards and every committed segment."""
    assert _sits(monkeypatch, "inspect", outputs / DAYS[0], "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_sound"] is True
    [output] = report["outputs"]
    assert output["path"] == str(outputs / DAYS[0])
    assert output["is_complete"] is True
    assert (output["rows"], output["rows_written"], output["rows_quarantined"]) == (8, 7, 1)
    assert set(output["fingerprint"]) == {"input", "model", "configuration"}
    assert output["shards"] == [{"index": 0, "row_start": 0, "row_end": 8}]
    assert [(s["row_start"], s["row_end"]) for s in output["segments"]] == [(0, 4), (4, 8)]
    assert output["digest"] == output["segments"][-1]["digest"]
    for kind in ("incomplete", "duplicated", "orphans", "damaged"):
        assert output[kind] == []


def _delete(folder: Path) -> Path:
    part = _parts(folder)[1]
    part.unlink()
    return part


def _shorten(folder: Path) -> Path:
    part = _parts(folder)[1]
    part.write_bytes(part.read_bytes()[:-1])
    return part


def _flip(folder: Path) -> Path:
    part = _parts(folder)[1]
    data = bytearray(part.read_bytes())
    data[6] ^= 1
    part.write_bytes(data)
    return part


def _zero_the_footer(folder: Path) -> Path:
    part = _parts(folder)[1]
    part.write_bytes(part.read_bytes()[:-8] + b"\0" * 8)
    return part


def _copy(folder: Path) -> Path:
    part = _parts(folder)[1]
    return Path(shutil.copy(part, part.with_name("copy.parquet")))


def _delete_quarantine(folder: Path) -> Path:
    [file] = (folder / DAYS[0] / "_quarantine").glob("*.parquet")
    file.unlink()
    return file


DAMAGES = [_delete, _shorten, _flip, _zero_the_footer, _copy, _delete_quarantine]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, damage: Any
) -> None:
    """A part that is missing, altered or twice there is named, once, and the exit code is 1."""
    file = damage(folder)
    assert _sits(monkeypatch, "inspect", folder) == 1
    printed = capsys.readouterr().out
    assert printed.count(file.name) == 1
    [line] = [line for line in printed.splitlines() if line.strip().startswith(DAYS[1])]
    assert "complete" in line
    assert "Traceback" not in printed
    assert _sits(monkeypatch, "inspect", folder, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert [output["is_sound"] for output in report["outputs"]] == [False, True]


def test_quick_compares_sizes_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    """`--quick` does not read the parts: it finds what is missing, but not a flipped bit."""
    _flip(folder)
    assert _sits(monkeypatch, "inspect", folder, "--quick") == 0
    _delete(folder)
    assert _sits(monkeypatch, "inspect", folder, "--quick") == 1


def test_folder_that_is_no_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A folder without outputs is an error in one sentence with a hint, and exit code 2."""
    assert _sits(monkeypatch, "inspect", tmp_path) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"DataError: {str(tmp_path)!r} is no output folder")
    assert captured.err.count("\n") == 1
    assert "Hint: give the sink's folder" in captured.err


def test_folder_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A path that does not exist, or is a file, is an error in one sentence, and exit code 2."""
    (tmp_path / "file").write_text("")
    for name in ("missing", "file"):
        assert _sits(monkeypatch, "inspect", tmp_path / name) == 2
        assert str(tmp_path / name) in capsys.readouterr().err


def test_unfinished_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    """An output whose run did not finish is shown as unfinished, and the exit code is 1."""
    [outcome] = (folder / DAYS[0] / "_sits").glob("generations/*/outcome.json")
    outcome.unlink()
    assert _sits(monkeypatch, "inspect", folder) == 1
    assert "unfinished" in capsys.readouterr().out


def _generate_little(home: Path) -> int:
    """Generate the demo's data and keep twelve lines a day; return how many can be read."""
    from sits_dagster.demo.data import generate

    generate(home, rows_per_partition=40)
    readable = 0
    for folder in sorted((home / "lines").iterdir()):
        lines = pq.read_table(folder).slice(0, LINES_PER_DAY)
        for file in folder.iterdir():
            file.unlink()
        pq.write_table(lines, folder / "part-0.parquet")
        path = home / "truth" / f"{folder.name}.parquet"
        truth = pq.read_table(path)
        truth = truth.filter(pc.is_in(truth.column("line_id"), lines.column("line_id").combine_chunks()))
        pq.write_table(truth, path)
        readable += truth.num_rows
    return readable


def _demo(home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SITS, "demo", "--home", home, *options],
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )


def test_demo(tmp_path: Path) -> None:
    """The demo reads three days of images, almost without errors; a second run computes nothing."""
    home = tmp_path / "home"
    readable = _generate_little(home)
    report = json.loads(_demo(home, "--json").stdout)
    assert [partition["key"] for partition in report["partitions"]] == [*DAYS, "2026-01-03"]
    assert report["rows"] == 3 * LINES_PER_DAY
    assert report["rows_written"] == readable
    quarantined = sum(partition["rows_quarantined"] for partition in report["partitions"])
    assert quarantined == 3 * LINES_PER_DAY - readable > 0
    assert all(partition["batches"] > 0 for partition in report["partitions"])
    assert report["rows_recomputed"] == 0
    assert 0 <= report["character_error_rate"] < 0.05

    again = _demo(home)
    assert "All is done already: nothing was computed." in again.stdout
    assert again.stdout.count("complete") == 3
    assert "character error rate" in again.stdout
    inspected = subprocess.run(
        [SITS, "inspect", home / "texts"], capture_output=True, timeout=60, check=False
    )
    assert inspected.returncode == 0


def test_demo_error_is_one_sentence(tmp_path: Path) -> None:
    """When a step of the demo fails, the command says in one line what and exits with 2."""
    from sits_dagster.demo.model import MODEL_NAME

    _generate_little(tmp_path)
    (tmp_path / MODEL_NAME).write_bytes(b"not a model")
    result = subprocess.run(
        [SITS, "demo", "--home", tmp_path, "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("ModelError: ")
    assert str(tmp_path / MODEL_NAME) in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(("verb", "is_resumed"), [("demo", True), ("profile", False)])
def test_interrupted(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    verb: str,
    is_resumed: bool,
) -> None:
    """Ctrl-C ends in a sentence; that the next run goes on is said where it does."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sits_dagster.commands.demo.run_demo", interrupt)
    monkeypatch.setattr("sits_dagster.commands.profile.profile_path", interrupt)
    arguments = ["--home", tmp_path] if verb == "demo" else [tmp_path / "model.onnx"]
    assert _sits(monkeypatch, verb, *arguments) == 130
    err = capsys.readouterr().err
    assert "Interrupted." in err
    assert ("goes on from the last commit" in err) == is_resumed
