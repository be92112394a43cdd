"""A device is probed with the graph that it would run, whatever the cache still has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sits_dagster.adapters import prober, profiling
from sits_dagster.adapters.onnx_trace import TimedSession, TracedSession
from sits_dagster.adapters.prober import OnnxProber, calibrate_model
from sits_dagster.adapters.profile_cache import ProfileCache
from sits_dagster.adapters.profiler import ProfileOptions, profile_model
from sits_dagster.adapters.sandbox import SandboxLimits
from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.errors import ConfigError
from sits_dagster.models.arena import ExtendStrategy
from sits_dagster.models.linear import Linear
from sits_dagster.models.profile import ModelProfile
from tests.models.onnx_files import FLOAT, constant, model, node, relu, value

GIB = 1 << 30
CPU = Device(
    uuid="CPU-0",
    kind=DeviceKind.CPU,
    ordinal=0,
    name="a CPU",
    memory_bytes_total=16 * GIB,
    memory_bytes_limit=16 * GIB,
)
CARD = replace(CPU, uuid="GPU-0", kind=DeviceKind.CUDA, name="a card")
ROWS = (1, 8, 24)


@pytest.fixture
def cache(tmp_path: Path) -> ProfileCache:
    return ProfileCache(tmp_path / "cache")


@pytest.fixture
def convolutions(tmp_path: Path) -> Path:
    """Convolutions whose activations the CPU's optimised graph keeps in blocks."""
    random = np.random.default_rng(1)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []
    last, channels = "x", 3
    for at, out in enumerate((16, 32, 16)):
        weights.append(constant(f"w{at}", random.standard_normal((out, channels, 3, 3)) * 0.1))
        nodes += [
            node("Conv", [last, f"w{at}"], [f"c{at}"], pads=[1, 1, 1, 1]),
            node("Sigmoid", [f"c{at}"], [f"s{at}"]),
            node("Mul", [f"c{at}", f"s{at}"], ["y" if at == 2 else f"m{at}"]),
        ]
        last, channels = f"m{at}", out
    path = tmp_path / "m.onnx"
    proto = model(
        nodes, [value("x", FLOAT, ["N", 3, 48, 48])], [value("y", FLOAT, ["N", 16, 48, 48])], weights
    )
    onnx.save(proto, str(path))
    return path


def _held(path: Path, profile: ModelProfile, cache: ProfileCache) -> list[int]:
    found = OnnxProber(path, profile, CPU, cache=cache, seconds_per_batch=0).probe(ROWS)
    assert all(probe.seconds is None for probe in found)
    return [probe.bytes_held for probe in found]


def test_figures_do_not_depend_on_the_cache(tmp_path: Path, cache: ProfileCache, convolutions: Path) -> None:
    """Without the optimised graph the file is optimised for the probe, and not measured as it is."""
    profile = profile_model(convolutions, cache=cache)
    kept = _held(convolutions, profile, cache)
    assert kept == [profile.held(rows) for rows in ROWS]
    assert _held(convolutions, profile, ProfileCache(tmp_path / "empty")) == kept


def test_a_damaged_graph_is_forgotten(cache: ProfileCache, convolutions: Path) -> None:
    """The file itself is there: what is measured is as right, and nobody stumbles over the damage again."""
    profile = profile_model(convolutions, cache=cache)
    assert profile.runtime is not None
    kept = _held(convolutions, profile, cache)
    graph = cache.optimized(profile.digest, profile.runtime)
    assert graph is not None
    graph.write_bytes(graph.read_bytes()[:200])
    assert _held(convolutions, profile, cache) == kept
    assert cache.optimized(profile.digest, profile.runtime) is None


