"""Topics of a synthetic corpus from the command line: write it, predict memory, fit, draw, compare with the truth.

    python datasets/topics/train.py --documents 20000 --terms 5000 --topics 20 --epochs 20 --devices 2

Rank 0 alone writes what was found; figures are drawn by this process, which trains nothing itself. A corpus of the same
settings that is there already is used again.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import kit


def main() -> None:
    """Run the command line; what is wrong with it is one line on stderr."""
    asked = _arguments()
    try:
        train(asked)
    except kit.KitError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def train(asked: argparse.Namespace) -> None:
    """Everything from the corpus to the figures."""
    corpus = kit.Corpus(asked.documents, asked.terms, asked.topics, asked.length, asked.seed)
    source, found = _write(corpus, asked.folder), asked.folder / "topics.npz"
    config = _config(asked, source, found)
    print(kit.predict_memory(config, data="kit.data:RowData"))
    trial = kit.fit(config, data="kit.data:RowData").wait()
    print(trial)
    topics = kit.open_topics(found)
    recovery = kit.compare_topics(topics, corpus.truth)
    print(recovery)
    figures = {"loss": trial.figure("loss"), "structure": recovery.aligned.figure("structure")}
    figures["terms"] = recovery.aligned.figure("terms")
    for name, figure in figures.items():
        figure.savefig(asked.folder / f"{name}.png", facecolor="white", dpi=200)
        print(asked.folder / f"{name}.png")


def _write(corpus: kit.Corpus, folder: Path) -> Path:
    settings = {name: value for name, value in vars(corpus).items() if isinstance(value, int | float | tuple)}
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:10]
    path = folder / f"corpus-{digest}.npy"
    print(kit.data.array_bytes(corpus.shape, path=path))
    if not path.exists():
        kit.data.write_rows(path, corpus.rows, corpus.shape)
    return path


def _config(asked: argparse.Namespace, source: Path, found: Path) -> kit.Config:
    sizes = {"documents": asked.documents, "terms": asked.terms, "topics": asked.topics}
    steps = asked.epochs * -(-asked.documents // (asked.batch_size * asked.devices))
    here = Path(__file__)
    return kit.Config.load(here.with_name("recipe.yaml")).replace({
        "hardware.accelerator": "auto", "hardware.devices": asked.devices,
        "hardware.strategy": "ddp" if asked.devices > 1 else "none", "training.seed": asked.seed,
        "loader.batch_size": asked.batch_size, "data.arguments": {"source": str(source)},
        "model.target": f"{here.with_name('topics.py')}:PoissonNMF",
        "model.arguments": {**sizes, "save_path": str(found)}, "trial.max_steps": steps,
        "trial.folder": str(asked.folder / "runs"),
    })  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    whole = {"documents": 2000, "terms": 1000, "topics": 8, "epochs": 20, "seed": 13}
    for name, default in whole.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--length", type=float, default=200.0, help="mean number of terms in a document")
    parser.add_argument("--batch-size", type=int, default=64, help="documents per batch on each device")
    parser.add_argument("--devices", type=int, default=1, help="more than one train by ddp")
    parser.add_argument("--folder", type=Path, default=Path("output/topics"), help="where everything is written")
    asked = parser.parse_args()
    asked.folder = asked.folder.absolute()
    asked.folder.mkdir(parents=True, exist_ok=True)
    return asked


if __name__ == "__main__":
    main()
