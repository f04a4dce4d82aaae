import re
from dataclasses import replace

import pytest

import kit
from kit.charts.compare import levers_figure
from kit.errors import ConfigError, TrialStopped
from kit.models import GPT, Tokens

pytestmark = pytest.mark.slow
NO_SUCH_BLOCKS = {"levers.gradient_checkpointing": True, "levers.checkpoint_blocks": ["Block"]}


def model():
    return GPT(vocabulary=64, width=64, heads=2, layers=6, context=128)


def data():
    return Tokens(vocabulary=64, context=128, batch_size=8)


@pytest.fixture
def check(config):
    return kit.studies.verify_levers(
        config(max_steps=4), model, data, levers=["gradient checkpointing", "bf16-mixed"], repeats=2
    )


def test_each_lever_is_measured_and_predicted_step_by_step(check):
    first, checkpointed, mixed = check.steps
    assert [step.name for step in check.steps] == ["as configured", "+ gradient checkpointing", "+ bf16-mixed"]
    assert mixed.config.levers.gradient_checkpointing, "each lever comes on top of those before"
    assert [step.precision for step in check.steps] == ["32-true", "32-true", "bf16-mixed"]
    assert checkpointed.measured_bytes < 0.7 * first.measured_bytes
    for step in (first, checkpointed):
        assert step.ratio == pytest.approx(1, abs=0.1)
        assert step.samples_per_second > 0
    saved = [check.saved_bytes(step) for step in check.steps]
    assert saved[0] is None
    assert saved[1] == first.measured_bytes - checkpointed.measured_bytes > 0
    assert saved[2] == checkpointed.measured_bytes - mixed.measured_bytes
    assert check.memory_fraction(first) == check.speed_fraction(first) == 1


def test_the_table_and_the_chart_show_every_rung(check):
    text = repr(check)
    assert "+ bf16-mixed" in text
    assert "predicted" in text
    assert "+ bf16-mixed" in check._repr_html_()
    memory, speed = levers_figure(check).axes
    assert [label.get_text() for label in memory.get_yticklabels()] == [step.name for step in check.steps]
    assert len(memory.patches) == 2 * len(check.steps)
    assert len(speed.patches) == len(check.steps)


def test_a_lever_without_effect_says_which_difference_would_have_been_seen(check):
    last = check.steps[-1]
    even = {"samples_per_second": (100.0, 102.0, 98.0)}
    tried = replace(last.tried, **{side: replace(getattr(last.tried, side), **even) for side in ("before", "after")})
    found = replace(check, steps=(*check.steps[:-1], replace(last, tried=tried)))
    assert any(re.search(r"\+ bf16-mixed: .*no difference .* one of \d%", text) for text in found.sentences)


def test_speeds_that_differ_too_much_to_compare_are_not_known(check):
    last = check.steps[-1]
    tried = replace(last.tried, after=replace(last.tried.after, samples_per_second=(1.0, 900.0)))
    found = replace(check, steps=(*check.steps[:-1], replace(last, tried=tried, samples_per_second=1.4)))
    assert found.rows[-1][-1] == "not known"
    assert any(re.search(r"\+ bf16-mixed: .*differ too much", text) for text in found.sentences)
    assert levers_figure(found).axes[1].texts[-1].get_text() == "1.4"


def test_what_is_said_of_several_levers_is_said_once(check):
    noted = tuple(replace(step, note="is experimental here") for step in check.steps[1:])
    found = replace(check, steps=(check.steps[0], *noted))
    assert "+ gradient checkpointing; + bf16-mixed: is experimental here" in found.sentences
    assert repr(found).count("experimental") == 1


def test_samples_of_one_run_that_the_runs_in_turn_contradict_are_not_to_be_believed(check):
    first, *_, last = check.steps
    even = {"samples_per_second": (100.0, 102.0, 98.0)}
    tried = replace(last.tried, **{side: replace(getattr(last.tried, side), **even) for side in ("before", "after")})
    for factor, is_told in ((9, True), (1, False)):
        step = replace(last, tried=tried, samples_per_second=factor * first.samples_per_second)
        found = replace(check, steps=(*check.steps[:-1], step))
        assert any(re.search(r"\+ bf16-mixed: .*believe", text) for text in found.sentences) == is_told
        texts = [text.get_text() for text in levers_figure(found).axes[1].texts]
        assert texts[-1].endswith("no difference")
        widths = [bar.get_width() for bar in levers_figure(found).axes[1].patches]
        assert widths[-1] == pytest.approx(widths[0])


def test_a_lever_that_cannot_run_stands_there_with_its_reason_and_the_next_goes_on(config):
    check = kit.studies.verify_levers(
        config(max_steps=3), model, data, levers=[NO_SUCH_BLOCKS, {"loader.pin_memory": False}], repeats=2
    )
    assert not check.steps[1].ran
    assert "GPT holds no" in check.steps[1].note
    assert check.steps[2].ran
    assert not check.steps[2].config.levers.gradient_checkpointing
    assert "did not run" in [text.get_text() for text in levers_figure(check).axes[0].texts]


def test_levers_alone_do_not_build_on_each_other(config):
    check = kit.studies.verify_levers(
        config(max_steps=3),
        model,
        data,
        levers=["gradient checkpointing", "fused optimizer"],
        cumulative=False,
        repeats=2,
    )
    assert not check.steps[2].config.levers.gradient_checkpointing


@pytest.mark.parametrize(
    ("levers", "words"),
    [
        (["magic"], "'magic' .*there are"),
        ([], "no levers"),
        (3, "3 is no lever"),
        ([["flash attention"]], "is no lever"),
        ({"levers.optimiser": "sgd"}, "mean levers.optimizer"),
        ({"model.arguments.layers": 2}, "model.arguments: .*made without"),
    ],
)
def test_levers_that_there_are_not_are_refused_before_anything_runs(config, levers, words):
    given = config()
    with pytest.raises(ConfigError, match=words):
        kit.studies.verify_levers(given, model, data, levers=levers)
    assert not kit.results(given.trial.folder, kind="all")


@pytest.mark.parametrize("lengths", [128, ["64", "128"], [64], [64, 0], [64.5, 128], None])
def test_lengths_that_cannot_be_compared_are_refused(config, lengths):
    with pytest.raises(ConfigError, match="lengths: .*two or more"):
        kit.studies.verify_sequences(config(), model, "kit.models:Tokens", lengths=lengths, chunk=16)


@pytest.mark.parametrize("end", [2, 4])
def test_an_interrupt_ends_all_levers(config, monkeypatch, end):
    """Of the trial of a lever, and of its second run beside the first."""
    ended, wait = [], kit.Trial.wait

    def interrupted(trial, *given):
        ended.append(trial)
        if len(ended) == end:
            raise TrialStopped("interrupted")
        return wait(trial, *given)

    monkeypatch.setattr(kit.Trial, "wait", interrupted)
    with pytest.raises(TrialStopped):
        kit.studies.verify_levers(config(), model, data, levers=["bf16-mixed", "8-bit optimizer"])
    assert len(ended) == end


def test_an_interrupt_ends_all_sequences(config, monkeypatch):
    asked = []

    def measured(name, *_):
        asked.append(name)
        if name == "in chunks":
            raise TrialStopped("interrupted")

    monkeypatch.setattr("kit.studies.levers._measured", measured)
    with pytest.raises(TrialStopped):
        kit.studies.verify_sequences(config(), model, "kit.models:Tokens", lengths=[16, 32], chunk=8)
    assert asked.count("in chunks") == 1
