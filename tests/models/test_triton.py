"""Which versions are served, which shapes a model meets, and what a repository is warned of."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_dagster.models.triton import (
    DynamicBatching,
    EnsembleStep,
    InstanceGroup,
    InstanceKind,
    TritonModel,
    TritonRepository,
    TritonTensor,
    TritonVersion,
    VersionPolicy,
    repository_warnings,
)

versions = st.sets(st.integers(1, 1 << 62), max_size=8)


def _tensor(name: str, *dims: int | None, **options: Any) -> TritonTensor:
    return TritonTensor(name=name, dtype="float32", dims=dims, **options)


def _model(name: str = "m", **options: Any) -> TritonModel:
    base = TritonModel(
        name=name,
        folder=name,
        platform="onnxruntime_onnx",
        backend="onnxruntime",
        filename="model.onnx",
        max_batch_size=8,
        inputs=(_tensor("x", 4),),
        outputs=(_tensor("y", 4),),
        version_numbers=(1,),
        versions=(TritonVersion(number=1, path=Path("1/model.onnx")),),
    )
    return replace(base, **options)


def _ensemble(name: str, *steps: EnsembleStep, **options: Any) -> TritonModel:
    values = {"platform": "ensemble", "backend": "", "filename": "", "steps": steps}
    return _model(name, **(values | {"versions": (TritonVersion(number=1, path=None),)} | options))


def _step(model: str, version: int | None = None, **wires: dict[str, str]) -> EnsembleStep:
    wires = {"inputs": {"x": "x"}, "outputs": {"y": "y"}} | wires
    return EnsembleStep(model=model, version=version, **wires)


def _warnings(*models: TritonModel, **options: Any) -> tuple[str, ...]:
    return repository_warnings(TritonRepository(path=Path("r"), models=models), **options)


@given(found=versions, newest=st.integers(0, 9))
def test_the_newest_versions_are_those_with_the_greatest_numbers(found: set[int], newest: int) -> None:
    chosen = VersionPolicy(newest=newest).choose(found)
    assert list(chosen) == sorted(chosen)
    assert len(chosen) == min(newest, len(found))
    assert all(other <= min(chosen) for other in found - set(chosen) if chosen)


@given(found=versions, wanted=versions)
def test_specific_versions_are_served_where_they_exist(found: set[int], wanted: set[int]) -> None:
    policy = VersionPolicy(newest=0, numbers=tuple(wanted))
    assert policy.choose(found) == tuple(sorted(found & wanted))


def test_by_default_the_newest_version_is_served_and_all_when_asked() -> None:
    assert VersionPolicy().choose({9, 10, 2}) == (10,)
    assert VersionPolicy(newest=None).choose({9, 10, 2}) == (2, 9, 10)


def test_a_batch_axis_comes_first_only_where_batches_are_allowed() -> None:
    image = _tensor("x", 3, None)
    assert _model(max_batch_size=8).graph_shape(image) == (None, 3, None)
    assert _model(max_batch_size=0).graph_shape(image) == (3, None)


def test_the_model_meets_the_reshaped_tensor() -> None:
    score = _tensor("y", 1, reshape=())
    assert _model(max_batch_size=8).graph_shape(score) == (None,)
    assert _model(max_batch_size=0).graph_shape(score) == ()


def test_a_shape_tensor_takes_the_batch_size_as_one_more_value() -> None:
    shape = _tensor("s", 2, is_shape_tensor=True)
    assert _model(max_batch_size=8).graph_shape(shape) == (3,)
    assert _model(max_batch_size=0).graph_shape(shape) == (2,)


def test_a_model_is_found_by_name() -> None:
    repository = TritonRepository(path=Path("r"), models=(_model("a"), _model("b")))
    assert repository.find("b") is repository.models[1]
    assert repository.find("c") is None


def test_a_sound_repository_has_no_warnings() -> None:
    steps = (_step("a", outputs={"y": "t"}), _step("b", 1, inputs={"x": "t"}))
    group = InstanceGroup(kind=InstanceKind.GPU, count=1, gpus=(0, 1))
    batching = DynamicBatching(preferred_batch_sizes=(4, 8), max_queue_delay_microseconds=100)
    model = _model("a", instance_groups=(group,), dynamic_batching=batching)
    assert _warnings(model, _model("b"), _ensemble("e", *steps), gpus={0, 1}) == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"folder": "other"}, "folder 'other'"),
        ({"version_numbers": (), "versions": ()}, "no numeric version folder"),
        ({"version_policy": VersionPolicy(newest=0, numbers=(1, 7))}, r"versions \[7\]"),
        ({"version_policy": VersionPolicy(newest=0), "versions": ()}, "serves no version"),
        ({"backend": "", "platform": ""}, "names no backend"),
        ({"versions": (TritonVersion(number=3, path=None),)}, "no file 'model.onnx' in version 3"),
        ({"max_batch_size": -1}, "max_batch_size -1"),
        ({"max_batch_size": 0, "dynamic_batching": DynamicBatching()}, "no batch axis"),
        ({"dynamic_batching": DynamicBatching(preferred_batch_sizes=(4, 16))}, "batches of 16 rows"),
        ({"dynamic_batching": DynamicBatching(preferred_batch_sizes=(0,))}, "batches of 0 rows"),
        ({"sequence_batching": True}, "depend on each other"),
        ({"inputs": (_tensor("x", 4, 0),)}, "'x' with the dims"),
    ],
)
def test_one_fault_is_one_warning_that_names_the_model(options: dict[str, Any], words: str) -> None:
    (warning,) = _warnings(_model(**options))
    assert warning.startswith("Model 'm' ")
    assert re.search(words, warning)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([InstanceGroup(kind=InstanceKind.GPU, count=3)], ["3 instances on every GPU"]),
        ([InstanceGroup(kind=InstanceKind.AUTO, count=2, gpus=(1,))], ["2 instances on GPU 1"]),
        (
            [
                InstanceGroup(kind=InstanceKind.GPU, count=1, gpus=(0,)),
                InstanceGroup(kind=InstanceKind.GPU, count=1),
            ],
            ["2 instances on GPU 0"],
        ),
        ([InstanceGroup(kind=InstanceKind.CPU, count=9)], []),
        ([InstanceGroup(kind=InstanceKind.CPU, count=1, gpus=(0,))], ["names GPUs"]),
        ([InstanceGroup(kind=InstanceKind.GPU, count=1, gpus=(0, 5))], [r"GPUs \[5\], which are not there"]),
    ],
)
def test_instances_that_share_a_gpu_are_counted_together(
    groups: list[InstanceGroup], words: list[str]
) -> None:
    found = _warnings(_model(instance_groups=tuple(groups)), gpus={0, 1})
    assert len(found) == len(words)
    for warning, pattern in zip(found, words, strict=True):
        assert re.search(pattern, warning)


def test_gpus_are_not_checked_where_nobody_says_which_there_are() -> None:
    group = InstanceGroup(kind=InstanceKind.GPU, count=1, gpus=(7,))
    assert _warnings(_model(instance_groups=(group,))) == ()


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (_step("gone"), "'gone'.*not in the repository"),
        (_step("m", 2), "version 2, which is not served"),
        (_step("m", inputs={"x": "x", "z": "x"}), "input 'z', which it lacks"),
        (_step("m", inputs={}), "leaves the input 'x' empty"),
        (_step("m", outputs={"y": "y", "z": "t"}), "output 'z', which it lacks"),
        (_step("m", inputs={"x": "t"}), "tensor 't', which nothing makes"),
        (_step("m", outputs={}), "returns the tensor 'y', which nothing makes"),
        (_step("m", outputs={"y": "x"}), "'x' more than once"),
    ],
)
def test_a_step_that_does_not_fit_is_named(step: EnsembleStep, words: str) -> None:
    assert re.search(words, "\n".join(_warnings(_model(), _ensemble("e", step))))


def test_an_optional_input_may_stay_empty() -> None:
    model = _model(inputs=(_tensor("x", 4), _tensor("mask", 4, optional=True)))
    assert _warnings(model, _ensemble("e", _step("m"))) == ()


def test_a_model_that_leaves_its_tensors_to_the_file_is_not_judged_by_them() -> None:
    model = _model(inputs=(), outputs=(), max_batch_size=0, dynamic_batching=DynamicBatching())
    assert model.is_completed
    assert _warnings(model, _ensemble("e", _step("m", inputs={"anything": "x"}))) == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": ()}, "without steps"),
        ({"backend": "python"}, "its backend empty"),
        ({"instance_groups": (InstanceGroup(kind=InstanceKind.GPU, count=1),)}, "belong to the models"),
        ({"max_batch_size": 16}, "8 rows at most, the ensemble 16"),
        ({"version_numbers": ()}, "even for an ensemble"),
    ],
)
def test_an_ensemble_that_triton_refuses_is_named(options: dict[str, Any], words: str) -> None:
    assert re.search(words, "\n".join(_warnings(_model(), _ensemble("e", _step("m"), **options))))


def test_ensembles_in_a_circle_are_named_in_the_order_of_their_need() -> None:
    models = [_ensemble("a", _step("b")), _ensemble("b", _step("c")), _ensemble("c", _step("a")), _model("d")]
    (circle,) = [text for text in _warnings(*models) if "circle" in text]
    assert any(order in circle for order in ("a > b > c > a", "b > c > a > b", "c > a > b > c"))


def test_an_ensemble_that_names_itself_is_a_circle() -> None:
    assert any("a > a" in text for text in _warnings(_ensemble("a", _step("a"))))


def test_a_model_may_serve_two_ensembles() -> None:
    assert (
        _warnings(
            _model(), _ensemble("a", _step("m")), _ensemble("b", _step("a"), _step("m", outputs={"y": "t"}))
        )
        == ()
    )
