"""A child process that is given one order and asked for one reply, and never waited for in vain."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import IO

from sits_dagster.errors import InvariantError, TransientError

__all__ = ["OUTPUT_BYTES_MAX", "Ending", "Reason", "converse", "printable"]

CHILD = Path(__file__).resolve().with_name("sandbox_child.py")
OUTPUT_BYTES_MAX = 16 * 2**10
READ_BYTES = 2**16
DRAIN_READS_MAX = 64
POLL_SECONDS = 0.05
EXIT_SECONDS_MAX = 1.0
KILL_SECONDS_MAX = 5.0
RETRY_AFTER_SECONDS = 30.0


class Reason(Enum):
    """Why a conversation was over."""

    ENDED = auto()
    LATE = auto()
    TOO_LARGE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a child ended: its reply, the tail of its output, and its exit code (a signal if negative)."""

    reason: Reason
    reply: bytes
    output: str
    exit_code: int | None


def converse(target: str, order: bytes, *, deadline_seconds: float, reply_bytes_max: int) -> Ending:
    """Return how a child that got the order ended; nothing is left of it, whatever happened.

    Raises:
        TransientError: No process could be started.
    """
    deadline = time.monotonic() + deadline_seconds
    with _child(target) as (process, reply):
        talk = _Talk(process, reply, order=order, reply_bytes_max=reply_bytes_max)
        reason = talk.until(deadline)
        if reason is Reason.ENDED:
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_SECONDS_MAX)
        _end(process)
        return Ending(
            reason=Reason.TOO_LARGE if talk.drain() else reason,
            reply=bytes(talk.reply),
            output=printable(talk.output.decode(errors="replace")).strip(),
            exit_code=process.returncode,
        )


@contextmanager
def _child(target: str) -> Generator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Start the child in a folder of its own; afterwards both and all pipes are gone."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="sits-sandbox-", ignore_cleanup_errors=True)
            )
            reading, writing = os.pipe()
            reply = stack.enter_context(open(reading, "rb", buffering=0))  # noqa: PTH123 - a descriptor
            with open(writing, "wb", buffering=0):  # noqa: PTH123 - a descriptor
                process = subprocess.Popen(  # noqa: S603 - our own program
                    [sys.executable, "-I", str(CHILD), target, str(writing), str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    cwd=folder,
                    env={**os.environ, "TMPDIR": folder},
                    pass_fds=(writing,),
                    start_new_session=True,
                )
                stack.callback(_close, process)
        except OSError as error:
            msg = f"No process could be started for {target}: {error}."
            hint = "free memory, processes or space for temporary files."
            raise TransientError(msg, retry_after_seconds=RETRY_AFTER_SECONDS, hint=hint) from error
        yield process, reply


class _Talk:
    """One order given and one reply received, without ever waiting for a child that does not take part."""

    def __init__(
        self, process: subprocess.Popen[bytes], reply: IO[bytes], *, order: bytes, reply_bytes_max: int
    ) -> None:
        self.reply = bytearray()
        self.output = bytearray()
        self._process = process
        self._order = memoryview(order)
        self._reply_bytes_max = reply_bytes_max
        self._reply_descriptor = reply.fileno()
        self._output_descriptor = _descriptor(process.stdout)
        self._order_descriptor = _descriptor(process.stdin)
        for descriptor in (self._reply_descriptor, self._output_descriptor, self._order_descriptor):
            os.set_blocking(descriptor, False)

    def until(self, deadline: float) -> Reason:
        """Talk until the reply is there, the child is gone or the moment of `time.monotonic` has come."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._reply_descriptor, selectors.EVENT_READ, self._read_reply)
            selector.register(self._output_descriptor, selectors.EVENT_READ, self._read_output)
            selector.register(self._order_descriptor, selectors.EVENT_WRITE, self._write_order)
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(min(left, POLL_SECONDS)):
                    if key.data():
                        continue
                    selector.unregister(key.fd)
                    # A crash closes it too, before the child can be seen to be gone.
                    if key.fd == self._reply_descriptor and self.reply:
                        return Reason.ENDED
                if self.is_too_large:
                    return Reason.TOO_LARGE
                # Something that it started may keep its pipes open.
                if self._process.poll() is not None:
                    return Reason.ENDED
        return Reason.LATE

    def drain(self) -> bool:
        """Read what a dead child left in its pipes; returns whether the reply is too large."""
        for read in (self._read_reply, self._read_output):
            # Something that escaped may go on writing.
            for _ in range(DRAIN_READS_MAX):
                if not read():
                    break
        return self.is_too_large

    @property
    def is_too_large(self) -> bool:
        """Whether the reply exceeds its limit; no more than one read beyond it is kept."""
        return len(self.reply) > self._reply_bytes_max

    def _read_reply(self) -> bool:
        data = _read(self._reply_descriptor)
        if not self.is_too_large:
            self.reply += data or b""
        return data is None or bool(data)

    def _read_output(self) -> bool:
        data = _read(self._output_descriptor)
        self.output += data or b""
        del self.output[:-OUTPUT_BYTES_MAX]
        return data is None or bool(data)

    def _write_order(self) -> bool:
        try:
            self._order = self._order[os.write(self._order_descriptor, self._order[:READ_BYTES]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:  # it died before it listened
            return False
        return bool(self._order)


def _read(descriptor: int) -> bytes | None:
    """Return the next bytes, nothing at the end, or `None` where there are none yet."""
    try:
        return os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return None


def _descriptor(pipe: IO[bytes] | None) -> int:
    if pipe is None:
        msg = "A pipe to the sandbox is missing."
        raise InvariantError(msg)
    return pipe.fileno()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the child and its whole process group; a process that the kernel cannot end is left to it."""
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses for a group of the dead
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS_MAX)


def _close(process: subprocess.Popen[bytes]) -> None:
    try:
        if process.returncode is None:
            _end(process)
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def printable(text: str) -> str:
    """Return at most `OUTPUT_BYTES_MAX` characters, with those written out that would steer a terminal."""
    shown = "".join(
        letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1]
        for letter in text[:OUTPUT_BYTES_MAX]
    )
    return shown if len(text) <= OUTPUT_BYTES_MAX else f"{shown}…"
