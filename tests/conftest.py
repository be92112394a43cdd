"""Shared by all tests: a clean environment, so that nobody's own Dagster or ONNX settings change a result."""

from __future__ import annotations

import os

import pytest

_FOREIGN_PREFIXES = ("DAGSTER_", "SITS_")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the settings of whoever runs the tests, but for the cache that the tests share."""
    for name in list(os.environ):
        if name.startswith(_FOREIGN_PREFIXES) and name != "SITS_CACHE_DIR":
            monkeypatch.delenv(name)
