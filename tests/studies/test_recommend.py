"""recommend: each step is what fits at some size, nothing is changed that need not be, and refusals."""

import functools
import re

import pytest
from scaling_parts import Blocks, blocks_data, cpu_of

from kit.config import Config
from kit.errors import ConfigError, PlanError
from kit.memory.alongside import fit
from kit.memory.recordings import UnansweredError
from kit.speed.prediction import predict_speed
from kit.studies.scaling import recommend as recommending
from kit.testing import TinyData, TinyModule
from kit.units import format_bytes

recommend = functools.partial(recommending.recommend, timeout_seconds=600)
"""A busy machine takes longer than a user is made to wait."""
HELD = {
    "levers.zero_grad_after_step": True, "levers.gradient_checkpointing": True, "levers.optimizer": "adamw-8bit"
}  # fmt: skip
ACCUMULATING = {"levers.accumulate_grad_batches": 2}
"""From here on more parts need no other recording."""


def advised(config, capacity_bytes, devices=1, **target):
    target = {"device": cpu_of(capacity_bytes), "devices": devices, "headroom_fraction": 0, **target}
    return recommend(config, target, Blocks, blocks_data)


def needs(tried):
    return tried.estimate.total_bytes[1]


@pytest.mark.slow
def test_as_memory_shrinks_ever_dearer_steps_are_taken_until_none_fits(config):
    given = config()
    taken = [advised(given, 1 << 30)]
    while (found := advised(given, needs(taken[-1].chosen) - 1)).fits:
        assert needs(found.chosen) < needs(taken[-1].chosen)
        assert not any(before.fits for before in found.tried[:-1])
        taken.append(found)
    names = list(dict.fromkeys(found.chosen.name for found in taken))
    assert names[0] == "as configured"
    for lever in (
        "zero_grad after the step",
        "accumulation in 8",
        "checkpointing",
        "8-bit optimizer",
        "accumulation in 512",
    ):
        assert any(lever in name for name in names)
    assert "nothing to change" in str(taken[0])
    assert taken[0].config == given


@pytest.mark.slow
def test_every_step_of_a_hopeless_model_is_answered_with_single_samples(config):
    refused = advised(config(), 1000)
    assert not refused.fits
    assert [tried.name for tried in refused.tried] == [
        "as configured",
        "zero_grad after the step + accumulation in 512",
        "zero_grad after the step + checkpointing + accumulation in 512",
        "zero_grad after the step + 8-bit optimizer + accumulation in 512",
        "zero_grad after the step + checkpointing + 8-bit optimizer + accumulation in 512",
    ]
    assert all(tried.estimate.batch_size in (1, 512) for tried in refused.tried)


@pytest.mark.slow
def test_what_leaves_too_little_free_is_not_advised(config):
    given = config()
    enough = needs(advised(given, 1 << 30).chosen)
    assert advised(given, enough).config == given
    careful = advised(given, enough, headroom_fraction=0.1)
    assert needs(careful.chosen) <= 0.9 * enough
    assert "no headroom" in str(careful)
    assert "headroom" in advised(given, needs(advised(given, 1000).tried[-1]), headroom_fraction=0.1).refusal
    with pytest.raises(PlanError, match="headroom_fraction"):
        advised(given, enough, headroom_fraction=1)


def test_steps_for_which_no_time_is_left_say_so(config):
    refused = recommend(config(), cpu_of(1001), Blocks, blocks_data, timeout_seconds=0)
    assert refused.tried[0].estimate is not None
    assert all("were over" in tried.note for tried in refused.tried[1:] if tried.estimate is None)
    assert any(tried.estimate is None for tried in refused.tried[1:])
    assert refused.refusal.startswith("undecided")
    assert "timeout_seconds" in refused.refusal


def test_where_processes_wait_for_each_core_a_change_has_as_many_times_as_long(config, monkeypatch):
    monkeypatch.setattr(recommending, "CHANGE_SECONDS", 1e-6)
    monkeypatch.setattr(recommending, "waiting_per_core", lambda: 6e8)
    found = recommending.recommend(config(), cpu_of(1001), Blocks, blocks_data)
    assert not any("were over" in tried.note for tried in found.tried)


