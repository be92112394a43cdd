"""A schedule that materialises the newest partition every night, with a deadline."""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import dagster as dg

from sits_dagster.errors import ConfigError
from sits_dagster.metadata import CLASS_TAG, DEADLINE_TAG, PRIORITY_TAG

__all__ = ["build_nightly_schedule"]

CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")
NIGHTLY_PRIORITY = 10


def build_nightly_schedule(
    assets: Sequence[dg.AssetsDefinition],
    *,
    at: str = "02:00",
    deadline: str | None = None,
    timezone: str = "UTC",
    name: str = "nightly",
    is_running: bool = False,
) -> dg.ScheduleDefinition:
    """Return a daily schedule of the assets' newest finished partition.

    Its runs carry `sits/class: batch`, a priority above that of backfills, and with a deadline
    `sits/deadline`: the next such time after the tick, ISO 8601 with UTC offset.

    Args:
        assets: Inference assets; those with partitions must share a time-window partitions definition.
        at: When, `HH:MM` in the time zone.
        deadline: When the night's work must be done, `HH:MM` in the time zone; `None` for no deadline.
        timezone: IANA name of a time zone.
        name: Name of the schedule; its job is `{name}_job`.
        is_running: Whether it ticks without being switched on in the UI.

    Raises:
        ConfigError: A time or the time zone is malformed, or the partitions are no time windows.

    Example:
        >>> import dagster as dg
        >>> @dg.asset(partitions_def=dg.DailyPartitionsDefinition("2026-01-01"))
        ... def scores(): ...
        >>> build_nightly_schedule([scores], at="01:30", deadline="06:00").cron_schedule
        '30 1 * * *'
    """
    if not assets:
        msg = f"Schedule {name!r} has no assets."
        raise ConfigError(msg, hint="give it the inference assets that run every night.")
    hour, minute = _clock(at, "at")
    if deadline is not None:
        _clock(deadline, "deadline")
    zone = _zone(timezone)
    partitions_def = _time_windows(assets)
    job = dg.define_asset_job(f"{name}_job", selection=dg.AssetSelection.assets(*assets))

    @dg.schedule(
        name=name,
        job=job,
        cron_schedule=f"{minute} {hour} * * *",
        execution_timezone=timezone,
        default_status=dg.DefaultScheduleStatus.RUNNING if is_running else dg.DefaultScheduleStatus.STOPPED,
    )
    def nightly(context: dg.ScheduleEvaluationContext) -> Any:  # noqa: ANN401 - a request or a reason
        tick = context.scheduled_execution_time.astimezone(zone)
        tags = {CLASS_TAG: "batch", PRIORITY_TAG: str(NIGHTLY_PRIORITY)}
        if deadline is not None:
            tags[DEADLINE_TAG] = _next(deadline, tick).isoformat()
        if partitions_def is None:
            return dg.RunRequest(run_key=tick.isoformat(), tags=tags)
        with dg.partition_loading_context(effective_dt=tick):
            partition = partitions_def.get_last_partition_key()
        if partition is None:
            return dg.SkipReason(f"No partition is finished at {tick.isoformat()}.")
        return dg.RunRequest(run_key=partition, partition_key=partition, tags=tags)

    return nightly


def _clock(text: str, what: str) -> tuple[int, int]:
    match = CLOCK.fullmatch(text)
    if match is None:
        msg = f"{what} must be a time like '02:30', got {text!r}."
        raise ConfigError(msg)
    return int(match[1]), int(match[2])


def _zone(timezone: str) -> ZoneInfo:
    try:
        return ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        msg = f"Unknown time zone {timezone!r}."
        raise ConfigError(msg, hint="use an IANA name such as 'Europe/Berlin'.") from error


def _next(clock: str, after: datetime) -> datetime:
    hour, minute = _clock(clock, "deadline")
    found = after.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return found if found > after else found + timedelta(days=1)


def _time_windows(assets: Sequence[dg.AssetsDefinition]) -> dg.TimeWindowPartitionsDefinition | None:
    found = [asset.partitions_def for asset in assets if asset.partitions_def is not None]
    for partitions_def in found:
        if not isinstance(partitions_def, dg.TimeWindowPartitionsDefinition) or partitions_def != found[0]:
            msg = f"A nightly schedule needs one time-window partitions definition, got {partitions_def!r}."
            raise ConfigError(msg, hint="make a schedule for each partitions definition.")
    return found[0] if found and isinstance(found[0], dg.TimeWindowPartitionsDefinition) else None
