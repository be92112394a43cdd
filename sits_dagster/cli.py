"""`sits VERB`: what can be done without opening Dagster; every verb has `--json`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from sits_dagster import __version__
from sits_dagster.errors import SitsError

__all__ = ["main"]

INTERRUPTED = 130
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


def main() -> Any:  # noqa: ANN401 - click exits
    """Run the command line; errors of this package are one sentence, not a traceback."""
    try:
        sits(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted. Run the same command again: it goes on from the last commit.", err=True)
        sys.exit(INTERRUPTED)
    except SitsError as error:
        click.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(2)
