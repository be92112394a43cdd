"""Where relative paths start."""

from pathlib import Path

import dagster as dg
from pydantic import ConfigDict, Field

__all__ = ["StorageResource"]


class StorageResource(dg.ConfigurableResource[None]):
    """Resolves the paths of models, sources and sinks."""

    model_config = ConfigDict(extra="forbid")  # a misspelt setting is an error

    root: str = Field(
        default=".",
        description="Folder that relative paths of models, sources and sinks start from.",
    )

    def resolve(self, path: str) -> str:
        """Return an absolute path; an absolute one stays as it is."""
        return str((Path(self.root) / path).absolute())
