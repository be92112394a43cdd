"""What is kept stays whole, within limits, and in the way of nobody."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sits_dagster.adapters import profile_cache
from sits_dagster.adapters.profile_cache import ProfileCache, cache_folder
from sits_dagster.models.batching import Batching, BatchingReport
from sits_dagster.models.profile import RuntimeKey

KEY = RuntimeKey(version="1", provider="CPUExecutionProvider", options="none")
REPORT = BatchingReport(verdict=Batching.INVARIANT)


@pytest.fixture
def cache(tmp_path: Path) -> ProfileCache:
    return ProfileCache(tmp_path / "cache")


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def _folder(tmp_path: Path, size: int) -> Path:
    made = tmp_path / f"made-{size}"
    made.mkdir(exist_ok=True)
    (made / "model.onnx").write_bytes(b"x" * size)
    return made


def test_optimised_graphs_that_were_not_used_for_long_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: ProfileCache
) -> None:
    """Their sum has a limit; one that was asked for lately stays, and so does the newest, however large."""
    monkeypatch.setattr(profile_cache, "OPTIMIZED_BYTES_MAX", 250)
    for at, digest in enumerate("ab"):
        kept = cache.keep_optimized(digest, KEY, _folder(tmp_path, 100))
        assert kept is not None
        os.utime(kept.parent, (at, at))
    assert cache.optimized("a", KEY) is not None, "used now"
    assert cache.keep_optimized("c", KEY, _folder(tmp_path, 100)) is not None
    assert [cache.optimized(digest, KEY) is not None for digest in "abc"] == [True, False, True]
    assert cache.keep_optimized("d", KEY, _folder(tmp_path, 1000)) is not None
    assert [cache.optimized(digest, KEY) is not None for digest in "acd"] == [False, False, True]


def test_an_optimised_graph_is_kept_once(tmp_path: Path, cache: ProfileCache) -> None:
    """The first one stays; another runtime has its own."""
    first = cache.keep_optimized("a", KEY, _folder(tmp_path, 10))
    assert cache.keep_optimized("a", KEY, _folder(tmp_path, 20)) == first
    assert first is not None
    assert first.stat().st_size == 10
    other = RuntimeKey(version="2", provider=KEY.provider, options=KEY.options)
    assert cache.optimized("a", other) is None
    assert len(list(first.parent.parent.iterdir())) == 1, "no staged copy is left"


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"SITS_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"SITS_CACHE_DIR": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/sits-dagster"),
        ({"HOME": "/c"}, "/c/.cache/sits-dagster"),
        ({}, str(Path.home() / ".cache" / "sits-dagster")),
    ],
)
def test_profiles_are_kept_where_caches_are(environment: dict[str, str], folder: str) -> None:
    """The variable of this package first, then those of the system."""
    assert cache_folder(environment) == Path(folder)


@pytest.mark.parametrize("variable", ["SITS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"])
def test_a_relative_folder_is_one_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Child processes run elsewhere: they are told where it is now."""
    monkeypatch.chdir(tmp_path)
    found = cache_folder({variable: "mine"})
    assert found.is_absolute()
    assert found.is_relative_to(tmp_path / "mine")


@pytest.mark.parametrize("home", [Path("/"), None], ids=["root", "none"])
def test_without_a_home_profiles_are_among_temporary_files(
    monkeypatch: pytest.MonkeyPatch, home: Path | None
) -> None:
    """A user of a container may have none; one that is named is not looked for."""

    def find() -> Path:
        if home is None:
            msg = "no home"
            raise RuntimeError(msg)
        return home

    monkeypatch.setattr(Path, "home", find)
    assert cache_folder({"HOME": ""}).name == f"sits-dagster-{os.getuid()}"
    assert cache_folder({"HOME": "/c"}) == Path("/c/.cache/sits-dagster")


