"""The nightly schedule: which partition, which tags, and the deadline on the wall's clock."""

from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import dagster as dg
import pytest

from sits_dagster import build_nightly_schedule
from sits_dagster.errors import ConfigError

BERLIN = ZoneInfo("Europe/Berlin")
DAILY = dg.DailyPartitionsDefinition("2026-01-01")


def _asset(name: str = "scores", partitions_def: Any = DAILY) -> dg.AssetsDefinition:
    @dg.asset(name=name, partitions_def=partitions_def)
    def asset() -> None: ...

    return asset


def _tick(schedule: dg.ScheduleDefinition, at: datetime, *assets: dg.AssetsDefinition) -> Any:
    """Return what Dagster's daemon gets from a tick."""
    definitions = dg.Definitions(assets=assets or [_asset()], schedules=[schedule])
    repository = definitions.get_repository_def()
    with dg.build_schedule_context(scheduled_execution_time=at, repository_def=repository) as context:
        return schedule.evaluate_tick(context)


def _request(schedule: dg.ScheduleDefinition, at: datetime, *assets: dg.AssetsDefinition) -> dg.RunRequest:
    [request] = _tick(schedule, at, *assets).run_requests
    return request


def test_tick_requests_the_newest_finished_partition() -> None:
    """At 02:00 the day that has just ended is requested, once, before backfills, without a deadline."""
    schedule = build_nightly_schedule([_asset()], at="02:00")
    request = _request(schedule, datetime(2026, 3, 10, 2, 0, tzinfo=UTC))
    assert request.partition_key == request.run_key == "2026-03-09"
    assert request.tags["sits/class"] == "batch"
    assert int(request.tags["dagster/priority"]) > 0
    assert "sits/deadline" not in request.tags


def test_late_tick_still_requests_its_own_night() -> None:
    """A tick that runs days late, as after an outage, asks for the partition of its scheduled time."""
    schedule = build_nightly_schedule([_asset()], at="02:00")
    assert _request(schedule, datetime(2026, 1, 5, 2, 0, tzinfo=UTC)).partition_key == "2026-01-04"


@pytest.mark.parametrize(
    ("at", "deadline", "tick", "expected"),
    [
        ("02:00", "06:00", datetime(2026, 1, 15, 2, tzinfo=BERLIN), "2026-01-15T06:00:00+01:00"),
        ("22:30", "06:00", datetime(2026, 1, 15, 22, 30, tzinfo=BERLIN), "2026-01-16T06:00:00+01:00"),
        ("06:00", "06:00", datetime(2026, 1, 15, 6, tzinfo=BERLIN), "2026-01-16T06:00:00+01:00"),
        ("23:00", "06:00", datetime(2026, 3, 28, 23, tzinfo=BERLIN), "2026-03-29T06:00:00+02:00"),
        ("01:00", "06:00", datetime(2026, 3, 29, 1, tzinfo=BERLIN), "2026-03-29T06:00:00+02:00"),
        ("23:00", "06:00", datetime(2026, 10, 24, 23, tzinfo=BERLIN), "2026-10-25T06:00:00+01:00"),
        ("01:00", "06:00", datetime(2026, 10, 25, 1, tzinfo=BERLIN), "2026-10-25T06:00:00+01:00"),
        ("02:00", "06:00", datetime(2026, 12, 31, 2, tzinfo=BERLIN), "2026-12-31T06:00:00+01:00"),
        ("23:00", "06:00", datetime(2026, 12, 31, 23, tzinfo=BERLIN), "2027-01-01T06:00:00+01:00"),
    ],
)
def test_deadline_is_the_next_such_time(at: str, deadline: str, tick: datetime, expected: str) -> None:
    """The deadline is the next such time on the wall's clock, also over a change of the clocks."""
    schedule = build_nightly_schedule([_asset()], at=at, deadline=deadline, timezone="Europe/Berlin")
    found = _request(schedule, tick.astimezone(UTC)).tags["sits/deadline"]
    assert found == expected
    assert datetime.fromisoformat(found) > tick


def test_cron_and_time_zone() -> None:
    """The schedule ticks at the wall-clock time of its zone, is stopped by default, and names its job."""
    schedule = build_nightly_schedule([_asset()], at="01:05", timezone="Europe/Berlin", name="night")
    assert schedule.cron_schedule == "5 1 * * *"
    assert schedule.execution_timezone == "Europe/Berlin"
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED
    assert (schedule.name, schedule.job_name) == ("night", "night_job")
    running = build_nightly_schedule([_asset()], is_running=True)
    assert running.default_status is dg.DefaultScheduleStatus.RUNNING


