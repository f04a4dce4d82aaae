"""Rules about how data is read and made: files, decoding, worker processes and what they hold.

They read what `kit.studies.diagnosis.host` watched in the training process and in the loader's workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from kit.studies.diagnosis.evidence import Evidence, most_seen
from kit.studies.diagnosis.rule import MANY_STEPS, SLIVER, WAITS, Range, Rule, gone_from_reading, without, without_part
from kit.studies.diagnosis.sampler import COMPUTING, MAKING, OWN_ORDER
from kit.units import format_bytes, format_count, format_seconds, plural

_DECODED_AGAIN = (4.0, 12.0)
"""How many times as fast a JPEG is decoded at an eighth of its size, where none could be timed: Huffman decoding
remains."""
_CHUNKED = {"h5py": "HDF5", "zarr": "Zarr", "npz": "npz"}
"""Packages whose files are decompressed in pieces, and what the files are called."""


# -- files


class _Read(NamedTuple):
    """What one process, the rank or a loader process, reads by one package."""

    package: str
    sizes: Mapping[str, Any]
    host: Mapping[str, Any]
    is_worker: bool

    @property
    def lines(self) -> list[Mapping[str, Any]]:
        return [line for line in self.host.get("lines", ()) if line["package"] == self.package]

    @property
    def share(self) -> float:
        """Of the time of its process."""
        return math.fsum(line["fraction"] for line in self.lines)

    @property
    def at(self) -> str:
        """The line of the user's that is seen most, in words."""
        return next((f" at {line['place']}" for line in self.lines if line["place"]), "")

    @property
    def share_at_lines(self) -> float:
        """As `share`, of the user's lines at which it reads, with all that their libraries do about it."""
        places = {line["place"] for line in self.lines if line["place"]}
        return math.fsum(line["fraction"] for line in self.host.get("lines", ()) if line["place"] in places)

    def making_seconds(self, found: Evidence) -> float:
        """Of those that make batches, while one is trained on."""
        return found.step_seconds * (max(1, _workers(found)) if self.is_worker else 1)


def _one_read(found: Evidence, *packages: str) -> _Read | None:
    for host in (found.host, *found.host.get("workers", ())):
        for package in packages:
            if package in host.get("reads", {}):
                return _Read(package, host["reads"][package], host, host is not found.host)
    return None


def _making(found: Evidence) -> tuple[Mapping[str, Any], ...]:
    """Who makes batches: loader processes, or the rank itself."""
    return tuple(found.host.get("workers", ())) or (found.host,)


def _row_read(found: Evidence) -> _Read | None:
    """As `_one_read`: a chunk that a reader told of, or what a package has read from files for a sample."""
    if (read := _one_read(found, *_CHUNKED)) is not None or found.own_loader or not found.batch_samples > 0:
        return read
    makers = _making(found)
    lines = [line for line in makers[0].get("lines", ()) if line["part"] in MAKING]
    packages = {line["package"] for line in lines} - {*COMPUTING}
    rate = math.fsum(one.get("file_read_bytes", 0) / one.get("seconds", 1.0) for one in makers)
    covered, is_worker = {"covered_bytes": rate * found.step_seconds / found.batch_samples}, bool(_workers(found))
    reads = (_Read(one, covered, {**makers[0], "lines": lines}, is_worker) for one in sorted(packages) if rate > 0)
    return max(reads, key=lambda read: read.share, default=None)


def _one_row(found: Evidence) -> float | None:
    if not found.host or found.wait_fraction is None:
        return None
    read = _row_read(found)
    if read is None or found.wait_fraction < SLIVER or read.share < SLIVER:
        return 1.0
    return float(read.sizes.get("covered_bytes", 1) / max(1, _wanted_bytes(found, read)))


def _wanted_bytes(found: Evidence, read: _Read) -> int:
    """What was asked for at a time; where that is not told, what a sample has at most."""
    return int(read.sizes.get("wanted_bytes", found.host.get("sample_bytes", 0)))


