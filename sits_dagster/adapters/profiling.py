"""The work on a model file that is done in a sandbox: reading it, and running it a few times."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sits_dagster.adapters.onnx_trace import TimedSession, TracedSession, optimize, runtime_key
from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.errors import ModelError, SitsError
from sits_dagster.models.analysis import analyse, row_counts
from sits_dagster.models.batching import (
    PROBE_ROWS,
    Batching,
    BatchingReport,
    probe_batching,
    probe_fixed_batch,
    probe_padding,
)
from sits_dagster.models.calibration import Probe
from sits_dagster.models.codec import dump, load
from sits_dagster.models.graph.files import external_data_files, make_traceable
from sits_dagster.models.graph.shapes import GraphFile
from sits_dagster.models.graph.structure import Graph, TensorType
from sits_dagster.models.inputs import IMAGE_SIZES, InputShapes, input_shapes
from sits_dagster.models.run_analysis import (
    RunAnalysis,
    arena_bytes,
    plan_of_traces,
    traced_kernels,
    traced_types,
)
from sits_dagster.models.samples import attempts, is_mask, sample_batch, sample_rows
from sits_dagster.models.trace import CallTrace
from sits_dagster.models.words import shown

__all__ = ["analyse_model", "list_files", "probe_model", "try_model"]

PADDING_CELLS = 32
NODES_TRIED_MAX = 20_000  # the runtime takes seconds to load these, and loads them a few times
Arrays = dict[str, NDArray[np.generic]]


def analyse_model(request: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Return a `GraphAnalysis` of the file at `path` as JSON values.

    Args:
        request: `path`, and `shapes` given by the user.

    Raises:
        ModelError: The file is broken.
        ConfigError: A given shape contradicts the file.
    """
    return dump(analyse(GraphFile(Path(request["path"])), _given(request)))


