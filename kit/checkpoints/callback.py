"""CheckpointUpload: checkpoints copied to a path or URL while training goes on; visible there only when complete.

It copies what the Trainer's own ModelCheckpoint saves (or any callback that writes to `folder`), so it decides nothing
about the training and its ranks exchange nothing: rank 0 looks for the newest checkpoint every so often and offers it
to a thread, which copies one at a time. A newer one replaces the one that waits. Its files are first hard-linked into
`.kit-upload` beside it, so that ModelCheckpoint may remove it meanwhile.

What is killed leaves nothing half visible, and a run resumed from that checkpoint sends only the parts that are
missing. `kit.checkpoints.download(url)` brings the newest back, for `trainer.fit(ckpt_path=...)`. A sharded checkpoint
is a folder; rank 0 must see the files of all ranks, so on several nodes it has to lie on a shared disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from kit.checkpoints.parts import Signature, saved_at, signature
from kit.checkpoints.uploading import BundleStore, SourceChanged, Upload
from kit.data.stores.url import redact, resolve_url
from kit.errors import StoreError, warn_caller
from kit.sections import Checkpoint
from kit.units import format_seconds

_DEFAULTS = Checkpoint()
_LINKS = ".kit-upload"


@dataclass(frozen=True, slots=True)
class _Saved:
    """A checkpoint on disk, as it was when it was found."""

    path: Path
    signature: Signature


class UploadThread:
    """One thread that runs `work(item, cancelled)` for one item at a time; call from one other thread.

    An item offered meanwhile replaces the one that waits, so a slow network never builds up a queue. Errors are not
    raised but returned by `take_outcomes`. The thread dies with the process.
    """

    def __init__(self, work: Callable[[Any, threading.Event], Any]) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._waiting: Any = None
        self._busy = False
        self._cancelled = threading.Event()
        self._outcomes: list[tuple[Any, Any]] = []
        self._thread = threading.Thread(target=self._run, name="kit-upload", daemon=True)
        self._thread.start()

    def offer(self, item: Any) -> Any:
        """Work on this next; returns the item that waited instead, or None."""
        with self._changed:
            replaced, self._waiting = self._waiting, item
            self._changed.notify_all()
            return replaced

    def finish(self, seconds: float) -> bool:
        """Wait until nothing waits or is under way; whether that came within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and not self._busy, max(0.0, seconds))

    def stop(self, seconds: float = 5.0) -> None:
        """Cancel what waits and what is under way."""
        with self._changed:
            self._waiting = None
            self._cancelled.set()
            self._changed.notify_all()
        self._thread.join(seconds)

    def take_outcomes(self) -> list[tuple[Any, Any]]:
        """Each item with its result or its exception, in order; those not taken yet."""
        with self._changed:
            taken, self._outcomes = self._outcomes, []
            return taken

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._cancelled.is_set())
                if self._cancelled.is_set():
                    return
                item, self._waiting, self._busy = self._waiting, None, True
            try:
                outcome = self._work(item, self._cancelled)
            except BaseException as error:
                outcome = error
            with self._changed:
                self._busy = False
                self._outcomes.append((item, outcome))
                self._changed.notify_all()


