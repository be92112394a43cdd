"""`sits VERB`: what can be done without opening Dagster; every verb has `--json`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from sits_dagster import __version__
from sits_dagster.commands import profile_options
from sits_dagster.errors import SitsError
from sits_dagster.models.hardware import DEVICES

__all__ = ["main"]

INTERRUPTED = 130
ROWS_MAX = 1 << 31
JSON_HELP = "Print one JSON object instead of a table."


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sits")
def sits() -> None:
    """Offline batch inference of ONNX models over partitioned datasets, in Dagster."""


@sits.command()
@click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="SITS_DEMO_HOME",
    default=Path(".sits"),
    show_default=True,
    help="Where the demo's data, model, results and Dagster's records lie.",
)
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def demo(home: Path, as_json: bool) -> None:  # noqa: FBT001 - click's way
    """Read 1,440 images of text lines by a real OCR model, in three daily partitions.

    Interrupt it, kill it, run it again: it goes on where it was. Once all is done nothing is computed.
    """
    os.environ["SITS_DEMO_HOME"] = str(home.absolute())
    from sits_dagster.commands.demo import run_demo

    report = run_demo(home.absolute(), say=lambda text: click.echo(text, err=as_json), as_json=as_json)
    if as_json:
        click.echo(json.dumps(report))


@sits.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
@click.option("--quick", is_flag=True, help="Compare sizes and row counts, not the files' digests.")
def inspect(path: Path, as_json: bool, quick: bool) -> None:  # noqa: FBT001 - click's way
    """Show what is in an output folder (or in each one below PATH) and verify it.

    Exits with 1 when something is missing, altered, twice there or left over.
    """
    from sits_dagster.commands.inspect import inspect_folders, print_report

    report = inspect_folders(path, is_quick=quick)
    if as_json:
        click.echo(json.dumps(report))
    else:
        print_report(report)
    sys.exit(0 if report["is_sound"] else 1)


@sits.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    callback=profile_options.as_callback(profile_options.shapes),
    help=f"{profile_options.SHAPE_FORMAT}. Once for each input.",
)
@click.option(
    "--value",
    "values",
    multiple=True,
    callback=profile_options.as_callback(profile_options.values),
    help=f"What an input is filled with when the model is tried: {profile_options.VALUE_FORMAT}.",
)
@click.option(
    "--memory",
    "memory_bytes",
    callback=profile_options.as_callback(profile_options.memory),
    help=f"Memory for the model, weights included: {profile_options.MEMORY_FORMAT}.  [default: the device's]",
)
@click.option(
    "--device",
    help=f"The card, by its data sheet: {', '.join(DEVICES)}.  [default: a100-80gb, for reference]",
)
@click.option(
    "--rows",
    type=click.IntRange(min=1, max=ROWS_MAX),
    help="Rows of the batch that is looked at.  [default: 1]",
)
@click.option("--optimized", is_flag=True, help="Count the kernels of ONNX Runtime's graph, not the file's.")
@click.option("--calibrate", is_flag=True, help="Measure a few batches on this machine's device too.")
@click.option("--no-run", is_flag=True, help="Only read the file: do not try the model.")
@click.option("--no-cache", is_flag=True, help="Take no earlier profile, and keep none.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def profile(  # noqa: PLR0913 - an argument for each option is click's way
    *,
    path: Path,
    shapes: Mapping[str, tuple[int | str, ...]],
    values: Mapping[str, float],
    memory_bytes: int | None,
    device: str | None,
    rows: int | None,
    optimized: bool,
    calibrate: bool,
    no_run: bool,
    no_cache: bool,
    as_json: bool,
) -> None:
    """Tell what an ONNX model costs and how large its batches may be, before it runs.

    PATH is an .onnx file, or a Triton model repository: then each version that is served is profiled, and
    the exit code is 1 when one cannot be.
    """
    from sits_dagster.adapters.profiler import ProfileOptions
    from sits_dagster.commands.profile import ProfileRequest, profile_path
    from sits_dagster.commands.profile_view import print_report, working

    if no_run and calibrate:
        msg = "--calibrate measures the model, which --no-run forbids: give one of them."
        raise click.UsageError(msg)
    request = ProfileRequest(
        path=path,
        options=ProfileOptions(shapes=shapes, values=values, is_run=not no_run, is_cached=not no_cache),
        memory_bytes=memory_bytes,
        device=device,
        rows=rows,
        is_optimized=optimized,
        is_calibrated=calibrate,
    )
    with working() as say:
        report = profile_path(request, say=say)
    if as_json:
        click.echo(json.dumps(report, allow_nan=False))
    else:
        print_report(report)
    sys.exit(1 if report.get("failed") else 0)


def main() -> Any:  # noqa: ANN401 - click exits
    """Run the command line; errors of this package are one sentence, not a traceback."""
    try:
        sits(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        is_resumed = sys.argv[1:2] == ["demo"]
        hint = " Run the same command again: it goes on from the last commit." if is_resumed else ""
        click.echo(f"Interrupted.{hint}", err=True)
        sys.exit(INTERRUPTED)
    except SitsError as error:
        click.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(2)