def try_model(request: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Return a `GraphAnalysis` and a `RunAnalysis` as JSON values; the second is `None` where trying failed.

    Args:
        request: `path`; `optimized`, where the optimised graph goes; `shapes` and `values` given by the user.

    Raises:
        ModelError: The file is broken.
        ConfigError: A given shape contradicts the file.
    """
    path, optimized = Path(request["path"]), Path(request["optimized"])
    given, values = _given(request), request.get("values")
    # What is refused here may make the runtime run for ever.
    file = GraphFile(path)
    if len(file.graph.nodes) > NODES_TRIED_MAX:
        reason = f"it has more than {NODES_TRIED_MAX} nodes"
        return {"analysis": dump(analyse(file, given)), "run": None, "reason": reason}
    # The runtime works without Python's lock: the file is analysed meanwhile.
    with ThreadPoolExecutor(1) as pool:
        optimizing = pool.submit(optimize, path, optimized)
        analysis = analyse(file, given)
        try:
            optimizing.result()
            run, known = _run(optimized, file.graph, given, values)
        except SitsError as error:
            return {"analysis": dump(analysis), "run": None, "reason": str(error)}
    if analysis.unknown or run.shapes != analysis.shapes:
        analysis = analyse(file, given, shapes=run.shapes, trace=lambda _, __, rows: known.get(rows, {}))
    if analysis.unknown:  # what the optimised graph has no more
        trace = partial(_raw_types, path, run.integer_limit, values)
        analysis = analyse(file, given, shapes=run.shapes, trace=trace)
    return {"analysis": dump(analysis), "run": dump(run), "reason": ""}


def _raw_types(
    path: Path,
    limit: int,
    values: Mapping[str, float] | None,
    graph: Graph,
    shapes: InputShapes,
    rows: int,
) -> Mapping[str, TensorType]:
    """Return the types of the file's own tensors, by running it as it is; none where that fails."""
    try:
        session = TracedSession(path)
        session.run(sample_batch(graph.inputs, shapes, rows, integer_limit=limit, values=values))
        return traced_types(graph, session.finish(), {})
    except SitsError:
        return {}


def _run(
    optimized: Path,
    original: Graph,
    given: Mapping[str, tuple[int | str, ...]],
    values: Mapping[str, float] | None,
) -> tuple[RunAnalysis, Mapping[int, Mapping[str, TensorType]]]:
    """Return what trying told, and the types of the optimised graph's tensors by rows."""
    make_traceable(optimized, original.inputs)
    session = TracedSession(optimized)
    shapes, limit, rows = _working_rows(session, original, given, values)
    if shapes.rows_fixed is None:
        report, traces = _batched(session, optimized, shapes, rows)
    else:
        report, traces = _fixed(session, shapes, rows)
    file = GraphFile(optimized)
    plan, resident = plan_of_traces(file.graph, traces, file.types({}, keeps_declared=True).types)
    run = RunAnalysis(
        shapes=shapes,
        memory_plan=plan,
        memory_bytes_resident=resident,
        kernels_optimized=traced_kernels(file.graph, traces, shapes),
        batching=report,
        runtime=runtime_key(),
        integer_limit=limit,
    )
    return run, {rows: traced_types(file.graph, trace, {}) for rows, trace in traces.items()}


def list_files(request: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Return the paths of the files that hold the model's external tensors, sorted by name.

    Args:
        request: `path`.

    Raises:
        ModelError: The file is broken, or refers to a file that is missing or outside of its folder.
    """
    return [str(file) for file in external_data_files(Path(request["path"]))]


def probe_model(request: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Return what batches of the model took, a list of `Probe` as JSON values, and if the graph is damaged.

    The CPU runs the graph that was optimised for it; without one that loads, the file is optimised first. A
    card has kernels of its own: there the runtime optimises the file while it loads it.

    Args:
        request: `path` of the model's file; `optimized`, its optimised graph for this CPU, or `None`;
            `device`; `input_shapes`; `integer_limit`; `values`; the `rows` of each batch; and `seconds_max`,
            how long the calls of one batch are repeated for their time.

    Returns:
        `probes`, and `is_damaged`: whether the optimised graph does not load.
    """
    path, shapes = Path(request["path"]), load(InputShapes, request["input_shapes"])
    device, seconds_max = load(Device, request["device"]), request["seconds_max"]
    with tempfile.TemporaryDirectory(prefix="sits-probe-") as folder:
        is_card, is_damaged = device.kind is not DeviceKind.CPU, False
        if not is_card:
            path, is_damaged = _optimized(path, request["optimized"], Path(folder))
        inputs = GraphFile(path).graph.inputs
        timed = TimedSession(path, device, is_optimizing=is_card) if seconds_max > 0 else None
        found: list[Any] = []
        for rows in request["rows"]:
            feeds = sample_batch(
                inputs, shapes, rows, integer_limit=request["integer_limit"], values=request.get("values")
            )
            session = TracedSession(path, device, is_optimizing=is_card)
            session.run(feeds)
            seconds = None if timed is None else timed.seconds(feeds, seconds_max)
            found.append(dump(Probe(rows=rows, bytes_held=arena_bytes(session.finish()), seconds=seconds)))
    return {"probes": found, "is_damaged": is_damaged}


def _optimized(model: Path, optimized: str | None, folder: Path) -> tuple[Path, bool]:
    """Return an optimised graph of a model that loads, and whether the one that was given does not."""
    if optimized is not None:
        with suppress(ModelError):
            GraphFile(Path(optimized))
            TracedSession(Path(optimized))
            return Path(optimized), False
    made = folder / "model.onnx"
    optimize(model, made)
    make_traceable(made, GraphFile(model).graph.inputs)
    return made, optimized is not None


def _given(request: Mapping[str, Any]) -> dict[str, tuple[int | str, ...]]:
    return {name: tuple(shape) for name, shape in (request.get("shapes") or {}).items()}


def _working_rows(
    session: TracedSession,
    graph: Graph,
    given: Mapping[str, tuple[int | str, ...]],
    values: Mapping[str, float] | None,
) -> tuple[InputShapes, int, list[Arrays]]:
    """Return the first shapes and made-up rows that the model takes."""
    first: SitsError | None = None
    tried: set[str] = set()
    for size, limit in attempts(IMAGE_SIZES):
        shapes = input_shapes(graph, given, image_size=size)
        if shapes.rows_fixed is None and all(axis is None for axis in shapes.axes.values()):
            break
        key = repr((shapes.lengths, limit if _has_integers(graph) else 0))
        if key in tried:
            continue
        tried.add(key)
        rows = sample_rows(graph.inputs, shapes, count=PROBE_ROWS, integer_limit=limit, values=values)
        try:
            session.run(rows[0])
        except ModelError as error:
            first = first or error
        else:
            return shapes, limit, rows
    raise first or ModelError("The model has no input with rows.", hint="it needs no inference.")


def _has_integers(graph: Graph) -> bool:
    return any("int" in kind.dtype for kind in graph.inputs.values())


def _batched(
    session: TracedSession, optimized: Path, shapes: InputShapes, rows: list[Arrays]
) -> tuple[BatchingReport, Mapping[int, CallTrace]]:
    """Probe batches of two and of three, each on an arena of its own.

    Their workspaces are the largest of all calls of a session: no other call may come before them.
    """
    padding = list(_padding_evidence(session, shapes, rows[0]))
    fresh: dict[int, TracedSession] = {}
    done: set[int] = set()

    def run(feeds: Mapping[str, NDArray[np.generic]]) -> Mapping[str, NDArray[np.generic]]:
        name, axis = next((name, axis) for name, axis in shapes.axes.items() if axis is not None)
        count = feeds[name].shape[axis]
        if count == 1:
            return session.run(feeds)
        fresh[count] = TracedSession(optimized)
        outputs = fresh[count].run(feeds)
        done.add(count)
        return outputs

    report = probe_batching(run, rows, shapes.axes)
    counts = row_counts(shapes)
    if done < set(counts):
        fresh, counts = {1: TracedSession(optimized)}, (1,)
        fresh[1].run(rows[0])
    return _with_padding(report, padding), {count: fresh[count].finish() for count in counts}


def _fixed(
    session: TracedSession, shapes: InputShapes, rows: list[Arrays]
) -> tuple[BatchingReport, Mapping[int, CallTrace]]:
    fixed = shapes.rows_fixed or 1
    report = probe_fixed_batch(session.run, rows, fixed)
    session.run(rows[0])
    return report, {fixed: session.finish()}


def _padding_evidence(
    session: TracedSession, shapes: InputShapes, row: Arrays
) -> Iterator[tuple[str, bool, bool, bool]]:
    """Yield each free axis, whether it has a mask, and if padding leaves a row alone without and with it."""
    for axis, places in shapes.free.items():
        axes = {name: at for name, at in places if name in row}
        if len(axes) < len(places):
            continue
        masks = [name for name in axes if is_mask(name)]
        try:
            without, with_mask = probe_padding(session.run, row, axes, masks, PADDING_CELLS)
        except (SitsError, ValueError):
            continue
        yield axis, bool(masks), without, with_mask


def _with_padding(report: BatchingReport, found: list[tuple[str, bool, bool, bool]]) -> BatchingReport:
    evidence = list(report.evidence)
    verdict = report.verdict
    for axis, has_mask, without, with_mask in found:
        if without:
            evidence.append(f"padding along {shown(axis)} leaves a row's result as it is")
        elif with_mask:
            evidence.append(f"padding along {shown(axis)} changes a row's result unless the mask covers it")
            verdict = Batching.MASK_REQUIRED if verdict is Batching.INVARIANT else verdict
        else:
            lacks = "in spite of the mask" if has_mask else "and there is no mask"
            evidence.append(f"padding along {shown(axis)} changes a row's result, {lacks}")
    return replace(
        report,
        verdict=verdict,
        evidence=tuple(evidence),
        paddable_axes=tuple(axis for axis, _, without, with_mask in found if without or with_mask),
    )
