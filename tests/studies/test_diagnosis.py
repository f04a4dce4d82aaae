import html
import math
import re
from dataclasses import replace

import pytest
import torch
from diagnosis_parts import evidence, host, line, shares, source, work
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from waiting import wait_until

import kit
from kit.config import Config
from kit.errors import ConfigError, TrialError
from kit.records.trace import trace_of
from kit.studies.diagnosis.diagnose import diagnose, finding_html, judge
from kit.studies.diagnosis.evidence import Slowing, StoreLayout
from kit.studies.diagnosis.gains import worth_measuring
from kit.studies.diagnosis.host_rules import drawing_hook
from kit.studies.diagnosis.rule import (
    BETWEEN_TRIALS,
    agreed,
    ahead_in_processes,
    ahead_in_threads,
    bounded,
    middle,
    widened,
    without_part,
)  # fmt: skip
from kit.studies.diagnosis.rules import RULES
from kit.studies.diagnosis.sampler import OWN_ORDER
from kit.studies.diagnosis.unit_costs import LOOP, PAGE, VALUE, Decoded, decoded, unit_costs
from kit.studies.profiling.trace import TraceInfo
from kit.testing import TinyData, TinyModule

LAYOUT = StoreLayout(
    seconds_per_batch=1.0, planned_seconds_per_batch=0.1, chunk=(1, 8, 8), planned_chunk=(4, 64, 64),
    dims=("time", "lat", "lon"),
)  # fmt: skip
LINE = {"place": "cell 3, line 4, in training_step", "calls": 4000, "syncs": 2000}


def trace(device="cpu", copies=None, **gaps):
    return TraceInfo(
        path="x", rank=0, device=device, steps=3, window_seconds=1.0, busy_seconds=1 - sum(gaps.values()),
        gaps=(), gap_seconds=gaps, operations=(), syncs_per_step=0,
        memory={}, **(copies or {}),
    )  # fmt: skip


def function(calls, seconds):
    return {"function": "item", "calls": calls, "call_seconds": seconds / calls, "own_fraction": seconds}


LOADER = {"workers": 2, "persistent": True, "start_method": "fork", "objects_bytes": 0}
COPYING = {"inherited_bytes": 2**30, "objects": 2**23, "copied": [(5, 2**25), (30, 2**26)]}
ON_DISK = {
    "lines": [line("data.py, line 5, in __getitem__", part="worker", fraction=0.9)], "idle_fraction": 0.05,
    "disk": {"worker": 0.8}, "disk_read_bytes": 300 << 20, "seconds": 10.0,
}  # fmt: skip
SLOWING = Slowing(
    rank=0, part="forward", step_seconds=(0.9, 1.2), part_seconds=0.1, each_seconds=0.01, steps=30, before=5
)
DRAWING = line("data.py, line 9, in __iter__", part="wait", package=OWN_ORDER, fraction=0.55)
PADDED = {"sizes": [[100], [80]], "ends": [[[100], [10], [12], [20]], [[80], [9], [70], [11]]]}
PLAIN = {"name": "AdamW", "can_fuse": True, "parameters": 5_000_000, "decays_gradients": False}
HOOK = "[Callback]Watcher.on_train_batch_end"


def reading(**reads):
    """A worker that reads most of its time, and is waited for."""
    ((package, read),) = reads.items()
    worker = {"lines": [line(part="worker", package=package, fraction=0.9)], "reads": {package: read}}
    return evidence(shares=shares(wait=0.5), hosts={0: host(workers=[worker])}, thread_cores=0.5)


FAULTS = {
    "waiting for data": evidence(shares=shares(wait=0.45), thread_cores=0.6),
    "no prefetch": evidence(shares=shares(wait=0.2), workers=0, thread_cores=0.6),
    "chunks that do not fit": evidence(shares=shares(wait=0.2), own_loader=True, layout=LAYOUT, thread_cores=0.8),
    "Python in the data": evidence(shares=shares(wait=0.3), thread_cores=0.99),
    "all cores busy": evidence(shares=shares(wait=0.2), accelerator="gpu", process_cores=3.9, thread_cores=0.8),
    "training shorter than preprocessing": evidence(shares=shares(wait=0.2), read_seconds=0.9, thread_cores=0.8),
    "loader start-up": evidence(start_up_seconds=4.0, total_seconds=10.0),
    "slow transfer": evidence(shares=shares(transfer=0.15), accelerator="gpu"),
    "copies that do not overlap": evidence(accelerator="gpu", trace=trace("gpu", {"bare_copy_seconds": 0.15})),
    "sync in the step": evidence(work=work(own_syncs=2000, lines=(LINE,)), unit_costs={VALUE: 1e-5, LOOP: 5e-5}),
    "full precision": evidence(
        {"hardware.precision": "32-true"}, measured_gains={"full precision": (1.6, 1.9), "batch too small": (1, 1)}
    ),
    "many tiny operations": evidence(work=work(calls=100_000)),
    "many tiny calls": evidence(functions=(function(2000, 0.02), function(10_000, 0.05))),
    "idle gaps": evidence(trace=trace(**{"data loading": 0.3})),
    "device memory near its limit": evidence(device_allocated_bytes=9.5e9, device_limit_bytes=1e10),
    "host memory near its limit": evidence(host_bytes=9.5e10),
    "fragmentation": evidence(accelerator="gpu", device_allocated_bytes=4 << 30, device_reserved_bytes=6 << 30),
    "stragglers": evidence(world_size=2, rank_seconds={0: 0.4, 1: 0.6}),
    "communication": evidence(world_size=2, rank_seconds={0: 0.4, 1: 0.4}, shares=shares(communication=0.4)),
    "images decoded at full size": reading(PIL={"pixels": 2_000_000}),
    "one row of a large chunk": reading(h5py={"chunk": [4096, 256], "wanted_bytes": 1024, "covered_bytes": 4_194_304}),
    "order drawn anew every epoch": evidence(
        shares=shares(wait=0.4), hosts={0: host(lines=[line("", package="sampler", part="wait", fraction=0.35)])}
    ),
    "padding": evidence(hosts={0: host(padding=PADDED)}),
    "slow sampler": evidence(shares=shares(wait=0.6), hosts={0: host(lines=[DRAWING])}, thread_cores=0.99),
    "slow disk": evidence(shares=shares(wait=0.5), hosts={0: host(workers=[ON_DISK] * 2)}, thread_cores=0.5),
    "checkpoints on a slow disk": evidence(shares=shares(checkpoint=0.3), hosts={0: host(disk={"checkpoint": 0.25})}),
    "dataset copied into workers": evidence(hosts={0: host(loader={**LOADER, "objects_bytes": 4e9})}),
    "workers copy the parent": evidence(hosts={0: host(workers=[COPYING] * 2)}, host_limit_bytes=2**35),
    "workers start slowly": evidence(
        hosts={0: host(loader={**LOADER, "start_method": "spawn"})}, start_up_seconds=8.0, total_seconds=100.0
    ),
    "workers started every epoch": evidence(
        hosts={0: host(loader={**LOADER, "persistent": False})}, epoch_start_fraction=0.3
    ),
    "validation too often": evidence({"trial.validate_every_steps": 2}, shares=shares(validation=0.4)),
    "checkpoints too often": evidence(shares=shares(checkpoint=0.3)),
    "drawing or logging in the step": evidence(hosts={0: host(lines=[line(package="matplotlib")])}),
    "Python in the step": evidence(
        work=work(places=("train.py, line 7, in training_step",)),
        hosts={0: host(lines=[line("train.py, line 9, in training_step", package="sklearn")])},
    ),
    "loader made anew every epoch": evidence(hosts={0: host(loaders_remade=3)}, epoch_start_fraction=0.3),
    "slow hook": evidence(
        hosts={0: host(hooks={HOOK: 0.3}, lines=[line("watch.py, line 3, in count", hook=HOOK, part="other")])}
    ),
    "garbage collection": evidence(hosts={0: host(garbage_fraction=0.2, collections=20)}),
    "interpreter held by a thread": evidence(
        hosts={0: host(threads=[{"name": "beat", "cores": 0.5, "place": "beat.py, line 2, in run"}])}, thread_cores=0.5
    ),
    "batch too small": evidence(measured_gains={"full precision": (1, 1), "batch too small": (2.5, 3.0)}),
    "optimizer larger than the work": evidence(shares=shares(optimizer=0.5), work=work(rows=10_000, rows_used=50)),
    "optimizer not fused": evidence(shares=shares(optimizer=0.5), hosts={0: host(optimizers=[PLAIN])}),
    "memory that grows": evidence(growth_bytes=2e6, hosts={0: host(grown={"Net.losses": [5, 30]})}),
    "steps that grow": evidence(slowing=SLOWING),
    "page faults": evidence(
        {"hardware.keep_freed_memory": False},
        hosts={0: host(page_faults_per_second=2e5, system_fraction=0.4)},
        measured_gains={"full precision": (1, 1), "batch too small": (1, 1), "page faults": (1.4, 1.5)},
    ),
    "anomaly detection": evidence(hosts={0: host(anomaly_detection=True)}),
    "uneven batches": evidence(world_size=2, rank_seconds={0: 0.4, 1: 0.4}, uneven=1.5),
    "small collectives": evidence(
        world_size=2,
        rank_seconds={0: 0.4, 1: 0.4},
        work=work(collectives=66, collective_bytes=400, collective_places=(("model.py, line 9, in step", 64),)),
        hosts={0: host(lines=[line("model.py, line 9, in step", fraction=0.3)])},
    ),
    "BatchNorm under checkpointing": evidence({"levers.gradient_checkpointing": True}, work=work(batch_norms_again=3)),
}


