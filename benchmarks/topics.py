"""Topics: seconds an epoch and memory of a topic model, kit beside tinytopics, on the same data, in memory and on disk.

    python benchmarks/topics.py [--record]

Both fit the same float32 counts with the same initial weights and the same batches of 16 documents in the same order,
each in a fresh process, in turn. tinytopics is `fit_model`, its `DataLoader` told the order; on disk it reads by its
`NumpyDiskDataset`. kit is `PoissonNMF` on `kit.data.RowData` in Lightning's Trainer. Seconds are those of the whole fit
over its epochs, so what either spends around them counts. Memory is the most that resident memory grows by during the
fit, without pages of the file, which the system takes back when it needs them. The file is in the page cache, as it
would be after a first epoch: reading cold is the disk's speed for both. Losses are means over an epoch; their
difference is the largest, relative to tinytopics'.

A GPU is used where there is one: then memory is that of the device.

    pip install --no-deps --target .peers tinytopics accelerate scipy scikit-image lazy_loader
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from publish import publish, read_options

PEERS = Path(__file__).parents[1] / ".peers"
ANSWER = "answer "
CASES = {
    "many documents": {"documents": 100_000, "terms": 1_000, "topics": 20, "epochs": 1},
    "many terms": {"documents": 8_000, "terms": 20_000, "topics": 20, "epochs": 1},
}
BATCH, SEED, LENGTH = 16, 13, 1_000
TURNS = 1
Answer = dict[str, Any]


def main() -> None:
    read_options(__doc__)
    version = _version()
    if not version:
        print(f"tinytopics is left out: it is not installed; {__file__} says how in its first lines")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            path = _write(case, Path(folder) / "counts.npy")
            rows += [_row(name, case, place, path, bool(version)) for place in ("memory", "disk")]
            path.unlink()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    publish("topics, seconds an epoch", rows, batch=BATCH, device=device, tinytopics=version or "absent")


def _version() -> str:
    found = importlib.metadata.distributions(name="tinytopics", path=[*sys.path, str(PEERS)])
    return next((package.version for package in found), "")


def _write(case: dict[str, int], path: Path) -> Path:
    import kit

    corpus = kit.Corpus(case["documents"], case["terms"], case["topics"], LENGTH, SEED)
    kit.data.write_rows(path, corpus.rows, corpus.shape, progress=False)
    return path


def _row(name: str, case: dict[str, int], place: str, path: Path, peer: bool) -> dict[str, Any]:
    names = ("tinytopics", "kit") if peer else ("kit",)
    answers: dict[str, list[Answer]] = {who: [] for who in names}
    for _ in range(TURNS):
        for who in names:
            answers[who].append(_ask(who, case, place, path))
    nan = float("nan")
    seconds = {who: statistics.median(one["seconds"] for one in found) for who, found in answers.items()}
    grown = {who: max(one["grown_bytes"] for one in found) / 2**20 for who, found in answers.items()}
    pairs = zip(answers["kit"][0]["losses"], answers["tinytopics"][0]["losses"], strict=True) if peer else ()
    return {
        "case": f"{name}, {case['documents']:,} × {case['terms']:,}",
        "data": place,
        "data MiB": case["documents"] * case["terms"] * 4 / 2**20,
        "tinytopics s": seconds.get("tinytopics", nan),
        "kit s": seconds["kit"],
        "tinytopics / kit": seconds.get("tinytopics", nan) / seconds["kit"],
        "tinytopics grown MiB": grown.get("tinytopics", nan),
        "kit grown MiB": grown["kit"],
        "losses differ by": max((abs(ours / theirs - 1) for ours, theirs in pairs), default=nan),
    }


def _ask(who: str, case: dict[str, int], place: str, path: Path) -> Answer:
    question = json.dumps({"who": who, "place": place, "path": str(path), **case})
    done = subprocess.run([sys.executable, __file__, "--answer", question], capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith(ANSWER)), None)
    if line is None:
        raise SystemExit(f"{who} has no answer for {place}:\n{done.stderr[-2000:]}")
    return dict(json.loads(line.removeprefix(ANSWER)))


# -- the process that fits


def answer(question: dict[str, Any]) -> None:
    who, place, path, epochs = (question[name] for name in ("who", "place", "path", "epochs"))
    fit = {"tinytopics": _tinytopics, "kit": _kit}[who]
    fit(path, {"documents": question["documents"], "terms": question["terms"], "topics": 2}, 0)  # imports
    data = _in_memory(path) if place == "memory" else path
    sizes = {name: question[name] for name in ("documents", "terms", "topics")}
    with _growth() as grown:
        began = time.perf_counter()
        losses = fit(data, sizes, epochs)
        seconds = (time.perf_counter() - began) / epochs
    print(f"\n{ANSWER}{json.dumps({'seconds': seconds, 'losses': losses, 'grown_bytes': grown[0]})}", flush=True)


def _in_memory(path: str) -> torch.Tensor:
    import numpy as np

    return torch.from_numpy(np.load(path))


def _order(documents: int) -> Any:
    from kit.data.rows.loader import RowOrder

    return RowOrder(rows=documents, batch_size=BATCH, world_size=1, seed=SEED, shuffle=True, drop_last=False)


def _tinytopics(data: Any, sizes: dict[str, int], epochs: int) -> list[float]:
    sys.path.append(str(PEERS))
    import tinytopics
    import tinytopics.fit

    passed = iter(range(max(1, epochs)))

    class Told(torch.utils.data.Sampler[int]):
        """kit's order instead of a shuffled one."""

        def __len__(self) -> int:
            return sizes["documents"]

        def __iter__(self) -> Iterator[int]:
            order, epoch = _order(sizes["documents"]), next(passed)
            for step in range(order.batches_per_epoch):
                yield from order.batch(epoch, step, 0).tolist()

    def loader(dataset: Any, batch_size: int, shuffle: bool) -> Any:
        assert shuffle
        return torch.utils.data.DataLoader(dataset, batch_size=batch_size, sampler=Told())

    tinytopics.fit.DataLoader = loader
    torch.manual_seed(SEED)
    source = tinytopics.NumpyDiskDataset(data) if isinstance(data, str) else data
    if epochs == 0:
        return []
    _, losses = tinytopics.fit_model(source, k=sizes["topics"], num_epochs=epochs, batch_size=BATCH)
    return [float(loss) for loss in losses]


