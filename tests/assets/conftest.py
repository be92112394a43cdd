"""A workspace for each test."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from tests.assets.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Workspace(tmp_path, instance)
