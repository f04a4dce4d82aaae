"""EventData: batches of entities with all their events, as features, for Lightning; the table may exceed all memory.

The table is read in `queries.load_query_chunks` query chunks an epoch, and in `queries.fit_query_chunks` once to fit
the features. Neither number changes what comes out: every entity once an epoch, with the same features. With
`queries.cache_path` the results of queries are kept there as Parquet, and fitted features beside them, for later epochs
and other tasks; rank 0 fills it in `prepare_data`, and the others find it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kit.config import Config
from kit.data.epoch_data import ConfiguredData
from kit.data.tables.declared import open_table
from kit.data.tables.event_loader import EventLoader
from kit.data.tables.event_plan import EventPlan
from kit.data.tables.event_table import EventTable
from kit.data.tables.features import Features
from kit.data.tables.fitting import fit_features
from kit.data.tables.query_cache import CachedSource, QueryCache

if TYPE_CHECKING:
    from kit.data.tables.source import TableSource


class EventData(ConfiguredData):
    """Entities of one event table, encoded by features that are fitted on it.

    The table is opened at once and read when it is needed. World size and rank are the trainer's, or 1 and 0 without
    one. Where kit runs the trial, the config is the trial's; in a committed run it is that of the file.

    Args:
        source: A table that is open, or what `kit.open_table` takes, such as a YAML file of data sources.
        config: `loader`, `training.seed` and `queries` of it; the defaults without one.
        table: Which data source of a YAML file that has several event tables.
        kinds: What a column is, where its type does not say; see `kit.fit_features`.
        columns: Which columns become features; empty for all.
        where: A condition on rows, in the database's SQL.
        sketch_quality: Width of the sketches, as a fraction of the usual; the model's argument of the same name.
        target_fraction: Part of an entity's latest events that is foretold; as in `kit.fit_features` by default.
        batch_size: Entities per batch on each device, in place of `loader.batch_size`.
        features: Fitted before; what `kinds` to `target_fraction` would say is then in them.

    Raises:
        ConfigError: for a source that is none, and settings that do not fit.
    """

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
        super().__init__(config or Config(), {} if batch_size is None else {"loader.batch_size": batch_size})
        named = {"name": table} if table else {}
        self.source = open_table(source, **named) if isinstance(source, str | Path | Mapping) else source
        self.sketch_quality = sketch_quality
        self.loader: EventLoader | None = None
        self._where = where
        self._asked: dict[str, Any] = {"kinds": dict(kinds or {}), "columns": tuple(columns), "where": where}
        if target_fraction is not None:
            self._asked["target_fraction"] = target_fraction
        self._fitted = features

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
        world_size, rank = self.ranks
        config, features, table = self.config, self.features, self._event_table()
        self._close()
        plan = EventPlan(
            entities=table.entities(), table=table.identity(), batch_size=config.loader.batch_size,
            world_size=world_size, seed=config.training.seed, shuffle=config.loader.shuffle,
            drop_last=config.loader.drop_last,
        )  # fmt: skip
        self.loader = EventLoader(
            table, plan, features.encode, rank=rank, memory_bytes=config.queries.memory_bytes,
            prefetch=config.queries.prefetch,
        )  # fmt: skip
        return self.loader

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

    # -- features that are kept

    def _kept_features(self) -> Features:
        path = self._features_path()
        kept = _read_features(path) if path is not None else None
        if kept is not None:
            return kept
        fitted = fit_features(self.table, self.config, sketch_quality=self.sketch_quality, **self._asked)
        if path is not None:
            _write_features(path, fitted)
        return fitted

    def _features_path(self) -> Path | None:
        """Named after everything that decides what is fitted, but the width of the sketches."""
        if self._cache is None:
            return None
        columns = [(field.name, str(field.type)) for field in self.source.schema()]
        decided = [self.source.identity(), self.source.state(), columns, sorted(self._asked.items())]
        digest = hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]
        return self._cache.folder / "features" / f"{self.source.name}-{digest}.json"


def _read_features(path: Path) -> Features | None:
    """None when there are none that can be read."""
    try:
        return Features.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_features(path: Path, features: Features) -> None:
    """In one move: whoever reads it meanwhile finds all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.partial")
    draft.write_text(features.to_json(), encoding="utf-8")
    draft.replace(path)
