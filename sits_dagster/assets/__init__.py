"""The Dagster surface: assets, their checks, schedules and components."""