FAULTS_RULE = {rule.name: rule for rule in RULES}


def names(found):
    return judge(found, source(found)).names


def test_there_is_a_fault_for_every_rule():
    assert set(FAULTS) == {rule.name for rule in RULES}


def test_a_healthy_trial_gets_a_clean_bill_and_hears_what_it_was_asked():
    found = evidence()
    diagnosis = judge(found, source(found))
    assert diagnosis.clean
    assert diagnosis.findings == ()
    assert diagnosis.headline.startswith("Nothing was found")
    assert "core" not in diagnosis.headline
    crowded = evidence(queued_fraction=0.6)
    assert "60% of the time" in judge(crowded, source(crowded)).headline
    assert len(diagnosis.values) + len(diagnosis.unasked) == len(RULES)
    assert re.search("unknown: .*PyTorch trace", diagnosis.table)
    assert "thresholds and sources" in diagnosis._repr_html_()


def test_figures_of_a_busy_machine_are_said_to_be_so():
    busy = evidence(queued_fraction=0.4)
    diagnosis = judge(busy, source(busy))
    assert re.search("waited 40% .*core", diagnosis.notes[0])
    assert diagnosis.notes[0] in diagnosis._repr_html_()
    assert len(diagnosis.notes) == 1
    crowded = evidence(queued_fraction=0.4, compute_threads=2)
    assert "hardware.threads_per_rank: 1" in judge(crowded, source(crowded)).notes[1]
    (said,) = judge(evidence(compute_threads=1, asked_threads=2), source(busy)).notes
    assert "torch.set_num_threads" in said
    of_one = evidence(queued_fraction=0.4, compute_threads=1, asked_threads=2)
    assert not any("hardware.threads_per_rank: " in note for note in judge(of_one, source(of_one)).notes)
    quiet = evidence(queued_fraction=0.02, compute_threads=2)
    assert judge(quiet, source(quiet)).notes == ()


def test_python_in_the_data_is_named_on_a_busy_machine_too():
    waits = {"shares": shares(wait=0.6)}  # of a core, half is used; the rest is queued for, or idle
    assert "Python in the data" in names(evidence(**waits, thread_cores=0.5 + 0.48, queued_fraction=0.48))
    assert "Python in the data" not in names(evidence(**waits, thread_cores=0.5, queued_fraction=0.0))


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_named(name):
    assert name in names(FAULTS[name])


@pytest.mark.parametrize("name", FAULTS)
def test_no_other_fault_is_named(name):
    assert names(FAULTS[name]) == (name,)


@pytest.mark.parametrize("name", FAULTS)
def test_each_finding_says_what_to_change_what_to_expect_and_why(name):
    found = FAULTS[name]
    finding = judge(found, source(found))[name]
    assert finding.sentence.endswith(".")
    assert finding.setting
    assert finding.rule.looks_at in finding.evidence
    assert finding.rule.source in finding.threshold
    assert all(text in repr(judge(found, source(found))) for text in finding.reasons.values())
    assert finding.predicted is None or finding.predicted[0] < finding.predicted_gain <= finding.predicted[1]
    assert finding.predicted_gain is None or finding.predicted_gain >= 1
    assert "at most" not in repr(judge(found, source(found)))
    changed = found.config.replace(finding.change)
    assert bool(finding.change) == bool(found.config.diff(changed)), "a change changes something"
    assert finding.code.startswith("config.replace(") == bool(finding.change)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_that_the_trial_cannot_answer_is_not_guessed(rule):
    unknown = (
        "work", "peaks", "thread_cores", "process_cores", "workers", "total_seconds", "host_bytes", "growth_bytes",
    )  # fmt: skip
    nothing = evidence(
        {"hardware.precision": "32-true"}, **dict.fromkeys(unknown), shares={}, hosts={}, measured_gains={}
    )
    assert rule.measure(nothing) is None


def test_a_trace_tells_copies_of_memory_that_is_not_pinned_though_the_loader_is_told_to_pin():
    copies = {"unpinned_copy_seconds": 0.3, "bare_copy_seconds": 0.3}
    found = evidence({"loader.pin_memory": True}, accelerator="gpu", trace=trace("gpu", copies))
    finding = judge(found, source(found))["slow transfer"]
    assert names(found) == ("slow transfer",), "pinning comes before overlapping"
    assert "pin_memory()" in finding.setting
    assert finding.change == {}
    pinned = evidence(accelerator="gpu", trace=trace("gpu", {"bare_copy_seconds": 0.01}), shares=shares(transfer=0.15))
    assert names(pinned) == (), "what the trace shows counts more than the share that the host waited"


def test_what_a_finding_explains_is_not_told_beside_it():
    found = evidence(shares=shares(wait=0.6), workers=0, thread_cores=0.99)
    assert names(found) == ("Python in the data",)
    (said,) = judge(found, source(found)).settled
    assert said.startswith("'Python in the data' ")
    left_out = ("waiting for data", "no prefetch", "training shorter than preprocessing")
    assert [said.count(name) for name in left_out] == [1, 1, 1]


def test_what_grows_explains_what_is_said_of_that_part_and_names_the_line_that_is_seen_later_and_later():
    at, grown = "train.py, line 9, in training_step", {"Net.outs": [5, 60]}
    lines = [
        line("train.py, line 3, in training_step", part="other", fraction=0.5, middle=0.5),
        line(at, part="other", fraction=0.3, hook=HOOK, middle=0.7),
    ]
    hosts = {0: host(hooks={HOOK: 0.3}, lines=lines, grown=grown)}
    found = evidence(slowing=replace(SLOWING, part="other"), hosts=hosts, shares=shares(other=0.5))
    assert names(found) == ("steps that grow",)
    sentence = judge(found, source(found))["steps that grow"].sentence
    assert at in sentence
    assert "Net.outs" in sentence
    assert names(replace(found, slowing=SLOWING)) == ("slow hook", "steps that grow"), "what grows is another part"


def test_what_is_left_out_is_laid_to_a_finding_that_is_told():
    """A chain: the row explains the disk, which explains the wait."""
    read = {"chunk": [4096, 256], "wanted_bytes": 1024, "covered_bytes": 4_194_304}
    worker = {**ON_DISK, "lines": [line(part="worker", package="h5py", fraction=0.9)], "reads": {"h5py": read}}
    found = evidence(shares=shares(wait=0.6), hosts={0: host(workers=[worker] * 2)}, thread_cores=0.5)
    diagnosis = judge(found, source(found))
    assert diagnosis.names == (ROW,)
    (said,) = diagnosis.settled
    assert said.startswith(f"'{ROW}' ")
    assert "slow disk" in said


def test_what_is_next_is_not_said_where_more_goes_than_the_part_has():
    """Drawing in a hook is not in the forward pass, by which the rule reckons."""
    found = evidence(
        shares=shares(forward=0.05, other=0.8),
        hosts={0: host(lines=[line(package="matplotlib", part="other", hook=HOOK, fraction=0.75)])},
    )  # fmt: skip
    assert judge(found, source(found))[LOGGED].limit_next == ""


def test_a_wait_in_which_the_thread_was_idle_is_no_computing_because_it_queued_elsewhere():
    queued = evidence(shares=shares(wait=0.5), thread_cores=0.7, queued_fraction=0.2)
    assert queued.busy_wait_fraction == pytest.approx(0.4), "thread_cores has what was queued"
    assert replace(queued, queued_fraction=0.0).busy_wait_fraction == pytest.approx(0.4)


def test_what_a_forked_worker_copies_is_told_by_what_it_did_and_never_beyond_the_objects_there_are():
    few = {**COPYING, "objects": 2**21}
    assert names(evidence(hosts={0: host(workers=[few] * 2)}, host_limit_bytes=2**35)) == ()
    still = {**COPYING, "copied": [(5, 2**25), (30, 2**25 + 2**19)]}
    assert names(evidence(hosts={0: host(workers=[still])}, host_limit_bytes=2**35)) == (), "the interpreter's own"
    one = {**COPYING, "copied": [(5, 3 * 2**28), (30, 3 * 2**28)]}
    found = evidence(hosts={0: host(workers=[still, one])}, host_limit_bytes=2**35)
    assert "768 MiB of its parent" in judge(found, source(found))["workers copy the parent"].sentence


