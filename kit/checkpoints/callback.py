"""CheckpointUpload: checkpoints copied to a path or URL while training goes on; seen there only when whole.

It copies what the Trainer's own ModelCheckpoint saves (or any callback that writes to `folder`), so it decides nothing
about the training and its ranks exchange nothing: rank 0 looks for the newest checkpoint every so often and hands it to
a thread. A newer one takes the place of one that waits. Before it waits, its files are given second names (hard links)
in `.kit-upload` beside it, so that ModelCheckpoint may remove it meanwhile.

What is killed leaves nothing half visible, and a run resumed from that checkpoint sends only the parts that are
missing. `kit.fetch_checkpoint(url)` brings the newest back, for `trainer.fit(ckpt_path=...)`. A sharded checkpoint is a
folder; rank 0 must see the files of all ranks, so on several nodes it has to lie on a shared disk.

DownloadedData: a data module whose files are brought once to each machine before any rank reads them.

Lightning calls `prepare_data` in one rank of each node and holds the others until it returns; trainers of several
processes that share a machine without knowing of each other take turns besides (see `kit.checkpoints.downloading`).

LatestOnlyWorker: one thread that delivers, while another goes on; at most one delivery waits, and it is the newest.

What is offered while one is under way takes the place of what waits, so a slow network never builds up a queue. Nothing
is raised in the thread that offers: it asks for outcomes. The thread dies with the process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from typing_extensions import override

from kit.checkpoints.downloading import download_once
from kit.checkpoints.parts import Signature, saved_at, signature
from kit.checkpoints.uploading import Parcels, SourceChanged, Upload
from kit.config import Checkpoint, resolve_path
from kit.data.stores.url import redact, resolve_url
from kit.errors import KitWarning, StoreError
from kit.units import format_seconds

_DEFAULTS = Checkpoint()
_SECOND_NAMES = ".kit-upload"


@dataclass(frozen=True, slots=True)
class _Saved:
    """A checkpoint on disk, as it was when it was found."""

    path: Path
    signature: Signature


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
        self._parcels: Parcels | None = None
        self._courier: LatestOnlyWorker[_Saved, Upload] | None = None
        self._last: Signature = ()
        self._raised: StoreError | None = None
        self._looked_seconds, self._looked_step = 0.0, 0

    # -- what Lightning calls

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        failed = self._open() if trainer.is_global_zero else ""
        failed = trainer.strategy.broadcast(failed)
        if failed:
            raise StoreError(f"checkpoints cannot be copied: {failed}")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._looked_seconds, self._looked_step = time.monotonic(), trainer.global_step
        self._courier = LatestOnlyWorker(self._deliver)
        for folder in self._folders(trainer):
            shutil.rmtree(folder / _SECOND_NAMES, ignore_errors=True)
        resumed = _local(trainer.ckpt_path)
        if resumed is not None and self.settings.during_training:
            self._offer(resumed)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._courier is None:
            return
        self._tell(self._courier)
        if self.settings.during_training and self._is_due(trainer.global_step):
            self._looked_seconds, self._looked_step = time.monotonic(), trainer.global_step
            self._offer(self._newest(trainer))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._courier is not None:
            self._finish(trainer, self.settings.on_fit_end)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Finish after an error or a notice to leave, so that what was saved outlives the machine; else give up."""
        if self._courier is None:
            return
        if isinstance(exception, Exception | SystemExit) and exception is not self._raised:
            with contextlib.suppress(StoreError):  # the exception under way says more
                self._finish(trainer, self.settings.during_training or self.settings.on_fit_end)
        else:
            self._stop()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._courier is not None:
            self._stop()

    # -- what is saved

    def _folders(self, trainer: Trainer) -> list[Path]:
        given = [self.folder] if self.folder else [
            getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks
        ]  # fmt: skip
        found = [_local(folder) for folder in given]
        return [folder for folder in dict.fromkeys(found) if folder is not None]

    def _newest(self, trainer: Trainer) -> _Saved | None:
        found = [saved for folder in self._folders(trainer) for saved in map(_look, folder.glob("*.ckpt")) if saved]
        return max(found, key=lambda saved: saved_at(saved.signature), default=None)

    def _is_due(self, step: int) -> bool:
        long_enough = time.monotonic() - self._looked_seconds >= self.settings.every_seconds
        return long_enough and step - self._looked_step >= self.settings.every_steps

    # -- sending it

    def _open(self) -> str:
        """Why checkpoints cannot be copied; empty when they can."""
        try:
            self._parcels = Parcels.open(self.settings.url, self.settings.credentials)
            self._parcels.check_writable()
        except StoreError as error:
            return str(error)
        return ""

    def _offer(self, saved: _Saved | Path | None) -> None:
        """Let the thread copy it, unless it is the one offered last."""
        found = _look(saved) if isinstance(saved, Path) else saved
        if found is None or found.signature == self._last or self._courier is None:
            return
        self._last = found.signature
        replaced = self._courier.offer(_with_second_names(found))
        if replaced is not None:
            _forget(replaced)

    def _deliver(self, saved: _Saved, cancelled: threading.Event) -> Upload:
        assert self._parcels is not None
        settings = self.settings
        try:
            sent = self._parcels.send(
                saved.path,
                part_bytes=settings.part_bytes,
                at_once=settings.parts_in_flight,
                cancelled=cancelled,
            )
            self._parcels.prune(settings.keep)
            return sent
        finally:
            _forget(saved)

    def _finish(self, trainer: Trainer, newest: bool) -> None:
        courier = self._courier
        assert courier is not None
        give_up = time.monotonic() + self.settings.deadline_seconds
        wanted = [self._newest(trainer), _best(trainer)] if newest else []
        done = courier.finish(self.settings.deadline_seconds)
        for saved in wanted:
            if done and saved is not None and not self._is_there(saved):
                self._offer(saved)
                done = courier.finish(give_up - time.monotonic())
        self._stop()
        self._tell(courier)
        if not done:
            self._complain(
                f"the last checkpoint was not at {redact(self.settings.url)} "
                f"{format_seconds(self.settings.deadline_seconds)} after the end of training; "
                "kit.upload_checkpoint(path, url) sends what is missing"
            )

    def _is_there(self, saved: _Saved) -> bool:
        """Whether it was copied by this run, and has not changed since."""
        name, at = saved.path.name, saved_at(saved.signature)
        return any(done.parcel.name == name and done.parcel.saved == at for done in self.uploads)

    def _stop(self) -> None:
        courier, self._courier = self._courier, None
        if courier is not None:
            courier.stop()

    # -- what became of it

    def _tell(self, courier: LatestOnlyWorker[_Saved, Upload]) -> None:
        for outcome in courier.take_outcomes():
            if outcome.result is not None:
                self.uploads.append(outcome.result)
            elif not self._is_superseded(outcome):
                self._complain(f"{outcome.item.path.name} was not copied: {outcome.error}")

    def _is_superseded(self, outcome: Outcome[_Saved, Upload]) -> bool:
        """Whether the file was written anew while it was read, so that the next look finds it."""
        return isinstance(outcome.error, SourceChanged) and self._courier is not None

    def _complain(self, text: str) -> None:
        if self.settings.required:
            self._raised = StoreError(text)
            raise self._raised
        warnings.warn(f"{text}; training went on without it", KitWarning, stacklevel=3)


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


