"""EventData: batches of entities with all their events, as features, for Lightning; the table may exceed all memory.

The table is read in `queries.load_query_chunks` query chunks an epoch, and in `queries.fit_query_chunks` once to fit
the features. Neither number changes what comes out: every entity once an epoch, with the same features. With
`queries.cache_path` the results of queries are kept there as Parquet, and fitted features beside them, for later epochs
and other tasks; rank 0 fills it in `prepare_data`, and the others find it.

`EventLoader` serves query chunk after query chunk, in an order that nothing but the plan decides. A thread reads them,
one at a time: the next one while this one is served, where `ChunkBudget` holds both. Each rank reads every query chunk
and keeps its own entities of it; with a cache the database is queried once for all of them.

`state_dict` says how far the pass has come, with any number of query chunks; a loader that takes it resumes with the
batches not yet handed over, and reads only the query chunks they are in. It is refused when the table has changed
since. A read that fails, and a table that is not what it was when the batches were planned, end the pass with an error
before anything of that query chunk is handed over; the state is still right, and the pass can go on from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from kit.arguments import checks_arguments
from kit.config import Config
from kit.data.patches.loader import EpochPasses
from kit.data.patches.module import ConfiguredData
from kit.data.tables.cache import CachedSource, QueryCache
from kit.data.tables.chunks import (
    ORDER_BYTES,
    ChunkBudget,
    EventChunk,
    EventPlan,
    EventTable,
    Numbers,
    Stopped,
    arrange,
    gather,
    release_memory,
    serve,
)
from kit.data.tables.declare import open_table
from kit.data.tables.features import Features
from kit.data.tables.fit import fit_features
from kit.data.tables.source import TableSource, import_extra
from kit.data.tables.table import DatabaseTable
from kit.errors import ConfigError, Problem, QueryError
from kit.json_text import write_whole
from kit.units import format_bytes, format_count

if TYPE_CHECKING:
    import pyarrow

Encode = Callable[["pyarrow.Table"], Any]


class EventLoader(EpochPasses[Any, EventPlan]):
    """The batches of one rank, read from a table.

    Args:
        table: What is read.
        plan: Which entities there are, and which batch each belongs to.
        encode: Makes a batch of the events of whole entities, which stand together, in the order they are served.
        rank: This process's rank in the plan.
        memory_bytes: Host memory for query chunks.
        prefetch: Read the next query chunk while one is served, where there is room.
    """

    def __init__(
        self, table: EventTable, plan: EventPlan, encode: Encode, *, rank: int, memory_bytes: int, prefetch: bool
    ) -> None:
        super().__init__(plan, rank)
        self.table, self.plan = table, plan
        self.reasons: tuple[str, ...] = ()
        """What was chosen in the last pass, and why."""
        self._encode, self._memory_bytes, self._prefetch = encode, memory_bytes, prefetch
        self._reading: _ReadAhead | None = None

    def close(self) -> None:
        """End a pass that is under way, and its thread."""
        if self._reading is not None:
            self._reading.close()

    @override
    def _batches(self, epoch: int, first_step: int) -> Iterator[Any]:
        self.table.refuse_change()
        self.close()
        arrow = import_extra("pyarrow")
        budget = ChunkBudget(self._memory_bytes, self.table.name, self.table.advice)
        reading = self._reading = _ReadAhead(self, epoch, first_step, budget)
        chunk: EventChunk | None = None
        cursor, plan = 0, self.plan_of(first_step)
        try:
            for step in range(first_step, plan.batches_per_epoch):
                needed, parts = len(plan.steps.positions(step, self.rank)), []
                while needed:
                    if chunk is None or cursor == len(chunk):
                        chunk = None
                        release_memory()
                        chunk, cursor = reading.next(self._prefetch), 0
                    count = min(needed, len(chunk) - cursor)
                    part = chunk.part(cursor, cursor + count)
                    needed, cursor = needed - count, cursor + count
                    if needed:  # the rest is in the next one: a copy, so that this one can go
                        part = part.take(arrow.array(np.arange(part.num_rows)))
                    parts.append(part)
                    del part
                batch = self._encode(parts[0] if len(parts) == 1 else arrow.concat_tables(parts))
                del parts  # else the query chunk that they are of would stay while the next is read
                yield batch
        finally:
            reading.close()
            self.reasons = reading.reasons
            if self._reading is reading:
                self._reading = None


class _ReadAhead:
    """The query chunks of one pass, read in a thread."""

    def __init__(self, loader: EventLoader, epoch: int, first_step: int, budget: ChunkBudget) -> None:
        self._table, self._plan, self._budget = loader.table, loader.plan, budget
        self._shares = loader.plan_of(first_step).shares(epoch, first_step, loader.rank)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kit-query")
        self._next: Future[EventChunk] | None = None
        self._ahead = self._alone = 0

    def next(self, prefetch: bool) -> EventChunk:
        """The next query chunk with something for this rank; the one before must have been let go."""
        self._budget.use(0)
        reading = self._next or self._submit()
        assert reading is not None, "no query chunk is left for a batch that is planned"
        chunk = reading.result()
        used_bytes = int(chunk.events.nbytes)
        self._budget.use(used_bytes)
        another_bytes = 2 * chunk.read_bytes + ORDER_BYTES * chunk.read_rows  # to read and arrange one like it
        ahead = prefetch and used_bytes + another_bytes <= self._budget.allowed_bytes
        self._ahead, self._alone = self._ahead + ahead, self._alone + (not ahead)
        self._next = self._submit() if ahead else None
        return chunk

    def close(self) -> None:
        self._budget.stop()
        self._thread.shutdown(wait=True, cancel_futures=True)

    @property
    def reasons(self) -> tuple[str, ...]:
        if self._alone > 1:
            allowed = format_bytes(self._budget.allowed_bytes)
            return (f"query chunks are read one at a time: two need more than the {allowed} of queries.memory_bytes",)
        return ("the next query chunk is read while one is served",) if self._ahead else ()

    def _submit(self) -> Future[EventChunk] | None:
        share = next(self._shares, None)
        return None if share is None else self._thread.submit(self._read, *share)

    def _read(self, number: int, chosen: Numbers) -> EventChunk:
        table = self._table
        try:
            with contextlib.closing(table.read(number)) as batches:
                events = gather(batches, table.schema, self._budget)
        except Stopped:
            raise QueryError(f"{table.name}: the pass was ended while query chunk {number} was read") from None
        rows, offsets = arrange(events, table.entity, table.date)
        found, planned = len(offsets) - 1, self._plan.entities[number]
        if found != planned:
            chunk = f"query chunk {number + 1} of {len(table.partitions)}"
            raise QueryError(
                f"{table.name}: {chunk} has {format_count(found)} entities, and {format_count(planned)} when batches "
                "were planned: the table has changed; make the loader anew"
            )
        return serve(events, rows, offsets, chosen)


class EventData(ConfiguredData):
    """Entities of one event table, encoded by features that are fitted on it.

    The table is opened at once and read when it is needed. World size and rank are the trainer's, or 1 and 0 without
    one. Where kit runs the trial, the config is the trial's; in a committed run it is that of the file.

    Args:
        source: A table that is open, or what `kit.data.open_table` takes, such as a YAML file of data sources.
        config: `loader`, `training.seed` and `queries` of it; the defaults without one.
        table: Which data source of a YAML file that has several event tables.
        kinds: What a column is, where its type does not say; see `kit.data.fit_features`.
        columns: Which columns become features; empty for all.
        where: A condition on rows, in the database's SQL.
        sketch_quality: Width of the sketches, as a fraction of the usual; the model's argument of the same name.
        target_fraction: Part of an entity's latest events that is predicted; as in `kit.data.fit_features` by default.
        batch_size: Entities per batch on each device, in place of `loader.batch_size`.
        features: Fitted before; what `kinds` to `target_fraction` would say is then in them.

    Raises:
        ConfigError: for a source that is none, and settings that do not fit.
    """

    @checks_arguments
    def __init__(
        self,
        source: TableSource | Mapping[str, Any] | str | Path,
        config: Config | None = None,
        *,
        table: str = "",
        kinds: Mapping[str, str] | None = None,
        columns: Sequence[str] = (),
        where: str = "",
        sketch_quality: float = 1.0,
        target_fraction: float | None = None,
        batch_size: int | None = None,
        features: Features | None = None,
    ) -> None:
        asked: Any = Config() if config is None else config  # by a user, who may give anything
        place: Any = source
        if not isinstance(asked, Config):
            how = "kit.data.EventData(source, config, table='purchases')"
            raise ConfigError([Problem("config", f"{type(asked).__name__} is no Config; write {how}")])
        if isinstance(place, Config):
            raise ConfigError([Problem("source", "a Config holds no table; write kit.data.EventData(source, config)")])
        super().__init__(asked, {} if batch_size is None else {"loader.batch_size": batch_size})
        named = {"name": table} if table else {}
        self.source: TableSource = place if hasattr(place, "partition_transformation") else open_table(place, **named)
        if not self.source.main_entity_column:
            names = ", ".join(self.source.schema().names)
            how = f"kit.data.open_table(path, main_entity_column=...), one of {names}"
            raise ConfigError([Problem("main_entity_column", f"missing: whose are the rows? Give {how}")])
        if where and isinstance(self.source, DatabaseTable):
            self.source.check(where)
        self.sketch_quality = sketch_quality
        self.loader: EventLoader | None = None
        self._where = where
        self._to_fit: dict[str, Any] = {"kinds": dict(kinds or {}), "columns": tuple(columns), "where": where}
        if target_fraction is not None:
            self._to_fit["target_fraction"] = target_fraction
        self._fitted = features

    @property
    @override
    def _contents(self) -> str:
        return f"entities of {self.source}, {self.config.loader.batch_size} in a batch"

    @override
    def use_config(self, config: Config) -> None:
        super().use_config(config)
        for name in ("_cache", "table"):  # what the config before said of a cache
            self.__dict__.pop(name, None)

    @cached_property
    def table(self) -> TableSource:
        """What is read: the source, behind the cache of query results where there is one."""
        return self._cache.over(self.source) if self._cache is not None else self.source

    @cached_property
    def features(self) -> Features:
        """What entities are encoded by: as given, as kept, or fitted now.

        Raises:
            QueryError: when the source fails.
        """
        fitted = self._fitted or self._kept_features()
        return fitted if fitted.sketch_quality == self.sketch_quality else fitted.with_quality(self.sketch_quality)

    @override
    def prepare_data(self) -> None:
        """With a cache, fit the features and count the entities once a machine, so that ranks find both."""
        self._use_committed()
        if self._cache is not None:
            self._event_table().entities()

    @override
    def train_dataloader(self) -> EventLoader:
        """The batches of this rank.

        Raises:
            ConfigError: for a global batch larger than the entities there are.
            PartitionError: for nulls in the partition column.
            QueryError: when the source fails.
        """
        self._use_committed()
        self._close()
        self.loader = self._entities()
        self.loader.on_length = self._tell_length
        return self.loader

    @override
    def _validation_batches(self) -> EventLoader:
        self.validation_loader = self._entities(validates=True)
        return self.validation_loader

    def _entities(self, validates: bool = False) -> EventLoader:
        world_size, rank = self.ranks
        config, features, table = self.config, self.features, self._event_table()
        fraction, loader, budget = config.data.validation_fraction, config.loader, config.queries.memory_bytes
        quarter = budget // 4 if fraction else 0  # what validation gets of the one budget
        plan = EventPlan(
            entities=table.entities(), table=table.identity(), batch_size=loader.batch_size, world_size=world_size,
            seed=config.training.seed, shuffle=loader.shuffle and not validates,
            drop_last=loader.drop_last and not validates, validation_fraction=fraction, validates=validates,
        )  # fmt: skip
        return EventLoader(
            table, plan, features.encode, rank=rank, memory_bytes=quarter if validates else budget - quarter,
            prefetch=config.queries.prefetch and not validates,
        )  # fmt: skip

    @override
    def teardown(self, stage: str | None = None) -> None:
        super().teardown(stage)
        self.source.close()

    def _event_table(self) -> EventTable:
        queries = self.config.queries
        return EventTable(
            self.table, columns=self.features.query_columns, where=self._where, batch_rows=queries.batch_rows,
            query_chunks=queries.load_query_chunks,
        )  # fmt: skip

    @cached_property
    def _cache(self) -> QueryCache | None:
        path = self.config.queries.cache_path
        return QueryCache(path) if path and not isinstance(self.source, CachedSource) else None

    def _kept_features(self) -> Features:
        """As a cache keeps them, in a file named after everything that decides them but the width of the sketches."""
        if self._cache is None:
            return fit_features(self.table, self.config, sketch_quality=self.sketch_quality, **self._to_fit)
        columns = [(field.name, str(field.type)) for field in self.source.schema()]
        decided = [self.source.identity(), self.source.state(), columns, sorted(self._to_fit.items())]
        digest = hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]
        path = self._cache.folder / "features" / f"{self.source.name}-{digest}.json"
        try:
            return Features.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            features = fit_features(self.table, self.config, sketch_quality=self.sketch_quality, **self._to_fit)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, features.to_json())
        return features