def _one_row_sentence(found: Evidence, _: float) -> str:
    read = _row_read(found) or _Read("", {}, {}, False)
    sizes, kind = read.sizes, _CHUNKED.get(read.package, "")
    wanted, covered = format_bytes(_wanted_bytes(found, read)), format_bytes(sizes["covered_bytes"])
    if "chunk" not in sizes:
        said = f"For a sample of {wanted}, {covered} are read from files{read.at}, in {read.package}"
    else:
        sides, count = "×".join(map(str, sizes["chunk"])), sizes.get("chunks", 1)
        many = f"{count} {kind} chunks of {sides}" if count > 1 else f"one {kind} chunk of {sides}"
        of = many if sides else f"an array of an {kind} archive"
        said = f"{wanted} are read at a time{read.at}, out of {of}: {covered} are decompressed for it"
    return f"{said}, {read.share:.0%} of the time of who reads."


def _one_row_effect(found: Evidence) -> Range | None:
    """Without the bytes that nobody asked for; each sample's calls remain, one read or, with its label, two."""
    read = _row_read(found)
    if read is None:
        return None
    share, sizes = max(read.share, read.share_at_lines), read.sizes
    each = found.unit_costs.get(sizes.get("through", read.package), 0.0)
    calls = found.batch_samples * each / read.making_seconds(found) / share
    gone = 1 - _wanted_bytes(found, read) / sizes["covered_bytes"]
    if calls or "chunk" in sizes:
        low, high = max(0.0, gone - (2 if "chunk" in sizes else 1) * calls), max(0.0, gone - calls)
    else:  # nobody knows what a call of that package takes
        low, high = _LEAST_GONE * gone, gone
    return gone_from_reading(found, share, read.is_worker, 0.9 * low if read.is_worker else low, high)


_LEAST_GONE = 0.8


def _picture(found: Evidence) -> _Read | None:
    """As `_one_read`, of the package that decodes most."""
    told = [one.get("reads", {}) for one in (found.host, *_making(found))]
    packages = {name for reads in told for name, sizes in reads.items() if "pixels" in sizes}
    reads = (read for name in sorted(packages) if (read := _one_read(found, name)) is not None)
    return max(reads, key=lambda read: read.share, default=None)


def _full_size(found: Evidence) -> float | None:
    if not found.host or found.wait_fraction is None:
        return None
    read, pixels = _picture(found), found.host.get("pixels", 0)
    if read is None or not pixels or found.wait_fraction < SLIVER or read.share < 3 * SLIVER:
        return 1.0
    return float(read.sizes["pixels"] / pixels)


def _full_size_sentence(found: Evidence, value: float) -> str:
    read = _picture(found) or _Read("", {}, {}, False)
    at = f",{read.at}" if read.at else ""
    return (
        f"Pictures are decoded at {value:.0f} times the pixels that the model gets{at}: {read.share:.0%} of the time "
        "of who reads."
    )


def _full_size_setting(found: Evidence) -> str:
    read = _picture(found)
    kind = read.sizes.get("format", "JPEG") if read is not None else "JPEG"
    if kind not in ("JPEG", "MPO"):
        return f"your files: smaller ones, made once beforehand; there is no reduced decode of a {kind}"
    return (
        "your dataset: a reduced decode (Pillow's image.draft('RGB', size) before it is loaded, OpenCV's "
        "IMREAD_REDUCED_COLOR_8), or smaller files"
    )


def _full_size_effect(found: Evidence) -> Range | None:
    """What is left of decoding as it was timed, and of what is done to pictures afterwards by their pixels.

    What it takes beyond decoding (converting, resizing) shrinks with the pixels at most, and at least by the geometric
    mean of that and of how decoding does.
    """
    read = _picture(found)
    if read is None:
        return None
    share, sizes = read.share, read.sizes
    timed, kept = found.decoded.get(read.package), found.host["pixels"] / sizes["pixels"]
    within = max(share, sizes.get("within", 0.0))
    low, high = (1 - 1 / factor for factor in _DECODED_AGAIN)
    if timed is None:
        most = max(high, 1 - kept) if "file" not in sizes else high  # a format that cannot be decoded smaller
        beside = (1 - kept) * (within - share)
        gone = (low * share + _LEAST_GONE * beside, most * share + beside)
        return gone_from_reading(found, within, read.is_worker, *(one / within for one in gone))
    left = min(1.0, timed.reduced_seconds / timed.whole_seconds)
    decoding = min(1.0, timed.whole_seconds * found.batch_samples / (share * read.making_seconds(found)))
    by_pixels = min(left, timed.pixels_kept)
    most, least = (decoding * left + (1 - decoding) * rest for rest in (math.sqrt(left * by_pixels), by_pixels))
    return gone_from_reading(found, share, read.is_worker, 1 - most, 1 - least)


