"""Chunks in one place: the published table, the expected union of a batch, and the plan with its reasons.

`chunk_table` counts (no latency needed), `expected_distinct_chunks` counts a batch, `plan_layout` decides. The parts:

- counting: `geometry` (a patch), `sharing` (a batch, a cache), `block_order` (block-shuffled order, defined there);
- pricing: `access` (what is read), `resources` (by what), `cost` (seconds, memory, money), `readers` (other patterns);
- deciding: `candidates` (sizes and rules), `shards`, `choice`, `layout` (the way in);
- showing: `chunk_plan` (the answer), `reasons`, `table`.
"""

from __future__ import annotations

from kit.plan.access import Access
from kit.plan.chunk_plan import ChunkPlan
from kit.plan.cost import LayoutCost, price
from kit.plan.geometry import expected_distinct_chunks
from kit.plan.layout import plan_layout
from kit.plan.resources import Host, Network, Prices
from kit.plan.table import ChunkRow, ChunkTable, chunk_table

__all__ = [
    "Access",
    "ChunkPlan",
    "ChunkRow",
    "ChunkTable",
    "Host",
    "LayoutCost",
    "Network",
    "Prices",
    "chunk_table",
    "expected_distinct_chunks",
    "plan_layout",
    "price",
]
