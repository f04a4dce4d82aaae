"""CommitView: the file a config would be committed as, and the command that starts it, as the settings change.

ExportView: the trials of a panel's experiment as a table, and a button that writes them to a file.

Both read in a thread. CommitView shows `kit.committed.file.preview` and writes as `kit.commit(config, trial)` does,
with the last ended trial of the panel; a config that cannot be committed says why. ExportView shows the newest trials
and exports all of them; it does not replace a file that is no export of kit. An error stands beside its button.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets

from kit.committed.file import Committed, commands_of, commit, preview
from kit.config import Config, project_folder
from kit.errors import ConfigError, KitError, Problem
from kit.records import results as results_table
from kit.records.results import Asked, Results
from kit.report.page import html_report
from kit.trial.trial import Trial
from kit.widgets.live import Background, weakly
from kit.widgets.parts import button, clicked, code_html, folded_html, line, pre_html, red_html, row


class CommitView(Background):
    """A button, the command and the file.

    Args:
        config: What is shown first.
        module: As `kit.commit` takes it.
        data: As `kit.commit` takes it.
        ended: Returns the trial to commit with, if there is one.
        check: Raises a KitError while `config` is not what the settings show.
    """

    def __init__(
        self, config: Config, module: Any = None, data: Any = None, ended: Callable[[], Trial | None] = lambda: None,
        check: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.config, self._module, self._data, self._ended, self._check = config, module, data, ended, check
        self.committed: Committed | None = None
        """The last commit of this view."""
        super().__init__("kit-commit")
        self._mutex = threading.Lock()
        self.button = button("Commit", "save", "write this file, its evidence and a job script", "110px")
        self.words, self.text = line(width="auto"), line()
        self.button.on_click(lambda _: self._latest.submit(lambda: clicked(self.commit)))
        self.ui = ipywidgets.VBox([row(self.button, self.words), self.text])

    def look(self, config: Config) -> None:
        """Show what `config` would be committed as; returns at once."""
        self.config, self.words.value = config, ""
        self._latest.submit(self._show)

    def commit(self) -> Committed:
        """Write the files.

        Raises:
            KitError: as `check` and `kit.commit` do; the reason stands beside the button too.
        """
        with self._mutex:
            try:
                self._check()
                self.committed = commit(self.config, self._trial(), module=self._module, data=self._data)
            except KitError as error:
                self.words.value = red_html(str(error))
                raise
            self.words.value = html.escape("written: " + ", ".join(path.name for path in self.committed.files))
            return self.committed

    def _trial(self) -> Trial | None:
        """The trial of this config, where it is the last one that ended."""
        trial = self._ended()
        same = trial is not None and trial.asked.fingerprint == self.config.fingerprint
        return trial if same else None

    def _show(self) -> None:
        config = self.config
        try:
            text, launch = preview(config, self._module, self._data, self._trial())
        except KitError as error:
            self.text.value = red_html(str(error))
            return
        commands = pre_html("\n".join(commands_of(launch).values()))
        file = folded_html("the file that is run", pre_html(text, ";max-height:420px;overflow:auto"))
        self.text.value = f"<div style='line-height:1.4'>to run it: {commands}{file}</div>"


FORMATS = {"CSV": "csv", "Markdown": "md", "HTML report": "html"}
EXPERIMENT, NOTEBOOK, FOLDER, ALL = "this experiment", "this notebook", "whole folder", "and what is no trial"
_CHOICES: dict[str, Callable[[Config], Asked]] = {
    EXPERIMENT: lambda config: Asked(config.trial.folder, name=config.name),
    NOTEBOOK: lambda config: Asked(config.trial.folder, notebook="this"),
    FOLDER: lambda config: Asked(config.trial.folder),
    ALL: lambda config: Asked(config.trial.folder, name=config.name, kind="all"),
}
"""Whose runs are shown, as `kit.results` takes it."""
_MOST_ROWS, _LOOK_AGAIN_SECONDS = 20, 1.0
_SAME_BYTES = 12
"""An export begins with the same bytes as an earlier one: the header."""


class ExportView(Background):
    """The trials of the config's experiment, or others of its `trial.folder`; `on_shown` is told when they change."""

    def __init__(self, config: Config, on_shown: Callable[[], object] = lambda: None) -> None:
        self.config, self.results, self._on_shown = config, Results(()), on_shown
        self.experiment = Results(())
        """The trials of the config's experiment, whichever are shown."""
        self.file: Path | None = None
        """The last file written by this view."""
        super().__init__("kit-results")
        self.choice = ipywidgets.Dropdown(
            options=list(_CHOICES), tooltip="whose trials are shown and written", description="trials of",
            layout={"width": "250px", "flex": "0 0 auto"}, style={"description_width": "auto"},
        )  # fmt: skip
        self.format = ipywidgets.Dropdown(
            options=list(FORMATS), tooltip="what kind of file the trials are written to", description="write as",
            layout={"width": "200px", "flex": "0 0 auto"}, style={"description_width": "auto"},
        )  # fmt: skip
        tooltip = "write these trials to a file in the project folder"
        self.button = button("Export", "download", tooltip, "110px", disabled=True)
        self.words, self.table = line(width="auto"), line()
        self.code = line()
        self.button.on_click(lambda _: self._latest.submit(lambda: clicked(self.export)))
        self.format.observe(lambda _: self._show_code(), names="value")
        self.choice.observe(lambda _: self._latest.submit(self._show), names="value")
        head = row(self.choice, self.format, self.button, self.words, gap="0 12px")
        head.layout.flex_flow = "row wrap"
        self.ui = ipywidgets.VBox([self.table, head, self.code], layout={"width": "100%", "display": "none"})

    def look(self, config: Config, *, again: bool = True) -> None:
        """Show the trials of its experiment; returns at once. Without `again` only where that is another one."""
        before, self.config = self.config, config
        if again or (before.name, before.trial.folder) != (config.name, config.trial.folder):
            self._latest.submit(self._show)

    def export(self, path: str | Path | None = None) -> Path:
        """Write the trials in the chosen format, by default to `NAME.csv`, `.md` or `.html` in the project folder.

        Raises:
            ConfigError: for a file of others, or one that cannot be written; the reason stands beside the button too.
        """
        try:
            self.file = self._write(self._path if path is None else Path(path))
        except KitError as error:
            self.words.value = red_html(str(error))
            raise
        self.words.value = html.escape(f"written: {self.file.name}")
        return self.file

    @property
    def line(self) -> str:
        """What the button does, in code."""
        found, name = self._asked.code, self._path.name
        return {
            "csv": f"{found}.to_csv({name!r})", "md": f"{found}.to_markdown({name!r})",
            "html": f"kit.html_report({found}, {name!r})",
        }[FORMATS[self.format.value]]  # fmt: skip

    @property
    def _asked(self) -> Asked:
        return _CHOICES[self.choice.value](self.config)

    @property
    def _path(self) -> Path:
        return project_folder() / f"{self.config.name}.{FORMATS[self.format.value]}"

    def _write(self, path: Path) -> Path:
        kind = FORMATS[self.format.value]
        if kind == "html":
            return html_report(self.results, path)
        text = self.results.to_csv() if kind == "csv" else self.results.to_markdown()
        try:
            if path.exists() and path.read_bytes()[:_SAME_BYTES] != text.encode()[:_SAME_BYTES]:
                message = f"{path} is there already and is no export of kit; rename it, or choose another name"
                raise ConfigError([Problem("path", message)])
            (self.results.to_csv if kind == "csv" else self.results.to_markdown)(path)
        except OSError as error:
            raise ConfigError([Problem("path", f"cannot write {path}: {error.strerror or error}")]) from error
        return path

    def _show(self) -> None:
        """What there is now, and soon again while a prediction is being made."""
        try:
            self.results = self._asked.read()
            mine = Asked(self.config.trial.folder, self.config.name)
            self.experiment = self.results if mine == self._asked else mine.read()
        except OSError:  # the folder is being removed
            self.results = self.experiment = Results(())
        count = len(self.results)
        self.button.disabled = not count
        self.ui.layout.display = "" if count or self.choice.value != EXPERIMENT else "none"
        whose = "" if self._asked.name is None else f" of {self.config.name}"
        noun = "run" if self.choice.value == ALL else "trial"
        caption = f"{count:,} {noun}{'s' * (count != 1)}{whose}, newest first"
        rows = self.results[:_MOST_ROWS]
        shown = results_table.as_html(rows, caption, rows.note) if count else rows._repr_html_()
        self.table.value = f"<div style='line-height:1.4'>{shown}</div>"
        self._show_code()
        self._on_shown()
        if self.results.predicted_soon:
            again = weakly(self._look_again)
            timer = threading.Timer(_LOOK_AGAIN_SECONDS, again)
            timer.daemon = True
            timer.start()

    def _look_again(self) -> None:
        if self.table.comm is not None:  # not closed
            self._latest.submit(self._show)

    def _show_code(self) -> None:
        self.code.value = code_html(self.line)