# -- disks


class _OnDisk(NamedTuple):
    """The wait for disks of who makes batches."""

    share: float = 0.0
    """Of the time that making takes."""
    of_ready: float = 0.0
    """The same, of the time in which it did not queue for a core: on a quiet machine the two are one."""
    bytes_per_second: float = 0.0
    place: str = ""
    """The line seen most."""


def _on_disk(found: Evidence) -> _OnDisk | None:
    host, wait = found.host, found.shares.get("wait", 0.0)
    workers = [worker for worker in host.get("workers", ()) if "disk" in worker]
    if not workers and ("disk" not in host or _workers(found)):
        return None
    if workers:
        making = math.fsum(1 - worker["idle_fraction"] for worker in workers)
        queued = math.fsum(worker.get("queued_fraction", 0.0) for worker in workers) / (making or 1.0)
        waited = math.fsum(worker["disk"].get("worker", 0.0) for worker in workers)
        lines = [line for worker in workers for line in worker["lines"]]
    else:
        making, waited, queued = wait, host["disk"].get("wait", 0.0), found.queued_fraction or 0.0
        lines = [line for line in host["lines"] if line["part"] == "wait"]
    rate = math.fsum(one["disk_read_bytes"] / one["seconds"] for one in workers or [host])
    most = max((line for line in lines if line["place"]), key=lambda line: float(line["fraction"]), default=None)
    share = min(1.0, waited / making) if making > 0 else 0.0
    return _OnDisk(share, min(1.0, share / max(_LEAST_READY, 1 - queued)), rate, most["place"] if most else "")


_LEAST_READY = 0.1


def _slow_disk(found: Evidence) -> float | None:
    read = _on_disk(found)
    if read is None or found.wait_fraction is None:
        return None
    return read.of_ready if found.wait_fraction >= SLIVER else 0.0


def _slow_disk_sentence(found: Evidence, value: float) -> str:
    _, __, rate, place = _on_disk(found) or _OnDisk()
    gives = f", which gives {format_bytes(rate)}/s" if rate >= _TOLD_BYTES else ""
    return (
        f"Who makes batches waits for the disk {value:.0%} of its time{gives}{f', at {place}' if place else ''}: "
        "reading holds it up, and not decoding."
    )


_TOLD_BYTES = 1 << 16
"""A second: less is a program's own files, or a disk whose reads the system does not count."""


def _slow_disk_effect(found: Evidence) -> Range:
    """From files in memory: the wait goes; the calls that read remain, which take less than a tenth of it."""
    share = (_on_disk(found) or _OnDisk()).share
    in_workers = bool(_workers(found))
    return gone_from_reading(found, share if in_workers else share * found.shares.get("wait", 0.0), in_workers, 0.9, 1)


def _slow_checkpoints(found: Evidence) -> float | None:
    """Of the time, the wait for a disk while a checkpoint is written, where that is most of what it takes."""
    if "disk" not in found.host or "checkpoint" not in found.shares:
        return None
    waited, whole = found.host["disk"].get("checkpoint", 0.0), found.shares["checkpoint"]
    return min(waited, whole) if waited >= whole / 2 else 0.0


# -- lengths


class _Padded(NamedTuple):
    """Numbers of the batches that were looked at, over all that they have."""

    real: float
    """What samples have."""
    alike: float
    """What batches would have that are made of samples of like lengths, of all that were seen."""


def _padded(found: Evidence) -> _Padded | None:
    seen = found.host.get("padding")
    if not seen:
        return None
    sizes, batches = seen["sizes"], seen["ends"]
    whole = math.fsum(len(ends) * math.prod(size) for size, ends in zip(sizes, batches, strict=True))
    samples = sorted((ends for batch in batches for ends in batch), key=math.prod)
    count = max(1, round(len(samples) / len(batches)))
    cuts = [samples[first : first + count] for first in range(0, len(samples), count)]
    alike = math.fsum(len(cut) * math.prod(map(max, zip(*cut, strict=True))) for cut in cuts)
    return _Padded(math.fsum(map(math.prod, samples)) / whole, min(1.0, alike / whole))


