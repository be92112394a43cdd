"""A store and a file format in memory, and stores that fail or hand over at a chosen operation."""

from __future__ import annotations

import hashlib
import io
import struct
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

import pyarrow as pa

from sits_dagster.errors import StorageError
from sits_dagster.inference.store import Counter, PartFile, Store

__all__ = ["FaultyStore", "MemoryFormat", "MemoryPartWriter", "MemoryStore", "SimulatedCrash", "SteppedStore"]

T = TypeVar("T")
COUNTER = struct.Struct("<q")


class SimulatedCrash(BaseException):
    """The process ended here: no handler of `Exception` catches it, as none outlives kill −9."""


class MemoryStore:
    """A folder in memory with the semantics of `LocalStore`; may be used from several threads.

    Args:
        objects: What it holds at first, path to bytes.

    Example:
        >>> store = MemoryStore()
        >>> store.create("a/b", b"first"), store.create("a/b", b"second"), store.read("a/b")
        (True, False, b'first')
    """

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self._objects = dict(objects or {})
        self._lock = threading.Lock()

    def list(self, prefix: str) -> Mapping[str, int]:
        """Return path and size of every object below the folder `prefix`."""
        folder = f"{prefix}/" if prefix else ""
        with self._lock:
            return {path: len(data) for path, data in self._objects.items() if path.startswith(folder)}

    def read(self, path: str) -> bytes:
        """Return an object's bytes."""
        with self._lock:
            if path not in self._objects:
                msg = f"Cannot read {path!r}: there is no such object."
                raise StorageError(msg)
            return self._objects[path]

    def create(self, path: str, data: bytes) -> bool:
        """Create an object; `False` where there is one."""
        with self._lock:
            if path in self._objects:
                return False
            self._objects[path] = bytes(data)
            return True

    def replace(self, path: str, data: bytes) -> None:
        """Write an object, over an older one if there is one."""
        with self._lock:
            self._objects[path] = bytes(data)

    def move(self, source: str, target: str) -> bool:
        """Give an object another name, over whatever has that; `False` where it is gone."""
        with self._lock:
            if source not in self._objects:
                return False
            self._objects[target] = self._objects.pop(source)
            return True

    def delete(self, path: str) -> None:
        """Remove an object; it may be absent."""
        with self._lock:
            self._objects.pop(path, None)

    def counter(self, path: str) -> MemoryCounter:
        """Begin a number; it is there as soon as it is set."""
        self.replace(path, b"")
        return MemoryCounter(self, path)


class MemoryCounter:
    """A number in a `MemoryStore`; a number whose object was deleted stays deleted, as on a disk."""

    def __init__(self, store: MemoryStore, path: str) -> None:
        self._store = store
        self._path = path

    def set(self, value: int) -> None:
        """Overwrite the number."""
        if self._path in self._store.list(""):
            self._store.replace(self._path, COUNTER.pack(value))

    def close(self) -> None:
        """Do nothing: the number stays."""


class SteppedStore:
    """A store that calls a function at its n-th change, so that a test can stand between any two steps.

    Args:
        store: What does the work.
        at: The number of the change, from 1; 0 for never.
        action: Called once, there.
        is_after: Whether the change took effect before the call.
        counts_looks: Whether listing and reading count as well.
    """

    def __init__(
        self,
        store: Store,
        *,
        at: int = 0,
        action: Callable[[], None] | None = None,
        is_after: bool = False,
        counts_looks: bool = False,
    ) -> None:
        self.operations: list[str] = []
        self._store = store
        self._at = at
        self._action = action
        self._is_after = is_after
        self._counts_looks = counts_looks

    def list(self, prefix: str) -> Mapping[str, int]:
        """Return path and size of every object below the folder `prefix`."""
        return self._look(f"list {prefix}", lambda: self._store.list(prefix))

    def read(self, path: str) -> bytes:
        """Return an object's bytes."""
        return self._look(f"read {path}", lambda: self._store.read(path))

    def create(self, path: str, data: bytes) -> bool:
        """Create an object; `False` where there is one."""
        return self._change(f"create {path}", lambda: self._store.create(path, data))

    def replace(self, path: str, data: bytes) -> None:
        """Write an object, over an older one if there is one."""
        self._change(f"replace {path}", lambda: self._store.replace(path, data))

    def move(self, source: str, target: str) -> bool:
        """Give an object another name; `False` where it is gone."""
        return self._change(f"move {target}", lambda: self._store.move(source, target))

    def delete(self, path: str) -> None:
        """Remove an object; it may be absent."""
        self._change(f"delete {path}", lambda: self._store.delete(path))

    def counter(self, path: str) -> Counter:
        """Begin a number; setting it is no change that counts."""
        return self._change(f"counter {path}", lambda: self._store.counter(path))

    def _look(self, name: str, look: Callable[[], T]) -> T:
        return self._change(name, look) if self._counts_looks else look()

    def _change(self, name: str, change: Callable[[], T]) -> T:
        self.operations.append(name)
        is_now = len(self.operations) == self._at and self._action is not None
        if is_now and not self._is_after and self._action:
            self._action()
        result = change()
        if is_now and self._is_after and self._action:
            self._action()
        return result


