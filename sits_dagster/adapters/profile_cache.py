"""Profiles and optimised graphs, kept in a folder of the user's cache by what they hold for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sits_dagster.errors import ModelError
from sits_dagster.models.batching import BatchingReport
from sits_dagster.models.codec import dump, load
from sits_dagster.models.profile import SCHEMA, ModelProfile, RuntimeKey

__all__ = ["ProfileCache", "cache_folder"]

FOLDER_VARIABLE = "SITS_CACHE_DIR"
BATCHING_SCHEMA = 3  # one more when trials find something else
OPTIMIZED_BYTES_MAX = 4 << 30  # of all optimised graphs; those not used for the longest time go first


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return where profiles are kept: `SITS_CACHE_DIR`, or `sits-dagster` in the user's cache folder."""
    known = os.environ if environment is None else environment
    if known.get(FOLDER_VARIABLE):
        return Path(known[FOLDER_VARIABLE])
    home = known.get("XDG_CACHE_HOME") or str(Path(known.get("HOME", str(Path.home()))) / ".cache")
    return Path(home) / "sits-dagster"


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
        try:
            return load(BatchingReport, json.loads(self._batching(digest, key).read_bytes()))
        except (OSError, ValueError, RecursionError):
            return None

    def keep_batching(self, digest: str, key: str, report: BatchingReport) -> None:
        """Keep what a trial showed."""
        _write(self._batching(digest, key), json.dumps(dump(report)))

    def optimized(self, digest: str, runtime: RuntimeKey) -> Path | None:
        """Return a model's optimised graph, or `None` where there is none."""
        path = self._optimized(digest, runtime) / "model.onnx"
        if not path.is_file():
            return None
        try:
            os.utime(path.parent)
        except OSError:
            return None
        return path

    def keep_optimized(self, digest: str, runtime: RuntimeKey, made: Path) -> Path | None:
        """Copy a folder with an optimised graph into the cache; return the graph, `None` if that fails."""
        target = self._optimized(digest, runtime)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            staged = Path(tempfile.mkdtemp(dir=target.parent, prefix=".staged-"))
            shutil.copytree(made, staged, dirs_exist_ok=True)
            try:
                staged.rename(target)
            except OSError:  # another process kept it first
                shutil.rmtree(staged, ignore_errors=True)
            self._prune(target)
        except OSError:
            return None
        return self.optimized(digest, runtime)

    def _prune(self, newest: Path) -> None:
        folders = sorted(newest.parent.iterdir(), key=lambda path: path.stat().st_mtime)
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

    def _batching(self, digest: str, key: str) -> Path:
        text = f"{BATCHING_SCHEMA}|{key}"
        return self.folder / "batching" / f"{digest}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def _optimized(self, digest: str, runtime: RuntimeKey) -> Path:
        text = f"{runtime.version}|{runtime.provider}|{runtime.options}"
        return self.folder / "optimized" / f"{digest[:32]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _write(path: Path, text: str) -> None:
    """Put a file in place whole; a folder that cannot be written to is no error of a cache."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except OSError:
        return