def _kit(data: Any, sizes: dict[str, int], epochs: int) -> list[float]:
    from lightning.pytorch import Callback, Trainer

    import kit
    from kit.models import PoissonNMF

    if epochs == 0:
        return []

    class Losses(Callback):
        """Their mean over each epoch."""

        def __init__(self) -> None:
            self.means: list[float] = []
            self.sum = torch.zeros((), dtype=torch.float64)

        def on_train_batch_end(self, *given: Any) -> None:
            self.sum += given[2]["loss"].cpu()

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            self.means.append(float(self.sum) / trainer.num_training_batches)
            self.sum.zero_()

    torch.manual_seed(SEED)
    model, seen = PoissonNMF(**sizes), Losses()
    trainer = Trainer(
        max_epochs=epochs, accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[seen],
    )  # fmt: skip
    trainer.fit(model, datamodule=kit.data.RowData(data, batch_size=BATCH, seed=SEED))
    model.topics()
    return seen.means


@contextmanager
def _growth() -> Iterator[list[int]]:
    """The most that memory of its own grows by: of the device where there is one, else of this process."""
    grown = [0]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        yield grown
        grown[0] = torch.cuda.max_memory_allocated()
        return
    before, ended = _own_bytes(), threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            grown[0] = max(grown[0], _own_bytes() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield grown
    finally:
        ended.set()
        thread.join()


def _own_bytes() -> int:
    """Resident memory without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    if "--answer" in sys.argv:
        answer(json.loads(sys.argv[sys.argv.index("--answer") + 1]))
    else:
        main()
