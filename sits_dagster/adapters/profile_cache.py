"""Profiles and optimised graphs, kept in a folder of the user's cache by what they hold for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from sits_dagster.errors import ModelError
from sits_dagster.inference.sizing import BatchOptimum
from sits_dagster.models.batching import BatchingReport
from sits_dagster.models.codec import dump, load
from sits_dagster.models.profile import SCHEMA, ModelProfile, RuntimeKey

Value = TypeVar("Value")

__all__ = ["ProfileCache", "cache_folder"]

FOLDER_VARIABLE = "SITS_CACHE_DIR"
TRIALS_SCHEMA = 3  # one more when trials find something else
OPTIMIZED_BYTES_MAX = 4 << 30  # of all optimised graphs; those not used for the longest time go first
KEPT_FILES_MAX = 1000  # of profiles, and of trials; the oldest go first
STAGED = ".staged-"  # what is not yet in its place: never read, and gone when it is old
STAGED_SECONDS_MAX = 3600.0
GRAPH = "model.onnx"


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return where profiles are kept: `SITS_CACHE_DIR`, or `sits-dagster` in the user's cache folder.

    It is a folder of its own among the temporary files where the user has no home.
    """
    known = os.environ if environment is None else environment
    if known.get(FOLDER_VARIABLE):
        return Path(known[FOLDER_VARIABLE]).absolute()
    if known.get("XDG_CACHE_HOME"):
        return Path(known["XDG_CACHE_HOME"]).absolute() / "sits-dagster"
    home = Path(known["HOME"]) if known.get("HOME") else _home()
    if home is None:
        return Path(tempfile.gettempdir()).absolute() / f"sits-dagster-{os.getuid()}"
    return home.absolute() / ".cache" / "sits-dagster"


def _home() -> Path | None:
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return None if home == Path(home.anchor) else home  # an empty HOME, or a user without one


class ProfileCache:
    """A folder of profiles; it may be shared by processes and be deleted at any time.

    Args:
        folder: Where it is; made when the first thing is kept.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder()

    def find(self, digest: str, request: Mapping[str, Any]) -> ModelProfile | None:
        """Return the profile of a model for a request, or `None` where there is none that can be read."""
        try:
            return ModelProfile.from_json(self._profile(digest, request).read_bytes())
        except (OSError, ModelError):
            return None

    def keep(self, profile: ModelProfile, request: Mapping[str, Any]) -> None:
        """Keep a profile for the next time; a folder that cannot be written to is no error."""
        _write(self._profile(profile.digest, request), profile.to_json())

    def find_batching(self, digest: str, key: str) -> BatchingReport | None:
        """Return what a trial of a model with such rows showed, or `None` where there was none."""
        return self._learned("batching", digest, key, BatchingReport)

    def keep_batching(self, digest: str, key: str, report: BatchingReport) -> None:
        """Keep what a trial showed."""
        _write(self._place("batching", digest, key), json.dumps(dump(report)))

    def find_optimum(self, digest: str, key: str) -> BatchOptimum | None:
        """Return the batch that was measured to be the best, or `None` where none was."""
        return self._learned("optimum", digest, key, BatchOptimum)

    def keep_optimum(self, digest: str, key: str, optimum: BatchOptimum) -> None:
        """Keep the batch that was measured to be the best."""
        _write(self._place("optimum", digest, key), json.dumps(dump(optimum)))

    def optimized(self, digest: str, runtime: RuntimeKey) -> Path | None:
        """Return a model's optimised graph, or `None` where there is none that can be read."""
        path = self._optimized(digest, runtime) / GRAPH
        try:
            if not path.is_file() or not os.access(path, os.R_OK):
                return None
        except OSError:
            return None
        with suppress(OSError):  # another user's is as good
            os.utime(path.parent)
        return path

    def keep_optimized(self, digest: str, runtime: RuntimeKey, made: Path) -> Path | None:
        """Copy a folder with an optimised graph into the cache; return the graph, `None` if that fails.

        One that is there already stays, unless its graph is missing.
        """
        target = self._optimized(digest, runtime)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _staged(target.parent) as staged:
                staged.mkdir()
                for file in made.iterdir():
                    shutil.copyfile(file, staged / file.name)
                try:
                    staged.rename(target)
                except OSError:  # another process kept it first, or what is there is damaged
                    if not (target / GRAPH).is_file():
                        _remove(target)
                        staged.rename(target)
        except OSError:
            return None
        with suppress(OSError):
            self._prune(target)
        return self.optimized(digest, runtime)

    def drop_optimized(self, digest: str, runtime: RuntimeKey) -> None:
        """Forget an optimised graph that cannot be loaded; one that cannot be removed is no error."""
        shutil.rmtree(self._optimized(digest, runtime), ignore_errors=True)

    def _prune(self, newest: Path) -> None:
        _drop_stale(newest.parent)
        folders = [folder for folder in newest.parent.iterdir() if not folder.name.startswith(STAGED)]
        folders.sort(key=_changed)
        sizes = {
            folder: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            for folder in folders
        }
        total = sum(sizes.values())
        for folder in folders:
            if total <= OPTIMIZED_BYTES_MAX:
                return
            if folder != newest:
                shutil.rmtree(folder, ignore_errors=True)
                total -= sizes[folder]

    def _profile(self, digest: str, request: Mapping[str, Any]) -> Path:
        key = hashlib.sha256(json.dumps([SCHEMA, request], sort_keys=True).encode()).hexdigest()
        return self.folder / "profiles" / f"{digest}-{key[:16]}.json"

    def _learned(self, kind: str, digest: str, key: str, value: type[Value]) -> Value | None:
        try:
            return load(value, json.loads(self._place(kind, digest, key).read_bytes()))
        except (OSError, ValueError, RecursionError):
            return None

    def _place(self, kind: str, digest: str, key: str) -> Path:
        text = f"{TRIALS_SCHEMA}|{key}"
        return self.folder / kind / f"{digest}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def _optimized(self, digest: str, runtime: RuntimeKey) -> Path:
        text = f"{runtime.version}|{runtime.provider}|{runtime.options}"
        return self.folder / "optimized" / f"{digest[:32]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _write(path: Path, text: str) -> None:
    """Put a file in place whole; a folder that cannot be written to is no error of a cache."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _staged(path.parent) as staged:
            staged.write_text(text, encoding="utf-8")
            staged.replace(path)
        _drop_stale(path.parent)
        kept = [file for file in path.parent.iterdir() if not file.name.startswith(STAGED)]
        if len(kept) > KEPT_FILES_MAX:
            for old in sorted(kept, key=_changed)[:-KEPT_FILES_MAX]:
                old.unlink(missing_ok=True)
    except OSError:
        return


@contextmanager
def _staged(folder: Path) -> Generator[Path]:
    """Give a name for a file or folder that is made now; whatever happens, nothing is left under it."""
    staged = folder / f"{STAGED}{uuid.uuid4().hex}"
    try:
        yield staged
    finally:
        _remove(staged)


def _drop_stale(folder: Path) -> None:
    """Remove what a process that was killed left."""
    oldest = time.time() - STAGED_SECONDS_MAX
    for staged in folder.glob(f"{STAGED}*"):
        if 0 < _changed(staged) < oldest:
            _remove(staged)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _changed(path: Path) -> float:
    """Return when a path was changed; 0 for one that another process removed meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