def _best(trainer: Trainer) -> _Saved | None:
    paths = [getattr(callback, "best_model_path", "") for callback in trainer.checkpoint_callbacks]
    found = [_look(path) for path in map(_local, paths) if path is not None]
    return next((saved for saved in found if saved is not None), None)


def _with_second_names(saved: _Saved) -> _Saved:
    """The same files under names of our own; as they are, where the disk knows no second names."""
    place = saved.path.parent / _SECOND_NAMES / f"{time.time_ns():x}" / saved.path.name
    try:
        for path, _, _ in saved.signature:
            second = place / path if path else place
            second.parent.mkdir(parents=True, exist_ok=True)
            os.link(saved.path / path if path else saved.path, second)
        return _Saved(place, saved.signature)
    except OSError:
        shutil.rmtree(place.parent, ignore_errors=True)
        return saved


def _forget(saved: _Saved) -> None:
    """Remove second names, and nothing else."""
    folder = saved.path.parent
    if folder.parent.name == _SECOND_NAMES:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


class DownloadedData(LightningDataModule):
    """Derive from it and read `self.path` in `setup` and in the loaders.

    Args:
        url: What to bring: a folder of objects, or one object.
        path: Where it goes, under its final name; a relative one starts at the project folder.
        credentials: As `data.credentials`.
        sha256: Of one object, when it is known.
    """

    def __init__(self, url: str, path: str | Path, *, credentials: str = "default", sha256: str = "") -> None:
        super().__init__()
        self.url, self.path = url, resolve_path(path)
        self.credentials, self.sha256 = credentials, sha256

    @override
    def prepare_data(self) -> None:
        """Bring it, unless it is there.

        Raises:
            StoreError: when that fails; see `kit.download_once`.
        """
        download_once(self.url, self.path, credentials=self.credentials, sha256=self.sha256)


Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Item, Result]):
    """How one delivery went."""

    item: Item
    result: Result | None = None
    error: BaseException | None = None


class LatestOnlyWorker(Generic[Item, Result]):
    """Delivers items by `deliver(item, cancelled)`, which gives up when `cancelled` is set."""

    def __init__(self, deliver: Callable[[Item, threading.Event], Result]) -> None:
        self._deliver = deliver
        self._changed = threading.Condition()
        self._waiting: list[Item] = []
        self._busy = False
        self._over = threading.Event()
        self._outcomes: list[Outcome[Item, Result]] = []
        self._thread = threading.Thread(target=self._run, name="kit-courier", daemon=True)
        self._thread.start()

    def offer(self, item: Item) -> Item | None:
        """Deliver this next; what waited instead, which will not be delivered."""
        with self._changed:
            replaced = self._waiting.pop() if self._waiting else None
            self._waiting = [item]
            self._changed.notify_all()
            return replaced

    def finish(self, seconds: float) -> bool:
        """Wait until nothing waits or is under way; whether that came within `seconds`."""
        give_up = time.monotonic() + seconds
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout=max(0.0, give_up - time.monotonic()))

    def stop(self, seconds: float = 5.0) -> None:
        """Give up what waits and what is under way."""
        with self._changed:
            self._waiting.clear()
            self._over.set()
            self._changed.notify_all()
        self._thread.join(seconds)

    def take_outcomes(self) -> list[Outcome[Item, Result]]:
        """Those not taken yet, in order."""
        with self._changed:
            taken, self._outcomes = self._outcomes, []
            return taken

    def _is_idle(self) -> bool:
        return not self._waiting and not self._busy

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                outcome = Outcome(item, result=self._deliver(item, self._over))
            except BaseException as error:
                outcome = Outcome(item, error=error)
            with self._changed:
                self._busy = False
                self._outcomes.append(outcome)
                self._changed.notify_all()

    def _next(self) -> Item | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._over.is_set())
            if self._over.is_set():
                return None
            self._busy = True
            return self._waiting.pop()
