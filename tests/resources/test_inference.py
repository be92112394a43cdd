"""The data plane's limits as a user sets them."""

import dataclasses
from typing import Any

import dagster as dg
import pydantic
import pytest

from sits_dagster import GpuPoolResource, InferenceResource, StorageResource
from sits_dagster.inference.policy import PipelinePolicy

OF_THE_STEP = {"batch_rows_max", "measuring_seconds_max", "progress_seconds", "retries_max"}


def test_defaults_are_those_of_the_data_plane() -> None:
    """Without settings the data plane's own defaults hold."""
    assert InferenceResource().policy() == PipelinePolicy()


@pytest.mark.parametrize("name", sorted(set(InferenceResource.model_fields) - OF_THE_STEP))
def test_each_setting_reaches_the_data_plane(name: str) -> None:
    """What a user sets is what the data plane gets, and nothing else changes."""
    before = getattr(InferenceResource(), name)
    value = (getattr(PipelinePolicy(), name) if before is None else before) + 1
    policy = InferenceResource(**{name: value}).policy()
    assert policy == dataclasses.replace(PipelinePolicy(), **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_rows", 0),
        ("batch_rows", -1),
        ("batch_rows", 2.5),
        ("batch_rows_max", 0),
        ("measuring_seconds_max", 0),
        ("segment_seconds", -0.1),
        ("encode_workers", 0),
        ("decode_workers", 0),
        ("chunk_rows", 0),
        ("window_rows", 0),
        ("queue_bytes", 0),
        ("rows_quarantined_max", -1),
        ("shard_seconds_min", -1),
        ("shards_max", 0),
        ("stall_seconds_max", 0),
        ("progress_seconds", 0),
        ("retries_max", -1),
    ],
)
def test_senseless_value_is_refused(name: str, value: Any) -> None:
    """A value out of its range is refused when the resource is made, with the field's name."""
    with pytest.raises(pydantic.ValidationError, match=name):
        InferenceResource(**{name: value})


def test_least_values_are_taken() -> None:
    """The smallest values that are allowed make a policy."""
    policy = InferenceResource(segment_seconds=0, rows_quarantined_max=0, shard_seconds_min=0).policy()
    assert (policy.segment_seconds, policy.rows_quarantined_max, policy.shard_seconds_min) == (0, 0, 0)


@pytest.mark.parametrize("resource", [InferenceResource, StorageResource, GpuPoolResource])
def test_misspelt_setting_is_refused(resource: type[dg.ConfigurableResource]) -> None:
    """A misspelt setting is an error that names it, not ignored."""
    with pytest.raises(pydantic.ValidationError, match="batch_row\\n"):
        resource(batch_row=3)


def test_fields_are_described() -> None:
    """Each field has a description, which is the help in Dagster's UI."""
    assert [name for name, field in InferenceResource.model_fields.items() if not field.description] == []
