"""The attention lever: torch's switches for the whole fit, and what ran."""

import warnings

import pytest
import torch
import train_parts
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from kit.config import Config
from kit.errors import ConfigError, KitWarning
from kit.train import AttentionKernel, make_trainer
from kit.train.sequences import KERNELS, available_kernels

SIDE = train_parts.SIDE


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


class Attends(train_parts.Net):
    """Four heads over the samples of a batch."""

    def __init__(self, call=functional.scaled_dot_product_attention, mask=None):
        super().__init__()
        self.call, self.mask, self.switches = call, mask, []

    def training_step(self, batch, batch_idx):
        values, target = batch
        self.switches.append(_cur_sdpa_kernel_backends(with_priority=True))
        heads = self.first(values).view(1, -1, 4, SIDE // 4).transpose(1, 2)
        mixed = self.call(heads, heads, heads, attn_mask=self.mask)
        values = mixed.transpose(1, 2).reshape(values.shape)
        return super().training_step((values, target), batch_idx)


def fit(module, name, precision="32-true", steps=2):
    config = Config.make({"trial": {"max_steps": steps, "warmup_steps": 0}, "levers": {"attention": name}})
    trainer = make_trainer(config, accelerator="cpu", world_size=1, precision=precision, module=module)
    trainer.fit(module, train_parts.regression(8))
    return next((part for part in trainer.callbacks if isinstance(part, AttentionKernel)), None)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["flash", "math"])
def test_the_kernel_asked_for_is_the_one_that_runs(name, precision):
    assert fit(Attends(), name, precision).ran == {name: 1}


def test_both_kernels_learn_the_same():
    weights = []
    for name in ("flash", "math"):
        torch.manual_seed(0)
        module = Attends()
        fit(module, name, steps=4)
        weights.append(module.first.weight.detach())
    assert torch.allclose(*weights, atol=1e-5)


def test_the_switches_hold_for_every_step_and_are_put_back():
    before = _cur_sdpa_kernel_backends(with_priority=True)
    module = Attends()
    fit(module, "math", steps=3)
    assert module.switches == [[SDPBackend.MATH]] * 3
    fit(module, "flash")
    assert module.switches[-1][0] == SDPBackend.FLASH_ATTENTION
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


def test_the_switches_are_put_back_after_a_failure():
    before = _cur_sdpa_kernel_backends(with_priority=True)

    def fails(*_, **__):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fit(Attends(call=fails), "math")
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


@pytest.mark.parametrize("name", ["efficient", "cudnn"])
def test_a_kernel_that_needs_a_gpu_is_replaced_by_torchs_choice_and_said(name):
    module = Attends()
    before = _cur_sdpa_kernel_backends(with_priority=True)
    with pytest.warns(KitWarning, match=f"attention: {name} needs a GPU; .*math and flash"):
        fit(module, name)
    assert module.switches[0] == before


def test_a_call_that_flash_cannot_take_falls_back_and_says_which():
    mask = torch.zeros(1, 4, 8, 8, requires_grad=True)
    with pytest.warns(KitWarning, match=r"flash .*not take .*\(math 1\).* query of 1×4×8×4 .*mask"):
        assert fit(Attends(mask=mask), "flash").ran == {"math": 1}


def test_attention_of_torchs_own_layers_is_counted():
    class Encoder(train_parts.Net):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(SIDE, 2, 32, dropout=0.0, batch_first=True)

        def training_step(self, batch, batch_idx):
            values, target = batch
            return super().training_step((self.encoder(values[None])[0], target), batch_idx)

    assert fit(Encoder(), "math").ran == {"math": 1}
    assert fit(Encoder(), "flash").ran == {"flash": 1}


def by_hand(query, key, value, attn_mask):
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value


def test_a_module_that_attends_by_hand_is_told_that_the_lever_does_nothing():
    with pytest.warns(KitWarning, match="flash does nothing: Attends .*scaled_dot_product_attention"):
        fit(Attends(call=by_hand), "flash")


def test_auto_leaves_torch_alone():
    module = Attends()
    assert fit(module, "auto") is None
    assert module.switches[0] == _cur_sdpa_kernel_backends(with_priority=True)


def test_auto_can_be_counted_too_and_says_nothing():
    config = Config.make({"trial": {"max_steps": 2, "warmup_steps": 0}})
    for call, ran in ((functional.scaled_dot_product_attention, {"flash": 1}), (by_hand, {})):
        counting, module = AttentionKernel("auto"), Attends(call=call)
        with warnings.catch_warnings():
            warnings.simplefilter("error", KitWarning)
            trainer = make_trainer(
                config, accelerator="cpu", world_size=1, precision="32-true", module=module, callbacks=[counting]
            )
            trainer.fit(module, train_parts.regression(8))
        assert counting.ran == ran
        assert module.switches[0] == _cur_sdpa_kernel_backends(with_priority=True)


def test_standing_in_for_a_gpu_every_kernel_can_be_asked_for():
    module = Attends(call=lambda query, key, value, attn_mask: query)
    config = Config.make({"trial": {"max_steps": 1, "warmup_steps": 0}, "levers": {"attention": "efficient"}})
    with warnings.catch_warnings():
        warnings.simplefilter("error", KitWarning)
        trainer = make_trainer(config, accelerator="cpu", world_size=1, precision="32-true", stands_in=True)
        trainer.fit(module, train_parts.regression(8))
    assert module.switches[0] == [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def test_every_kernel_is_listed_with_a_reason_or_none():
    for device in ("cpu", "cuda"):
        assert set(available_kernels(device)) == set(KERNELS)
    assert available_kernels("cpu")["flash"] == ""


def test_a_name_that_is_not_offered_is_refused():
    with pytest.raises(ConfigError, match="'ring' .*none of math"):
        AttentionKernel("ring")
