"""What an inference asset does with a partition, apart from Dagster: open, run, publish, inspect."""

import functools
import hashlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from sits_dagster.adapters.object_store import LocalStore
from sits_dagster.adapters.parquet import ParquetFormat, ParquetReader, check_separate, scan_partition
from sits_dagster.errors import DataError, InvariantError
from sits_dagster.inference.attempt import join_attempt
from sits_dagster.inference.code_digest import code_digest
from sits_dagster.inference.dataset import partition_path
from sits_dagster.inference.decode import DecodeFunction, decode_columns, default_schema
from sits_dagster.inference.encode import EncodeFunction, encode_columns
from sits_dagster.inference.engine import Arrays, ModelSignature
from sits_dagster.inference.generation import Fingerprint
from sits_dagster.inference.partition import PartitionPlan, start_partition
from sits_dagster.inference.pipeline import PartitionWork
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.inference.sink import ParquetSink
from sits_dagster.inference.source import ParquetDataset
from sits_dagster.models.graph.files import input_names
from sits_dagster.models.model import OnnxModel, model_digest, model_files

__all__ = ["InferenceJob", "OpenPartition", "PartitionName", "current_digest", "now_utc"]


def now_utc() -> datetime:
    """Return the present, in UTC."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionName:
    """Which partition: `key` is `None` for an asset without partitions."""

    key: str | None
    dimensions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPartition:
    """A partition that a run has looked at.

    Args:
        name: Which one.
        output: Its output folder.
        store: The same as a store.
        work: What to do with each row; the defaults need the model's signature, see `with_signature`.
        fingerprint: What the output is made from.
        plan: What there is to do.
    """

    name: PartitionName
    output: str
    store: LocalStore
    work: PartitionWork
    fingerprint: Fingerprint
    plan: PartitionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceJob:
    """A model, where rows come from and go to, and the two functions in between.

    Args:
        model: The model.
        source: Where rows come from.
        sink: Where results go.
        encode: Rows to model inputs; `None` takes each input from the column of its name.
        decode: Model outputs to columns; `None` makes each output a column.
        code_version: Stands for both functions' code; `None` digests their source.
        batch_rows: Rows of a batch; `None` leaves it to the inference resource.
    """

    model: OnnxModel
    source: ParquetDataset
    sink: ParquetSink
    encode: EncodeFunction | None
    decode: DecodeFunction | None
    code_version: str | None
    batch_rows: int | None = None

    def open(
        self,
        name: PartitionName,
        *,
        resolve: Callable[[str], str],
        policy: PipelinePolicy,
        owner: str,
        token: str = "",
    ) -> OpenPartition:
        """Scan the input and register an attempt, or find that the output is complete.

        Args:
            name: The partition.
            resolve: Makes a declared path absolute.
            policy: The data plane's limits.
            owner: Who this is, for messages to rivals.
            token: Asks for everything to be computed again, once for each token.
        """
        found = self._look(name, resolve)
        plan = start_partition(
            found.store,
            found.work,
            fingerprint=found.fingerprint,
            policy=policy,
            owner=owner,
            now=now_utc(),
            token=token,
        )
        return replace(found, plan=plan)

    def join(
        self, name: PartitionName, *, resolve: Callable[[str], str], generation: str, epoch: int
    ) -> OpenPartition:
        """Scan the input and take part in an attempt that another step of the run registered.

        Raises:
            DataError: The input, the model or the code changed since then.
        """
        found = self._look(name, resolve)
        attempt = replace(join_attempt(found.store, generation, epoch), writer=uuid.uuid4().hex[:8])
        changes = found.fingerprint.changes(attempt.generation.fingerprint)
        if changes:
            what = f"The {' and '.join(changes)} of {name.key or 'the dataset'}"
            msg = f"{what} changed while the run was going on."
            raise DataError(msg, hint="run it again.")
        return replace(found, plan=PartitionPlan(attempt=attempt, complete=None))

    def _look(self, name: PartitionName, resolve: Callable[[str], str]) -> OpenPartition:
        source = resolve(partition_path(self.source.path, name.key, dict(name.dimensions)))
        output = resolve(partition_path(self.sink.path, name.key, dict(name.dimensions)))
        check_separate(source, output)
        model = resolve(self.model.path)
        digest = current_digest(model)
        work = self._work(source, output, Path(model))
        # Which columns are read follows from the configuration: the files alone are the input.
        files = replace(work.partition, schema=pa.schema([]))
        return OpenPartition(
            name=name,
            output=output,
            store=LocalStore(output),
            work=work,
            fingerprint=Fingerprint(
                input=files.digest(), model=digest, configuration=self._configuration_digest()
            ),
            plan=PartitionPlan(attempt=None, complete=None),
        )

    def with_signature(self, opened: OpenPartition, signature: ModelSignature) -> PartitionWork:
        """Return the work with the defaults that follow from the model's inputs and outputs."""
        return replace(
            opened.work,
            encode=self.encode or encode_columns(signature),
            decode=self.decode or decode_columns(signature),
            output_schema=opened.work.output_schema or (None if self.decode else default_schema(signature)),
        )

    def _work(self, source: str, output: str, model: Path) -> PartitionWork:
        required = tuple(self.source.columns or (() if self.encode else input_names(model)))
        kept = tuple(self.sink.keep_columns)
        is_narrow = self.source.columns is not None or self.encode is None
        partition = scan_partition(source, list(dict.fromkeys((*required, *kept))) if is_narrow else None)
        missing = [name for name in kept if name not in partition.schema.names]
        if missing and partition.files:
            msg = f"Column {missing[0]!r}, which is to be kept, is missing in {source!r}."
            raise DataError(msg, hint=f"it has {partition.schema.names}: check the sink's keep_columns.")
        return PartitionWork(
            partition=partition,
            reader=ParquetReader(partition),
            encode=self.encode or _not_yet,
            decode=self.decode or _not_yet,
            padding=self.model.padding,
            columns_required=required,
            columns_kept=kept if partition.files else (),
            output_schema=self.sink.output_schema,
            part_format=ParquetFormat(output, compression=self.sink.compression),
        )

    def _configuration_digest(self) -> str:
        code = self.code_version or "|".join(
            code_digest(function) if function else "default" for function in (self.encode, self.decode)
        )
        parts = (
            self.model.padding,
            self.source.columns,
            self.sink.keep_columns,
            str(self.sink.output_schema),
            self.sink.compression,
            code,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def current_digest(model: str) -> str:
    """Return the SHA-256 of a model as it is on disk now; unchanged files are read once a process."""
    files = tuple((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in model_files(model))
    return _digest_of(model, files)


@functools.lru_cache(maxsize=64)
def _digest_of(model: str, files: tuple[tuple[str, int, int], ...]) -> str:
    del files  # part of the key
    return model_digest(model)


def _not_yet(_: object) -> Arrays:
    msg = "The model's signature is not known yet."
    raise InvariantError(msg)