def test_what_workers_copy_beside_a_dataset_says_what_the_dataset_holds():
    found = FAULTS["workers copy the parent"]
    alone = judge(found, source(found))["workers copy the parent"].sentence
    held = {**found.host, "loader": {**LOADER, "objects_bytes": 2**26}}
    beside = replace(found, hosts={0: held})
    assert "dataset" not in alone
    assert "dataset" in judge(beside, source(beside))["workers copy the parent"].sentence


def test_a_dataset_of_arrays_is_shared_by_forked_workers_and_pickled_to_new_ones():
    loader = {**LOADER, "arrays_bytes": 4e9}
    assert names(evidence(hosts={0: host(loader=loader)})) == ()
    spawned = evidence(hosts={0: host(loader={**loader, "start_method": "spawn"})})
    assert "pickled" in judge(spawned, source(spawned))["dataset copied into workers"].sentence


def test_the_line_at_which_a_loader_process_is_busy_stands_beside_the_wait():
    found = replace(reading(lmdb={}), thread_cores=0.5)
    assert "at train.py, line 7" in judge(found, source(found))["waiting for data"].sentence


def test_two_findings_never_turn_one_setting_in_different_ways():
    found = evidence(
        {"levers.gradient_checkpointing": True, "loader.batch_size": 8}, device_allocated_bytes=9.5e9,
        device_limit_bytes=1e10, measured_gains={"batch too small": (2.5, 3.0)},
    )  # fmt: skip
    diagnosis = judge(found, source(found))
    assert diagnosis.names == ("device memory near its limit", "batch too small"), "without the first a step fails"
    assert diagnosis["batch too small"].change == {}
    assert "loader.batch_size" in diagnosis.settled[-1]


def test_effects_follow_from_the_parts_of_a_step_and_say_what_is_next():
    """40 % of validation, made 14 times as rare: 1 / (1 - 0.4 × 13 / 14), give or take how unlike two trials are."""
    finding = judge(FAULTS["validation too often"], source(evidence()))["validation too often"]
    chance = math.exp(2 * math.sqrt(2) * BETWEEN_TRIALS)
    assert finding.predicted == pytest.approx((1 / (1 - 0.4 * 13 / 14) / chance, 1 / (1 - 0.4)))
    assert finding.change == {"trial.validate_every_steps": 28}
    assert finding.limit_next.startswith("forward is longest, 40%")
    wide = evidence({"trial.validate_every_steps": 2}, shares=shares(validation=0.4), errors={"validation": 0.1})
    low, high = judge(wide, source(wide))["validation too often"].predicted
    assert low < finding.predicted[0] < finding.predicted[1] == high


class Hoarding(Dataset):
    """Keeps a mebibyte of each sample in the process that made it, where `kept` says so."""

    def __init__(self, kept):
        self.kept = [] if kept else None

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        if self.kept is not None:
            self.kept.append(b"x" * (1 << 20))
        return torch.zeros(8), torch.zeros(1)


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_that_grows_in_a_loader_process_is_seen_and_told(config, keeps):
    """By pages that the process holds alone; its rank holds none of them."""
    loader = DataLoader(Hoarding(keeps), batch_size=4, num_workers=1)
    trial = kit.fit(config(max_steps=24, warmup_steps=2, predict_memory=False), TinyModule, loader).wait()
    (row,) = kit.results(trial.config.trial.folder)
    diagnosis = diagnose(trial, short_trials=False)
    if keeps:
        assert row["workers_peak_bytes"] >= 24 * 4 * (1 << 20)
        assert diagnosis.evidence.growth_in_workers
        assert diagnosis.evidence.growth_bytes == pytest.approx(4 << 20, rel=0.3)
        assert diagnosis.evidence.host_bytes > row["host_rss_peak_bytes"] + row["workers_peak_bytes"] / 2
        assert "in loader processes" in diagnosis["memory that grows"].sentence
        assert "loader processes" in trace_of([*trial.events, *trial.steps], trial.config).memory().sentence
        assert "your dataset" in diagnosis["memory that grows"].setting
    else:
        assert 0 < row["workers_peak_bytes"] < 24 * 4 * (1 << 20)
        assert not diagnosis.evidence.growth_in_workers
        assert "memory that grows" not in diagnosis.names


def test_a_range_grows_with_the_noise_of_what_is_left_of_a_step_and_keeps_its_middle():
    """Where nine tenths of a step go, an error of the tenth that stays is nearly one of the gain."""
    still = evidence(shares=shares(checkpoint=0.9))
    noisy = replace(still, errors={name: 0.2 for name in still.shares if name != "checkpoint"})
    calm, wide = (widened(without_part(one, "checkpoint"), one, "checkpoint") for one in (still, noisy))
    assert middle(wide) == pytest.approx(middle(calm))
    assert wide[1] / wide[0] > 1.1 * calm[1] / calm[0]


@pytest.mark.parametrize("error", [0.0, 0.3, 1.0])
def test_no_change_brings_more_than_all_of_the_share_that_was_measured(error):
    """Of 70 % of validation whose steps vary, half as much again would be all of the time: 52 times as fast."""
    noisy = dict.fromkeys(shares(validation=0.5), error)
    found = evidence({"trial.validate_every_steps": 2}, shares=shares(validation=0.7, forward=0.05), errors=noisy)
    assert without_part(found, "validation", 1 / 47)[1] <= 1 / (1 - 0.7)
    low, high = judge(found, source(found))["validation too often"].predicted
    assert 1 < low < high <= 1 / (1 - 0.7)
    told = 0
    for case in FAULTS.values():
        found = replace(case, errors=dict.fromkeys(case.shares, error))
        for finding in judge(found, source(found)).findings:
            is_share = finding.rule.looks_at.startswith("share of the time") and finding.rule.part != "wait"
            if is_share and finding.predicted and finding.name != "optimizer larger than the work":
                most = max(1 / (1 - finding.value), finding.rule.effect(found)[1])
                assert finding.predicted[1] <= most + 1e-9, finding.name
                told += 1
    assert told > 5


@pytest.mark.parametrize(
    ("name", "pictures"), [("chunks that do not fit", 1), ("Python in the step", 1), ("waiting for data", 0)]
)
def test_the_evidence_is_a_picture_and_the_threshold_is_folded_away(name, pictures):
    """A part of a step has its picture in the bar of all parts."""
    finding = judge(FAULTS[name], source(FAULTS[name]))[name]
    shown, folded = finding_html(finding).split("<details")
    assert shown.count('role="img"') == pictures
    assert finding.rule.source not in re.sub("<[^>]*>", "", shown)
    assert finding.rule.source in html.unescape(folded)


def test_nothing_is_said_twice_of_a_finding():
    diagnosis = judge(FAULTS["batch too small"], source(evidence()))
    text = repr(diagnosis)
    assert text.count(diagnosis.findings[0].effect) == 1
    assert text.count("times as fast") + text.count("× as fast") == 1
    assert diagnosis.headline.count("batch too small") == 1
    assert diagnosis.headline.startswith("One thing")


@pytest.mark.parametrize(
    ("whose", "where"),
    [
        ("your DataLoader", "batch_size=40 of your DataLoader"),
        ("your Photos", "made by your Photos"),
        ("the data of factory make", "made by factory make"),
        ("", "loader.batch_size: 64"),
    ],
)
def test_a_small_batch_is_made_larger_by_whom_it_is_made(whose, where):
    found = replace(FAULTS["batch too small"], whose_batches=whose)
    finding = judge(found, source(found))["batch too small"]
    assert where in finding.setting
    assert (finding.change, finding.batch_size) == (({}, 40) if whose else ({"loader.batch_size": 64}, None))
    assert finding.can_try


def test_what_takes_time_at_every_batch_explains_why_a_larger_one_pays():
    found = replace(FAULTS["batch too small"], hosts=FAULTS["slow hook"].hosts)
    assert names(found) == ("slow hook",)


