import numpy as np
import pytest
import torch
import train_parts
import train_ranks
from lightning.pytorch import LightningModule

from kit.config import Config
from kit.errors import ConfigError
from kit.memory.record.fakes import ONEDNN_HALF
from kit.models import Field, RandomData, Recurrent
from kit.train import SequenceChunks, make_trainer
from kit.train.sequences import check_contract, cut_sequence

CHUNKED = {"levers": {"sequence_chunk": 16}}


def case(strategy, settings=CHUNKED, **more):
    common = {"module": "Series", "strategy": strategy, "settings": settings, "loader": "series", "global_batch": 8}
    return {**common, **more}


def with_levers(**levers):
    return {"levers": {**CHUNKED["levers"], **levers}}


def of_tokens(module, strategy, length, **more):
    return case(strategy, {"levers": {"sequence_chunk": length, **more}}, module=module, loader="tokens")


PAIRS = {
    "ddp": case("ddp"),
    "fsdp": case("fsdp"),
    "fsdp, one replica each": case("fsdp:2:1"),
    "ddp, accumulated": case("ddp", with_levers(accumulate_grad_batches=2)),
    "fsdp, accumulated": case("fsdp", with_levers(accumulate_grad_batches=2)),
    "fsdp, checkpointed": case("fsdp", with_levers(gradient_checkpointing=True)),
    "fsdp, clipped": case("fsdp", {**CHUNKED, "training": {"gradient_clip_norm": 0.1}}),
    "fsdp, fitted twice": case("fsdp", fits=2),
    "GPT, ddp": of_tokens("SmallGPT", "ddp", 3),
    "GPT, fsdp": of_tokens("SmallGPT", "fsdp", 3),
    "GPT with a window, ddp": of_tokens("WindowedGPT", "ddp", 4),
    "GPT with a window, fsdp, checkpointed": of_tokens("WindowedGPT", "fsdp", 4, gradient_checkpointing=True),
}


COUNTED = {"ddp": 1, "fsdp": 3, "GPT, ddp": 1, "GPT, fsdp": 3}
"""Reductions of a step: one bucket under ddp; two blocks, and the rest, under fsdp."""


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    counted = {f"{name}, counted": {**PAIRS[name], "counts": True} for name in COUNTED}
    return train_ranks.run_ranks({**PAIRS, **counted}, 2, tmp_path_factory.mktemp("chunks"))


def alone(one):
    return train_ranks.fit({**one, "strategy": "none"}, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_two_ranks_train_in_chunks_as_one_process_does(two_ranks, name):
    expected = alone(PAIRS[name])["losses"]
    found = np.mean([answer["losses"] for answer in two_ranks[name]], axis=0)
    assert np.ptp(expected) > 0
    np.testing.assert_allclose(found, expected, rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "units"), COUNTED.items())
def test_gradients_are_synchronized_once_a_step_however_many_chunks_there_are(two_ranks, name, units):
    for answer in two_ranks[f"{name}, counted"]:
        reductions = sum(count for event, count in answer["counts"].items() if "reduce" in event)
        assert reductions == units, answer["counts"]


def test_the_loss_of_a_step_is_that_of_the_whole_sequence_for_any_chunk():
    whole = alone(case("none", {}))["losses"][0]
    for length in (1, 7, 16, 39, 40, 100):
        found = alone(case("none", {"levers": {"sequence_chunk": length}}))["losses"][0]
        assert found == pytest.approx(whole, rel=1e-6), length


@pytest.mark.parametrize("module", ["SmallGPT", "WindowedGPT"])
def test_a_gpt_in_chunks_has_the_loss_of_whole_sequences(module):
    whole = alone(case("none", {}, module=module, loader="tokens"))["losses"][0]
    for length in (1, 3, 8, 100):
        assert alone(of_tokens(module, "none", length))["losses"][0] == pytest.approx(whole, rel=1e-6), length


def test_one_chunk_trains_exactly_as_the_whole_sequence():
    whole = alone(case("none", {}))["losses"]
    np.testing.assert_allclose(alone(case("none", {"levers": {"sequence_chunk": 40}}))["losses"], whole, rtol=1e-6)


