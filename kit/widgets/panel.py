"""Panel: everything about one Config in one place: four answers, its form, a tab for each question, the same in code.

On top stand memory, speed, data and the whole run, as far as they are known before anything runs. Memory is predicted
once the panel is shown and anew when a setting changes, but never beside a trial, which it would slow.

Every control has a method of the same name, so that a notebook and a script do the same. A click returns at once: what
takes time (looking at the store, building, checking a trial before it starts) runs in a thread, and a trial runs in
processes of its own. One button fits and stops. `wait()` and `await panel` block; an interrupt ends the trial, keeps
what it measured, and ends Run All. Only widget traits are set from threads, never an Output.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets

from kit.arguments import config_first
from kit.charts.speed import breakdown_html
from kit.committed.file import Committed
from kit.config import Config
from kit.errors import ConfigError, KitError, TrialError
from kit.memory.alongside import fit
from kit.memory.dials import model_dials
from kit.memory.query import precision_of
from kit.memory.replay.cards import THIS_MACHINE, DeviceTarget, target_of
from kit.memory.replay.estimate import MemoryEstimate
from kit.speed.prediction import SpeedEstimate, speed_beside
from kit.studies.calibration.result import Calibration, calibrate
from kit.studies.diagnosis.diagnose import Diagnosis
from kit.studies.profiling.profile import Profile, profile
from kit.train.choices import explain_attention, explain_batch, explain_strategy
from kit.trial.payload import BATCH, Part, batch_rule
from kit.trial.trial import Trial, warm_up
from kit.widgets.build_panel import BuildPart
from kit.widgets.chunk_panel import ChunkPart
from kit.widgets.diagnose import CalibrationView, DiagnosisControl, ProfileView
from kit.widgets.files import CommitView, ExportView
from kit.widgets.form import ConfigForm
from kit.widgets.live import ConfigPanel, LatestOnlyWorker, live_box, weakly
from kit.widgets.memory_panel import MemoryPart
from kit.widgets.memory_view import CardAnswer
from kit.widgets.overview import (
    MeasuredSpeed,
    Overview,
    calibrated_card,
    data_card,
    measure_speed,
    memory_card,
    run_card,
    speed_card,
    speed_expected,
)
from kit.widgets.parts import (
    QUIET,
    Fold,
    button,
    code_html,
    error_words,
    folded_html,
    line,
    note_html,
    pre_html,
    put,
    red_html,
    relabel,
    row,
    turn_grey,
    two_columns,
)
from kit.widgets.store import StoreFacts, StoreView
from kit.widgets.trial_view import TrialView

_TICK_SECONDS = 0.05
_AFTER = "predicted after the trial"


@config_first
def panel(config: Any = None, module: Any = None, data: Any = None) -> Panel:
    """Show the whole kit as widgets for one config: a form, the chunk plan, memory, a live trial and its diagnosis.

    `close()` removes its widgets. They are also removed once no variable holds the panel, none of its trials runs, and
    the cell that shows it has run again.

    Args:
        config: What the form starts from; the default config when left out. It is not changed: `panel.config` is the
            edited copy.
        module: What is trained, as `kit.fit` takes it. None takes `model.target`.
        data: What it is trained on, as `kit.fit` takes it. None takes the config's own store.

    Returns:
        The panel, which a notebook shows as the last line of a cell.

    Raises:
        ConfigError: for a config that is none.

    Example:
        >>> shown = kit.panel(config)
        >>> shown.config == config
        True
        >>> shown.close()
    """
    return Panel(config, module, data)


class Panel(ConfigPanel):
    """The widgets, and the methods that mirror them."""

    def __init__(self, config: Config, module: Any = None, data: Any = None) -> None:
        rule = batch_rule(Part.of(data), config)
        if rule.note and not rule.is_worth_a_warning and rule.size is not None:  # nobody chose the config's number
            config = config.replace({BATCH: rule.size})
        self._base, self._module, self._data = config, module, data
        self._starting, self._mutex = LatestOnlyWorker("kit-fit"), threading.RLock()
        self.trial: Trial | None = None
        """The last trial started here."""
        self.form = ConfigForm(config)
        self.view = TrialView(config)
        self.overview = Overview()
        self._breakdown = line()
        self.breakdown = Fold("where a step's time goes", [self._breakdown], weakly(self._show_breakdown))
        """The predicted step by part of the module, each of which opens to its lines."""
        self._speed: MeasuredSpeed | None = None
        self._estimate_priced: MemoryEstimate | None = None
        self._wanted = False
        self._built: bool | None = None
        self._facts_drawn: StoreFacts | None = None
        self._drawing = LatestOnlyWorker("kit-chunks")
        self._refused = False
        """Whether the last Fit was, and nothing has changed since."""
        self._no_advice, self._no_trials = line(), line()
        self.memory = MemoryPart(self.form, module, data, on_change=weakly(self._show_memory))
        """What the device needs; predicted once the panel is shown, or by `memory.predict()`."""
        self.button = button("", "", "")
        self.code = line(margin="6px 0 0")
        self.changes = line(width="auto", flex="1 1 auto", min_width="0")
        self.reset_button = button("reset", "undo", "take every setting back to what the panel started from")
        self.diagnosing = DiagnosisControl(
            weakly(self._ended_trial), weakly(self._check_before_diagnosing), weakly(self._count_tabs)
        )
        self.profiling = ProfileView(weakly(self._profile))
        self.calibration = CalibrationView(weakly(self._calibrate), weakly(self._on_calibrated))
        self.committing = CommitView(config, module, data, weakly(self._last_ended), self.form.check)
        self.exporting = ExportView(config, weakly(self._on_results))
        self.store: StoreView | None = None
        self.chunks: ChunkPart | None = None
        self.building: BuildPart | None = None
        self.tabs = ipywidgets.Tab(layout={"width": "100%", "margin": "0"})
        self._draw()
        if data is None:
            self.chunks = ChunkPart(self.form, weakly(self._check_before_measuring))
            self.building = BuildPart(self.form, config)
            children = (*self.building.plans, *self.building.advice)
            self._fold = Fold("who builds it, and who loads", children, weakly(self._plan_build))
            self.store = StoreView(config, weakly(self._on_facts), self.form.check)
            parts = (self.store.ui, self.chunks.ui, self._fold.ui)
            self._data_tab.children = (*parts, *self._data_tab.children)
        else:
            words = "data of your own: Calibrate measures what its loader gives, and which settings are enough"
            self._data_tab.children = (line(note_html(words, margin="0")), *self._data_tab.children)
        self._label(busy=False)
        self._listen()
        self._show_changes()
        self._show_code()
        self._show_hints()
        self._show_cards()
        self.committing.look(config)
        self.exporting.look(config)
        self._count_tabs()
        self._own()

    # -- what the controls do

    @property
    def busy(self) -> bool:
        """Whether a trial is being started or runs."""
        return self._starting.busy or (self.trial is not None and not self.trial.ended)

    def fit(self) -> Trial:
        """Start a trial of the config and return it at once; the trial that runs, when there is one.

        Raises:
            ConfigError: for edits in the form that do not fit, and as `kit.fit` does.
        """
        with self._mutex:
            if self.trial is not None and not self.trial.ended:
                return self.trial
            try:
                self.form.check()
                self._check_alone(self)
                self.view.reset(self.config, "checking …")
                self.trial = fit(self.config, self._module, self._data)
            except Exception as error:
                self._label(busy=False)
                self._refused = True
                self.view.say("not started", 0.0)
                problems = error.problems if isinstance(error, ConfigError) else [error_words(error)]
                self.view.show_error(" ".join(map(str, problems)))
                raise
            self._label(busy=True)
            self.diagnosing.reset()
            self.select("Live")
            self.view.watch(self.trial)
            self.trial.on_change(self._on_trial)
            return self.trial

    def diagnose(self) -> Diagnosis:
        """Say what the last trial suffers from; the findings appear under it, each with a button that tries its change.

        Raises:
            TrialError: when no trial has ended here, and as `kit.studies.diagnose` does.
        """
        return self.diagnosing.run()

    def _ended_trial(self) -> Trial:
        if self.trial is None or not self.trial.ended:
            raise TrialError("no trial has ended here; fit one first")
        return self.trial

    def _check_before_diagnosing(self) -> None:
        self._check_alone(self.diagnosing)

    def _check_before_measuring(self) -> None:
        self._check_alone(self.chunks)

    def _check_alone(self, mine: object) -> None:
        """That nothing else here runs in processes of its own.

        Raises:
            TrialError: while something does, and says what.
        """
        others: dict[str, Any] = {
            "a trial is running": self, "a profile is running": self.profiling,
            "the loader is being calibrated": self.calibration,
            "the last trial is being diagnosed, or a change tried": self.diagnosing,
            "the store is being measured": self.chunks,
        }  # fmt: skip
        for what, part in others.items():
            if part is not None and part is not mine and part.busy:
                raise TrialError(f"{what}, and each would slow the other; stop it or wait for it")

    def profile(self) -> Profile:
        """Run the config under each profiler, and return at once; the tables appear under the trial.

        Raises:
            KitError: for edits in the form that do not fit, and as `kit.studies.profile` does.
        """
        return self.profiling.run()

    def _profile(self) -> Profile:
        self.form.check()
        self._check_alone(self.profiling)
        return profile(self.config, self._module, self._data)

    def calibrate(self) -> None:
        """Measure loader settings in a thread, and take the cheapest fast one over into the form; returns at once."""
        self.calibration.start()

    def _calibrate(self, on_start: Callable[[Trial], object]) -> Calibration:
        self.form.check()
        self._check_alone(self.calibration)
        return calibrate(self.config, self._module, self._data, on_start=on_start)

    def _on_calibrated(self, found: Calibration) -> None:
        self.config = found.apply(self.config)
        self._show_cards()

    def stop(self) -> None:
        """Ask the trial to end after its current step; what it measured is kept."""
        if self.trial is not None and not self.trial.ended:
            self.view.say("stopping after the current step …", None)
            self.trial.stop()

    def build(self) -> None:
        """Build the store, or what is missing of it, in a thread; returns at once.

        Raises:
            ConfigError: for edits in the form that do not fit.
        """
        if self.store is not None:
            self.store.build()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the trial has ended and the store is looked at and built.

        Raises:
            TrialError: when the trial FAILED or is LOST.
            TrialStopped: after an interrupt, which stops the trial and keeps what it measured.
            TimeoutError: after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._preparing:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"still busy after {timeout} s; it goes on")
            time.sleep(_TICK_SECONDS)
        try:
            if self.trial is not None:
                self.trial.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        finally:
            self._settle()

    def __await__(self) -> Generator[Any, None, None]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> None:
        while self._preparing:
            await asyncio.sleep(_TICK_SECONDS)
        try:
            if self.trial is not None:
                await self.trial
        finally:
            self._settle()

    def commit(self) -> Committed:
        """Write the config as a file that runs anywhere, with the last trial as its evidence where it ran the same.

        Raises:
            KitError: for edits in the form that do not fit, and as `kit.commit` does.
        """
        return self.committing.commit()

    def export(self, path: str | Path | None = None) -> Path:
        """Write the trials of this experiment to a file, in the format that is chosen under their table.

        Raises:
            ConfigError: for a file of others, or one that cannot be written.
        """
        self.exporting.wait()
        return self.exporting.export(path)

    def _last_ended(self) -> Trial | None:
        return self.trial if self.trial is not None and self.trial.ended else None

    @property
    def _preparing(self) -> bool:
        building = self.store is not None and not self.store.wait(0)
        parts = (self.chunks, self.building, self._drawing)
        building = building or any(part is not None and part.busy for part in parts)
        measuring = self.diagnosing.busy or self.profiling.busy or self.calibration.busy
        return self._starting.busy or measuring or building or self.committing.busy or self.exporting.busy

    # -- what happens

    def _listen(self) -> None:
        """Let the controls do what the methods do."""
        clicked, reset, predict = weakly(self._clicked), weakly(self.form.reset), weakly(self._predict)
        select = weakly(self.select)
        self.button.on_click(lambda _: clicked())
        self.reset_button.on_click(lambda _: reset())
        self.calibration.button.on_click(lambda _: select("Data"))
        self.profiling.button.on_click(lambda _: select("Advice"))
        self.diagnosing.button.on_click(lambda _: select("Advice"))
        cards, hints = weakly(self._show_cards), weakly(self._show_hints)
        self.memory.device_control.observe(lambda _: (predict(), cards(), hints()), "value")
        self.form.on_change(weakly(self._on_config))
        self.form.on_rejected(weakly(self._show_changes))
        self.form.on_rejected(weakly(self._forget_refusal))
        show_plan = weakly(self._show_plan)
        drawing = self._drawing
        self.tabs.observe(lambda _: drawing.submit(show_plan), "selected_index")

    def _clicked(self) -> None:
        if self.trial is not None and not self.trial.ended:
            self.stop()
        elif not self._starting.busy:
            self._label(busy=True)
            self.select("Live")
            self.view.say("checking …", None)
            self._starting.submit(self._start)

    def _start(self) -> None:
        """What a click on Fit does; what went wrong stands beside the button, and has no place in a log."""
        with contextlib.suppress(Exception):
            self.fit()

    def _on_trial(self, trial: Trial) -> None:
        if trial.ended and trial is self.trial:
            self._settle()

    def _settle(self) -> None:
        """The end of a trial or a profile, however it came."""
        self.profiling.settle()
        if self.trial is not None and self.trial.ended:
            self.view.show(self.trial)
            self._label(busy=False)
            self.diagnosing.button.disabled = False
            self.exporting.look(self.config)
            self._measure(self.trial)
            self._predict()
        self._refresh()

    def _measure(self, trial: Trial) -> None:
        """Take over what an ended trial says about speed, once."""
        if self._speed is None or self._speed.name != trial.name:
            self._speed = measure_speed(trial) or self._speed
            self._show_cards()

    def _predict(self) -> None:
        """Predict memory for the config as it is now; after the trial, while one runs."""
        if self._wanted and not self.busy:
            self.memory.predict()
        elif self._wanted:
            self.memory.view.wait_for_answer()
            self.memory.view.say(_AFTER)

    def _on_config(self, config: Config) -> None:
        self._show_changes()
        self._show_code()
        self._show_cards()
        self._predict()
        self._show_hints()
        self.committing.look(config)
        self.exporting.look(config, again=False)
        self._forget_refusal()
        if self.store is not None:
            self.store.look(config)
            self._plan_build()
        if not self.busy and self.trial is None and config.trial != self.view.limits:
            self.view.reset(config)

    def _forget_refusal(self) -> None:
        """Show the last trial again, once what was refused is another."""
        if self._refused and not self.form.rejected and not self.busy:
            self._refused = False
            self.view.reset(self.config)
            if self.trial is not None:
                self.view.watch(self.trial)

    def _show_plan(self) -> None:
        """Draw the plan of the store, once its tab is in sight: a slider of the memory tab does not wait for it."""
        if self.store is None or self.chunks is None or self.tabs.selected_index != self._pages.index("Data"):
            return
        facts = self.store.facts
        if facts.plan is not None and facts is not self._facts_drawn:
            self._facts_drawn = facts
            self.chunks.show(facts.config, facts.plan, () if facts.dataset is None else facts.costs)

    def _plan_build(self) -> None:
        """Who can build it, once somebody has opened that."""
        if self.building is not None and self._fold.opened:
            self.building.advise(self.config.as_code(against=self._base))
            self.building.plan()

    def _on_facts(self, facts: StoreFacts) -> None:
        assert self.chunks is not None
        self._show_plan()
        self.form.show_hints({**facts.hints, **self.chunks.hints(self.config)}, "store")
        self._show_cards()
        built = facts.dataset is not None
        if self._built is False and built:
            self._predict()
        if self._built is None and not built and self.trial is None:
            self.select("Data")
        self._built = built

    # -- what is shown

    def _draw(self) -> None:
        """Four answers over the settings and the tabs; the line of code below."""
        self._data_tab = ipywidgets.VBox([self.calibration.ui])
        pages = {
            "Live": [self.view.progress, self.view.chart, self.view.logged, self.view.notes, self.view.error],
            "Memory": [*self.memory.named_sliders(), self.memory.dials.ui, self.memory.view.ui],
            "Data": self._data_tab, "Advice": [self._no_advice, self.diagnosing.ui, self.profiling.ui],
            "Trials": [self._no_trials, self.exporting.ui], "Commit": [self.committing.ui],
        }  # fmt: skip
        children = [ipywidgets.VBox(page) if isinstance(page, list) else page for page in pages.values()]
        self.tabs.children, self.tabs.titles, self.tabs.selected_index = children, tuple(pages), 0
        self._pages = tuple(pages)
        actions = row(self.button, self.calibration.button, self.profiling.button, self.diagnosing.button, gap="4px")
        device = self.memory.device_control
        device.layout.width, device.style.description_width = "240px", "auto"
        head = ipywidgets.HBox([actions, self.changes, self.reset_button, device], layout={
            "align_items": "center", "flex_flow": "row wrap", "grid_gap": "4px 16px",
        })  # fmt: skip
        below = two_columns(self.form.ui, [self.tabs])
        self.ui = live_box([head, self.overview.ui, self.breakdown.ui, below, self.code])

    def select(self, name: str) -> None:
        """Show the tab of this name."""
        self.tabs.selected_index = self._pages.index(name)

    def _on_results(self) -> None:
        """Other trials, or a prediction that was made after its trial had ended."""
        self._count_tabs()
        self._show_cards()
        if self.trial is not None and self.trial.ended:
            self.view.show(self.trial)

    def _count_tabs(self) -> None:
        """How many trials and findings there are, in the titles of their tabs."""
        view = self.diagnosing.view
        counts = {"Trials": len(self.exporting.results), "Advice": len(view.findings) if view else 0}
        self.tabs.titles = tuple(f"{name} ({counts[name]})" if counts.get(name) else name for name in self._pages)
        none = "no trial of this experiment has ended: Fit runs one"
        put(self._no_trials, "" if counts["Trials"] else note_html(none, margin="0"))
        asked = view is not None or self.profiling.profile is not None
        none = "nothing is diagnosed: Diagnose says what holds the last trial up, Profile where its time goes"
        put(self._no_advice, "" if asked else note_html(none, margin="0"))

    def _show_changes(self) -> None:
        changed = self.form.changed
        words = f"{len(changed)} setting{'s' * (len(changed) > 1)} changed" if changed else "unchanged"
        words = f"<span style='color:{QUIET}'>{words}</span>"
        rejected = self.form.rejected
        if rejected:
            words = red_html(f"not as in the form, as {rejected[0].path} does not fit: all is of the settings before")
        self.changes.value = f"<b>{html.escape(self.config.name)}</b> {words}"
        turn_grey(self.overview.ui, bool(rejected))
        self.reset_button.layout.display = None if changed else "none"

    def _show_cards(self) -> None:
        """Speed, data and the whole run; memory has its own."""
        facts = StoreFacts(problem="Calibrate measures your loader")
        if self.store is not None:
            facts = self.store.facts
        missing = facts.problem or "looking at the store …"
        rows, elsewhere = reversed(self.exporting.experiment), self._elsewhere
        expected = speed_expected(self.config, self._module, self._data, rows)
        ranks = facts.plan.ranks if facts.plan else 1
        predicted = self._predicted_speed
        cards = {
            "speed": speed_card(self._speed, self.config, expected, elsewhere, predicted),
            "data": data_card(
                facts.costs, ranks, self._speed, self.config, missing, elsewhere, from_bucket=facts.in_folder
            ),
            "run": run_card(self._speed, self.config, elsewhere, predicted),
        }  # fmt: skip
        if self.store is None and (calibrated := calibrated_card(self.calibration.found, self.config)) is not None:
            cards["data"] = calibrated
        looks = self.store is not None and facts.config != self.config  # at the store of the settings before
        self.overview.show(**{name: replace(card, stale=looks) for name, card in cards.items()})
        self._show_breakdown(predicted)
        if not self._wanted:
            self._show_memory()

    def _show_breakdown(self, predicted: SpeedEstimate | None = None) -> None:
        """Drawn while it is open only."""
        if self.breakdown.opened:
            found = predicted or self._predicted_speed
            unknown = "not known: memory of this is not predicted yet, or kit.predict_speed never measured this machine"
            self._breakdown.value = note_html(unknown, margin="0") if found is None else breakdown_html(found)

    @property
    def _predicted_speed(self) -> SpeedEstimate | None:
        """Of the device that memory was predicted for, from the same recording."""
        view = self.memory.view
        if view.estimate is None or view.failure is not None or view.estimate_waiting:
            return None
        loading_seconds = None if self.store is None else self.store.facts.loading_seconds
        return speed_beside(view.estimate, self.config, loading_seconds)

    @property
    def _elsewhere(self) -> str:
        """The GPU model that is asked about, where that is not this machine."""
        return "" if self.memory.device == THIS_MACHINE else CardAnswer(self.memory.device).name

    def _show_memory(self) -> None:
        view, state = self.memory.view, ""
        if not self._wanted:
            state = "predicted once the panel is shown"
        elif view.failure is not None:
            state = str(view.failure).partition("\n")[0]
        elif view.estimate_waiting and self.busy:
            state = _AFTER
        elif view.estimate_waiting:
            state = f"predicting for {self.memory.device} …"
        known = None if view.failure is not None else view.estimate
        self.overview.show(memory=memory_card(self.memory.answer, known, state, self._elsewhere))
        if self._wanted and known is not self._estimate_priced:
            self._estimate_priced = known
            self._show_cards()

    def _label(self, busy: bool) -> None:
        if busy:
            relabel(
                self.button, "Stop", "stop", "warning", "end the trial after its current step; what it measured is kept"
            )
        else:
            relabel(self.button, "Fit", "play", "primary", "start a trial: this config, run briefly in other processes")

    def _show_hints(self) -> None:
        hints = device_hints(self.config, self._base, self._data, self.memory.device)
        self.form.show_hints({**hints, **size_hints(self.config, self._module)}, "settings")

    def _show_code(self) -> None:
        yaml = folded_html("config as YAML", pre_html(self.config.to_yaml(comments=False)))
        self.code.value = code_html(f"kit.fit({self._arguments()})", below=yaml)

    def _still(self) -> tuple[str, bytes | None]:
        return self.view.still

    def _ipython_display_(self) -> None:
        if self.config.trial.start == "warm":
            warm_up()
        self._show_code()  # by its own name, which a cell has given it meanwhile
        self._show()
        if not self._wanted and not self.closed:
            self._wanted = True
            self._predict()


def device_hints(
    config: Config, base: Config | None = None, data: Any = None, device: str | int = THIS_MACHINE
) -> dict[str, str]:
    """What `auto` came to on this machine and why, what the strategy means, and the samples of a step.

    `base` is the config that the learning rate was chosen for, by default this one; `data` is as `kit.fit` takes it.
    Precision and attention are those of `device`, the one that memory is predicted for.
    """
    from kit.machine.machine import hardware, resolve_devices

    machine = hardware()
    on_card = {} if device == THIS_MACHINE else _card_hints(config, target_of(device))
    strategy = {"hardware.strategy": explain_strategy(config.hardware.strategy)}
    try:
        resolved = resolve_devices(config, machine)
    except KitError as error:
        return {**strategy, "hardware.devices": str(error), **on_card}
    precision = [reason for reason in resolved.reasons if reason.startswith(resolved.precision)]
    rule, before = batch_rule(Part.of(data), config), None
    sizes = {} if rule.by_config or rule.size is None else {"loader.batch_size": rule.size}
    with contextlib.suppress(KitError):  # the first config may want more devices than there are
        first = base or config
        before = first.replace(sizes), resolve_devices(first, machine).world_size
    seen = explain_batch(config.replace(sizes), resolved.world_size, before) if rule.size else ""
    return {
        **strategy,
        "hardware.devices": "; ".join(reason for reason in resolved.reasons if reason not in precision),
        "hardware.precision": "; ".join(precision),
        "loader.batch_size": "; ".join(filter(None, [rule.note, seen])),
        "levers.attention": explain_attention(resolved.accelerator, config.levers.attention),
        **on_card,
    }


def _card_hints(config: Config, target: DeviceTarget) -> dict[str, str]:
    return {
        "hardware.precision": f"{precision_of(config, target)} on {target}",
        "levers.attention": explain_attention("gpu", config.levers.attention),
    }


def size_hints(config: Config, module: Any = None) -> dict[str, str]:
    """The sizes of the model, and where they can be changed."""
    with contextlib.suppress(KitError):  # a missing target is an error of the fit
        sizes = ", ".join(f"{dial.name} {dial.value}" for dial in model_dials(config, module))
        return {"model.arguments": f"sizes: {sizes}; kit.memory.panel shows what they cost"} if sizes else {}
    return {}
