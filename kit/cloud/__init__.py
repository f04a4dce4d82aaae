"""A simulated cloud on this machine: object stores with the latency, bandwidth and faults of a real bucket.

`simulate` starts one. Names are loaded when first used.
"""

from typing import TYPE_CHECKING

from kit.registry import lazy

if TYPE_CHECKING:
    from kit.cloud.simulated import simulated_cloud as simulate

__getattr__, __dir__ = lazy(__name__)