class FaultyStore(SteppedStore):
    """A store whose n-th change fails. After a `SimulatedCrash` every operation fails: the process is gone.

    Args:
        store: What does the work.
        fail_at: The number of the change, from 1.
        error: What is raised.
        is_after: Whether the change took effect before that.

    Example:
        >>> store = FaultyStore(MemoryStore(), fail_at=2, error=OSError("The disk is full."))
        >>> store.create("a", b"")
        True
        >>> store.create("b", b"")
        Traceback (most recent call last):
        OSError: The disk is full.
    """

    def __init__(self, store: Store, *, fail_at: int, error: BaseException, is_after: bool = False) -> None:
        super().__init__(store, at=fail_at, action=self._fail, is_after=is_after)
        self.has_failed = False
        self._error = error

    def _fail(self) -> None:
        self.has_failed = True
        raise self._error

    def _look(self, name: str, look: Callable[[], T]) -> T:
        self._check_alive()
        return super()._look(name, look)

    def _change(self, name: str, change: Callable[[], T]) -> T:
        self._check_alive()
        return super()._change(name, change)

    def _check_alive(self) -> None:
        if self.has_failed and isinstance(self._error, SimulatedCrash):
            raise self._error


class MemoryFormat:
    """Part files as Arrow streams in any store; beginning and finishing a file are changes of the store.

    Args:
        store: Where the files go.
    """

    suffix = ".arrows"

    def __init__(self, store: Store) -> None:
        self._store = store

    def open(self, path: str, schema: pa.Schema) -> MemoryPartWriter:
        """Begin a file; it is there, empty, from now on."""
        return MemoryPartWriter(self._store, path, schema)

    def read(self, path: str) -> pa.Table:
        """Return all rows of a file."""
        try:
            with pa.ipc.open_stream(self._store.read(path)) as stream:
                return stream.read_all()
        except pa.ArrowInvalid as error:
            msg = f"{path!r} cannot be read: {error}"
            raise StorageError(msg) from error


class MemoryPartWriter:
    """Writes one file of a `MemoryFormat`; a file that was deleted meanwhile stays deleted, as on a disk."""

    def __init__(self, store: Store, path: str, schema: pa.Schema) -> None:
        self._store = store
        self._path = path
        self._rows = 0
        self._buffer = io.BytesIO()
        self._stream = pa.ipc.new_stream(self._buffer, schema)
        store.replace(path, b"")

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows."""
        self._stream.write_batch(batch)
        self._rows += batch.num_rows

    def close(self) -> PartFile:
        """Finish the file and describe it."""
        self._stream.close()
        data = self._buffer.getvalue()
        if self._path in self._store.list(""):
            self._store.replace(self._path, data)
        digest = hashlib.sha256(data).hexdigest()
        return PartFile(path=self._path, rows=self._rows, size_bytes=len(data), sha256=digest)

    def abort(self) -> None:
        """Remove the unfinished file."""
        self._stream.close()
        self._store.delete(self._path)
