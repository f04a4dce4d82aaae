"""An epoch stopped and resumed with other ranks, workers and batch sizes: what litdata and kit then serve of it.

    python benchmarks/elastic.py [--ranks-only] [--record]

The cases are those of litdata's own tests of elastic resuming (Lightning-AI/litData#878): as many samples, 8 in a
chunk, ranks, loader processes and batch sizes. Each rank is a process with a loader of its own, all resume from what
the first rank's `state_dict` says, as from a checkpoint, and batches are taken as in a training, one of each rank a
step. Both read the numbers of samples from files on this machine. Told is what comes over all ranks, beside the epoch
that is not stopped. kit reads in grid order, which like litdata's has each sample once, and in block order, the
counterpart of litdata's order by chunks.

It needs litdata (pip install litdata).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from publish import publish

from kit.config import Config
from kit.data.build.build import build
from kit.data.patches.module import PatchData
from kit.errors import KitWarning

EACH_CHUNK = 8
SEED = 42
Reader = Literal["litdata", "kit, grid order", "kit, block order"]
READERS: tuple[Reader, ...] = ("litdata", "kit, grid order", "kit, block order")
State = Mapping[str, Any]


class Way(NamedTuple):
    """How batches are taken."""

    ranks: int = 1
    batch_size: int = 4
    workers: int = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """An epoch that is stopped before each of its ways but the first."""

    samples: int
    ways: Sequence[Way]
    stops: Sequence[int]
    """Steps taken until then, by each rank."""
    shuffle: bool = True
    drop_last: bool = False


CASES = {
    "2 ranks to 1": Case(samples=80, ways=[Way(2), Way()], stops=[2]),
    "1 rank to 2": Case(samples=80, ways=[Way(), Way(2)], stops=[5]),
    "8 ranks to 2 to 8": Case(samples=128, ways=[Way(8), Way(2), Way(8)], stops=[1, 5]),
    "8 ranks × 4 to 4 ranks × 8": Case(samples=128, ways=[Way(8, 4), Way(4, 8)], stops=[1]),
    "a stop inside a batch of what follows": Case(samples=40, ways=[Way(1, 13), Way(2, 4)], stops=[1]),
    "chunks of uneven size": Case(samples=27, ways=[Way(1, 5), Way(2, 2)], stops=[1]),
    "resumed a second time": Case(samples=96, ways=[Way(), Way(3), Way()], stops=[6, 9]),
    "unshuffled, last batch dropped": Case(
        samples=80, ways=[Way(1, 3), Way(2, 3)], stops=[4], shuffle=False, drop_last=True
    ),
    "2 to 8 loader processes": Case(samples=128, ways=[Way(workers=2), Way(workers=8)], stops=[6]),
    "8 to 2 loader processes": Case(samples=128, ways=[Way(workers=8), Way(workers=2)], stops=[5]),
    "0 to 6 loader processes": Case(samples=96, ways=[Way(), Way(workers=6)], stops=[7]),
}


def main() -> None:
    import litdata  # here, since each loader process of kit imports this file

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks-only", action="store_true", help="leave out the cases with loader processes")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            if options.ranks_only and any(way.workers for way in case.ways):
                continue
            for reader in READERS:
                place = Path(folder) / name / reader
                write(reader, place, case.samples)
                rows.append({"case": name, "samples": case.samples, "read with": reader} | play(reader, place, case))
                print(*rows[-1].values(), sep=" | ", flush=True)
    publish("an epoch resumed in another way", rows, record=options.record, litdata=litdata.__version__)


def write(reader: Reader, place: Path, samples: int) -> None:
    place.mkdir(parents=True)
    if reader == "litdata":
        from litdata.streaming import Cache

        cache = Cache(str(place), chunk_size=EACH_CHUNK)
        for number in range(samples):
            cache[number] = number
        cache.done()
        cache.merge()
        return
    import xarray

    numbers = xarray.Dataset({"number": ("sample", np.arange(samples, dtype=np.float32))})
    build(config_of(reader, place, Case(samples=samples, ways=[], stops=[]), Way()), source=numbers, progress=False)


def config_of(reader: Reader, place: Path, case: Case, way: Way) -> Config:
    return Config.make({
        "data": {"url": str(place / "numbers.zarr"), "patch": {"sample": 1}, "stride": {"sample": 1},
                 "order": "block" if "block" in reader else "grid", "samples_per_epoch": case.samples,
                 "standardize": False},
        "chunking": {"chunk": {"sample": EACH_CHUNK}, "shard": "none"},
        "loader": {"batch_size": way.batch_size, "num_workers": way.workers, "shuffle": case.shuffle,
                   "drop_last": case.drop_last, "window_blocks": 4},
        "training": {"seed": SEED},
    })  # fmt: skip


def play(reader: Reader, place: Path, case: Case) -> dict[str, Any]:
    """What an epoch serves that is stopped and resumed, beside one that is not."""
    first = case.ways[0] if reader == "litdata" else case.ways[0]._replace(workers=0)  # kit's order is the same
    whole, _, _ = take(reader, place, case, first, steps=None, state=None)
    seen, state, said = list[int](), None, False
    lengths = [stop - before for before, stop in pairwise([0, *case.stops])]
    for way, steps in zip(case.ways, [*lengths, None], strict=True):
        part, state, noted = take(reader, place, case, way, steps=steps, state=state)
        seen += part
        said |= noted
    wanted, counts = Counter(whole), Counter(seen)
    return {
        "never came": (wanted - counts).total(), "came again": (counts - wanted).total(),
        "in the same order": seen == whole, "said so": said,
    }  # fmt: skip


def take(
    reader: Reader, place: Path, case: Case, way: Way, *, steps: int | None, state: State | None
) -> tuple[list[int], State, bool]:
    """Samples of all ranks in the order of the steps, the first rank's state then, and whether it warned."""
    context = multiprocessing.get_context("fork")  # each like a rank of its own: nothing has been read here
    pipes = [context.Pipe(duplex=False) for _ in range(way.ranks)]
    ranks = [
        context.Process(target=rank_of, args=(pipes[rank][1], reader, place, case, way, rank, steps, state))
        for rank in range(way.ranks)
    ]
    for process in ranks:
        process.start()
    found = [here.recv() for here, _ in pipes]
    for process in ranks:
        process.join()
    in_turn = zip_longest(*(batches for batches, _, _ in found), fillvalue=())
    return [sample for step in in_turn for batch in step for sample in batch], found[0][1], found[0][2]


