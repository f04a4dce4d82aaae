"""A module that waits for a test: so that what must happen meanwhile happens meanwhile, however slow the machine is."""

import time
from pathlib import Path

from kit.testing import TinyModule


class Gated(TinyModule):
    """Waits in step `step` (from 1) of a rank for a file `gate`; from then on there is a file `gate.reached`."""

    def __init__(self, gate, step=1, rank=0):
        super().__init__()
        self.gate, self.step, self.rank = Path(gate), step, rank

    @property
    def reached(self):
        return self.gate.with_suffix(".reached")

    def training_step(self, batch, batch_idx):
        if (self.global_rank, self.global_step + 1) == (self.rank, self.step):
            self.reached.touch()
            while not self.gate.exists():
                time.sleep(0.01)
        return super().training_step(batch, batch_idx)