class CheckpointUpload(Callback):
    """Copy checkpoints to `url` during training and at its end, by rank 0.

    Whether it may write there is asked before training starts, on all ranks at once. Later failures are tried again
    for two minutes, then warned of, and the next checkpoint is tried. An interrupt gives up what is under way; after
    another exception it is finished.

    Args:
        url: Where: each checkpoint gets its own name below it.
        every_seconds: Shortest time between two looks for a new checkpoint.
        every_steps: Fewest optimizer steps between two looks.
        during_training: Copy while training.
        on_fit_end: Copy the newest and the best checkpoint at the end, and wait for it.
        required: Raise where it would warn.
        keep: Whole checkpoints kept at `url`; 0 keeps all.
        folder: Where checkpoints are saved; by default where the Trainer's ModelCheckpoint saves.
        credentials: As `data.credentials`: default, anonymous or env:NAME.
        deadline_seconds: How long the end waits.
        part_bytes: What is sent at a time, and need not be sent again.
        parts_in_flight: Parts sent at once.

    Raises:
        StoreError: for a URL that names no store; when the fit starts, for one that cannot be written.
    """

    def __init__(
        self,
        url: str,
        *,
        every_seconds: float = _DEFAULTS.every_seconds,
        every_steps: int = _DEFAULTS.every_steps,
        during_training: bool = _DEFAULTS.during_training,
        on_fit_end: bool = _DEFAULTS.on_fit_end,
        required: bool = _DEFAULTS.required,
        keep: int = _DEFAULTS.keep,
        folder: str = "",
        credentials: str = _DEFAULTS.credentials,
        deadline_seconds: float = _DEFAULTS.deadline_seconds,
        part_bytes: int = _DEFAULTS.part_bytes,
        parts_in_flight: int = _DEFAULTS.parts_in_flight,
    ) -> None:
        self.settings = Checkpoint(
            url=resolve_url(url), credentials=credentials, every_seconds=every_seconds, every_steps=every_steps,
            during_training=during_training, on_fit_end=on_fit_end, keep=keep, required=required,
            deadline_seconds=deadline_seconds, part_bytes=part_bytes, parts_in_flight=parts_in_flight,
        )  # fmt: skip
        self.folder = folder
        self.uploads: list[Upload] = []
        """What was copied, in order."""
        self._bundles: BundleStore | None = None
        self._worker: UploadThread | None = None
        self._last: Signature = ()
        self._raised: StoreError | None = None
        self._looked_seconds, self._looked_step = 0.0, 0

    # -- what Lightning calls

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        failed = ""
        if trainer.is_global_zero:
            try:
                self._bundles = BundleStore.open(self.settings.url, self.settings.credentials)
                self._bundles.check_writable()
            except StoreError as error:
                failed = str(error)
        failed = trainer.strategy.broadcast(failed)
        if failed:
            raise StoreError(f"checkpoints cannot be copied: {failed}")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._looked_seconds, self._looked_step = time.monotonic(), trainer.global_step
        self._worker = UploadThread(self._copy)
        for folder in self._folders(trainer):
            shutil.rmtree(folder / _LINKS, ignore_errors=True)
        resumed = _local(trainer.ckpt_path)
        if resumed is not None and self.settings.during_training:
            self._offer(_look(resumed))

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._worker is None:
            return
        self._report(self._worker)
        seconds, steps = time.monotonic() - self._looked_seconds, trainer.global_step - self._looked_step
        is_due = seconds >= self.settings.every_seconds and steps >= self.settings.every_steps
        if self.settings.during_training and is_due:
            self._looked_seconds, self._looked_step = time.monotonic(), trainer.global_step
            self._offer(self._newest(trainer))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._worker is not None:
            self._finish(trainer, self.settings.on_fit_end)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Finish after an error or a notice to leave, so that what was saved outlives the machine; else cancel."""
        if self._worker is None:
            return
        if isinstance(exception, Exception | SystemExit) and exception is not self._raised:
            with contextlib.suppress(StoreError):  # the exception under way says more
                self._finish(trainer, self.settings.during_training or self.settings.on_fit_end)
        else:
            self._stop()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    # -- what is saved

    def _folders(self, trainer: Trainer) -> list[Path]:
        given = [self.folder] if self.folder else [
            getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks
        ]  # fmt: skip
        return [folder for folder in dict.fromkeys(map(_local, given)) if folder is not None]

    def _newest(self, trainer: Trainer) -> _Saved | None:
        found = [saved for folder in self._folders(trainer) for saved in map(_look, folder.glob("*.ckpt")) if saved]
        return max(found, key=lambda saved: saved_at(saved.signature), default=None)

    # -- copying it

    def _offer(self, saved: _Saved | None) -> None:
        """Let the thread copy it, unless it is the one offered last."""
        if saved is None or saved.signature == self._last or self._worker is None:
            return
        self._last = saved.signature
        replaced = self._worker.offer(_linked(saved))
        if replaced is not None:
            _remove_links(replaced)

    def _copy(self, saved: _Saved, cancelled: threading.Event) -> Upload:
        assert self._bundles is not None
        part_bytes, at_once = self.settings.part_bytes, self.settings.parts_in_flight
        try:
            sent = self._bundles.send(saved.path, part_bytes=part_bytes, at_once=at_once, cancelled=cancelled)
            self._bundles.prune(self.settings.keep)
            return sent
        finally:
            _remove_links(saved)

    def _finish(self, trainer: Trainer, newest: bool) -> None:
        worker = self._worker
        assert worker is not None
        give_up = time.monotonic() + self.settings.deadline_seconds
        best = [getattr(callback, "best_model_path", "") for callback in trainer.checkpoint_callbacks]
        found = [_look(path) for path in map(_local, best) if path is not None]
        wanted = [self._newest(trainer), next(filter(None, found), None)] if newest else []
        done = worker.finish(self.settings.deadline_seconds)
        for saved in wanted:
            if done and saved is not None and not self._is_there(saved):
                self._offer(saved)
                done = worker.finish(give_up - time.monotonic())
        self._stop()
        self._report(worker)
        if not done:
            self._complain(
                f"the last checkpoint was not at {redact(self.settings.url)} "
                f"{format_seconds(self.settings.deadline_seconds)} after the end of training; "
                "kit.checkpoints.upload(path, url) sends what is missing"
            )

    def _is_there(self, saved: _Saved) -> bool:
        """Whether it was copied by this run, and has not changed since."""
        name, at = saved.path.name, saved_at(saved.signature)
        return any(done.bundle.name == name and done.bundle.saved == at for done in self.uploads)

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()

    def _report(self, worker: UploadThread) -> None:
        for saved, outcome in worker.take_outcomes():
            if isinstance(outcome, Upload):
                self.uploads.append(outcome)
            elif not isinstance(outcome, SourceChanged) or self._worker is None:  # else the next look finds it anew
                self._complain(f"{saved.path.name} was not copied: {outcome}")

    def _complain(self, text: str) -> None:
        if self.settings.required:
            self._raised = StoreError(text)
            raise self._raised
        warn_caller(f"{text}; training went on without it")


# -- files


def _local(path: Any) -> Path | None:
    """The path, when it is one of this machine."""
    return None if not path or "://" in str(path) else Path(path).resolve()


def _look(path: Path) -> _Saved | None:
    """A checkpoint and what it looks like; None when it is going, or is not one."""
    try:
        found = signature(path.resolve(strict=True))
    except OSError:
        return None
    return _Saved(path.resolve(), found) if found and not path.name.startswith(".") else None


def _linked(saved: _Saved) -> _Saved:
    """The same files by hard links of our own; as they are, where the disk knows none."""
    place = saved.path.parent / _LINKS / f"{time.time_ns():x}" / saved.path.name
    try:
        for path, _, _ in saved.signature:
            link = place / path if path else place
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(saved.path / path if path else saved.path, link)
        return _Saved(place, saved.signature)
    except OSError:
        shutil.rmtree(place.parent, ignore_errors=True)
        return saved


def _remove_links(saved: _Saved) -> None:
    folder = saved.path.parent
    if folder.parent.name == _LINKS:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()