def _padding(found: Evidence) -> float | None:
    if "padding" not in found.host:
        return None
    padded = _padded(found)
    return 0.0 if padded is None or 1 - padded.alike < SLIVER else 1 - padded.real


def _padding_sentence(found: Evidence, value: float) -> str:
    seen, padded = found.host["padding"], _padded(found) or _Padded(1.0, 1.0)
    ends = [one[0] for batch in seen["ends"] for one in batch]
    return (
        f"Of a batch {value:.0%} is padding: samples are {min(ends)} to {max(ends)} long and are filled up to the size "
        f"of their batch, so {1 / padded.real:.1f} times the numbers are computed with. Sorted into batches of like "
        f"lengths, the same samples would be {1 - padded.real / padded.alike:.0%} padding "
        f"({plural(len(seen['ends']), 'batch', 'batches')} looked at)."
    )


def _padding_effect(found: Evidence) -> Range:
    """Of the passes, from half of what goes with batches of like lengths to all of the padding.

    A part of a pass does not depend on lengths (calls, weights); attention depends on them by their square.
    """
    padded = _padded(found) or _Padded(1.0, 1.0)
    passes = math.fsum(found.shares.get(part, 0.0) for part in ("forward", "backward"))
    return without(passes * (1 - padded.alike) / 2, passes * (1 - padded.real))


def _padding_example(found: Evidence) -> str:
    return f"""class LikeLengths(torch.utils.data.Sampler):
    def __init__(self, lengths, size):
        self.lengths, self.size = torch.as_tensor(lengths), size
    def __len__(self):
        return -(-len(self.lengths) // self.size)
    def __iter__(self):
        blocks = torch.randperm(len(self.lengths)).split(50 * self.size)
        batches = [one for block in blocks for one in block[self.lengths[block].argsort()].split(self.size)]
        return (batches[place].tolist() for place in torch.randperm(len(batches)))

DataLoader(data, batch_sampler=LikeLengths(lengths, {max(1, round(found.batch_samples))}), collate_fn=pad)"""


# -- workers


def _workers(found: Evidence) -> int:
    return int(found.host.get("loader", {}).get("workers", 0))


def _forked(found: Evidence) -> bool:
    return bool(found.host.get("loader", {}).get("start_method") == "fork")


def _dataset_bytes(found: Evidence) -> float:
    """What each worker will hold of the dataset: objects once they are read; pickled to it, also NumPy's arrays."""
    loader = found.host["loader"]
    return float(loader.get("objects_bytes", 0) + (0 if _forked(found) else loader.get("arrays_bytes", 0)))


def _copied(found: Evidence) -> float | None:
    """What all workers will hold of a dataset, over the host's memory."""
    if not found.host or not found.host_limit_bytes:
        return None
    copies = _workers(found) * found.world_size
    return copies * (_dataset_bytes(found) if copies else 0.0) / found.host_limit_bytes


def _copied_sentence(found: Evidence, value: float) -> str:
    size, count = format_bytes(_dataset_bytes(found)), _workers(found)
    if _forked(found):
        held = f"The dataset holds {size} of Python objects, and each of {count} workers copies what it reads of them"
    else:
        held = f"The dataset is pickled, {size}, to each of {count} workers, which are new interpreters"
    return f"{held}: {value:.0%} of the machine's memory{' in time' if _forked(found) else ''}."


def _copies(found: Evidence) -> tuple[float, float, float]:
    """Of the forked worker that copies most of its parent: bytes so far, bytes a step adds, what they will come to.

    Counting references and collecting garbage write to Python's objects only, so these are all that can be copied.
    """
    if not found.host or not _forked(found):
        return 0.0, 0.0, 0.0
    each = [_copies_of(worker) for worker in found.host.get("workers", ()) if worker.get("copied")]
    return max(each, key=lambda one: one[2], default=(0.0, 0.0, 0.0))


def _copies_of(worker: Mapping[str, Any]) -> tuple[float, float, float]:
    (before, at_first), (after, so_far) = worker["copied"][0], worker["copied"][-1]
    rate = (so_far - at_first) / (after - before) if so_far - at_first >= _OWN_BYTES else 0.0
    most = min(worker["inherited_bytes"], worker["objects"] * _OBJECT_BYTES)
    return so_far, rate, max(so_far, min(most, so_far + rate * MANY_STEPS))


