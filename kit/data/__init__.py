"""Data for training: stores of samples and rows, tables, and what reading them costs.

    patches   `PatchData` trains on them. `split` and `join` say which, `statistics` what a filter or a mean needs;
              `probe`, `measure_reading` and `measure_networks` how fast they come; `prefetch` and `download_once`
              bring them near
    stores    `chunk_table` and `chunk_panel` choose chunks; `plan_build`, `expected_bytes`, `advise_schedule` and
              `build_panel` say what `kit.build` will do, `verify` what lies there
    rows      `RowData` trains on them; `open_rows`, `write_rows` and `array_bytes` read, write and size them
    tables    `EventData` trains on them; `open_table` and `read_sources` open, `fit_features`, `plan_partitions` and
              `measure_queries` prepare them, `QueryCache` keeps what queries gave

Names are loaded when first used; `help(kit.data.probe)` explains one.
"""

from typing import TYPE_CHECKING

from kit.registry import lazy

if TYPE_CHECKING:
    from kit.checkpoints.downloading import download_once as download_once
    from kit.chunks.table import chunk_table as chunk_table
    from kit.data.build.layout import expected_bytes as expected_bytes
    from kit.data.build.plan import plan_build as plan_build
    from kit.data.build.schedulers import advise_schedule as advise_schedule
    from kit.data.build.verify import verify as verify
    from kit.data.joined import join as join
    from kit.data.patches.module import PatchData as PatchData
    from kit.data.patches.prefetch import prefetch as prefetch
    from kit.data.patches.probe import probe as probe
    from kit.data.patches.reading import measure_networks as measure_networks
    from kit.data.patches.reading import measure_reading as measure_reading
    from kit.data.patches.tiles import statistics as statistics
    from kit.data.rows.loader import RowData as RowData
    from kit.data.rows.rows import open_rows as open_rows
    from kit.data.rows.write import array_bytes as array_bytes
    from kit.data.rows.write import write_rows as write_rows
    from kit.data.splits import split as split
    from kit.data.tables.cache import QueryCache as QueryCache
    from kit.data.tables.declare import open_table as open_table
    from kit.data.tables.declare import read_sources as read_sources
    from kit.data.tables.fit import fit_features as fit_features
    from kit.data.tables.loader import EventData as EventData
    from kit.data.tables.measure import measure_queries as measure_queries
    from kit.data.tables.source import plan_partitions as plan_partitions
    from kit.widgets.build_panel import build_panel as build_panel
    from kit.widgets.chunk_panel import chunk_panel as chunk_panel

__getattr__, __dir__ = lazy(__name__)
