"""CommitView: the file a config would be committed as, and the command that starts it, as the settings change.

A view of `kit.committed.file.preview`, computed in a thread; the button writes the files, as `kit.commit(config,
trial)` does, with the trial that ended last here. What cannot be committed says why in the place of the text.

ExportView: the trials of a panel's experiment as a table, and one button that writes them to a file for others.

A view of `kit.results` and its exports, read in a thread. What the button does stands under it as a line of code. The
table has the newest trials; the file has all. A file that is there and begins otherwise is not replaced.
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
from kit.records.results import Results, results
from kit.report.page import html_report
from kit.trial.trial import Trial
from kit.widgets.live import Latest

_FONT = "font-family:var(--jp-code-font-family, monospace);font-size:.9em"
_CODE = f"{_FONT};white-space:pre-wrap;line-height:1.4;margin:2px 0"


class CommitView:
    """The widgets.

    Args:
        config: What is shown first.
        module: As `kit.commit` takes it.
        data: As `kit.commit` takes it.
        ended: The trial to commit with, if there is one.
        check: Raises a KitError while `config` is not what the settings show.
    """

    def __init__(
        self, config: Config, module: Any = None, data: Any = None, ended: Callable[[], Trial | None] = lambda: None,
        check: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.config, self._module, self._data, self._ended, self._check = config, module, data, ended, check
        self.committed: Committed | None = None
        """What was committed here last."""
        self._latest, self._mutex = Latest("kit-commit"), threading.Lock()
        self.button = ipywidgets.Button(
            description="Commit", icon="save", layout={"width": "110px", "flex": "0 0 auto"},
            tooltip="write this file, its evidence and a job script",
        )  # fmt: skip
        self.words = ipywidgets.HTML()
        self.text = ipywidgets.HTML(layout={"width": "100%"})
        self.button.on_click(lambda _: self._latest.submit(self._try))
        line = ipywidgets.HBox([self.button, self.words], layout={"align_items": "center", "grid_gap": "12px"})
        self.ui = ipywidgets.VBox([line, self.text])

    @property
    def busy(self) -> bool:
        return self._latest.busy

    def wait(self, timeout: float | None = None) -> bool:
        """Return when the text is that of the config; False after `timeout` seconds."""
        return self._latest.wait(timeout)

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
                self.words.value = _red(str(error))
                raise
            self.words.value = html.escape("written: " + ", ".join(path.name for path in self.committed.files))
            return self.committed

    def _trial(self) -> Trial | None:
        """The trial of this config, where it is the last one that ended."""
        trial = self._ended()
        same = trial is not None and trial.asked.fingerprint == self.config.fingerprint
        return trial if same else None

    def _try(self) -> None:
        try:
            self.commit()
        except KitError:
            return  # it stands beside the button

    def _show(self) -> None:
        config = self.config
        try:
            text, launch = preview(config, self._module, self._data, self._trial())
        except KitError as error:
            self.text.value = _red(str(error))
            return
        commands = html.escape("\n".join(commands_of(launch).values()))
        self.text.value = (
            f"<div style='line-height:1.4'>to run it: <pre style='{_CODE}'>{commands}</pre><details>"
            f"<summary style='cursor:pointer'>the file that is run</summary>"
            f"<pre style='{_CODE};max-height:420px;overflow:auto'>{html.escape(text)}</pre></details></div>"
        )


def _red(text: str) -> str:
    return f"<span style='color:var(--jp-error-color1, #b00020)'>{html.escape(text)}</span>"


FORMATS = {"CSV": "csv", "Markdown": "md", "HTML report": "html"}
_LINE_STYLE = "font-family:var(--jp-code-font-family, monospace);font-size:.9em;white-space:pre-wrap;margin:2px 0"
_MOST_ROWS = 20
_SAME_BYTES = 12


class ExportView:
    """The widgets.

    Args:
        config: Whose experiment is shown: its `name`, in its `trial.folder`.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.results = config, Results(())
        self.file: Path | None = None
        """What was written here last."""
        self._latest = Latest("kit-results")
        self.format = ipywidgets.Dropdown(
            options=list(FORMATS), tooltip="what kind of file the trials are written to",
            layout={"width": "130px", "flex": "0 0 auto"},
        )  # fmt: skip
        self.button = ipywidgets.Button(
            description="Export", icon="download", disabled=True, layout={"width": "110px", "flex": "0 0 auto"},
            tooltip="write these trials to a file in the project folder",
        )  # fmt: skip
        self.words, self.table = ipywidgets.HTML(), ipywidgets.HTML(layout={"width": "100%"})
        self.code = ipywidgets.HTML(layout={"width": "100%"})
        self.button.on_click(lambda _: self._latest.submit(self._try))
        self.format.observe(lambda _: self._show_code(), names="value")
        line = ipywidgets.HBox([self.format, self.button, self.words], layout={"align_items": "center"})
        self.ui = ipywidgets.VBox([self.table, line, self.code], layout={"width": "100%", "display": "none"})

    @property
    def busy(self) -> bool:
        return self._latest.busy

    def wait(self, timeout: float | None = None) -> bool:
        """Return when the table is that of the config; False after `timeout` seconds."""
        return self._latest.wait(timeout)

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
            self.words.value = f"<span style='color:var(--jp-error-color1, #b00020)'>{html.escape(str(error))}</span>"
            raise
        self.words.value = html.escape(f"written: {self.file.name}")
        return self.file

    @property
    def line(self) -> str:
        """What the button does, in code."""
        folder = "" if self.config.trial.folder == Config().trial.folder else repr(self.config.trial.folder)
        found = f"kit.results({folder}).where(name={self.config.name!r})"
        name = self._path.name
        return {
            "csv": f"{found}.to_csv({name!r})", "md": f"{found}.to_markdown({name!r})",
            "html": f"kit.html_report({found}, {name!r})",
        }[FORMATS[self.format.value]]  # fmt: skip

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

    def _try(self) -> None:
        try:
            self.export()
        except KitError:
            return  # it stands beside the button

    def _show(self) -> None:
        config = self.config
        try:
            self.results = results(config.trial.folder).where(name=config.name)
        except OSError:  # the folder is going
            self.results = Results(())
        count = len(self.results)
        self.button.disabled = not count
        self.ui.layout.display = "" if count else "none"
        caption = f"{count:,} trial{'s' * (count > 1)} of {config.name}, newest first"
        shown = results_table.as_html(self.results[:_MOST_ROWS], caption) if count else ""
        self.table.value = f"<div style='max-height:320px;overflow:auto;line-height:1.4'>{shown}</div>"
        self._show_code()

    def _show_code(self) -> None:
        line = f"<pre style='{_LINE_STYLE}'>{html.escape(self.line)}</pre>"
        self.code.value = f"<div style='line-height:1.4'>the same in code: {line}</div>"