def test_a_slow_disk_is_told_from_slow_decoding_and_from_other_waits():
    """In loader processes and without them; of 0.475 × 2 of making, 0.8 × 2 wait for the disk."""
    finding = judge(FAULTS["slow disk"], source(evidence()))["slow disk"]
    assert "84% of its time, which gives 60 MiB/s, at data.py, line 5" in finding.sentence
    decoding = {**ON_DISK, "disk": {"worker": 0.2}}
    found = evidence(shares=shares(wait=0.5), hosts={0: host(workers=[decoding] * 2)}, thread_cores=0.5)
    assert names(found) == ("waiting for data",)
    alone = {"loader": {**LOADER, "workers": 0}, "disk_read_bytes": 0, "seconds": 10.0}
    found = evidence(shares=shares(wait=0.5), hosts={0: host(disk={"wait": 0.4}, **alone)}, thread_cores=0.5)
    finding = judge(found, source(found))["slow disk"]
    assert "80% of its time:" in finding.sentence, "a disk whose bytes are not counted"
    assert finding.predicted_gain == pytest.approx(math.sqrt(1 / (1 - 0.36) / (1 - 0.4)))
    asleep = replace(found, hosts={0: host(disk={"wait": 0.01}, **alone)})
    assert "slow disk" not in names(asleep)
    busy = replace(found, queued_fraction=0.8, hosts={0: host(disk={"wait": 0.06}, **alone)}, thread_cores=0.99)
    assert names(busy) == ("slow disk",), "whoever queues for a core computes nothing in Python"
    assert judge(busy, source(busy))["slow disk"].predicted_gain < 1.1, "what goes is what was seen"
    hidden = replace(FAULTS["slow disk"], shares=shares(wait=0.05))
    assert names(hidden) == (), "processes that wait for a disk hold nobody up"


@pytest.mark.parametrize("name", ["waiting for data", "no prefetch", "Python in the data"])
def test_the_line_at_which_a_batch_is_made_is_named_without_loader_processes_too(name):
    """Of a wait of 0.5, 0.2 at one line of a function and 0.1 at another."""
    lines = [
        line("rows.py, line 9, in __getitem__", part="wait", package="pandas", fraction=0.2),
        line("rows.py, line 8, in __getitem__", part="wait", fraction=0.1), line(fraction=0.3),
    ]  # fmt: skip
    found = replace(FAULTS[name], shares=shares(wait=0.5), hosts={0: host(lines=lines)})
    said = judge(found, source(found))[name].sentence
    assert "60% of the time in __getitem__" in said
    assert "at rows.py, line 9, in pandas" in said


def making(workers=2, **changes):
    """Loader processes that are waited for, all of them at the same."""
    worker = {"lines": [line(**{"part": "worker", "fraction": 0.6, **changes})], "reads": changes.pop("reads", {})}
    return evidence(shares=shares(wait=0.5), hosts={0: host(workers=[worker] * workers)}, thread_cores=0.5)


def test_the_share_of_a_line_is_that_of_one_loader_process_however_many_there_are():
    one, two = (judge(found, source(found))["waiting for data"].sentence for found in (making(1), making(2)))
    assert "60% of the time at train.py, line 7" in one
    assert one == two


def test_a_data_set_of_a_library_is_named_by_its_package():
    said = judge(of := making(place="", package="webdataset"), source(of))["waiting for data"].sentence
    assert "60% of the time in webdataset" in said
    idle = making(place="", package="kit")
    assert "loader process" not in judge(idle, source(idle))["waiting for data"].sentence


def test_a_thread_that_holds_the_interpreter_is_told_on_a_busy_machine_too():
    """Of a quarter of the time that was left by others, a third stood still; a larger batch pays because of that."""
    beat = FAULTS["interpreter held by a thread"].hosts
    gains = {"full precision": (1, 1), "batch too small": (2.5, 10.0)}
    found = evidence(hosts=beat, thread_cores=0.9, queued_fraction=0.75, measured_gains=gains)
    diagnosis = judge(found, source(found))
    assert diagnosis.names == ("interpreter held by a thread",)
    assert diagnosis["interpreter held by a thread"].value == pytest.approx(0.08 / 0.25)


def test_a_clean_bill_says_where_the_time_goes():
    lines = [line("train.py, line 8, in auc", fraction=0.3), line("train.py, line 9, in auc", fraction=0.2)]
    found = evidence(hosts={0: host(lines=lines)}, work=work(places=tuple(one["place"] for one in lines)))
    diagnosis = judge(found, source(found))
    assert diagnosis.clean
    assert any("in auc" in text and "line 8" in text and "50%" in text for text in diagnosis.sentences)
    on_gpu = replace(found, accelerator="gpu", work=work())
    assert not any("in auc" in text for text in judge(on_gpu, source(on_gpu)).sentences)


def test_many_values_that_are_logged_are_told_and_a_few_are_not():
    many, few = (
        replace(evidence(), hosts={0: host(lines=[line(package="self.log", fraction=one)])}) for one in (0.6, 0.1)
    )
    finding = judge(many, source(many))["drawing or logging in the step"]
    assert finding.value == pytest.approx(0.6)
    assert finding.predicted[1] > 2
    assert judge(few, source(few)).clean


def test_many_operations_that_move_much_are_not_tiny():
    many = work(calls=60_000)
    assert names(evidence(work=many)) == ("many tiny operations",)
    assert names(evidence(work=replace(many, bytes=6e9))) == (), "100 KB each, as of a recurrent layer"
    assert names(evidence(work=replace(many, bytes=6e9), accelerator="gpu")) == ("many tiny operations",)


def test_a_loop_of_tiny_operations_is_told_by_its_line_and_gains_by_its_share():
    """No larger batch helps a loop over the samples of one."""
    place = "train.py, line 7, in backward"
    found = evidence(
        work=work(calls=100_000, lines=({"place": place, "calls": 99_000, "syncs": 0},)),
        hosts={0: host(lines=[line(place, part="backward", fraction=0.8)])},
    )
    finding = judge(found, source(found))["many tiny operations"]
    assert "batch" not in finding.setting
    assert finding.change == {}
    assert finding.predicted_gain == pytest.approx(math.sqrt(1 / 0.6 / 0.2))


def test_many_small_chunks_for_one_read_are_told_with_the_line():
    read = {"chunk": [1, 64], "chunks": 64, "wanted_bytes": 1 << 14, "covered_bytes": 1 << 14}
    found = replace(reading(h5py=read), thread_cores=0.5)
    assert "64 chunks of 1×64" in judge(found, source(found))["waiting for data"].sentence
    tall = replace(reading(h5py={**read, "chunk": [16, 64], "covered_bytes": 1 << 18}), thread_cores=0.5)
    said = judge(tall, source(tall))["one row of a large chunk"].sentence
    assert "at train.py, line 7" in said
    assert "64 HDF5 chunks of 16×64: 256 KiB" in said


def test_calibrating_is_not_promised_to_find_the_workers_of_an_iterable_data_set():
    loader = {**LOADER, "iterable": True}
    found = evidence(shares=shares(wait=0.5), given_loader=True, hosts={0: host(loader=loader)}, thread_cores=0.5)
    finding = judge(found, source(found))["waiting for data"]
    assert "calibration" not in finding.setting
    assert "get_worker_info" in finding.setting


def test_checkpoints_that_are_slow_to_make_are_not_blamed_on_the_disk():
    found = replace(FAULTS["checkpoints on a slow disk"], hosts={0: host(disk={"checkpoint": 0.1})})
    assert names(found) == ("checkpoints too often",)


def test_what_a_checkpoint_callback_does_is_one_finding_with_what_it_writes():
    key = "SlowDisk{'monitor': None, 'every_n_train_steps': 2}"
    hook = f"[Callback]{key}.on_train_batch_end"
    own = line("disk.py, line 5, in _save_checkpoint", hook=hook, part="other")
    watched = host(hooks={hook: 0.2, "[Callback]Quick.on_train_end": 0.01}, checkpointers=[key], lines=[own])
    found = evidence(shares=shares(checkpoint=0.12), hosts={0: watched})
    finding = judge(found, source(found))["checkpoints too often"]
    assert names(found) == ("checkpoints too often",)
    assert finding.value == pytest.approx(0.32)
    assert "SlowDisk.on_train_batch_end" in finding.sentence
    assert "disk.py, line 5" in finding.sentence
    other = replace(found, hosts={0: {**watched, "checkpointers": []}})
    slow = judge(other, source(other))["slow hook"]
    assert slow.sentence.startswith("SlowDisk.on_train_batch_end ")
    assert "{" not in slow.sentence


def test_a_fused_optimizer_is_tried_where_it_computes_the_same():
    found = FAULTS["optimizer not fused"]
    finding = judge(found, source(found))["optimizer not fused"]
    assert finding.change == {"levers.optimizer": "adamw-fused"}
    low, high = finding.rule.effect(found)
    assert (low, high) == pytest.approx((1 / (1 - 0.5 * 1.2 / 2.2), 1 / (1 - 0.5 * 6.5 / 7.5)))
    gpu = replace(found, accelerator="gpu")
    assert 1 < finding.rule.effect(gpu)[0] < low
    decays = replace(found, hosts={0: host(optimizers=[{**PLAIN, "name": "Adam", "decays_gradients": True}])})
    by_hand = judge(decays, source(decays))["optimizer not fused"]
    assert by_hand.change == {}
    assert by_hand.setting == "fused=True of your Adam"
    scaled = replace(
        found, config=found.config.replace({"hardware.precision": "16-mixed", "training.gradient_clip_norm": 1.0})
    )
    assert judge(scaled, source(scaled))["optimizer not fused"].change == {}
    fused = {**PLAIN, "can_fuse": False}
    assert names(replace(found, hosts={0: host(optimizers=[fused])})) == ()
    assert names(replace(found, hosts={0: host(optimizers=[{**PLAIN, "parameters": 1_000_000}, fused])})) == ()
    rows = replace(found, work=work(rows=10_000, rows_used=50))
    assert names(rows) == ("optimizer larger than the work",)


