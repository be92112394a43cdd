"""Python blocks in Markdown files are tests: a document runs top to bottom in an empty folder of its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# Not the user's own cache of profiles; processes that tests start have the same one.
os.environ["SITS_CACHE_DIR"] = tempfile.mkdtemp(prefix="sits-cache-")


def _enter_empty_folder(namespace: dict[str, Any]) -> None:
    folder = tempfile.TemporaryDirectory(prefix="sits-docs-")
    namespace["_folder"], namespace["_folder_before"] = folder, Path.cwd()
    os.chdir(folder.name)


def _leave_folder(namespace: dict[str, Any]) -> None:
    os.chdir(namespace["_folder_before"])
    namespace["_folder"].cleanup()


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["*.md"],
    setup=_enter_empty_folder,
    teardown=_leave_folder,
).pytest()
