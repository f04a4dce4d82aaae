"""What is not modelled widens the range and says so: on modules with compiled code, own kernels, experts and loops."""

import functools

import pytest
import torch
from torch.utils.data import DataLoader

from kit.config import Config
from kit.memory.replay.cards import find_card
from kit.models import Field, RandomData
from kit.speed.prediction import predict_speed
from kit.studies.scaling.predict import predict_run
from kit.testing import TinyData, TinyModule


class Compiled(TinyModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.compile(self.layer, mode="reduce-overhead")


class OwnKernel(TinyModule):
    def training_step(self, batch, batch_idx):
        if not hasattr(torch.ops.kit_tests, "twice"):
            twice = torch.library.custom_op(
                "kit_tests::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
            )
            twice.register_fake(torch.empty_like)
            twice.register_autograd(lambda _, grad: grad * 2)
        return torch.ops.kit_tests.twice(super().training_step(batch, batch_idx))


class Loop(TinyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        while loss.detach() > 100:
            loss = loss / 2
        return loss


class Experts(TinyModule):
    """Mixtral of transformers."""

    def __init__(self):
        from transformers import MixtralConfig, MixtralForCausalLM

        super().__init__()
        shape = MixtralConfig(
            num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=64, num_local_experts=4,
        )  # fmt: skip
        self.model = MixtralForCausalLM(shape)

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch[0], labels=batch[1]).loss


class Labelled(TinyModule):
    """Sums few of its targets, which is little of its step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + 0 * batch[1][batch[1] > 0].sum()


class Wide(Labelled):
    """Sums so many that it is most of its step."""

    def training_step(self, batch, batch_idx):
        many = batch[1].repeat(1 << 24, 1)
        return super().training_step(batch, batch_idx) + 0 * many[many > 0].exp().sum()


def words():
    return RandomData((Field(shape=(16,), below=64), Field(shape=(16,), below=64)), 2)


@pytest.mark.parametrize(
    ("module", "data", "said"),
    [(Compiled, TinyData, "compiled code"), (OwnKernel, TinyData, "kernels of kit_tests"),
     (Loop, TinyData, "dry run does not have"), (Experts, words, "each expert")],
)  # fmt: skip
def test_what_is_not_modelled_widens_the_range_and_says_so(config, module, data, said):
    if module is Experts:
        pytest.importorskip("transformers")
    plain = predict_speed(config(), TinyModule, TinyData, device="A100-40GB")
    found = predict_speed(config(), module, data, device="A100-40GB")
    assert said in " ".join(found.reasons)
    assert said not in " ".join(plain.reasons)
    spread, usual = (speed.high_seconds / speed.low_seconds for speed in (found, plain))
    assert spread > 1.5 * usual


def test_a_selection_widens_the_range_by_what_depends_on_it(config):
    plain, little, most = (
        predict_speed(config(), module, TinyData, device="A100-40GB") for module in (TinyModule, Labelled, Wide)
    )
    assert any("how much is selected" in reason for reason in little.reasons)
    assert little.high_seconds / little.low_seconds < 1.1 * plain.high_seconds / plain.low_seconds
    assert most.low_seconds < 0.6 * most.step_seconds
    assert most.high_seconds / most.step_seconds < most.step_seconds / most.low_seconds


def test_copies_of_fsdp_are_known_and_widen_nothing():
    config = Config.make({"hardware": {"devices": 8, "strategy": "fsdp", "precision": "bf16-mixed"}})
    speed = predict_speed(config, TinyModule, TinyData, device="A100-40GB")
    step = speed.time.step
    kinds = {
        work.kind
        for call, work in zip(step.calls, step.call_work, strict=True)
        if call.operator.startswith("fsdp::")
    }  # fmt: skip
    assert kinds == {"copy"}
    assert not any("kernels of" in reason for reason in speed.reasons)
    assert speed.mfu < 1


class Images(TinyModule):
    """Convolutions of float32, which torch lets use the units for TF32."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(*(torch.nn.Conv2d(256, 256, 3, padding=1) for _ in range(3)))

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()


def images():
    return RandomData(Field(shape=(256, 56, 56)), 32)


def test_a_step_reaches_less_than_the_peak_of_the_units_it_uses():
    config = Config.make({"hardware": {"precision": "32-true"}})
    speed = predict_speed(config, Images, images, device="A100-40GB")
    ordinary = speed.time.step.flops / speed.step_seconds / find_card("A100-40GB").float32_flops_per_second
    assert 0.1 < speed.mfu < 1 < ordinary


def test_what_is_computed_again_is_no_work_of_the_model():
    """The same products, in more time."""
    tokens = {"vocabulary": 64, "width": 256, "heads": 4, "layers": 3, "context": 128}
    config = Config.make({"hardware": {"precision": "bf16-mixed"}, "model": {"arguments": tokens}}).replace(
        {"data.arguments": {"vocabulary": 64, "context": 128}}
    )
    once, again = (
        predict_speed(
            config.replace({"levers.gradient_checkpointing": on}), "kit.models:GPT", "kit.models:Tokens",
            device="A100-40GB",
        )
        for on in (False, True)
    )  # fmt: skip
    assert again.time.step.recomputes.any()
    assert again.step_seconds > once.step_seconds
    assert again.mfu * again.step_seconds == pytest.approx(once.mfu * once.step_seconds)


def padded(long):
    lengths = [long if index % 100 == 3 else 8 for index in range(200)]
    rows = [torch.zeros(length, 8) for length in lengths]
    return DataLoader(rows, 1, collate_fn=lambda samples: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True))


class Rows(TinyModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(8, 4096), torch.nn.Linear(4096, 1))

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()


def test_where_samples_differ_in_size_the_range_has_the_batch_of_the_mean():
    short, skewed = (
        predict_speed(Config(), Rows, functools.partial(padded, long), device="T4-16GB") for long in (8, 50_000)
    )  # fmt: skip
    assert skewed.low_seconds < 2 * short.step_seconds < skewed.step_seconds
    assert any("on average" in reason for reason in skewed.reasons)
    assert not any("differ" in reason for reason in short.reasons)


class Forgetful(TinyModule):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)


class Huge(TinyModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(8, 1 << 30), torch.nn.Linear(1 << 30, 1))


def test_what_trains_nothing_and_what_does_not_fit_say_so():
    forgetful, huge = (predict_speed(Config(), module, TinyData, device="T4-16GB") for module in (Forgetful, Huge))
    assert any("return the loss" in reason for reason in forgetful.reasons)
    assert huge.lacks_bytes > 90 << 30
    assert "does not fit" in huge.sentence
    assert "does not fit" in str(predict_run(huge, epochs=1, samples_per_epoch=100, memory=False))