def test_the_headline_counts_what_is_wrong_and_names_what_comes_first():
    grown = replace(FAULTS["memory that grows"], shares=shares(checkpoint=0.3))
    headline = judge(grown, source(grown)).headline
    assert headline.startswith("2 things hold this")
    assert "checkpoints too often most" in headline
    full = replace(grown, device_allocated_bytes=9.5e9, device_limit_bytes=1e10)
    headline = judge(full, source(full)).headline
    assert headline.startswith("3 things are wrong with this")
    assert "device memory near its limit" in headline


def test_counted_calls_take_what_one_was_measured_to_take():
    """2,000 values of 10 to 50 µs in a step of a second: 2 to 10 % of it, though no sample fell on the line."""
    found = replace(FAULTS["sync in the step"], unit_costs={VALUE: 1e-5, LOOP: 5e-5})
    low, high = judge(found, source(found))["sync in the step"].predicted
    assert low < 1 / 0.98 < 1 / 0.9 < high
    assert math.sqrt(low * high) == pytest.approx(math.sqrt(1 / 0.98 / 0.9))


def test_pictures_gain_by_what_decoding_one_of_them_smaller_was_timed_to_take():
    """80 % of a second decode 10 pictures: 60 ms each whole, 20 reduced, and 20 ms for what has fewer pixels then."""
    lines = [line("data.py, line 3, in __getitem__", package="PIL", part="wait", fraction=0.8)]
    hosts = {0: host(lines=lines, reads={"PIL": {"pixels": 640_000}}, pixels=4096)}
    guessed = evidence(shares=shares(wait=0.9), hosts=hosts, samples_per_second=10.0, step_seconds=1.0)
    timed = replace(guessed, decoded={"PIL": Decoded(0.06, 0.02, 1 / 64)})
    effect = next(rule.effect for rule in RULES if rule.name == "images decoded at full size")
    left = (0.6 / 3 + 0.2 * math.sqrt(1 / 3 / 64), 0.6 / 3 + 0.2 / 64)
    assert effect(timed) == pytest.approx([1 / (0.2 + one) for one in left])
    assert effect(guessed)[1] > effect(timed)[1], "a constant"
    no_smaller = replace(guessed, decoded={"PIL": Decoded(0.06, 0.06, 1.0)})
    assert effect(no_smaller) == pytest.approx((1, 1))


def test_no_reduced_decode_is_advised_for_pictures_that_have_none():
    settings = []
    for kind in ("JPEG", "PNG"):
        found = reading(PIL={"pixels": 2_000_000, "format": kind})
        settings.append(judge(found, source(found))["images decoded at full size"].setting)
    assert ["draft" in setting for setting in settings] == [True, False]
    assert "PNG" in settings[1]


def test_reading_gains_until_the_training_alone_sets_the_pace():
    """Half a second beside the reading, a quarter alone: what is left of reading slows it down while it lasts."""
    effect = next(rule.effect for rule in RULES if rule.name == "images decoded at full size")
    in_workers = replace(FAULTS["images decoded at full size"], decoded={"PIL": Decoded(0.18, 0.02, 1.0)})
    assert effect(in_workers) == pytest.approx((2, 2))
    steps = [1 / gain for gain in effect(replace(in_workers, alone_seconds=0.25))]
    assert steps == pytest.approx([0.25 + 0.25 * 0.2 / steps[0]] * 2), "of reading, 0.2 s are left"
    assert effect(replace(in_workers, alone_seconds=0.8)) == pytest.approx((1.25, 1.25))
    slow = replace(in_workers, decoded={"PIL": Decoded(0.18, 0.16, 1.0)}, alone_seconds=0.25)
    assert effect(slow) == pytest.approx([1 / 0.9] * 2), "reading still sets the pace"


def test_training_is_faster_too_where_its_own_thread_reads_less():
    """Half a second after the reading, 0.3 alone: without four fifths of the reading 0.34, and 0.1 of reading."""
    effect = next(rule.effect for rule in RULES if rule.name == "images decoded at full size")
    lines = [line("data.py, line 3, in __getitem__", package="PIL", part="wait", fraction=0.5)]
    hosts = {0: host(lines=lines, reads={"PIL": {"pixels": 640_000}}, pixels=4096)}
    own = evidence(shares=shares(wait=0.5), hosts=hosts, decoded={"PIL": Decoded(0.05, 0.01, 0.2)})
    assert effect(own) == pytest.approx([1 / 0.6] * 2)
    assert effect(replace(own, alone_seconds=0.3)) == pytest.approx([1 / 0.44] * 2)


def test_no_cure_of_reading_is_promised_more_than_a_step_without_any():
    found = evidence(shares=shares(wait=0.5, validation=0.1), alone_seconds=0.15)
    assert bounded((1.5, 9.0), found, "wait") == pytest.approx((1.5, 4))
    assert bounded((1.5, 9.0), found, "forward") == (1.5, 9.0)
    assert bounded((1.5, 9.0), replace(found, alone_seconds=None), "wait") == (1.5, 9.0)
    assert bounded((1.5, 9.0), replace(found, alone_seconds=2.0), "wait") == (1, 1)
    told = replace(FAULTS["waiting for data"], alone_seconds=0.25)
    (finding,) = (one for one in judge(told, source(told)).findings if one.rule.part == "wait")
    assert "alone takes 250 ms" in finding.sentence


def test_a_loader_that_takes_the_cores_of_the_training_is_told():
    found = evidence(shares=shares(wait=0.02), own_loader=True, queued_fraction=0.5, alone_seconds=0.25)
    assert "kit.studies.calibrate" in str(judge(found, source(found)))
    for other in (
        replace(found, own_loader=False, workers=0),
        replace(found, alone_seconds=0.9),
        replace(found, queued_fraction=0.02),
    ):
        assert "kit.studies.calibrate" not in str(judge(other, source(other)))


@pytest.mark.parametrize("package", ["PIL", "cv2"])
def test_a_picture_is_decoded_whole_and_at_the_least_size_that_still_has_the_pixels(package, tmp_path):
    pytest.importorskip(package)
    path = str(tmp_path / "photo.jpg")
    Image.effect_noise((800, 640), 60).convert("RGB").save(path)
    found = decoded(package, path, 800 * 640, 96 * 96)
    assert found.pixels_kept == pytest.approx(1 / 16), "a quarter of each side: 160 of 640 and no 80"
    assert min(found.whole_seconds, found.reduced_seconds) > 0
    assert decoded(package, path, 400 * 320, 96 * 96) is None, "another picture"
    assert decoded(package, str(tmp_path / "gone.jpg"), 800 * 640, 96 * 96) is None
    assert decoded("lmdb", path, 800 * 640, 96 * 96) is None


def test_a_read_of_a_small_chunk_still_costs_its_calls():
    found = replace(FAULTS["one row of a large chunk"], shares={"wait": 0.9, "forward": 0.1})
    slower = replace(found, unit_costs={"h5py": 0.01})
    free, dear = (judge(one, source(one))["one row of a large chunk"].predicted for one in (found, slower))
    assert dear[1] < free[1]
    assert dear[0] < free[0]


def test_a_read_through_a_library_costs_what_that_takes_for_a_small_chunk():
    sizes = {"chunk": [1024, 64], "wanted_bytes": 256, "covered_bytes": 262_144}
    lines = [line(part="wait", package="h5py", fraction=0.7), line(part="wait", package="xarray", fraction=0.1)]
    base = evidence(shares=shares(wait=0.8, forward=0.05, optimizer=0.05), thread_cores=0.5)
    found = replace(base, unit_costs={"h5py": 0.001, "xarray": 0.01})
    direct, through = (
        judge(one, source(one))["one row of a large chunk"].predicted_gain
        for one in (
            replace(found, hosts={0: host(lines=lines, reads={"h5py": sizes | more})})
            for more in ({}, {"through": "xarray"})
        )
    )
    assert through < direct < 1 / (1 - 0.8)