def test_partitions_of_another_time_zone() -> None:
    """The newest finished partition is found by its own zone: 01:00 in Berlin is before midnight in UTC."""
    schedule = build_nightly_schedule([_asset()], at="01:00", timezone="Europe/Berlin")
    assert _request(schedule, datetime(2026, 7, 10, 1, tzinfo=BERLIN)).partition_key == "2026-07-08"


def test_before_the_first_partition_is_finished_the_tick_is_skipped() -> None:
    """While there is no finished partition the tick says so instead of failing."""
    schedule = build_nightly_schedule([_asset()])
    data = _tick(schedule, datetime(2026, 1, 1, 2, tzinfo=UTC))
    assert not data.run_requests
    assert "No partition is finished at 2026-01-01T02:00" in (data.skip_message or "")


def test_assets_without_partitions_run_every_night() -> None:
    """Assets without partitions are requested once a night, each night anew."""
    asset = _asset(partitions_def=None)
    schedule = build_nightly_schedule([asset], deadline="06:00")
    first, second = (_request(schedule, datetime(2026, 1, day, 2, tzinfo=UTC), asset) for day in (1, 2))
    assert first.partition_key is None
    assert first.tags["sits/deadline"] == "2026-01-01T06:00:00+00:00"
    assert first.run_key != second.run_key


def test_several_assets_are_one_job() -> None:
    """Assets of one partitions definition, and those without, are materialised by one run."""
    assets = [_asset("a"), _asset("b"), _asset("c", partitions_def=None)]
    schedule = build_nightly_schedule(assets)
    definitions = dg.Definitions(assets=assets, schedules=[schedule])
    job = definitions.resolve_job_def("nightly_job")
    assert {key.to_user_string() for key in job.asset_layer.executable_asset_keys} == {"a", "b", "c"}
    request = _request(schedule, datetime(2026, 1, 3, 2, tzinfo=UTC), *assets)
    result = job.execute_in_process(partition_key=request.partition_key, tags=request.tags)
    assert {event.partition for event in result.get_asset_materialization_events()} == {"2026-01-02", None}


@pytest.mark.parametrize("text", ["2:00", "24:00", "02:60", "0200", "", "02:00:00", "noon", "-1:00"])
def test_malformed_time_is_refused(text: str) -> None:
    """A time that is not HH:MM is refused when the schedule is built, with an example of a right one."""
    with pytest.raises(ConfigError, match=r"at must be a time like '02:30'"):
        build_nightly_schedule([_asset()], at=text)
    with pytest.raises(ConfigError, match=r"deadline must be a time like '02:30'"):
        build_nightly_schedule([_asset()], deadline=text)


@pytest.mark.parametrize("name", ["Europe/Atlantis", "CEST+1", "", "../etc/passwd", "Europe"])
def test_unknown_time_zone_is_refused(name: str) -> None:
    """An unknown time zone is refused when the schedule is built, with an example of a right one."""
    with pytest.raises(ConfigError, match=r"Unknown time zone .*Europe/Berlin"):
        build_nightly_schedule([_asset()], timezone=name)


@pytest.mark.parametrize(
    "partitions_def",
    [
        dg.StaticPartitionsDefinition(["a", "b"]),
        dg.DynamicPartitionsDefinition(name="uploads"),
        dg.MultiPartitionsDefinition({"day": DAILY, "region": dg.StaticPartitionsDefinition(["eu"])}),
    ],
)
def test_partitions_without_a_newest_one_are_refused(partitions_def: Any) -> None:
    """Which key is tonight's is unknown for partitions that are no time windows: that is refused."""
    with pytest.raises(ConfigError, match="needs one time-window partitions definition"):
        build_nightly_schedule([_asset(partitions_def=partitions_def)])


def test_mixed_partitions_are_refused() -> None:
    """Assets of two partitions definitions need a schedule each."""
    weekly = _asset("weekly", dg.WeeklyPartitionsDefinition("2026-01-01"))
    with pytest.raises(ConfigError, match="make a schedule for each partitions definition"):
        build_nightly_schedule([_asset(), weekly])
