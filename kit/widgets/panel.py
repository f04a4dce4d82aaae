"""Panel: everything about one Config in one place: its form, its store, a trial of it, and the same thing in code.

Every control has a method of the same name, so that a notebook and a script do the same. A click returns at once: what
takes time (looking at the store, building, checking a trial before it starts) runs in a thread, and a trial runs in
processes of its own. One button fits and stops. Blocking is asked for with `wait()` or `await panel`; an interrupt ends
the trial, keeps what it measured, and ends Run All. Only widget traits are set from threads, never an Output.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets

from kit.committed.file import Committed
from kit.config import Config
from kit.errors import ConfigError, KitError, TrialError
from kit.memory.alongside import fit
from kit.memory.dials import model_dials
from kit.studies.calibration.result import Calibration, calibrate
from kit.studies.diagnosis.diagnose import Diagnosis
from kit.studies.profiling.profile import Profile, profile
from kit.train.choices import explain_attention, explain_batch, explain_strategy
from kit.trial.payload import BatchRule, Part, batch_rule
from kit.trial.trial import Trial, warm_up
from kit.widgets.diagnose import CalibrationView, DiagnosisControl, ProfileView
from kit.widgets.files import CommitView, ExportView
from kit.widgets.form import ConfigForm
from kit.widgets.handle import Handle, weakly
from kit.widgets.live import Latest, live_box
from kit.widgets.store import StoreFacts, StoreView
from kit.widgets.trial_view import TrialView

if TYPE_CHECKING:
    from kit.machine.machine import Machine

_TICK_SECONDS = 0.05


def panel(config: Config | None = None, module: Any = None, data: Any = None) -> Panel:
    """A form, a chunk plan and a live trial for this config (by default, the default one).

    `close()` gives its widgets back. So does forgetting it: when no variable holds it, none of its trials runs, and the
    cell that shows it has been run again (what IPython keeps of that result goes then too).

    Args:
        config: what the form starts from; it is not changed, `panel.config` is the edited copy.
        module: what is trained, as `kit.fit` takes it; None takes `model.target`.
        data: what it is trained on, as `kit.fit` takes it; None takes the config's own store.
    """
    return Panel(config or Config(), module, data)


class Panel(Handle):
    """The widgets, and the methods that mirror them."""

    def __init__(self, config: Config, module: Any = None, data: Any = None) -> None:
        self._base, self._module, self._data = config, module, data
        self._starting, self._mutex = Latest("kit-fit"), threading.RLock()
        self.trial: Trial | None = None
        """The last trial started here."""
        self.form = ConfigForm(config)
        self.view = TrialView(config)
        self._device_hints: dict[str, str] = device_hints(config, data=data)
        self._store_hints: dict[str, str] = {}
        self._hinting = threading.Lock()
        self.store = StoreView(config, weakly(self._on_facts), self.form.check) if data is None else None
        self.button = ipywidgets.Button(layout={"width": "90px", "flex": "0 0 auto"})
        self.code = ipywidgets.HTML(layout={"margin": "6px 0 0", "width": "100%"})
        self.diagnosing = DiagnosisControl(weakly(self._ended_trial), weakly(self._check_before_diagnosing))
        self.profiling = ProfileView(weakly(self._profile))
        self.calibration = CalibrationView(weakly(self._calibrate), weakly(self._on_calibrated))
        self.committing = CommitView(config, module, data, weakly(self._last_ended), self.form.check)
        self.exporting = ExportView(config)
        self._label(busy=False)
        clicked = weakly(self._clicked)
        self.button.on_click(lambda _: clicked())
        self.form.on_change(weakly(self._on_config))
        self._show_code()
        self._show_hints()
        self.committing.look(config)
        self.exporting.look(config)
        self.ui = self._draw()
        self._own()

    # -- what the controls do

    @property
    def config(self) -> Config:
        """The last valid Config of the form; setting it sets every control."""
        return self.form.config

    @config.setter
    def config(self, config: Config) -> None:
        self.form.config = config

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
                self.trial = self._submit(self.config)
            except Exception as error:
                self._label(busy=False)
                self.view.say("not started", 0.0)
                self.view.show_error(_first_line(error))
                raise
            self._label(busy=True)
            self.diagnosing.offer(possible=False)
            self.view.watch(self.trial)
            self.trial.on_change(self._on_trial)
            return self.trial

    def _submit(self, config: Config) -> Trial:
        self.form.check()
        self._check_alone(self)
        self.view.reset(config, "checking …")
        given = self._module is not None or self._data is not None
        return fit(self._module, self._data, config) if given else fit(config)

    def diagnose(self) -> Diagnosis:
        """Say what the last trial suffers from; the findings appear under it, each with a button that tries its change.

        Raises:
            TrialError: when no trial has ended here, and as `kit.diagnose` does.
        """
        return self.diagnosing.run()

    def _ended_trial(self) -> Trial:
        if self.trial is None or not self.trial.ended:
            raise TrialError("no trial has ended here; fit one first")
        return self.trial

    def _check_before_diagnosing(self) -> None:
        self._check_alone(self.diagnosing)

    def _check_alone(self, mine: object) -> None:
        """That nothing else here runs in processes of its own.

        Raises:
            TrialError: while something does, and says what.
        """
        others: dict[str, Any] = {
            "a trial is running": self, "a profile is running": self.profiling,
            "the loader is being calibrated": self.calibration,
            "the last trial is being diagnosed, or a change tried": self.diagnosing,
        }  # fmt: skip
        for what, part in others.items():
            if part is not mine and part.busy:
                raise TrialError(f"{what}, and each would slow the other; stop it or wait for it")

    def profile(self) -> Profile:
        """Run the config under each profiler, and return at once; the tables appear under the trial.

        Raises:
            KitError: for edits in the form that do not fit, and as `kit.profile` does.
        """
        return self.profiling.run()

    def _profile(self) -> Profile:
        self.form.check()
        self._check_alone(self.profiling)
        given = self._module is not None or self._data is not None
        return profile(self._module, self._data, self.config) if given else profile(self.config)

    def calibrate(self) -> None:
        """Measure loader settings in a thread, and take the cheapest fast one over into the form; returns at once."""
        self.calibration.start()

    def _calibrate(self, on_start: Callable[[Trial], object]) -> Calibration:
        self.form.check()
        self._check_alone(self.calibration)
        given = self._module is not None or self._data is not None
        asked = (self._module, self._data, self.config) if given else (self.config,)
        return calibrate(*asked, on_start=on_start)

    def _on_calibrated(self, found: Calibration) -> None:
        self.config = found.apply(self.config)

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

    def save(self, path: str | Path) -> Path:
        """Write the config as YAML, to be committed."""
        return self.config.save(path)

    @property
    def _preparing(self) -> bool:
        building = self.store is not None and not self.store.wait(0)
        measuring = self.diagnosing.busy or self.profiling.busy or self.calibration.busy
        return self._starting.busy or measuring or building or self.committing.busy or self.exporting.busy

    # -- what happens

    def _clicked(self) -> None:
        if self.trial is not None and not self.trial.ended:
            self.stop()
        elif not self._starting.busy:
            self._label(busy=True)
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
        self._refresh()

    def _on_config(self, config: Config) -> None:
        self._show_code()
        self._show_hints(device=device_hints(config, self._base, self._data))
        self.committing.look(config)
        self.exporting.look(config, again=False)
        if self.store is not None:
            self.store.look(config)
        if not self.busy and self.trial is None:
            self.view.reset(config)

    def _on_facts(self, facts: StoreFacts) -> None:
        self._show_hints(store=facts.hints)

    # -- what is shown

    def _label(self, busy: bool) -> None:
        label, icon, style, tooltip = (
            ("Stop", "stop", "warning", "end the trial after its current step; what it measured is kept")
            if busy
            else ("Fit", "play", "primary", "start a trial: this config, run briefly in processes of its own")
        )
        self.button.description, self.button.icon, self.button.button_style = label, icon, style
        self.button.tooltip = tooltip

    def _show_hints(self, device: dict[str, str] | None = None, store: dict[str, str] | None = None) -> None:
        with self._hinting:
            self._device_hints = self._device_hints if device is None else device
            self._store_hints = self._store_hints if store is None else store
            sizes = size_hints(self.config, self._module)
            self.form.show_hints({**self._device_hints, **self._store_hints, **sizes})

    def _show_code(self) -> None:
        config = self.config.as_code(against=self._base)
        own = {"module": self._module, "data": self._data}
        parts = [name if part is not None else "None" for name, part in own.items()]
        given = parts if set(parts) != {"None"} else []
        call = f"kit.fit({', '.join([*given, config])})"
        self.code.value = _code_html(call, self.config)

    def _draw(self) -> Any:
        head = ipywidgets.HBox([self.button, self.view.progress], layout={"align_items": "center", "grid_gap": "12px"})
        store = [self.store.ui] if self.store is not None else []
        right = ipywidgets.VBox(
            [
                *store,
                head,
                self.view.chart,
                self.view.notes,
                self.view.error,
                self.diagnosing.ui,
                self.calibration.ui,
                self.profiling.ui,
                self.code,
                self.committing.ui,
                self.exporting.ui,
            ],
            layout={"flex": "100 1 480px", "min_width": "0"},
        )
        columns = ipywidgets.HBox(
            [self.form.ui, right], layout={"flex_flow": "row wrap", "align_items": "flex-start", "grid_gap": "8px 28px"}
        )
        return live_box([columns])

    def _still(self) -> tuple[str, bytes | None]:
        return self.view.still

    def __repr__(self) -> str:
        return f"Panel of {self.config!r}"

    def _ipython_display_(self) -> None:
        if self.config.trial.start == "warm":
            warm_up()
        self._show()


def device_hints(config: Config, base: Config | None = None, data: Any = None) -> dict[str, str]:
    """What `auto` came to on this machine and why, what the strategy means, and what a step sees.

    `base` is the config that the learning rate was chosen for, by default this one; `data` is as `kit.fit` takes it.
    """
    from kit.machine.machine import hardware, resolve_devices

    machine = hardware()
    strategy = {"hardware.strategy": explain_strategy(config.hardware.strategy)}
    try:
        resolved = resolve_devices(config, machine)
    except KitError as error:
        return {**strategy, "hardware.devices": str(error)}
    precision = [reason for reason in resolved.reasons if reason.startswith(resolved.precision)]
    devices = [reason for reason in resolved.reasons if reason not in precision]
    chosen = base or config
    ranks = _ranks(chosen, machine)
    rule = batch_rule(Part.of(data), config)
    used, before = (_with_batch(item, rule) for item in (config, chosen))
    seen = explain_batch(used, resolved.world_size, (before, ranks) if ranks else None) if rule.size else ""
    return {
        **strategy,
        "hardware.devices": "; ".join(devices),
        "hardware.precision": "; ".join(precision),
        "loader.batch_size": "; ".join(filter(None, [rule.note, seen])),
        "levers.attention": explain_attention(resolved.accelerator, config.levers.attention),
    }


def _with_batch(config: Config, rule: BatchRule) -> Config:
    """The config with the batch that runs, where that is not its own."""
    return config if rule.by_config or rule.size is None else config.replace({"loader.batch_size": rule.size})


def size_hints(config: Config, module: Any = None) -> dict[str, str]:
    """Where the sizes of the model stand, and where they are turned."""
    with contextlib.suppress(KitError):  # a target that is not there is told when it is fitted
        sizes = ", ".join(f"{dial.name} {dial.value}" for dial in model_dials(config, module))
        return {"model.arguments": f"sizes: {sizes}; kit.memory_panel shows what they cost"} if sizes else {}
    return {}


def _ranks(config: Config, machine: Machine) -> int:
    """How many a config gets here; 0 where it gets none."""
    from kit.machine.machine import resolve_devices

    try:
        return resolve_devices(config, machine).world_size
    except KitError:
        return 0


def _first_line(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return " ".join(str(problem) for problem in error.problems)
    if isinstance(error, KitError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _code_html(call: str, config: Config) -> str:
    font = "font-family:var(--jp-code-font-family, monospace);font-size:.9em"
    code = f"{font};white-space:pre-wrap;line-height:1.4;margin:2px 0"
    yaml = html.escape(config.to_yaml(comments=False))
    return (
        f"<div style='line-height:1.4'>the same in code: <pre style='{code}'>{html.escape(call)}</pre>"
        "<details><summary style='cursor:pointer'>config as YAML</summary>"
        f"<pre style='{code}'>{yaml}</pre></details></div>"
    )