def test_lines_that_call_torch_draw_or_belong_to_another_part_are_no_python_in_the_step():
    known = "train.py, line 7, in training_step"
    others = [
        line(known), line("a", package="torch"), line("b", package="matplotlib", fraction=0.01),
        line("c", part="backward"), line(""),
    ]  # fmt: skip
    found = evidence(work=work(places=(known,)), hosts={0: host(lines=others)})
    assert judge(found, source(found)).values["Python in the step"] == 0
    untold = replace(found, work=work())
    assert "Python in the step" not in judge(untold, source(untold)).values


def test_a_gain_that_only_a_trial_tells_is_none_until_it_was_measured():
    slower = evidence({"hardware.precision": "32-true"}, measured_gains={"full precision": (0.2, 0.3)})
    assert names(slower) == ()
    unasked = evidence({"hardware.precision": "32-true"}, measured_gains={})
    assert "full precision" in {rule.name for rule in judge(unasked, source(unasked)).unasked}


def test_more_processes_than_cores_are_never_advised():
    """One core trains, so three of four prepare: 0.7 / 3 s a batch; four cores share 1 s of work."""
    found = evidence(shares=shares(wait=0.7), thread_cores=0.99, workers=0)
    finding = judge(found, source(found))["Python in the data"]
    assert finding.change == {"loader.num_workers": 3}
    assert finding.predicted_gain == pytest.approx(1 / 0.3, rel=0.03)
    lone = replace(found, cores=1)
    assert judge(lone, source(lone))["Python in the data"].predicted[0] <= 1


READING = evidence(
    {"loader.batches_ahead": 0}, shares=shares(wait=0.6), own_loader=True, workers=0, read_seconds=0.3,
    thread_cores=0.7, process_cores=0.7, layout=LAYOUT,
)  # fmt: skip
"""Half of the wait is reading, and a thread of the process does it; the other half the training thread does itself."""


@pytest.mark.parametrize(
    ("changes", "low", "high"),
    [
        ({}, 1 / 0.7, 1 / 0.7),  # it waits for a store
        ({"process_cores": 1.0, "layout": replace(LAYOUT, python_fraction=0.0)}, 1 / 0.7, 1 / 0.7),  # it decodes
        ({"process_cores": 1.0, "cores": 1}, 0.7, 1.0),
        ({"process_cores": 1.0}, 1.0, 1 / 0.7),  # it runs Python, which the training does, too, less than half the time
        ({"process_cores": 1.0, "work": work(calls=100_000)}, 0.7, 1.2),  # the training runs Python all the time
    ],
)  # fmt: skip
def test_threads_that_read_ahead_hide_what_waits_and_compute_where_a_core_and_the_interpreter_are_idle(
    changes, low, high
):
    slowest, fastest = ahead_in_threads(replace(READING, **changes))
    assert low * 0.99 <= slowest <= fastest <= high * 1.01


def test_nothing_is_read_ahead_for_where_python_reads_beside_python():
    held = replace(
        READING, process_cores=1.0, work=work(calls=100_000), shares=shares(wait=0.98, forward=0, optimizer=0)
    )
    assert "no prefetch" in names(READING)
    assert "no prefetch" not in names(replace(held, cores=1))


def test_processes_make_batches_as_far_as_cores_are_idle_and_each_is_handed_over():
    sleeping = evidence(shares=shares(wait=0.6), workers=0, cores=2, process_cores=0.4, thread_cores=0.4)
    computing = replace(sleeping, process_cores=1.0, thread_cores=1.0)
    large = replace(computing, hosts={0: host(sample_bytes=2**24)}, unit_costs={PAGE: 2e-6})
    gains = [ahead_in_processes(one, 1, 2) for one in (sleeping, computing, large)]
    assert gains[0] == pytest.approx((1 / 0.601, 1 / 0.401), rel=0.01)
    assert gains[1] == pytest.approx((1 / 0.626, 1 / 0.501), rel=0.01)
    assert gains[2][1] < 1 / (0.5 + 10 * 2**24 / 4096 * 2e-6)


def test_loader_processes_that_wait_are_as_many_as_calibrating_may_start():
    """Seven tenths of a second of waiting for a network, on two cores: more than two processes hide it."""
    remote = evidence(
        shares=shares(wait=0.8), workers=0, cores=2, process_cores=0.2, thread_cores=0.2, given_loader=True
    )
    finding = judge(remote, source(remote))["no prefetch"]
    assert finding.change == {"calibration.enabled": True}
    assert 0.9 / 0.202 < finding.predicted_gain < 1 / 0.2


def test_what_is_done_to_batches_around_the_loader_stays_with_the_training():
    found = replace(READING, process_cores=1.0)
    assert ahead_in_processes(found, 2, 2)[1] <= 1 / 0.7
    chunks = judge(found, source(found))["chunks that do not fit"]
    assert chunks.predicted_gain == pytest.approx(1 / (0.7 + 0.3 / 10))


def test_the_order_of_an_epoch_costs_all_that_its_beginning_takes():
    """To make the list is seen; to make batches of it, and to free it, belongs to other parts."""
    found = replace(FAULTS["order drawn anew every epoch"], epoch_start_fraction=0.6)
    gains = [
        judge(one, source(one))["order drawn anew every epoch"].predicted_gain
        for one in (found, replace(found, hosts={0: {**found.host, "loaders_remade": 2}}))
    ]
    assert gains[0] == pytest.approx(math.sqrt(1 / (1 - 0.54) / (1 - 0.6)))
    assert gains[1] < gains[0]


def test_a_slow_sampler_is_named_and_no_processes_are_advised():
    worker = {"lines": [], "idle_fraction": 0.3}
    found = replace(FAULTS["slow sampler"], hosts={0: host(lines=[DRAWING], workers=[worker] * 2)})
    finding = judge(found, source(found))["slow sampler"]
    assert "at data.py, line 9" in finding.sentence
    assert OWN_ORDER not in finding.sentence
    assert finding.change == {}
    assert "num_workers" not in finding.setting
    low, high = finding.rule.effect(found)
    assert (low, high) == pytest.approx((1 / 0.7, 1 / 0.45), rel=0.01), "loader processes are idle 30 % of the time"
    little = host(lines=[{**DRAWING, "fraction": 0.12}])
    assert names(replace(found, hosts={0: little})) == ("Python in the data", "slow sampler"), "the rest is reading"


def test_padding_gains_what_batches_of_like_lengths_save_and_all_of_it_at_best():
    found = FAULTS["padding"]
    finding = judge(found, source(found))["padding"]
    assert finding.value == pytest.approx(1 - 312 / 720)
    assert "9 to 100" in finding.sentence
    passes, alike = 0.25 + found.shares["backward"], 4 * 12 + 4 * 100
    low, high = finding.rule.effect(found)
    assert low == pytest.approx(1 / (1 - passes * (1 - alike / 720) / 2))
    assert high == pytest.approx(1 / (1 - passes * finding.value))
    assert finding.example in finding.reasons["in code"]
    assert "pre-wrap" in finding_html(finding)


def test_the_sampler_that_is_shown_draws_each_sample_once_in_batches_of_like_lengths():
    found = {"torch": torch}
    exec(FAULTS_RULE["padding"].example(FAULTS["padding"]).partition("\n\n")[0], found)
    lengths = torch.randperm(1000).tolist()
    batches = found["LikeLengths"](lengths, 10)
    drawn = [*batches]
    assert len(drawn) == len(batches) == 100
    assert sorted(place for batch in drawn for place in batch) == [*range(1000)]
    spread = [max(lengths[place] for place in batch) - min(lengths[place] for place in batch) for batch in drawn]
    assert sum(spread) / len(spread) < 50
    assert [*batches] != drawn


def test_a_batch_of_like_lengths_or_one_that_nothing_would_shorten_is_no_padding():
    like = {"sizes": [[100], [80]], "ends": [[[100], [95], [90], [97]], [[80], [79], [75], [77]]]}
    assert names(evidence(hosts={0: host(padding=like)})) == ()
    lone = {"sizes": [[100], [80]], "ends": [[[100]] * 4, [[80]] * 4]}
    assert names(evidence(hosts={0: host(padding=lone)})) == ()
    assert names(evidence(hosts={0: host(padding={})})) == ()


def test_a_hook_gains_what_steps_without_it_were_measured_to():
    """Its arrays may have prevented page faults, or slowed what comes after: its share tells neither."""
    by_share = FAULTS["slow hook"]
    measured = replace(by_share, measured_gains={**by_share.measured_gains, "slow hook": (0.95, 1.05)})
    share, gain = (judge(one, source(one))["slow hook"].predicted_gain for one in (by_share, measured))
    assert share == pytest.approx(math.sqrt(1 / 0.7 / (1 - 0.285)))
    assert gain == pytest.approx(1, abs=0.01)