_OWN_BYTES = 1 << 20
"""Below that it is the interpreter's own."""
_OBJECT_BYTES = 64
"""Of a block of Python's allocator, about: a number takes 32, a list of three 120 in two of them."""


def _parent_copied(found: Evidence) -> float | None:
    """What all workers will hold a second time beyond the dataset, over the host's memory."""
    if not found.host or not found.host_limit_bytes:
        return None
    beyond = _copies(found)[2] - float(found.host["loader"].get("objects_bytes", 0))
    copies = _workers(found) * found.world_size
    return copies * beyond / found.host_limit_bytes if beyond >= _LEAST_COPIED_BYTES else 0.0


_LEAST_COPIED_BYTES = 1 << 28
"""Twice what torch and Lightning alone leave to be copied."""


def _parent_copied_sentence(found: Evidence, value: float) -> str:
    so_far, rate, most = _copies(found)
    more = f", copies {format_bytes(rate)} more at every step" if most > so_far else ""
    held = found.host["loader"].get("objects_bytes", 0)
    own = f", and the dataset's own lists and dictionaries are {format_bytes(held)} more" if held else ""
    return (
        f"A worker starts with the memory of the training process, its parent, and shares it: by now it holds "
        f"{format_bytes(so_far)} of its parent's a second time{more}, as to count a reference to a Python object, or "
        f"to collect garbage, writes to its page, which copies it. Of {_workers(found)} workers that is {value:.0%} of "
        f"the machine's memory"
        f"{' in time' if most > so_far else ''}{own}."
    )


def _slow_start(found: Evidence) -> float | None:
    if not found.host or found.start_up_seconds is None:
        return None
    fresh = found.host.get("loader", {}).get("start_method") in ("spawn", "forkserver")
    return found.start_up_seconds if fresh and _workers(found) else 0.0


def _order(found: Evidence) -> float | None:
    """The share of samplers of torch in the time of the training thread: loader processes have none."""
    if not found.host:
        return None
    lines = [line for line in found.host["lines"] if line["part"] == "wait" and line["package"] == "sampler"]
    return math.fsum(line["fraction"] for line in lines)


def _order_sentence(found: Evidence, value: float) -> str:
    samples = found.host["loader"].get("samples", 0)
    return (
        f"Drawing the order of the samples takes {value:.0%} of the time: at the beginning of every epoch a list of "
        f"{format_count(samples) if samples else 'all'} numbers is made, and no loader process can do it."
    )


def _order_effect(found: Evidence) -> Range:
    """The whole beginning of an epoch: the order is also made into batches' indexes, and freed when an epoch ends.

    Where loader processes or a loader are made anew then, too, it is the order at least and the beginning at most.
    """
    order = _order(found) or 0.0
    whole = max(order, found.epoch_start_fraction or 0.0)
    processes = _workers(found) and not found.host["loader"].get("persistent")
    return without(0.9 * (order if processes or found.host.get("loaders_remade") else whole), whole)


def _drawn(found: Evidence) -> list[Mapping[str, Any]]:
    """Lines of the training thread at which a sampler of the user's draws indices."""
    return [line for line in found.host.get("lines", ()) if line["package"] == OWN_ORDER and line["part"] == "wait"]


def _slow_sampler(found: Evidence) -> float | None:
    return math.fsum(line["fraction"] for line in _drawn(found)) if found.host else None


def _slow_sampler_sentence(found: Evidence, value: float) -> str:
    _, where, _package = most_seen(_drawn(found))
    seconds, several = format_seconds(value * found.step_seconds), _workers(found)
    whose = f"though {plural(several, 'worker')} read the samples" if several else "itself"
    return (
        f"Your sampler takes {value:.0%} of the time, {seconds} a batch, {where}: the training process draws all "
        f"indices {whose}, so no number of loader processes makes that faster."
    )


def _slow_sampler_effect(found: Evidence) -> Range:
    """Without it, at most; at least as fast as loader processes make batches now, or by the error of its share."""
    share, count = _slow_sampler(found) or 0.0, int(found.host.get("samples", 1)) or 1
    busy = [1 - worker["idle_fraction"] for worker in found.host.get("workers", ()) if "idle_fraction" in worker]
    left = max(1 - share, *busy) if busy else 1 - share
    error = 2 * math.sqrt(max(0.0, share * (1 - share)) / count)
    return without(min(1 - left, share - error), share)


