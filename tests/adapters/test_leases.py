"""Leases among real processes: one holder a slot, freed by the kernel, and messages that name the holder."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sits_dagster.adapters import leases
from sits_dagster.adapters.leases import LeaseCancelled, LeaseHolder, lease_device
from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.errors import ConfigError, TransientError

ROOT = Path(__file__).resolve().parents[2]
ANSWER_SECONDS_MAX = 30
HOLD = """
import sys
from tests.adapters.test_leases import device
from sits_dagster.adapters.leases import lease_device

folder, owner, slots, wait, *uuids = sys.argv[1:]
with lease_device([device(uuid) for uuid in uuids], folder=folder, slots_per_device=int(slots), owner=owner,
                  wait_seconds_max=float(wait), on_wait=lambda message: print("wait", flush=True)) as held:
    print(held.uuid, flush=True)
    sys.stdin.readline()
print("released", flush=True)
"""


def device(uuid: str) -> Device:
    return Device(
        uuid=uuid, kind=DeviceKind.CPU, ordinal=0, name="stand-in", memory_bytes_total=2, memory_bytes_limit=1
    )


class Holder:
    """A process that holds a lease until it is told to let go."""

    def __init__(self, folder: Path, owner: str, *uuids: str, slots: int = 1, wait: float = 0) -> None:
        command = [sys.executable, "-c", HOLD, str(folder), owner, str(slots), str(wait), *uuids]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def says(self) -> str:
        return self.process.stdout.readline().strip()

    def let_go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=ANSWER_SECONDS_MAX)


@pytest.fixture(autouse=True)
def _nothing_stays_locked() -> Iterator[None]:
    yield
    assert leases._held == set()


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    with contextlib.ExitStack() as stack:

        def begin(owner: str, *uuids: str, **options: float) -> Holder:
            holder = Holder(tmp_path, owner, *uuids, **options)
            stack.callback(holder.close)
            return holder

        yield begin


def take(folder: Path, *uuids: str, **options: object) -> contextlib.AbstractContextManager[Device]:
    options = {"slots_per_device": 1, "owner": "me", "wait_seconds_max": 0, **options}
    return lease_device([device(uuid) for uuid in uuids], folder=folder, **options)


def test_second_process_waits_for_the_first(start) -> None:
    first = start("run 1", "GPU-a")
    assert first.says() == "GPU-a"
    second = start("run 2", "GPU-a", wait=ANSWER_SECONDS_MAX)
    assert second.says() == "wait"
    assert second.process.poll() is None
    first.let_go()
    assert (first.says(), second.says()) == ("released", "GPU-a")


def test_killed_holder_frees_the_slot(start, tmp_path: Path) -> None:
    holder = start("run 1", "GPU-a")
    assert holder.says() == "GPU-a"
    with pytest.raises(TransientError), take(tmp_path, "GPU-a"):
        pytest.fail("held twice")
    holder.process.send_signal(signal.SIGKILL)
    with take(tmp_path, "GPU-a", wait_seconds_max=ANSWER_SECONDS_MAX) as held:
        assert held.uuid == "GPU-a"
        text = (tmp_path / "GPU-a.0.lock").read_text(encoding="utf-8")
        assert json.loads(text)["pid"] == os.getpid()


def test_time_out_names_the_holder(start, tmp_path: Path) -> None:
    holder = start("run 'night' of asset labels", "GPU-a")
    assert holder.says() == "GPU-a"
    began = time.monotonic()
    with pytest.raises(TransientError) as caught, take(tmp_path, "GPU-a", wait_seconds_max=0.3):
        pytest.fail("held twice")
    assert 0.3 <= time.monotonic() - began < 10
    message = caught.value.message
    assert f"GPU-a slot 0: run 'night' of asset labels (pid {holder.process.pid}) since 20" in message
    assert "0.3 seconds" in message
    assert "lease_seconds_max" in caught.value.hint
    assert caught.value.retry_after_seconds > 0


def test_wait_is_told_once(start, tmp_path: Path) -> None:
    assert start("run 1", "GPU-a").says() == "GPU-a"
    told: list[str] = []
    with (
        pytest.raises(TransientError),
        take(tmp_path, "GPU-a", wait_seconds_max=0.5, on_wait=told.append),
    ):
        pytest.fail("held twice")
    assert len(told) == 1
    assert "run 1" in told[0]


def test_free_device_is_had_without_a_word(tmp_path: Path) -> None:
    told: list[str] = []
    with take(tmp_path, "GPU-a", on_wait=told.append, should_stop=lambda: True) as held:
        assert held == device("GPU-a")
    assert told == []


def test_request_to_stop_ends_the_wait(tmp_path: Path) -> None:
    asked = iter([False, True])
    with (
        take(tmp_path, "GPU-a"),
        pytest.raises(LeaseCancelled, match="me was told to stop"),
        take(tmp_path, "GPU-a", wait_seconds_max=ANSWER_SECONDS_MAX, should_stop=lambda: next(asked)),
    ):
        pytest.fail("held twice")
    with take(tmp_path, "GPU-a"):
        pass


def test_limit_is_measured_by_the_given_clock(tmp_path: Path) -> None:
    ticks = iter([0.0, 3599.9, 3600.0])
    with (
        take(tmp_path, "GPU-a"),
        pytest.raises(TransientError, match="3600 seconds"),
        take(tmp_path, "GPU-a", wait_seconds_max=3600, clock=lambda: next(ticks)),
    ):
        pytest.fail("held twice")


def test_two_slots_let_two_in(start, tmp_path: Path) -> None:
    holders = [start(f"run {i}", "GPU-a", slots=2) for i in range(2)]
    assert [holder.says() for holder in holders] == ["GPU-a", "GPU-a"]
    with pytest.raises(TransientError) as caught, take(tmp_path, "GPU-a", slots_per_device=2):
        pytest.fail("held by three")
    assert "run 0" in caught.value.message
    assert "run 1" in caught.value.message


def test_leases_spread_over_devices(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        held = [
            stack.enter_context(take(tmp_path, "GPU-a", "GPU-b", "GPU-c", slots_per_device=2)).uuid
            for _ in range(6)
        ]
    assert held == ["GPU-a", "GPU-b", "GPU-c"] * 2


def test_emptiest_device_is_taken_first(tmp_path: Path) -> None:
    def enter(*uuids: str) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(take(tmp_path, *uuids, slots_per_device=2))
        return stack

    with contextlib.ExitStack() as stack:
        first = enter("GPU-a")
        for uuid in ("GPU-a", "GPU-b"):
            stack.enter_context(enter(uuid))
        first.close()  # slot 0 of GPU-a is free, slot 1 is held
        stack.enter_context(enter("GPU-b"))
        assert stack.enter_context(take(tmp_path, "GPU-b", "GPU-a", slots_per_device=2)).uuid == "GPU-a"


def test_many_threads_never_share_a_slot(tmp_path: Path) -> None:
    inside: list[str] = []
    most: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        with take(tmp_path, "GPU-a", "GPU-b", wait_seconds_max=ANSWER_SECONDS_MAX) as held:
            with lock:
                inside.append(held.uuid)
                most.append(len(inside))
                assert len(set(inside)) == len(inside)
            time.sleep(0.01)
            with lock:
                inside.remove(held.uuid)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ANSWER_SECONDS_MAX)
    assert len(most) == 8
    assert max(most) == 2


def test_free_slot_is_found_though_another_chooses(tmp_path: Path) -> None:
    """A process that tries once is not sent away because another one looks at the same moment."""
    tmp_path.mkdir(exist_ok=True)
    guard = leases._try_lock(tmp_path / leases.GUARD_FILE)
    timer = threading.Timer(0.1, leases._release, [guard])
    timer.start()
    with take(tmp_path, "GPU-a") as held:
        assert held.uuid == "GPU-a"
    timer.join()


def test_chooser_that_was_stopped_blocks_nobody_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "GUARD_SECONDS_MAX", 0.02)
    guard = leases._try_lock(tmp_path / leases.GUARD_FILE)
    with pytest.raises(TransientError, match="unknown process"), take(tmp_path, "GPU-a"):
        pytest.fail("chose without the guard")
    leases._release(guard)


def test_forked_child_does_not_keep_the_lease_of_a_killed_parent(tmp_path: Path) -> None:
    code = HOLD.replace("print(held.uuid, flush=True)", "os.write(1, b'%d\\n' % os.fork())")
    command = [sys.executable, "-c", "import os\n" + code, str(tmp_path), "run 1", "1", "0", "GPU-a"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        child = max(int(parent.stdout.readline()) for _ in range(2))  # each of them says one; 0 in the child
        try:
            parent.kill()
            parent.wait(ANSWER_SECONDS_MAX)
            os.kill(child, 0)
            with take(tmp_path, "GPU-a", wait_seconds_max=5) as held:
                assert held.uuid == "GPU-a"
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_lease_ends_when_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), take(tmp_path, "GPU-a"):
        _ = 1 / 0
    assert (tmp_path / "GPU-a.0.lock").read_bytes() == b""
    with take(tmp_path, "GPU-a"):
        pass


def test_no_device_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no device"), take(tmp_path, wait_seconds_max=3600):
        pytest.fail("leased nothing")
    with pytest.raises(ConfigError, match="slots_per_device is 0"), take(tmp_path, "a", slots_per_device=0):
        pytest.fail("leased nothing")


def test_folder_that_cannot_hold_locks_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="Cannot keep leases") as caught, take(file, "GPU-a"):
        pytest.fail("leased nothing")
    assert "lease_folder" in caught.value.hint


def test_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious", encoding="utf-8")
    (tmp_path / "GPU-a.0.lock").symlink_to(target)
    with pytest.raises(ConfigError), take(tmp_path, "GPU-a"):
        pytest.fail("leased nothing")
    assert target.read_text(encoding="utf-8") == "precious"


def test_identity_with_odd_letters_stays_in_the_folder(tmp_path: Path) -> None:
    with take(tmp_path, "../CPU of ü"):
        assert {path.name for path in tmp_path.iterdir()} == {".._CPU_of__.0.lock", leases.GUARD_FILE}


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"owner": "x"}', '{"owner":"x","pid":"y","since":""}'])
def test_holder_that_cannot_be_read_is_unknown(text: str) -> None:
    assert LeaseHolder.from_json(text) is None


def test_holder_reads_what_it_wrote() -> None:
    holder = LeaseHolder(owner="run ü", pid=7, since="2030-01-02T03:04:05+00:00")
    assert LeaseHolder.from_json(holder.to_json()) == holder
    assert str(holder) == "run ü (pid 7) since 2030-01-02T03:04:05+00:00"


def test_message_is_bounded(tmp_path: Path) -> None:
    uuids = [f"GPU-{index}" for index in range(20)]
    with contextlib.ExitStack() as stack:
        for _ in uuids:
            stack.enter_context(take(tmp_path, *uuids))
        with pytest.raises(TransientError, match="and 12 more"), take(tmp_path, *uuids):
            pytest.fail("held twice")