def test_a_short_trial_leaves_drawing_out_by_its_hook_or_where_loggers_do_all_of_it():
    def drawing(*lines):
        return replace(FAULTS["slow hook"], hosts={0: host(hooks={HOOK: 0.3}, lines=lines)})

    of_hook = line("watch.py, line 3, in draw", package="matplotlib", hook=HOOK, part="other", fraction=0.3)
    in_step, logged = line(package="matplotlib"), line(package="tensorboard")
    hooks = [drawing_hook(drawing(*lines)) for lines in ([of_hook], [logged], [in_step], [of_hook, logged], [])]
    assert hooks == [HOOK, "", None, None, None]
    measured = replace(drawing(logged), measured_gains={"drawing or logging in the step": (2.0, 2.2)})
    gains = [
        judge(one, source(one))["drawing or logging in the step"].predicted_gain for one in (measured, drawing(logged))
    ]
    assert gains == pytest.approx([math.sqrt(4.4), 1.25], abs=0.01)


def test_a_hook_that_draws_a_little_is_slow_by_what_else_it_does():
    draws = line("watch.py, line 9, in draw", package="matplotlib", hook=HOOK, part="other", fraction=0.08)
    counts = line("watch.py, line 3, in count", package="numpy", hook=HOOK, part="other", fraction=0.5)
    found = evidence(hosts={0: host(hooks={HOOK: 0.6}, lines=[counts, draws])}, shares=shares(other=0.6))
    diagnosis = judge(found, source(found))
    assert diagnosis.names == ("slow hook", LOGGED)
    assert diagnosis["slow hook"].value == pytest.approx(0.52)
    assert "line 3" in diagnosis["slow hook"].sentence
    assert drawing_hook(found) is None, "it would leave out more"
    half = replace(
        found, hosts={0: host(hooks={HOOK: 0.6}, lines=[{**counts, "fraction": 0.25}, {**draws, "fraction": 0.35}])}
    )
    assert drawing_hook(half) is None
    assert judge(half, source(half))[LOGGED].predicted[1] < 2.1


def test_a_gain_that_was_measured_badly_is_bounded_by_the_share_that_was_seen():
    """A third of a step is gone: 1.4 to 1.5, by a quarter more or less; steps of a busy machine say 0.8 to 2.5."""
    assert agreed((0.8, 2.5), (1.4, 1.5)) == pytest.approx((1.4 / 1.25, 1.5 * 1.25))
    assert agreed((1.45, 1.47), (1.4, 1.5)) == (1.45, 1.47)
    assert agreed((0.95, 1.05), (1.4, 1.5)) == (0.95, 1.05), "what it prevented came instead"


def test_what_may_bring_nothing_is_neither_first_nor_said_to_hold_anything_up():
    doubtful = evidence(shares=shares(wait=0.12), workers=0, cores=2, process_cores=0.9, thread_cores=0.9)
    judged = judge(doubtful, source(doubtful))
    assert judged.names == ("no prefetch",)
    assert judged["no prefetch"].predicted[0] < 1
    assert " may hold " in judged.headline
    held = replace(doubtful, thread_cores=0.5, hosts=FAULTS["interpreter held by a thread"].hosts)
    assert "held by a thread most" in judge(held, source(held)).headline
    rather_none = replace(doubtful, process_cores=1.75)
    assert "no prefetch" not in names(rather_none), "the cores are busy"


def test_page_faults_are_a_finding_where_keeping_memory_was_measured_to_help():
    found = FAULTS["page faults"]
    again = {0: {**found.host, "loader": {**LOADER, "persistent": False}}}
    fewer = replace(found, hosts={0: {**found.host, "system_fraction": 0.1}}, measured_gains={})
    assert "page faults" in names(found)
    assert "page faults" not in names(replace(found, measured_gains={"page faults": (1.05, 1.3)}))
    assert judge(fewer, source(fewer)).values["page faults"] == 1
    asked = [found, fewer, replace(found, accelerator="gpu")]
    assert ["page faults" in worth_measuring(one) for one in asked] == [True, False, False]
    assert "page faults" in worth_measuring(replace(found, hosts=again))
    forked = replace(found, hosts=again, epoch_start_fraction=0.05)  # its pages are shared with new workers
    assert "page faults" not in worth_measuring(forked)


ROW, PICTURES = "one row of a large chunk", "images decoded at full size"


def test_whatever_decodes_or_reads_whole_files_is_named():
    read = {"pixels": 2_000_000}
    waiting = {"wait": 0.9, "forward": 0.1}
    of_all, of_package = (replace(reading(imagecodecs=one), shares=waiting) for one in ({**read, "within": 1.0}, read))
    effect = next(rule.effect for rule in RULES if rule.name == PICTURES)
    assert PICTURES in names(of_all)
    assert effect(of_all)[0] > effect(of_package)[0], "what else the function does shrinks, too"
    worker = {"lines": [line(part="worker", package="pyarrow", fraction=0.9)], "seconds": 1.0}
    whole, small = (
        replace(of_all, hosts={0: host(workers=[{**worker, "file_read_bytes": size}], sample_bytes=256)})
        for size in (1 << 30, 1 << 10)
    )
    assert [ROW in names(one) for one in (whole, small, replace(whole, own_loader=True))] == [True, False, False]


LOGGED = "drawing or logging in the step"


def test_what_writes_logs_is_told_once():
    writer = {"name": "Thread-7", "cores": 0.4, "place": "", "package": "tensorboard"}
    logged = [line(package="tensorboard", fraction=0.3)]
    found = replace(FAULTS["interpreter held by a thread"], hosts={0: host(threads=[writer], lines=logged)})
    beat = FAULTS["interpreter held by a thread"].host["threads"]
    both = replace(found, hosts={0: host(threads=[writer, *beat], lines=logged)})
    assert "interpreter held by a thread" not in names(found)
    assert "interpreter held by a thread" in names(both)
    assert LOGGED in names(both)
    alone = replace(found, hosts={0: host(threads=[writer])})
    assert "interpreter held by a thread" in names(alone)


def test_of_two_findings_with_one_cure_the_one_that_names_the_cause_is_told():
    found = evidence(shares=shares(wait=0.7), thread_cores=0.99, workers=0, given_loader=True)
    assert names(found) == ("Python in the data",)


def test_collectives_are_the_cause_of_the_hook_or_the_logging_that_makes_them_and_of_no_other():
    found, at = FAULTS["small collectives"], "model.py, line 9, in step"
    in_hook = host(hooks={HOOK: 0.5}, lines=[line(at, fraction=0.4, hook=HOOK, part="other")])
    assert names(replace(found, hosts={0: in_hook})) == ("small collectives",)
    assert names(replace(found, hosts={0: host(lines=[line(at, fraction=0.4, package="self.log")])})) == (
        "small collectives",
    )
    other = [line(at), line("watch.py, line 3, in count", hook=HOOK, part="other")]
    assert {*names(replace(found, hosts={0: host(hooks={HOOK: 0.5}, lines=other)}))} == {
        "small collectives", "slow hook",
    }  # fmt: skip


def test_garbage_of_young_objects_counts_and_one_full_collection_is_an_accident():
    lines = [line("tree.py, line 5, in __init__", package="gc")]
    young = evidence(hosts={0: host(garbage_fraction=0.3, young_garbage_fraction=0.2, collections=1, lines=lines)})
    finding = judge(young, source(young))["garbage collection"]
    assert finding.value == 0.2
    assert "tree.py, line 5" in finding.sentence
    accident = evidence(hosts={0: host(garbage_fraction=0.3, young_garbage_fraction=0.01, collections=1, lines=lines)})
    assert names(replace(accident, work=work(places=()))) == ()


def test_a_hook_of_one_rank_is_told_with_the_rank_for_which_the_others_wait():
    slow = host(hooks={HOOK: 0.4}, lines=[line("watch.py, line 3, in count", hook=HOOK, part="other")])
    ranks = {"world_size": 2, "rank_seconds": {0: 0.4, 1: 0.4}}
    found = evidence(**ranks, hosts={0: host(hooks={HOOK: 0.001}), 1: slow})
    assert names(found) == ("slow hook",)
    assert re.search("watch.py, line 3.* rank 1 alone", judge(found, source(found))["slow hook"].sentence)
    both = evidence(**ranks, hosts={0: slow, 1: slow})
    assert "alone" not in judge(both, source(both))["slow hook"].sentence


def test_whose_batches_are_larger_is_told_where_it_is_always_the_same_rank():
    found = replace(FAULTS["uneven batches"], uneven_rank=1)
    always, now_and_then = (judge(one, source(one))["uneven batches"] for one in (found, FAULTS["uneven batches"]))
    assert "rank 1" in always.sentence
    assert "rank 1" not in now_and_then.sentence
    assert always.setting != now_and_then.setting


def test_small_collectives_explain_why_a_larger_batch_pays():
    found = replace(FAULTS["small collectives"], measured_gains={"full precision": (1, 1), "batch too small": (2, 3)})
    assert names(found) == ("small collectives",)


