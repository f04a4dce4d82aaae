"""Memory without the hardware: what a batch size, a lever or a card would change, and how right it was so far.

`kit.predict_memory` answers for one configuration, `what_if` for several, `model` for any batch size at once,
`largest_batch` for a device; `sizes` lists the dials of a model, `panel` turns them, `residuals` tells how right it
was. Names are loaded when first used.
"""

from typing import TYPE_CHECKING

from kit.registry import lazy

if TYPE_CHECKING:
    from kit.memory.batch_model import largest_batch as largest_batch
    from kit.memory.batch_model import memory_model as model
    from kit.memory.dials import model_dials as sizes
    from kit.memory.residual_table import residuals as residuals
    from kit.memory.variations import what_if as what_if
    from kit.widgets.memory_panel import memory_panel as panel

__getattr__, __dir__ = lazy(__name__)
