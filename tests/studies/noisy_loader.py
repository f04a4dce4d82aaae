"""A loader that is known exactly, on a machine that is not always as fast: what calibration rules are judged by.

`NoisyLoader.true` gives batches per second; measuring it spends seconds of its own clock, and hears noise of each batch
and a drift that later measurements share in part.
"""

import math
import random

from kit.studies.calibration.rules import (
    SLOW_SECONDS,
    LoaderSetting,
    Measurement,
    block_size,
    choose,
    cpu_cap,
    long_enough,
    standard_error,
    together,
)
from kit.studies.calibration.search import Bounds, MeasurementRequest, search, sweep_workers, worker_counts

PLAIN = LoaderSetting(num_workers=0, prefetch_factor=2)
FACTORS = (2, 4, 8)
BOUNDS = Bounds(timeout_seconds=20.0, most_batches=200)
BATCH_BYTES = 1000
KINDS = ("computes", "waits", "does both", "feeds a step", "takes unlike times")


def measured(setting, speed, error=0.0, turns=0):
    return Measurement(
        setting=setting, batches_per_second=speed, batches=10, seconds=10 / speed, error=error, first_batch_seconds=0.1,
        whole_seconds=1.0, turns=turns,
    )  # fmt: skip


class NoisyLoader:
    """Drawn from `seed`: 2.5 to 250 ms a batch, 2 to 16 cores; `noise` scales what hides the truth."""

    def __init__(self, seed, noise=1.0):
        self.random = draw = random.Random(seed)
        self.cores, self.kind = draw.choice([2, 4, 8, 16]), draw.choice(KINDS)
        self.seconds = 10 ** draw.uniform(-2.6, -0.6)
        self.busy = {"computes": 1.0, "waits": draw.uniform(0.02, 0.1)}.get(self.kind, draw.uniform(0.1, 1))
        self.passing_on = draw.uniform(0, 0.05) * self.seconds
        self.step = self.seconds / draw.uniform(1, 12) if self.kind == "feeds a step" else 0.0
        self.unlike = draw.uniform(0.3, 1.5) if self.kind == "takes unlike times" else 0.0
        self.of_a_batch, self.drift = noise * draw.uniform(0.02, 0.4), noise * draw.uniform(0, 0.15)
        self.drift_seconds, self.start_seconds = draw.uniform(0.5, 10), draw.uniform(0.01, 0.08)
        self.clock, self.state = 0.0, draw.gauss(0, 1)

    @property
    def cap(self):
        return cpu_cap(self.cores, self.busy)

    @property
    def ceiling(self):
        return 1 / self.step if self.step else math.inf

    @property
    def grid(self):
        counts = range(1, self.cap + 1)
        return [PLAIN, *(LoaderSetting(num_workers=w, prefetch_factor=p) for w in counts for p in FACTORS)]

    def true(self, setting):
        """Processes wait for the slowest batch on order, share the cores, and pass batches on one at a time."""
        workers = setting.num_workers
        if not workers:
            return 1 / (self.seconds + self.step)
        held_up = 1 + self.unlike * (1 - 1 / workers) / setting.prefetch_factor
        crowd = max(1.0, workers * self.busy / self.cores)
        speed = min(workers / self.seconds / held_up, self.cores / self.busy / self.seconds)
        return min(speed * (1 - 0.03 * math.log2(crowd)), 1 / self.passing_on, self.ceiling)

    def wait(self, setting, batches):
        """Seconds that so many batches take now."""
        mean = batches / self.true(setting)
        kept = math.exp(-mean / self.drift_seconds)
        self.state = kept * self.state + math.sqrt(1 - kept * kept) * self.random.gauss(0, 1)
        chance = max(0.2, 1 + self.of_a_batch / math.sqrt(batches) * self.random.gauss(0, 1))
        seconds = mean * math.exp(self.drift * self.state) * chance
        self.clock += seconds
        return seconds

    def measure(self, ask, to_the_end=False):
        """As a real one is measured."""
        setting, began = ask.setting, self.clock
        self.clock += self.start_seconds * setting.num_workers + self.seconds + 0.01
        first = self.clock - began
        fraction = 1.0 if first > BOUNDS.slow_start_seconds and not ask.again else ask.fraction
        most, allowed = round(BOUNDS.most_batches * fraction), BOUNDS.timeout_seconds * fraction
        self.wait(setting, max(1, min(setting.warmup_batches, int(allowed / 2 * self.true(setting)))))
        paces, batches, seconds = [], 0, 0.0
        while not batches or (batches < most and self.clock - began - first < allowed):
            slow = block_size(setting) / self.true(setting) > SLOW_SECONDS
            size = min(together(setting) if slow else block_size(setting), most - batches)
            took = self.wait(setting, size)
            batches, seconds = batches + size, seconds + took
            if size >= together(setting):
                paces.append(took / size)
            if not to_the_end and long_enough(paces, seconds, ask.rival):
                break
        return Measurement(
            setting=setting, batches_per_second=batches / seconds, batches=batches, seconds=seconds,
            error=standard_error(paces), first_batch_seconds=first, whole_seconds=self.clock - began,
            paces=tuple(paces),
        )  # fmt: skip

    def sweep(self, measure):
        return sweep_workers(
            measure, PLAIN, worker_counts((), lambda: self.cap), FACTORS, lambda _: "", 0.0, self.ceiling
        )

    def calibrate(self):
        """What is chosen, the figures of all, what was asked for, and the seconds it took."""
        figures, asks, began = {}, [], self.clock

        def measure(ask):
            asks.append(ask)
            return self.measure(ask)

        search(self.sweep, measure, BOUNDS, figures, lambda _: True, lambda: BATCH_BYTES)
        return choose(list(figures.values()), BATCH_BYTES).setting, figures, asks, self.clock - began

    def exhaustive_seconds(self):
        began = self.clock
        for setting in self.grid:
            self.measure(MeasurementRequest(setting=setting, fraction=1.0), to_the_end=True)
        return self.clock - began

    def best(self):
        return max(map(self.true, self.grid))