def test_data_of_the_callers_own_that_reads_by_the_engine_takes_its_processes_from_the_config():
    found = evidence(shares=shares(wait=0.7), thread_cores=0.99, given_loader=True, own_loader=True)
    finding = judge(found, source(found))["Python in the data"]
    assert finding.change == {"loader.num_workers": 3}
    assert "loader.num_workers" in finding.setting


def test_a_smaller_batch_is_only_tried_where_the_config_makes_it():
    full = {"device_allocated_bytes": 9.5e9, "device_limit_bytes": 1e10}
    changes = {"levers.gradient_checkpointing": True, "loader.batch_size": 8}
    sides = [evidence(changes, given_loader=mine, **full) for mine in (False, True)]
    kits, theirs = (judge(found, source(found))["device memory near its limit"] for found in sides)
    assert kits.change["loader.batch_size"] == 4
    assert theirs.change == {}
    assert "your own loader" in theirs.setting


def test_a_loader_of_the_callers_own_is_calibrated_as_the_config_does_not_make_it():
    found = evidence(shares=shares(wait=0.7), thread_cores=0.99, given_loader=True)
    finding = judge(found, source(found))["Python in the data"]
    assert finding.change == {"calibration.enabled": True}
    assert "your own DataLoader" in finding.setting


def test_an_iterable_data_set_keeps_its_processes_so_nothing_is_there_to_try():
    found = evidence(
        given_loader=True, shares=shares(wait=0.45), thread_cores=0.6, hosts={0: host(loader={"iterable": True})}
    )
    finding = judge(found, source(found))["waiting for data"]
    assert not finding.change
    assert "num_workers" in finding.setting


def test_a_store_of_other_chunks_is_built_beside_the_one_there_is():
    found = FAULTS["chunks that do not fit"]
    change = judge(found, source(found))["chunks that do not fit"].change
    assert change["data.url"] == "data/dataset-4x64x64.zarr"
    assert change["data.source"] == "data/dataset.zarr", "what is stored is the source, where there is no other"
    assert change["chunking.chunk"] == {"time": 4, "lat": 64, "lon": 64}


def test_one_value_asked_for_stops_a_gpu_and_costs_a_cpu_nothing():
    one = work(own_syncs=1, lines=({**LINE, "syncs": 1},))
    assert names(evidence(work=one, accelerator="gpu")) == ("sync in the step",)
    assert names(evidence(work=one)) == ()
    many = work(own_syncs=2000, lines=({**LINE, "calls": 2000},))
    costs = {VALUE: 1e-6, LOOP: 5e-5}
    assert names(evidence(work=many, unit_costs=costs)) == (), "each makes no element of a loop"
    assert names(evidence(work=many, unit_costs={VALUE: 1e-4})) == ("sync in the step",)
    assert names(evidence(work=many)) == (), "on another machine nobody knows what a call takes"
    assert "%" in judge(FAULTS["sync in the step"], source(evidence()))["sync in the step"].sentence


def test_what_no_setting_mends_is_not_tried():
    found = FAULTS["sync in the step"]
    finding = judge(found, source(found))["sync in the step"]
    assert "cell 3, line 4" in finding.sentence
    with pytest.raises(ConfigError, match="no setting .*new_module"):
        finding.try_it()


def test_a_finding_that_is_not_there_is_answered_with_those_that_are():
    found = FAULTS["loader start-up"]
    diagnosis = judge(found, source(found))
    with pytest.raises(KeyError, match="loader start-up"):
        diagnosis["full precision"]
    with pytest.raises(KeyError, match="mean 'loader start-up'"):
        diagnosis["start-up"]
    with pytest.raises(KeyError, match="mean 'loader start-up'"):
        diagnosis["loader startup"]
    with pytest.raises(KeyError, match="rule 'no prefetch' .*loader start-up"):
        diagnosis["prefetch"]


parts = st.floats(0, 1)


@given(st.lists(parts, min_size=5, max_size=5), parts, st.booleans(), st.booleans(), st.integers(0, 4))
def test_any_evidence_gets_an_answer(weights, cores, own, gpu, workers):
    total = sum(weights) or 1.0
    names_ = ("wait", "transfer", "forward", "backward", "optimizer")
    found = evidence(
        shares={name: weight / total for name, weight in zip(names_, weights, strict=True)}, thread_cores=cores,
        process_cores=4 * cores, own_loader=own, accelerator="gpu" if gpu else "cpu", workers=workers,
        layout=LAYOUT if own else None,
    )  # fmt: skip
    diagnosis = judge(found, source(found))
    assert all(finding.value >= finding.rule.threshold for finding in diagnosis.findings)
    assert all(finding.predicted_gain is None or finding.predicted_gain > 0.99 for finding in diagnosis.findings)


# -- real trials


def test_small_acts_are_timed_where_their_package_is_known():
    costs = unit_costs([VALUE, LOOP, PAGE, "zarr", "lmdb"])
    assert set(costs) == {VALUE, LOOP, PAGE, "zarr"}
    assert all(seconds > 0 for seconds in costs.values())
    assert unit_costs(["h5py"], 2**18)["h5py"] > unit_costs(["h5py"], 256)["h5py"], "a longer row takes longer"


class Slow(Dataset):
    """Vectors that take Python a while."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        for _ in range(20_000):
            index = (index * 31 + 7) % 1009
        return torch.ones(8), torch.tensor([index / 1009])


@pytest.mark.slow
def test_a_slow_transform_is_found_in_a_real_trial_and_can_be_tried(config):
    trial = kit.fit(config(max_steps=24, warmup_steps=3), TinyModule, Slow()).wait()
    diagnosis = diagnose(trial)
    # A module this small gains by larger batches too; whether that shows beside the waiting differs with the machine.
    assert {*diagnosis.names} - {"batch too small"} == {"Python in the data"}
    assert any("test_diagnosis.py" in line["place"] for line in diagnosis.evidence.host["lines"])
    assert diagnosis.roofline.bound == "data"
    tried = diagnosis["Python in the data"].try_it(repeats=2)
    assert tried.after.config.loader.num_workers >= 1
    assert tried.predicted == diagnosis["Python in the data"].predicted


@pytest.mark.slow
def test_a_config_is_run_and_then_diagnosed(own):
    diagnosis = diagnose(own().replace({"trial.max_steps": 6}), peaks=False)
    assert diagnosis.evidence.own_loader
    assert diagnosis.evidence.layout is not None
    assert diagnosis.evidence.requests_per_sample > 0
    assert diagnosis.roofline is None


@pytest.mark.slow
def test_a_run_directory_is_as_good_as_its_trial(config):
    trial = kit.fit(config(max_steps=6, warmup_steps=3), TinyModule, TinyData).wait()
    first, second = (
        diagnose(given, peaks=False, short_trials=False) for given in (trial, trial.run_directory)
    )  # what is measured anew differs
    assert first.values == second.values


def test_two_ranks_are_judged_together(config):
    trial = kit.fit(config(ranks=2, max_steps=8, warmup_steps=3), TinyModule, TinyData).wait()
    found = diagnose(trial, peaks=False)
    assert set(found.evidence.rank_seconds) == {0, 1}
    assert found.evidence.work.samples == 8
    assert "stragglers" in found.values
    assert "communication" in found.values


@pytest.mark.slow
def test_a_profile_answers_the_rules_that_ask_for_one(config, tmp_path):
    settings = config(max_steps=8, warmup_steps=2).replace({"profiler.folder": str(tmp_path / "profiles")})
    profile = kit.studies.profile(settings, TinyModule, Slow()).wait()
    diagnosis = diagnose(settings, TinyModule, Slow(), peaks=False, profile=profile)
    assert diagnosis["idle gaps"].sentence.endswith("data loading.")
    assert "many tiny calls" in diagnosis.values


def test_a_trial_of_warm_up_steps_only_cannot_be_diagnosed(config):
    trial = kit.fit(config(max_steps=4000, warmup_steps=3000), TinyModule(seconds=0.2), TinyData)
    wait_until(lambda: (trial.poll(), trial.steps)[1])
    with pytest.raises(TrialError, match=r"trial\.wait\(\)"):
        diagnose(trial, peaks=False)
    trial.stop()
    trial.wait()
    with pytest.raises(TrialError, match="all .* were warm-up") as refused:
        diagnose(trial, peaks=False)
    assert "wait" not in str(refused.value)


def test_a_failed_trial_is_not_diagnosed(config):
    trial = kit.fit(config().replace({"model.arguments": {"faults": {}}}), "faulty:FaultyModule", TinyData)
    trial.wait()
    missing = Config().replace({"data.url": "nowhere.zarr"})
    with pytest.raises(kit.KitError, match=r"nowhere\.zarr"):
        diagnose(missing)
