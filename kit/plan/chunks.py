"""Chunks in one place: the published table, the expected union of a batch, and the plan with its reasons.

`chunk_table` counts (no latency needed), `expected_distinct_chunks` counts a batch, `plan_layout` decides. The parts
live in `geometry` (counts), `table`, `cost` (seconds), `layout` (the choice), `chunk_plan` (the answer) and `reasons`.
"""

from __future__ import annotations

from kit.plan.chunk_plan import ChunkPlan
from kit.plan.cost import Access, LayoutCost, Network, price
from kit.plan.geometry import expected_distinct_chunks
from kit.plan.layout import plan_layout
from kit.plan.table import ChunkRow, ChunkTable, chunk_table

__all__ = [
    "Access",
    "ChunkPlan",
    "ChunkRow",
    "ChunkTable",
    "LayoutCost",
    "Network",
    "chunk_table",
    "expected_distinct_chunks",
    "plan_layout",
    "price",
]
