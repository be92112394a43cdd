"""The pool of devices as Dagster builds it: providers, limits, and the lease behind it."""

import os
from pathlib import Path

import dagster as dg
import pydantic
import pytest

from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.errors import ConfigError, TransientError
from sits_dagster.resources.gpu_pool import GpuPoolResource, _cpu_name, usable_cores
from tests.data import nvml_stub
from tests.data.nvml_stub import GPU_A, GPU_B, IS_LOST

DEVICES = """
import os
from sits_dagster.errors import ConfigError
from sits_dagster.resources.gpu_pool import GpuPoolResource
try:
    found = GpuPoolResource(provider={provider!r}, watermark=0.5).devices()
    answer = [[d.kind, d.uuid, d.ordinal, d.memory_bytes_limit] for d in found]
except ConfigError as error:
    answer = str(error)
answer = [answer, os.environ.get("CUDA_DEVICE_ORDER")]
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


def devices(provider: str, library: Path | None, gpus: list[str], **variables: str) -> tuple:
    return nvml_stub.ask(DEVICES.format(provider=provider), library=library, gpus=gpus, **variables)


def pool(folder: Path, **fields: object) -> GpuPoolResource:
    return GpuPoolResource(**{"provider": "cpu", "lease_folder": str(folder), **fields})


def lease(resource: GpuPoolResource, owner: str, told: list[str] | None = None):
    return resource.lease(
        owner=owner, should_stop=lambda: False, on_wait=(told if told is not None else []).append
    )


@pytest.mark.parametrize("provider", ["auto", "nvml"])
def test_gpus_are_found_and_counted_by_bus(library: Path, provider: str) -> None:
    found, order = devices(provider, library, [GPU_A, GPU_B])
    assert [(kind, ordinal, limit) for kind, _, ordinal, limit in found] == [
        ("cuda", 0, 500),
        ("cuda", 1, 1000),
    ]
    assert order == "PCI_BUS_ID"


def test_gpus_that_cuda_hides_are_not_leased(library: Path) -> None:
    (found, _) = devices("nvml", library, [GPU_A, GPU_B], CUDA_VISIBLE_DEVICES="1")
    assert [(uuid[:8], ordinal, limit) for _, uuid, ordinal, limit in found] == [("GPU-aaaa", 0, 1000)]


def test_another_order_of_cuda_is_refused(library: Path) -> None:
    for provider in ("auto", "nvml"):
        message, _ = devices(provider, library, [GPU_A, GPU_B], CUDA_DEVICE_ORDER="FASTEST_FIRST")
        assert "CUDA_DEVICE_ORDER is 'FASTEST_FIRST'" in message


def test_cpu_stands_in_where_no_gpu_answers(library: Path) -> None:
    for gpus in ([], [f"{GPU_A}handle={IS_LOST}"]):
        found, order = devices("auto", library, gpus)
        assert [kind for kind, *_ in found] == ["cpu"]
        assert order is None


def test_gpus_that_were_asked_for_and_are_not_there_are_an_error(library: Path) -> None:
    message, _ = devices("nvml", library, [])
    assert message.startswith("There is no GPU that could be used. Hint: ")
    message, _ = devices("nvml", library, [f"{GPU_A}handle={IS_LOST}"])
    assert "GPU 0 does not answer and is left out: GPU is lost" in message
    message, _ = devices("nvml", library, [GPU_A], CUDA_VISIBLE_DEVICES="")
    assert "CUDA_VISIBLE_DEVICES='' hides every GPU" in message


def test_missing_driver_is_the_cpu_for_auto_and_an_error_for_nvml() -> None:
    found, _ = devices("auto", None, [])
    if found[0][0] == "cuda":
        pytest.skip("this host has NVIDIA's driver")
    assert [kind for kind, *_ in found] == ["cpu"]
    message, _ = devices("nvml", None, [])
    assert "management library does not answer" in message
    assert "Hint: " in message


def test_cpu_is_never_a_gpu_when_asked_for(library: Path) -> None:
    found, _ = devices("cpu", library, [GPU_A])
    assert [kind for kind, *_ in found] == ["cpu"]


def test_stand_in_is_the_same_each_time_and_limited() -> None:
    first, second = (
        GpuPoolResource(provider="cpu", cpu_memory_bytes=1001, watermark=0.5).devices()[0] for _ in "ab"
    )
    assert first == second
    assert first == Device(
        uuid=first.uuid,
        kind=DeviceKind.CPU,
        ordinal=0,
        name=_cpu_name(),
        memory_bytes_total=1001,
        memory_bytes_limit=500,
    )
    assert first.uuid.startswith("CPU-")
    assert first.name


def test_threads_are_the_usable_cores() -> None:
    assert GpuPoolResource().threads == usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("provider", "gpu", "'auto', 'nvml' or 'cpu'"),
        ("cpu_memory_bytes", 0, "greater than 0"),
        ("watermark", 0, "greater than 0"),
        ("watermark", 1.01, "less than or equal to 1"),
        ("slots_per_device", 0, "greater than or equal to 1"),
        ("threads", 0, "greater than or equal to 1"),
        ("lease_seconds_max", -1, "greater than or equal to 0"),
        ("lease_seconds_max", float("inf"), "finite"),
    ],
)
def test_impossible_settings_are_refused(field: str, value: object, says: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=says) as caught:
        GpuPoolResource(**{field: value})
    assert field in str(caught.value)


def test_every_field_is_described_for_the_user() -> None:
    assert all(field.description for field in GpuPoolResource.model_fields.values())


def test_lease_as_dagster_runs_it(tmp_path: Path) -> None:
    told: list[str] = []
    resource = pool(tmp_path, lease_seconds_max=0.2)
    with resource.yield_for_execution(dg.build_init_resource_context()) as ready:
        with lease(ready, "run 1") as held:
            assert held == ready.devices()[0]
            with pytest.raises(TransientError, match="run 1"), lease(ready, "run 2", told):
                pytest.fail("held twice")
        assert "run 1" in told[0]
        with lease(ready, "run 3"):
            pass


def test_two_slots_let_two_runs_in(tmp_path: Path) -> None:
    assert pool(tmp_path, slots_per_device=2).devices()[0].memory_bytes_limit == (
        pool(tmp_path).devices()[0].memory_bytes_limit // 2
    )
    resource = pool(tmp_path, slots_per_device=2, lease_seconds_max=0)
    with lease(resource, "run 1") as one, lease(resource, "run 2") as two:
        assert one == two
        with pytest.raises(TransientError), lease(resource, "run 3"):
            pytest.fail("held by three")


def test_folder_is_the_users_own_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with lease(GpuPoolResource(provider="cpu"), "run 1"):
        assert [path.name for path in tmp_path.iterdir()] == [f"sits-leases-{os.getuid()}"]


def test_pool_in_an_asset(tmp_path: Path) -> None:
    @dg.asset
    def labels(gpu_pool: GpuPoolResource) -> str:
        with lease(gpu_pool, "labels") as held:
            return held.kind.value

    result = dg.materialize(
        [labels],
        resources={"gpu_pool": pool(tmp_path)},
        run_config={"resources": {"gpu_pool": {"config": {"cpu_memory_bytes": 5 << 30, "threads": 1}}}},
    )
    assert result.output_for_node("labels") == "cpu"


def test_misplaced_provider_is_refused_before_the_run(tmp_path: Path) -> None:
    @dg.asset
    def labels(gpu_pool: GpuPoolResource) -> None: ...

    with pytest.raises(dg.DagsterInvalidConfigError):
        dg.materialize(
            [labels],
            resources={"gpu_pool": pool(tmp_path)},
            run_config={"resources": {"gpu_pool": {"config": {"provider": "tpu"}}}},
        )


def test_error_of_the_driver_reaches_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        msg = "the driver sleeps"
        raise ConfigError(msg)

    monkeypatch.setattr("sits_dagster.resources.gpu_pool.read_devices", fail)
    with (
        pytest.raises(ConfigError, match="the driver sleeps"),
        lease(pool(tmp_path, provider="nvml"), "run 1"),
    ):
        pytest.fail("leased nothing")