def test_gradients_end_at_the_borders_of_chunks_and_nowhere_else():
    """A chunk's gradient is that of its own loss with the state it was given."""
    module, (values, target) = train_parts.Series(), next(iter(train_parts.series(4)))
    state = None
    for start in (0, 16, 32):
        chunk = values[:, start : start + 16], target[:, start : start + 16]
        loss, state = module.chunk_step(chunk, None if state is None else tuple(part.detach() for part in state))
        (loss * chunk[0].shape[1] / 40).backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    grads = []
    trainer = fit_once(module, SequenceChunks(16), lambda: grads.extend(p.grad.clone() for p in module.parameters()))
    assert trainer.global_step == 1
    for mine, by_hand in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, by_hand)


def fit_once(module, chunks, look):
    from lightning.pytorch import Callback

    class Look(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            look()

    trainer = make_trainer(
        Config(), accelerator="cpu", world_size=1, precision="32-true", callbacks=[chunks, Look()], max_steps=1
    )
    trainer.fit(module, train_parts.series(4))
    return trainer


def kept_bytes(positions, sequence_chunk):
    """Bytes that autograd holds at once while a step runs."""
    held = {"now": 0, "peak": 0}

    class Kept:
        def __init__(self, tensor):
            self.tensor, self.size = tensor, tensor.nbytes
            held["now"] += self.size
            held["peak"] = max(held["peak"], held["now"])

        def __del__(self):
            held["now"] -= self.size

    config = Config.make({"levers": {"sequence_chunk": sequence_chunk}})
    module = Recurrent(features=8, width=16, layers=1)
    data = RandomData((Field(shape=(positions, 8)), Field(shape=(positions, 8))), batch_size=2, samples=2)
    trainer = make_trainer(config, accelerator="cpu", world_size=1, precision="32-true", max_steps=1)
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        trainer.fit(module, data)
    return held["peak"]


def test_what_a_step_keeps_is_flat_in_the_length_with_chunks_and_grows_without():
    assert kept_bytes(512, 64) < 1.2 * kept_bytes(128, 64)
    assert kept_bytes(512, 0) > 3 * kept_bytes(128, 0)


@pytest.mark.skipif(not ONEDNN_HALF[torch.bfloat16](), reason="this CPU has no LSTM in bfloat16")
def test_bfloat16_trains_in_chunks():
    answer = alone(case("none", precision="bf16-mixed"))
    np.testing.assert_allclose(answer["losses"], alone(case("none"))["losses"], rtol=0.02)


def test_the_module_gets_its_own_methods_back():
    module = train_parts.Series()
    fit_once(module, SequenceChunks(16), lambda: None)
    assert not {"training_step", "optimizer_zero_grad"} & vars(module).keys()


class TakesOne(LightningModule):
    def chunk_step(self, chunk):
        return chunk


class Manual(train_parts.Series):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (train_parts.Net(), "Net .*no chunk_step"),
        (TakesOne(), r"takes \(chunk\)"),
        (Manual(), "optimizes manually"),
    ],
)
def test_a_module_that_does_not_keep_the_contract_is_refused(module, words):
    with pytest.raises(ConfigError, match=words):
        check_contract(module)


def test_a_batch_is_cut_along_its_second_dimension_and_what_has_none_stays_whole():
    batch = {"values": torch.arange(14).reshape(2, 7), "weight": torch.ones(2)}
    chunks = cut_sequence(batch, 3)
    assert [chunk["values"].shape[1] for chunk in chunks] == [3, 3, 1]
    assert torch.equal(torch.cat([chunk["values"] for chunk in chunks], dim=1), batch["values"])
    assert all(torch.equal(chunk["weight"], batch["weight"]) for chunk in chunks)


@pytest.mark.parametrize("batch", [torch.ones(3), (torch.ones(2, 4), torch.ones(2, 5))])
def test_a_batch_without_one_length_is_refused(batch):
    with pytest.raises(ConfigError, match="one length"):
        cut_sequence(batch, 2)


class CutsItself(train_parts.Series):
    def sequence_chunks(self, batch, length):
        self.asked = length
        return cut_sequence(batch, 10)


def test_a_module_may_cut_its_batches_itself():
    module, chunks = CutsItself(), SequenceChunks(16)
    fit_once(module, chunks, lambda: None)
    assert (module.asked, chunks.count) == (16, 4)


def test_no_positions_are_no_chunk():
    with pytest.raises(ConfigError, match="0 positions"):
        SequenceChunks(0)