def test_a_batch_is_cut_no_finer_than_it_must_be_where_time_was_over(config, monkeypatch):
    def unanswered(*_args, **_options):
        raise UnansweredError("the dry run was still running after 1 s")

    given = config()
    whole = needs(advised(given, 1 << 30).chosen)
    known = advised(given, 0.9 * whole)
    monkeypatch.setattr(recommending, "memory_model", unanswered)
    found = advised(given, 0.9 * whole)
    assert found.fits
    assert known.chosen.parts <= found.chosen.parts <= 2 * known.chosen.parts
    monkeypatch.setattr(recommending._Escalation, "_between", lambda *_: None)
    finest = advised(given, needs(advised(given, 1000).tried[-1]))
    assert finest.chosen.parts == 512
    assert "timeout_seconds" in str(finest)


def test_the_config_sets_what_the_changes_say_and_keeps_the_global_batch(config):
    given = config()
    whole = needs(advised(given, 1 << 30).chosen)
    found = advised(given, 0.9 * whole)
    changed = found.config
    levers = {"levers.zero_grad_after_step", "levers.accumulate_grad_batches"}
    assert set(given.diff(changed)) == {"loader.batch_size", *levers}
    assert changed.loader.batch_size * changed.levers.accumulate_grad_batches == 512
    assert "make its loader" in str(found)
    assert "accumulation" in found._repr_html_()
    assert "<table" in found._repr_html_()


def test_a_refusal_says_by_how_much_and_gives_no_config(config):
    given = config().replace(HELD)
    found = advised(given, 100_000)
    least = min(tried.estimate.total_bytes[1] for tried in found.tried)
    assert format_bytes(least - 100_000) in found.refusal
    assert "too much" in str(found)
    of_a_size = advised(given, 1, device="1 MB").refusal
    assert of_a_size.count("977 KiB") == 1
    with pytest.raises(PlanError, match="nothing fits .*small CPU"):
        found.config  # noqa: B018
    assert "<table" in found._repr_html_()


class ByHand(Blocks):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("module", [ByHand, ByHand(), lambda: ByHand()], ids=["class", "instance", "function"])
def test_a_module_that_steps_itself_is_offered_no_accumulation(config, module):
    refused = recommend(config().replace(HELD), cpu_of(100_000), module, blocks_data)
    assert [tried.name for tried in refused.tried] == ["as configured"]
    assert re.search("accumulation .*left out: .*manually", str(refused))


@pytest.mark.slow
def test_copies_are_preferred_until_only_shards_fit(config):
    given = config().replace({**HELD, **ACCUMULATING})
    copies = advised(given, 1 << 30, devices=2)
    assert copies.config.hardware.strategy == "ddp"
    assert copies.config.hardware.devices == 2
    refused = advised(given, 1000, devices=2)
    assert [tried.step.strategy for tried in refused.tried].count("ddp") == 2  # as configured, and what needs least
    assert any("ddp was not looked at" in text for text in refused.reasons)
    ddp = min(needs(tried) for tried in refused.tried if tried.step.strategy == "ddp")
    shards = advised(given, ddp - 1, devices=2)
    assert shards.config.hardware.strategy == "fsdp"
    assert "does not fit one" in str(shards)


@pytest.mark.slow
@pytest.mark.parametrize(("given_devices", "devices"), [({}, 2), ({"devices": 1}, 1)])
def test_a_card_alone_is_as_many_of_it_as_the_config_asks_for(config, given_devices, devices):
    given = config().replace({"hardware.strategy": "ddp", "hardware.devices": 2})
    found = recommend(given, cpu_of(1 << 30), Blocks, blocks_data, **given_devices)
    assert found.target.devices == found.config.hardware.devices == devices
    first = found.tried[0]
    assert first.step.devices == devices
    assert first.name == ("as configured" if devices == 2 else "one device")
    assert bool(found.changes) is (devices == 1)