def rank_of(
    pipe: Any, reader: Reader, place: Path, case: Case, way: Way, rank: int, steps: int | None, state: State | None
) -> None:
    os.environ |= {"WORLD_SIZE": str(way.ranks), "GLOBAL_RANK": str(rank)}  # where litdata looks
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = (_litdata if reader == "litdata" else _kit)(reader, place, case, way, rank)
        if state is not None:
            loader.load_state_dict(state)
        batches = [*_numbers(loader, steps)]
    told = any(issubclass(one.category, KitWarning) or "resum" in str(one.message).lower() for one in caught)
    pipe.send((batches, loader.state_dict(), told))
    if hasattr(loader, "close"):
        loader.close()


def _numbers(loader: Any, steps: int | None) -> Iterator[list[int]]:
    for batch in islice(loader, steps):
        values = batch["values"] if isinstance(batch, dict) else batch
        yield [int(value) for value in values.flatten().tolist()]


def _litdata(_: Reader, place: Path, case: Case, way: Way, __: int) -> Any:
    import litdata

    dataset = litdata.StreamingDataset(str(place), shuffle=case.shuffle, seed=SEED, drop_last=case.drop_last)
    return litdata.StreamingDataLoader(
        dataset, batch_size=way.batch_size, num_workers=way.workers, drop_last=case.drop_last
    )


def _kit(reader: Reader, place: Path, case: Case, way: Way, rank: int) -> Any:
    class RankData(PatchData):
        """One rank's part, without a Trainer that says which."""

        ranks = way.ranks, rank

    return RankData(config_of(reader, place, case, way)).train_dataloader()


if __name__ == "__main__":
    main()
