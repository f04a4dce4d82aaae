"""Data advice: loader processes and chunk layout of a recommendation, where data is what holds the run up.

Sizes of loading come from `kit.plan.schedule`, the layout from `kit.plan_chunks` beside the store as it is. What would
help only if data were the limit is said and not changed: nothing is rebuilt on a guess.
"""

from __future__ import annotations

from kit.config import Config
from kit.errors import KitError
from kit.plan.schedule import advise_schedule
from kit.report.big_run import BigRunRow
from kit.report.recommendation import Change
from kit.units import format_seconds

_DATA = ("loading", "store requests/s", "store bandwidth", "loader CPU")
_WORTH = 1.5
"""So many times faster another layout has to be to be built for."""


def data_changes(
    config: Config, run: BigRunRow | None, *, ranks: int, cores: int | None, own: bool
) -> tuple[list[Change], list[str]]:
    """What to change of loading, and what to know of it.

    Args:
        config: With the other changes made.
        run: The prediction for it, where there is one.
        ranks: Of a node.
        cores: Of a node; None for those of this machine.
        own: Whether kit makes the loader.
    """
    held = run is not None and run.bound in _DATA
    workers, said = _workers(config, held, ranks, cores, own)
    layout, more = _layout(config, held) if own else ([], [])
    return [*workers, *layout], [*said, *more]


def _workers(config: Config, held: bool, ranks: int, cores: int | None, own: bool) -> tuple[list[Change], list[str]]:
    schedule = advise_schedule(config, cores=cores, ranks=ranks, heavy_transform=held and not own)
    values = {"loader.num_workers": schedule.loader_workers, "loader.decode_threads": schedule.decode_threads}
    values = {path: value for path, value in values.items() if config.get(path) != value}
    crowded = [text for text in schedule.warnings if "take turns" in text and own]
    if not values or not (held or crowded):
        return [], []
    reason = crowded[0] if crowded else f"data holds the run up; {schedule.reasons[0]}"
    notes = [] if own else ["loader settings reach a loader that kit makes; kit.calibrate measures yours"]
    return [Change(name="workers", values=values, reason=reason)], notes


def _layout(config: Config, held: bool) -> tuple[list[Change], list[str]]:
    """Another layout where the store is slow to read; nothing where there is no store yet."""
    from kit.data.dataset import open_dataset
    from kit.data.layout import plan_chunks
    from kit.data.reading import price_store

    try:
        now = price_store(config, open_dataset(config))
        free = config.replace({"chunking.chunk": "auto", "chunking.shard": "auto", "data.source": None})
        plan = plan_chunks(free)
    except KitError:
        return [], []
    seconds = sum(cost.seconds_per_batch for cost in now)
    if seconds < _WORTH * plan.seconds_per_batch:
        return [], []
    chunk = dict(zip(plan.dims, plan.chunk, strict=True))
    planned, cut = format_seconds(plan.seconds_per_batch), " × ".join(map(str, plan.chunk))
    said = f"a batch takes {format_seconds(seconds)} to read as the store is cut, {planned} in chunks of {cut}"
    if not held:
        return [], [f"{said}: worth building anew if data should hold the run up"]
    reason = f"{said}; build it anew with kit.build"
    return [Change(name="chunk layout", values={"chunking.chunk": chunk}, reason=reason)], []