def _slow_sampler_explains(found: Evidence) -> tuple[str, ...]:
    """What is waited for, where that is mostly the sampler."""
    is_most = (_slow_sampler(found) or 0.0) >= found.shares.get("wait", 0.0) / 2
    return (*WAITS, "no prefetch", "Python in the data", "all cores busy", "loader start-up") if is_most else ()


def _remade(found: Evidence) -> float | None:
    if not found.host or "loaders_remade" not in found.host:
        return None
    return found.epoch_start_fraction or 0.0 if found.host["loaders_remade"] else 0.0


def _restarts(found: Evidence) -> float | None:
    if not found.host:
        return None
    again = _workers(found) and not found.host["loader"].get("persistent")
    return found.epoch_start_fraction if again and found.epoch_start_fraction is not None else 0.0


LOADER_RULES: tuple[Rule, ...] = (
    Rule(
        name="images decoded at full size", looks_at="pixels decoded over pixels that the model gets, where decoding "
        "holds the training up", unit="ratio", threshold=4.0, source="kit: a JPEG decodes at a half, a quarter or an "
        "eighth of its size for less", needs="watched processes that make pictures",
        measure=_full_size,
        sentence=_full_size_sentence, part="wait",
        setting=_full_size_setting,
        effect=_full_size_effect,
        explains=(*WAITS, "no prefetch", "Python in the data", "all cores busy", "one row of a large chunk"),
    ),
    Rule(
        name="one row of a large chunk", looks_at="bytes decompressed over bytes asked for, where reading holds the "
        "training up; of readers that do not tell, bytes read from files over those of a sample", unit="ratio",
        threshold=8.0, source="kit: a chunk is decompressed whole", needs="watched processes that read",
        measure=_one_row, sentence=_one_row_sentence,
        setting=lambda _: "the file: chunks of about what is read at once (an npz has none: Zarr, HDF5 or .npy with "
        "mmap_mode do); or read the rows of a chunk together",
        effect=_one_row_effect, part="wait",
        explains=(*WAITS, "no prefetch", "Python in the data", "all cores busy", "slow disk"),
    ),
    Rule(
        name="padding", looks_at="part of a batch that is padding", unit="fraction", threshold=0.25,
        source="Krell et al. 2021, Efficient Sequence Packing: half of BERT's tokens are padding; the quarter is "
        "kit's, where batches of like lengths save a tenth and more", needs="watched steps",
        measure=_padding, sentence=_padding_sentence, part="backward",
        setting=lambda _: "batch_sampler of your DataLoader: batches of like lengths, sorted within blocks that are "
        "drawn at random, so that the order stays random; lengths are those of all samples, known before",
        example=_padding_example, effect=_padding_effect,
    ),
    Rule(
        name="slow disk", looks_at="part of the time of who makes batches in which it waits for a disk",
        unit="fraction", threshold=0.5, source="kit: the system tells a wait for a disk from computing and from other "
        "waits", needs="watched processes on Linux", measure=_slow_disk, sentence=_slow_disk_sentence, part="wait",
        setting=lambda _: "where your files are: a local disk, or memory where they fit; else larger files, read in "
        "order, or more loader processes, which wait at the same time",
        effect=_slow_disk_effect, explains=(*WAITS, "Python in the data"),
    ),
    Rule(
        name="checkpoints on a slow disk", looks_at="share of the time in which writing a checkpoint waits for a disk",
        unit="fraction", threshold=SLIVER, source="kit: where that is half of what checkpoints take and more",
        needs="watched steps on Linux", measure=_slow_checkpoints, part="checkpoint",
        sentence=lambda found, value: f"Writing checkpoints waits for the disk {value:.0%} of the time, "
        f"{format_seconds(value * found.step_seconds)} a step; to make them takes "
        f"{max(0.0, found.shares['checkpoint'] - value):.0%}.",
        setting=lambda _: "dirpath of your ModelCheckpoint: a faster disk, from which they are copied afterwards; or "
        "write less, by every_n_train_steps and save_weights_only",
        effect=lambda found: without_part(
            found, "checkpoint", 1 - (_slow_checkpoints(found) or 0.0) / found.shares["checkpoint"]
        ),
        explains=("checkpoints too often",),
    ),
    Rule(
        name="dataset copied into workers", looks_at="Python objects of the dataset, in all workers, over the "
        "machine's memory", unit="fraction", threshold=0.03, source="kit: reading an object counts its references, "
        "which copies its page", needs="a trial of this machine", measure=_copied,
        explains=("workers copy the parent",), sentence=_copied_sentence,
        setting=lambda found: "your dataset: one array or tensor (or Arrow) in place of lists and dictionaries"
        if _forked(found) else "your dataset: tensors, whose memory all workers share, or files opened by each worker",
    ),
    Rule(
        name="workers copy the parent", looks_at="memory of the training process that all forked workers will "
        "hold a second time, beside the Python objects counted in the dataset, over the machine's memory",
        unit="fraction", threshold=0.02, source="kit: from 256 MiB a worker on; counting a reference in a forked "
        "process writes to, and so copies, a page of objects",
        needs="a trial of this machine", measure=_parent_copied, sentence=_parent_copied_sentence,
        setting=lambda _: "the large tables that workers read: NumPy, Arrow or tensors in place of lists and "
        "dictionaries, loaded after the workers start where these need none of them; gc.freeze() before the loader "
        "starts, and no gc.collect() in a worker",
    ),
    Rule(
        name="workers start slowly", looks_at="seconds until the first batch, where workers are new interpreters",
        unit="count", threshold=3.0, source="kit: each imports all that the dataset needs", needs="loader processes",
        measure=_slow_start, explains=("loader start-up",),
        sentence=lambda found, value: "Every worker is started as a new interpreter, which imports everything again: "
        f"with {plural(_workers(found), 'worker')} the first batch came after {format_seconds(value)}.",
        setting=lambda _: "multiprocessing_context='fork', fewer workers, or imports within the functions that need "
        "them",
    ),
    Rule(
        name="workers started every epoch", looks_at="share of the time that first steps of epochs take longer",
        unit="fraction", threshold=SLIVER, source="kit", needs="watched steps", measure=_restarts,
        sentence=lambda found, value: f"At every epoch {plural(_workers(found), 'worker')} must start anew: that takes "
        f"{value:.0%} of the time.",
        setting=lambda _: "persistent_workers=True of your DataLoader",
        effect=lambda found: without(0.8 * (found.epoch_start_fraction or 0.0), found.epoch_start_fraction),
        part="wait", explains=(*WAITS, "loader start-up"),
    ),
    Rule(
        name="order drawn anew every epoch", looks_at="share of the time that torch's samplers take", unit="fraction",
        threshold=SLIVER, source="kit: torch.randperm(n).tolist() takes about 60 ns a sample", needs="watched steps",
        measure=_order, sentence=_order_sentence, part="wait",
        setting=lambda _: "the sampler of your DataLoader: RandomSampler(data, replacement=True, num_samples=...) "
        "draws as it goes; or longer epochs",
        effect=_order_effect,
        explains=(*WAITS, "no prefetch", "Python in the data", "all cores busy", "loader start-up"),
    ),
    Rule(
        name="slow sampler", looks_at="share of the time in which your sampler draws indices", unit="fraction",
        threshold=SLIVER, source="kit: a sampler runs in the training process, whatever num_workers is",
        needs="watched steps", measure=_slow_sampler, sentence=_slow_sampler_sentence, part="wait",
        setting=lambda _: "that sampler: draw all indices of an epoch in one call when it starts (as "
        "torch.utils.data.WeightedRandomSampler does), from weights or tables that are made once",
        effect=_slow_sampler_effect, explains=_slow_sampler_explains,
    ),
    Rule(
        name="loader made anew every epoch", looks_at="share of the time that first steps of epochs take longer, where "
        "each has a loader of its own", unit="fraction", threshold=SLIVER, source="kit", needs="watched steps",
        measure=_remade,
        sentence=lambda _, value: "Each epoch has a loader of its own, and to make it, with its data and its "
        f"workers, takes {value:.0%} of the time.",
        setting=lambda _: "reload_dataloaders_every_n_epochs of the Trainer: 0; or read the data once, in setup(), and "
        "make only the loader in train_dataloader()",
        effect=lambda found: without(0.8 * (found.epoch_start_fraction or 0.0), found.epoch_start_fraction),
        part="other", explains=(*WAITS, "loader start-up", "workers started every epoch"),
    ),
)  # fmt: skip
