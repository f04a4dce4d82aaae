"""What a trial says of itself: not what was asked for, what ran."""

import pytest
from waiting import PATIENCE_SECONDS

import kit
from kit.trial.settings_used import settings_used
from kit.widgets.trial_view import notes_html

GPT = {"vocabulary": 32, "width": 16, "heads": 2, "layers": 2, "context": 16}


@pytest.fixture
def small(config):
    from kit.models import Tokens

    def fit(ranks=1, strategy=None, **levers):
        settings = {f"levers.{name}": value for name, value in levers.items()}
        chosen = config(ranks, strategy, max_steps=2).replace(
            {"model.target": "kit.models:GPT", "model.arguments": GPT, **settings}
        )
        return kit.fit(chosen, None, Tokens(vocabulary=32, context=16, batch_size=2, sequences=16)).wait(
            PATIENCE_SECONDS
        )

    return fit


def test_a_plain_trial_says_its_precision_its_optimizer_and_the_kernel_torch_chose(small):
    loader, *others, attention = settings_used(small())
    assert "batch_size 2, not 16" in loader
    assert others == ["precision: 32-true", "optimizer: AdamW"]
    assert attention.startswith("attention: flash × 2 ")
    for part in ("first batch", "math, flash", "efficient needs", "cudnn needs"):
        assert part in attention


def test_levers_say_what_they_did(small):
    trial = small(gradient_checkpointing=True, optimizer="sgd", attention="math", sequence_chunk=8)
    assert settings_used(trial)[2:4] == ["optimizer: SGD", "gradient checkpointing: 2 blocks"]
    assert settings_used(trial)[4].startswith("sequence chunks: 2 ")
    assert settings_used(trial)[5].startswith("attention: math × 4 ")  # two chunks of two blocks
    assert all(sentence in repr(trial) for sentence in settings_used(trial))


def test_what_was_left_out_is_said_with_a_trial_that_went_well(small):
    trial = small(attention="cudnn")
    assert trial.state == "COMPLETE"
    assert settings_used(trial)[-1].startswith("attention: flash × 2 ")
    (warning,) = trial.warnings
    assert warning.startswith("levers.attention: cudnn")
    assert "GPU" in warning
    assert "math and flash" in warning
    assert f"warning: {warning}" in repr(trial)
    assert "torch chooses" in notes_html(trial)


def test_before_the_first_batch_only_the_batch_size_is_said(small):
    trial = small()
    trial.events.clear()
    (note,) = settings_used(trial)
    assert "batches of 2" in note
    assert note in notes_html(trial)
