"""Errors that say who must act.

SitsError
├── ConfigError             the deployment must be changed
├── DataError               the input must be mended (a file, a column)
│   └── QuarantineLimitError    more rows failed than the limit allows
├── ModelError              the model cannot do what was asked
├── DeviceOutOfMemoryError  a smaller batch may fit
├── StorageError            the output could not be written; run again when there is room
├── TransientError          run again later
├── CommitConflictError     another run won; this one stops and nothing is lost
├── StallError              a stage made no progress for its named limit
└── InvariantError          a fault of this package
"""

from __future__ import annotations

__all__ = [
    "CommitConflictError",
    "ConfigError",
    "DataError",
    "DeviceOutOfMemoryError",
    "InvariantError",
    "ModelError",
    "QuarantineLimitError",
    "SitsError",
    "StallError",
    "StorageError",
    "TransientError",
]


class SitsError(Exception):
    """The root of every error that this package raises on purpose.

    Args:
        message: What happened, where, with which values.
        hint: What the reader can do about it; shown after the message.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} Hint: {hint}" if hint else message)
        self.message = message
        self.hint = hint


class ConfigError(SitsError):
    """The deployment or the definition must be changed before a run can succeed."""


class DataError(SitsError):
    """The input data must be mended; the message names the file, column or row."""


class QuarantineLimitError(DataError):
    """More rows failed than `rows_quarantined_max`; the first errors are in the message."""


class ModelError(SitsError):
    """The model file is broken or refuses the arrays it was given."""


class DeviceOutOfMemoryError(SitsError):
    """The device could not hold a batch; the caller may split it and go on.

    Args:
        message: The device's own words.
        batch_rows: Rows of the batch that did not fit; 0 while the model was loaded.
        hint: What the reader can do about it.
    """

    def __init__(self, message: str, *, batch_rows: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.batch_rows = batch_rows


class StorageError(SitsError):
    """The output or a checkpoint could not be read or written; what was committed stays."""


class TransientError(SitsError):
    """A passing fault: the same work may succeed after `retry_after_seconds`."""

    def __init__(self, message: str, *, retry_after_seconds: float, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_seconds = retry_after_seconds


class CommitConflictError(SitsError):
    """Another attempt at the same partition won; this one must stop."""


class StallError(SitsError):
    """A stage waited longer than its named limit."""


class InvariantError(SitsError):
    """Something that must always hold did not: a fault of this package."""