def test_a_card_is_probed_with_the_file_itself(
    monkeypatch: pytest.MonkeyPatch, cache: ProfileCache, convolutions: Path
) -> None:
    """The graph that was optimised for this CPU has kernels that no card has: it gets one of its own."""
    profile = profile_model(convolutions, cache=cache)
    opened: list[tuple[Path, DeviceKind, bool]] = []

    def traced(path: Path, device: Device, *, is_optimizing: bool) -> TracedSession:
        opened.append((path, device.kind, is_optimizing))
        return TracedSession(path, is_optimizing=is_optimizing)

    def timed(path: Path, device: Device, *, is_optimizing: bool) -> TimedSession:
        opened.append((path, device.kind, is_optimizing))
        return TimedSession(path, CPU, is_optimizing=is_optimizing)

    def run_here(target: str, request: Mapping[str, Any], **_: object) -> Any:
        return getattr(profiling, target.partition(":")[2])(request)

    monkeypatch.setattr(profiling, "TracedSession", traced)
    monkeypatch.setattr(profiling, "TimedSession", timed)
    monkeypatch.setattr(prober, "run_sandboxed", run_here)
    measured = OnnxProber(convolutions, profile, CARD, cache=cache, seconds_per_batch=0.01)
    assert measured.policy.strategy is ExtendStrategy.SAME_AS_REQUESTED
    assert [probe.rows for probe in measured.probe((1, 2))] == [1, 2]
    assert opened == [(convolutions, DeviceKind.CUDA, True)] * 3


def test_a_calibration_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: ProfileCache) -> None:
    """The second time no process is started; it holds for the device that was measured."""
    path = tmp_path / "m.onnx"
    onnx.save(relu(), str(path))
    found = calibrate_model(path, CPU, cache=cache)
    assert found.calibration is not None
    assert (found.calibration.device, set(found.calibration.probes)) == ("a CPU", {8, 16})
    assert found.time_model is not None
    with monkeypatch.context() as patch:
        patch.setattr(prober, "run_sandboxed", None)
        assert calibrate_model(path, CPU, cache=cache) == found
    other = calibrate_model(path, replace(CPU, name="another CPU"), cache=cache)
    assert other.calibration is not None
    assert other.calibration.device == "another CPU"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (ProfileOptions(is_run=False), "the model was not tried: its memory plan"),
        (ProfileOptions(running_seconds_max=0.01), "could not be tried: .* did not finish in 0.01 seconds"),
    ],
)
def test_a_model_that_was_not_tried_says_why(
    tmp_path: Path, cache: ProfileCache, options: ProfileOptions, reason: str
) -> None:
    """What is wrong is what the profile found, and not always a runtime that is missing."""
    path = tmp_path / "m.onnx"
    onnx.save(relu(), str(path))
    with pytest.raises(ConfigError, match=f"cannot be measured: .*{reason}"):
        calibrate_model(path, CPU, options, cache=cache)


def test_limits_follow_the_model(cache: ProfileCache, convolutions: Path) -> None:
    """A small one cannot take the machine; a large one is given time and memory, but not without end."""
    small = replace(profile_model(convolutions, cache=cache), kernels=())
    large = replace(small, file_bytes=2 * GIB)
    endless = replace(small, file_bytes=1 << 50)
    quick, roomy, most = (prober._limits(profile, (8, 16), 0.3) for profile in (small, large, endless))
    assert prober.MEMORY_BYTES_MIN <= quick.memory_bytes < prober.MEMORY_BYTES_MIN + GIB
    assert prober.DEADLINE_SECONDS_MIN <= quick.deadline_seconds < prober.DEADLINE_SECONDS_MIN + 10
    assert roomy.memory_bytes >= quick.memory_bytes + 4 * GIB
    assert roomy.deadline_seconds > quick.deadline_seconds + 60
    assert most == SandboxLimits(
        memory_bytes=prober.MEMORY_BYTES_MAX, deadline_seconds=prober.DEADLINE_SECONDS_MAX
    )
    slow = replace(
        small, kernels=(replace(profile_model(convolutions, cache=cache).kernels[0], flops=Linear(0, 1e10)),)
    )
    assert prober._limits(slow, (8, 16), 0.3).deadline_seconds > quick.deadline_seconds + 100