@pytest.mark.slow
def test_a_step_that_cannot_be_had_is_passed_over_with_its_reason(config):
    given = config().replace({"levers.checkpoint_blocks": ["NoSuchBlock"], **ACCUMULATING})
    found = advised(given, 1000)
    passed = [tried for tried in found.tried if tried.estimate is None]
    assert passed
    assert all(tried.step.checkpointing and "NoSuchBlock" in tried.note for tried in passed)
    assert any(tried.step.eight_bit and tried.estimate is not None for tried in found.tried)
    assert "nothing fits" in found.refusal


# -- time


def test_limits_need_a_trial_and_take_the_fewest_devices_that_keep_within_them(config):
    given = config(max_steps=12, warmup_steps=2, count_work=False)
    with pytest.raises(PlanError, match="needs a trial"):
        recommend(given, {"hours": 1}, TinyModule, TinyData)
    trial = fit(given, TinyModule, TinyData).wait()
    roomy = {"device": "this machine", "devices": 2, "hours": 100, "cores": 64}
    found = recommend(given, roomy, TinyModule, TinyData, trial=trial)
    assert found.chosen.step.devices == 1
    assert found.chosen.seconds > 0
    as_given = {f"loader.{name}": getattr(given.loader, name) for name in ("num_workers", "decode_threads")}
    assert found.config.replace(as_given) == given  # on a busy machine the loader is measured as slow
    tight = {**roomy, "hours": 1e-9}
    refused = recommend(given, tight, TinyModule, TinyData, trial=trial)
    assert "times the limit" in refused.refusal
    dear = {**roomy, "hours": None, "money": 1e-9, "prices": 1000.0}
    assert "nothing keeps within" in recommend(given, dear, TinyModule, TinyData, trial=trial).refusal
    with pytest.raises(PlanError, match="no time of"):
        recommend(given, {"device": "T4", "hours": 1}, TinyModule, TinyData, trial=trial)
    assert any("factors only" in text for text in _told(given, trial).reasons)


def test_a_speed_that_was_predicted_for_another_card_tells_no_time_of_this_one(config):
    given = config().replace({"training.max_epochs": 2})
    speed = predict_speed(given, TinyModule, TinyData, device="T4")
    for limited in ({}, {"hours": 1}):
        goal = {"device": "T4", "devices": 8, **limited}
        assert recommend(given, goal, TinyModule, TinyData, trial=speed).chosen.seconds > 0
    other = recommend(given, {"device": "H100", "devices": 8}, TinyModule, TinyData, trial=speed)
    assert other.chosen.seconds is None
    assert any("factors only" in text for text in other.reasons)
    with pytest.raises(PlanError, match="T4-16GB"):
        recommend(given, {"device": "H100", "hours": 1}, TinyModule, TinyData, trial=speed)


def test_a_setting_that_leaves_devices_unused_says_so(config):
    goal = {"device": "T4", "devices": 8, "hours": 1}
    given = config().replace({"hardware.strategy": "none", "hardware.devices": 1})
    speed = predict_speed(given, TinyModule, TinyData, device="T4")
    found = recommend(given, goal, TinyModule, TinyData, trial=speed)
    assert found.chosen.step.devices == 1
    assert "8 ×" not in str(found).splitlines()[0]


def _told(given, trial):
    return recommend(given, "T4", TinyModule, TinyData, trial=trial)


@pytest.mark.parametrize("target", [3.5, {"devcies": 2}, {"devices": 0}])
def test_what_is_no_target_is_refused_before_anything_runs(config, target):
    with pytest.raises(PlanError):
        recommend(config(), target, Blocks, blocks_data)


@pytest.mark.parametrize("given", ["recipe.yaml", {"name": "a"}])
def test_what_is_no_config_is_refused(given):
    with pytest.raises(ConfigError, match="takes a Config"):
        recommend(given, "T4", Blocks, blocks_data)


def test_a_config_may_be_left_out():
    device = cpu_of(1 << 34)
    found = recommend(Blocks, blocks_data, device=device)
    assert found.config == Config()
    others = [
        recommend(module=Blocks, data=blocks_data, device=device),
        recommend(None, device, Blocks, blocks_data),
        recommend(device, Blocks, blocks_data),
    ]
    assert [(other.config, needs(other.chosen)) for other in others] == [(Config(), needs(found.chosen))] * 3
