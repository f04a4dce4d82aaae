"""CommitView: the file a config would be committed as, and the command that starts it, as the settings change.

A view of `kit.report.commit.preview`, computed in a thread; the button writes the files, as `kit.commit(config, trial)`
does, with the trial that ended last here. What cannot be committed says why in the place of the text.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable
from typing import Any

import ipywidgets

from kit.config import Config
from kit.errors import KitError
from kit.report.commit import Committed, commands_of, commit, preview
from kit.run.trial import Trial
from kit.widgets.background import Latest

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