def test_a_graph_that_may_not_be_looked_at_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: ProfileCache
) -> None:
    """A cache of somebody else ends no step."""
    assert cache.keep_optimized("a", KEY, _folder(tmp_path, 10)) is not None

    def refuse(*_: object, **__: object) -> bool:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", refuse)
        assert cache.optimized("a", KEY) is not None, "only its time of use is not ours"
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert cache.optimized("a", KEY) is None
    monkeypatch.setattr(Path, "is_file", refuse)
    assert cache.optimized("a", KEY) is None


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_nothing_half_made_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: ProfileCache, error: type[BaseException]
) -> None:
    """Neither by a full disk nor by a user who is tired of waiting."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    cache.keep_batching("a", "key", REPORT)
    monkeypatch.setattr(shutil, "copyfile", fail)
    monkeypatch.setattr(Path, "replace", fail)
    for keep in (
        lambda: cache.keep_optimized("a", KEY, _folder(tmp_path, 10)),
        lambda: cache.keep_batching("b", "key", REPORT),
    ):
        if issubclass(error, OSError):
            assert keep() is None
        else:
            with pytest.raises(error):
                keep()
    assert list((cache.folder / "optimized").iterdir()) == []
    assert len(list((cache.folder / "batching").iterdir())) == 1


def test_what_another_process_is_making_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: ProfileCache
) -> None:
    """Unless it is so old that the process must have been killed."""
    monkeypatch.setattr(profile_cache, "OPTIMIZED_BYTES_MAX", 5)
    cache.keep_batching("a", "key", REPORT)
    assert cache.keep_optimized("a", KEY, _folder(tmp_path, 10)) is not None
    old = time.time() - profile_cache.STAGED_SECONDS_MAX - 60
    for name in ("optimized", "batching"):
        for staged in (".staged-new", ".staged-old"):
            (cache.folder / name / staged).mkdir()
            (cache.folder / name / staged / "model.onnx").write_bytes(b"x" * 100)
        os.utime(cache.folder / name / ".staged-old", (old, old))
    assert cache.keep_optimized("b", KEY, _folder(tmp_path, 10)) is not None
    cache.keep_batching("b", "key", REPORT)
    for name, kept in (("optimized", 1), ("batching", 2)):
        found = sorted(path.name for path in (cache.folder / name).iterdir())
        assert found[0] == ".staged-new"
        assert len(found) == 1 + kept


def test_only_the_newest_profiles_are_kept(monkeypatch: pytest.MonkeyPatch, cache: ProfileCache) -> None:
    """A folder that nobody looks at does not grow for ever."""
    monkeypatch.setattr(profile_cache, "KEPT_FILES_MAX", 3)
    for at in range(6):
        cache.keep_batching(str(at), "key", REPORT)
        for kept in (cache.folder / "batching").glob(f"{at}-*"):
            os.utime(kept, (at, at))
    assert [cache.find_batching(str(at), "key") is not None for at in range(6)] == 3 * [False] + 3 * [True]


def test_a_folder_without_its_graph_is_replaced(tmp_path: Path, cache: ProfileCache) -> None:
    """Half a folder would otherwise stand in the way for ever."""
    kept = cache.keep_optimized("a", KEY, _folder(tmp_path, 10))
    assert kept is not None
    (kept.parent / "model.onnx.data").write_bytes(b"x")
    kept.unlink()
    assert cache.optimized("a", KEY) is None
    assert cache.keep_optimized("a", KEY, _folder(tmp_path, 20)) == kept
    assert [file.name for file in kept.parent.iterdir()] == ["model.onnx"]


def test_a_graph_that_does_not_load_is_forgotten(tmp_path: Path, cache: ProfileCache) -> None:
    """The next one takes its place; that of another runtime stays."""
    other = replace(KEY, version="2")
    for key in (KEY, other):
        assert cache.keep_optimized("a", key, _folder(tmp_path, 10)) is not None
    cache.drop_optimized("a", KEY)
    cache.drop_optimized("a", KEY)
    assert cache.optimized("a", KEY) is None
    assert cache.optimized("a", other) is not None


@pytest.mark.usefixtures("umask")
def test_others_may_read_what_the_umask_lets_them(tmp_path: Path, cache: ProfileCache) -> None:
    """A group shares a cache as it shares everything else."""
    made = _folder(tmp_path, 10)
    made.chmod(0o700)
    (made / "model.onnx").chmod(0o600)
    kept = cache.keep_optimized("a", KEY, made)
    assert kept is not None
    cache.keep_batching("a", "key", REPORT)
    (report,) = (cache.folder / "batching").iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (kept.parent, kept, report)] == [
        0o750,
        0o640,
        0o640,
    ]
