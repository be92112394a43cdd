"""A folder of the local file system as a store: conditional, durable creates and atomic moves."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import struct
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sits_dagster.errors import ConfigError, StorageError

__all__ = ["FileCounter", "LocalStore", "in_folder", "storage_errors"]

T = TypeVar("T")
FOLDER_TRIES_MAX = 100
TEMPORARY_FOLDER = "_sits/temporary"
COUNTER = struct.Struct("<q")
NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "the file is too large",
}


@contextmanager
def storage_errors(action: str, path: str | Path) -> Generator[None]:
    """Translate what the operating system says of a path into an error that says what to do.

    Raises:
        ConfigError: The folder may not be written or is no folder.
        StorageError: There is no room, or the storage fails.
    """
    try:
        yield
    except (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        msg = f"Cannot {action} {str(path)!r}: {error.strerror}."
        raise ConfigError(msg, hint="give the run a folder that it may write.") from error
    except OSError as error:
        if error.errno == errno.EROFS:
            msg = f"Cannot {action} {str(path)!r}: {error.strerror}."
            raise ConfigError(msg, hint="give the run a folder that it may write.") from error
        reason = NO_ROOM.get(error.errno or 0, error.strerror or str(error))
        msg = f"Cannot {action} {str(path)!r}: {reason}."
        raise StorageError(msg, hint="make room and run again: what was committed stays.") from error


def in_folder(folder: Path, action: Callable[[], T]) -> T:
    """Make a folder durably and act in it; again where a rival removed it in between, since it was empty."""
    for _ in range(FOLDER_TRIES_MAX):
        try:
            _make_folder(folder)
            return action()
        except FileNotFoundError:
            continue
        except FileExistsError:
            if any(path.exists() and not path.is_dir() for path in (folder, *folder.parents)):
                raise
    return action()


class LocalStore:
    """A folder on a local or network file system that has hard links.

    A file is created by linking a finished temporary file to its name: it appears whole, and only
    one of several callers succeeds. Files and folders are synchronised to disk before that.

    Args:
        root: The folder; created when the first file is written.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def list(self, prefix: str) -> Mapping[str, int]:
        """Return path and size of every file below the folder `prefix`."""
        found: dict[str, int] = {}
        with storage_errors("list", self.root / prefix):
            stack = [str(self.root / prefix)]
            while stack:
                try:
                    entries = list(os.scandir(stack.pop()))
                except FileNotFoundError:
                    continue
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
                    else:
                        self._add(entry, found)
        return found

    def read(self, path: str) -> bytes:
        """Return a file's bytes."""
        with storage_errors("read", self.root / path):
            return (self.root / path).read_bytes()

    def create(self, path: str, data: bytes) -> bool:
        """Create a file wholly and durably; `False` where there is one."""
        target = self.root / path
        with storage_errors("create", target):
            temporary = self._write_temporary(data)
            try:
                is_new = in_folder(target.parent, lambda: _link(temporary, target))
            finally:
                temporary.unlink(missing_ok=True)
            if is_new:
                _sync_folder(target.parent)
        return is_new

    def replace(self, path: str, data: bytes) -> None:
        """Write a file wholly and durably, over an older one."""
        target = self.root / path
        with storage_errors("write", target):
            temporary = self._write_temporary(data)
            try:
                in_folder(target.parent, lambda: temporary.replace(target))
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(target.parent)

    def move(self, source: str, target: str) -> bool:
        """Rename a file over whatever has the name; `False` where it is gone. Empty folders go with it."""
        old, new = self.root / source, self.root / target
        with storage_errors("move", new):
            is_moved = in_folder(new.parent, lambda: _rename(old, new))
            if is_moved:
                _sync_folder(new.parent)
                self._prune(Path(source).parent)
        return is_moved

    def delete(self, path: str) -> None:
        """Remove a file, and its folder when that is this package's and empty then."""
        with storage_errors("delete", self.root / path):
            (self.root / path).unlink(missing_ok=True)
            self._prune(Path(path).parent)

    def sha256(self, path: str) -> str:
        """Return the digest of a file's bytes, read in blocks."""
        with storage_errors("read", self.root / path), (self.root / path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def counter(self, path: str) -> FileCounter:
        """Begin a number in a file."""
        with storage_errors("create", self.root / path):
            target = self.root / path
            return in_folder(target.parent, lambda: FileCounter(target))

    def _prune(self, folder: Path) -> None:
        """Remove a folder of this package and those above it while they are empty."""
        while str(folder).startswith("_"):
            try:
                (self.root / folder).rmdir()
            except OSError:  # it is not empty, or a rival was quicker
                return
            folder = folder.parent

    def _add(self, entry: os.DirEntry[str], found: dict[str, int]) -> None:
        try:
            size = entry.stat().st_size
        except FileNotFoundError:
            return
        path = os.path.relpath(entry.path, self.root)
        if not path.startswith(TEMPORARY_FOLDER):
            found[path] = size

    def _write_temporary(self, data: bytes) -> Path:
        folder = self.root / TEMPORARY_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / uuid.uuid4().hex
        try:
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path


class FileCounter:
    """A number in eight bytes of a file, overwritten in place.

    The bytes are mapped: a write is no system call, keeps the interpreter and outlives the process. On a
    full disk the number is left out, since it only informs.
    """

    def __init__(self, path: Path) -> None:
        self._bytes: mmap.mmap | None = None
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # Written first: a mapped page that the disk has no room for would end the process.
            os.pwrite(descriptor, COUNTER.pack(0), 0)
            self._bytes = mmap.mmap(descriptor, COUNTER.size)
        except OSError:
            return
        finally:
            os.close(descriptor)

    def set(self, value: int) -> None:
        """Overwrite the number."""
        if self._bytes is not None:
            COUNTER.pack_into(self._bytes, 0, value)

    def close(self) -> None:
        """Close the file."""
        if self._bytes is not None:
            self._bytes.close()


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    return True


def _rename(source: Path, target: Path) -> bool:
    try:
        source.replace(target)
    except FileNotFoundError:
        if source.exists():
            raise  # the target's folder is gone
        return False
    return True


def _make_folder(folder: Path) -> None:
    missing: list[Path] = []
    for ancestor in (folder, *folder.parents):
        if ancestor.is_dir():
            break
        missing.append(ancestor)
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        _sync_folder(made.parent)


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # a rival removed it again
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
