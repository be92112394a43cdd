"""A folder as a store: creates have one winner, files are whole or absent, errors say what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sits_dagster.adapters.object_store import LocalStore
from sits_dagster.errors import ConfigError, StorageError

ROOT = Path(__file__).resolve().parents[2]
RACE = """
import sys, time
from sits_dagster.adapters.object_store import LocalStore
store, me, start = LocalStore(sys.argv[1]), sys.argv[2], float(sys.argv[3])
time.sleep(max(0, start - time.time()))
print(*[n for n in range(60) if store.create(f"_sits/commits/{n}", me.encode() * 1000)])
"""
CREATE_FOREVER = """
import itertools, sys
from sits_dagster.adapters.object_store import LocalStore
store = LocalStore(sys.argv[1])
for n in itertools.count():
    assert store.create(f"a/{n}", b"%08d" % n * 5000)
    store.replace("b/newest", b"%08d" % n * 5000)
    if n == 0:
        print("began", flush=True)
"""
DELETE_AND_CREATE = """
import sys, time
from sits_dagster.adapters.object_store import LocalStore
store, me, start = LocalStore(sys.argv[1]), sys.argv[2], float(sys.argv[3])
time.sleep(max(0, start - time.time()))
for n in range(150):
    path = f"_sits/folder/{me}"
    assert store.create(path, b"1")
    store.replace(path, b"2")
    assert store.move(path, f"_sits/other/{me}")
    store.delete(f"_sits/other/{me}")
"""


def _start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def _race(code: str, folder: Path, count: int) -> list[str]:
    start = str(time.time() + 1.5)
    processes = [_start(code, str(folder), str(number), start) for number in range(count)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * count
    return outputs


def test_one_of_eight_processes_creates_each_object(tmp_path: Path) -> None:
    """However many runs commit at the same moment, one succeeds, and its bytes are there."""
    won = [output.split() for output in _race(RACE, tmp_path, 8)]
    assert sorted(int(n) for numbers in won for n in numbers) == list(range(60))
    assert len([numbers for numbers in won if numbers]) > 1, "the processes did not meet"
    store = LocalStore(tmp_path)
    for winner, numbers in enumerate(won):
        for number in numbers:
            assert store.read(f"_sits/commits/{number}") == str(winner).encode() * 1000


def test_removing_an_empty_folder_never_disturbs_a_writer(tmp_path: Path) -> None:
    """Folders that vanish when they are empty come back for whoever writes into them at that moment."""
    _race(DELETE_AND_CREATE, tmp_path, 3)
    assert LocalStore(tmp_path).list("") == {}


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.11, 0.2])
def test_a_killed_process_leaves_whole_objects_or_none(tmp_path: Path, seconds: float) -> None:
    """After kill -9 no reader ever meets half an object, and what is left can be written on."""
    process = _start(CREATE_FOREVER, str(tmp_path))
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    store = LocalStore(tmp_path)
    listing = store.list("")
    assert listing
    assert set(listing.values()) == {40_000}
    for path in listing:
        data = store.read(path)
        assert data == data[:8] * 5000
    assert store.create(f"a/{len(listing) + 5}", b"next")


def test_folders_inside_the_control_folder_do_not_pile_up(tmp_path: Path) -> None:
    """A folder that was emptied goes away; the user's own folders and the root stay."""
    store = LocalStore(tmp_path / "root")
    for path in ("_sits/a/b/c", "_quarantine/x", "file"):
        store.create(path, b"")
    (tmp_path / "root" / "users").mkdir()
    for path in ("_sits/a/b/c", "_quarantine/x", "file"):
        store.delete(path)
    assert not (tmp_path / "root" / "_sits" / "a").exists()
    assert not (tmp_path / "root" / "_quarantine").exists()
    assert (tmp_path / "root" / "users").is_dir()


def test_a_missing_folder_is_empty(tmp_path: Path) -> None:
    """A first run needs no preparation."""
    assert LocalStore(tmp_path / "new").list("") == {}


def test_an_overwritten_object_is_never_seen_half(tmp_path: Path) -> None:
    """A replacement keeps an open reader's bytes as they were."""
    store = LocalStore(tmp_path)
    store.replace("x", b"old" * 1000)
    with (tmp_path / "x").open("rb") as reader:
        store.replace("x", b"new")
        assert reader.read() == b"old" * 1000
    assert store.read("x") == b"new"


def test_a_root_that_is_a_file_is_a_configuration_error(tmp_path: Path) -> None:
    """A wrong output path is named, whichever operation meets it first."""
    (tmp_path / "file").write_text("mine")
    store = LocalStore(tmp_path / "file")
    for operation in (
        lambda: store.list(""),
        lambda: store.create("a", b""),
        lambda: store.create("a/b", b""),
        lambda: store.replace("a", b""),
        lambda: store.move("a", "b"),
        lambda: store.counter("c/d"),
    ):
        with pytest.raises(ConfigError, match="Hint: give the run a folder"):
            operation()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_missing_object_is_a_storage_error(tmp_path: Path) -> None:
    """Reading what is not there names it."""
    with pytest.raises(StorageError, match="no/such"):
        LocalStore(tmp_path).read("no/such")


def test_a_folder_in_an_objects_place_is_a_configuration_error(tmp_path: Path) -> None:
    """A folder that has an object's name is said so."""
    (tmp_path / "x").mkdir()
    with pytest.raises(ConfigError, match="directory"):
        LocalStore(tmp_path).read("x")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk of its own with a few hundred kilobytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_a_storage_error_and_leaves_nothing_behind(small_disk: Path) -> None:
    """When there is no room the message says so, and no half object stays; with room it goes on."""
    store = LocalStore(small_disk)
    store.create("ballast", bytes(300_000))
    before = store.list("")
    for operation in (store.create, store.replace):
        with pytest.raises(StorageError, match=r"the disk is full.*make room and run again"):
            operation("x/y", bytes(300_000))
    assert store.list("") == before
    assert [path for path in (small_disk / "_sits").rglob("*") if path.is_file()] == []
    store.delete("ballast")
    assert store.create("x/y", bytes(300_000))


def test_a_counter_ignores_a_full_disk_and_survives_its_process(tmp_path: Path) -> None:
    """The number is there after kill -9; it never ends a run."""
    store = LocalStore(tmp_path)
    first = store.counter("p/1")
    first.set(5)
    first.set(300)
    first.close()
    assert store.read("p/1") == (300).to_bytes(8, "little")
    again = store.counter("p/1")
    again.set(7)
    again.close()
    assert store.read("p/1") == (7).to_bytes(8, "little")
