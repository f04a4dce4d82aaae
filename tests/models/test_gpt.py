import math

import pytest
import torch
from lightning.pytorch import Callback

from kit.config import Config
from kit.errors import ConfigError
from kit.models import GPT, Tokens
from kit.models.gpt import DecoderBlock, attend
from kit.train import GradientCheckpointing, make_trainer
from kit.train.fsdp import repeated_blocks

SMALL = {"vocabulary": 32, "width": 16, "heads": 2, "layers": 2, "context": 8}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def small_tokens(**changes):
    return Tokens(**{"vocabulary": 32, "context": 8, "batch_size": 16, "sequences": 16, **changes})


def only_batch(data):
    (batch,) = data.train_dataloader()
    return batch


def fit(model, steps, callbacks=(), **settings):
    config = Config.make(
        {"trial": {"max_steps": steps, "warmup_steps": 0}, "training": {"max_epochs": steps}, **settings}
    )
    trainer = make_trainer(
        config, accelerator="cpu", world_size=1, precision="32-true", module=model, callbacks=list(callbacks)
    )
    trainer.fit(model, datamodule=small_tokens())
    return model


def test_at_its_defaults_it_is_gpt_2_small():
    with torch.device("meta"):
        model = GPT()
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_475_904


def test_the_embedding_is_the_output_layer_and_is_counted_once():
    model = GPT(**SMALL)
    assert model.head.weight is model.tokens.weight
    names = [name for name, _ in model.named_parameters()]
    assert "tokens.weight" in names
    assert "head.weight" not in names


def test_an_untrained_gpt_finds_every_token_about_as_likely():
    loss = GPT(**SMALL).loss(only_batch(small_tokens()))
    assert loss.item() == pytest.approx(math.log(32), rel=0.02)


def test_it_learns_the_sequences_it_sees_again():
    model = GPT(**SMALL, learning_rate=1e-2)
    batch = only_batch(small_tokens())
    before = model.loss(batch).item()
    assert fit(model, 60).loss(batch).item() < 0.3 * before


def test_no_token_sees_the_ones_after_it():
    model = GPT(**SMALL)
    tokens = only_batch(small_tokens())[:, :-1]
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    one, other = model(tokens), model(changed)
    torch.testing.assert_close(one[:, :5], other[:, :5])
    assert not torch.isclose(one[:, 5:], other[:, 5:]).all(dim=-1).any()


def test_the_loss_is_the_cross_entropy_of_the_next_token():
    model = GPT(**SMALL)
    batch = only_batch(small_tokens())
    odds = model(batch[:, :-1]).log_softmax(dim=-1)
    expected = -odds.gather(-1, batch[:, 1:, None]).mean()
    torch.testing.assert_close(model.loss(batch), expected)


class CountedBlocks(Callback):
    def __init__(self, lever):
        self.lever, self.count = lever, 0

    def on_train_start(self, *_):
        self.count = self.lever.count


def test_its_layers_are_the_blocks_that_kit_shards_and_checkpoints():
    model = GPT(**SMALL)
    assert repeated_blocks(model) == list(model.blocks)
    lever = GradientCheckpointing()
    counted = CountedBlocks(lever)
    fit(model, 1, [lever, counted])
    assert counted.count == 2


def test_checkpointing_its_layers_changes_no_weight():
    models = [GPT(**SMALL) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    fit(models[0], 3)
    fit(models[1], 3, levers={"gradient_checkpointing": True})
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_sequence_may_be_shorter_than_the_context():
    assert GPT(**SMALL)(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 32)


def test_a_sequence_longer_than_the_context_names_the_argument_to_set():
    with pytest.raises(ConfigError, match=r"8 tokens, .* 9; .*model\.arguments\.context: 9"):
        GPT(**SMALL)(torch.zeros(1, 9, dtype=torch.int64))


def test_a_width_its_heads_cannot_share_is_refused():
    with pytest.raises(ConfigError, match="width 16 .*shared by 3 heads"):
        GPT(**{**SMALL, "heads": 3})


def test_tokens_are_the_same_for_the_same_seed_and_no_others():
    batches = [only_batch(small_tokens(seed=seed)) for seed in (4, 4, 5)]
    assert batches[0].shape == (16, 9)
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    assert len({tuple(sequence.tolist()) for batch in batches[1:] for sequence in batch}) == 32
    assert batches[0].min() >= 0
    assert batches[0].max() < 32


def test_its_arguments_are_kept_with_its_checkpoint():
    assert dict(GPT(**SMALL).hparams) == {**SMALL, "learning_rate": 3e-4, "window": None}


def test_a_block_keeps_the_shape_of_what_it_is_given():
    values = torch.randn(2, 5, 16)
    assert DecoderBlock(16, 4)(values).shape == values.shape


@pytest.mark.parametrize(("length", "window"), [(1, 1), (5, 1), (8, 3), (9, 3), (10, 4), (12, 12), (7, 20)])
def test_a_window_attends_as_a_mask_over_all_pairs_would(length, window):
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 2, length, 4, requires_grad=True).unbind(0)
    place = torch.arange(length)
    mask = (place <= place[:, None]) & (place > place[:, None] - window)
    expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    torch.testing.assert_close(attend(queries, keys, values, window), expected)


def test_a_window_keeps_scores_in_proportion_to_the_length():
    def kept(length, window):
        sizes = []
        queries = torch.randn(1, 1, length, 4, requires_grad=True)
        with (
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t),
        ):
            attend(queries, queries, queries, window)
        return sum(sizes)

    assert kept(512, 16) < 5 * kept(128, 16)
    assert kept(512, None) > 12 * kept(128, None)


def test_a_token_does_not_see_beyond_its_window_and_gradients_stay_finite():
    torch.manual_seed(0)
    model = GPT(vocabulary=16, width=8, heads=2, layers=1, context=12, window=4)
    tokens = torch.randint(16, (1, 12))
    changed = tokens.clone()
    changed[0, 0] = (tokens[0, 0] + 1) % 16
    before, after = model(tokens), model(changed)
    assert not torch.equal(before[0, 3], after[0, 3])
    torch.testing.assert_close(before[0, 4:], after[0, 4:])
    model.loss(torch.randint(16, (2, 12))).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_a_window_without_tokens_is_refused():
    with pytest.raises(ConfigError, match="0 tokens"):
        GPT(window=0)


@pytest.mark.parametrize("window", [None, 1, 3, 4, 7, 50])
@pytest.mark.parametrize(("earlier", "length"), [(0, 9), (1, 1), (2, 9), (5, 3), (9, 8)])
def test_keys_of_earlier_tokens_are_seen_as_far_as_the_window_reaches(earlier, length, window):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 2, earlier + length, 4).unbind(0)
    queries = torch.randn(2, 2, earlier + length, 4)
    whole = attend(queries, keys, values, window)
    torch.testing.assert_close(attend(queries[:, :, earlier:], keys, values, window), whole[:, :, earlier:])


class Silent(GPT):
    """Without a Trainer there is nobody to log to."""

    def log(self, *_, **__):
        pass


def in_chunks(model, batch, length):
    """The loss of a batch trained a chunk at a time, gradients added up, and the last state."""
    state, total = None, 0.0
    for chunk in model.sequence_chunks(batch, length):
        loss, state = model.chunk_step(chunk, state)
        share = chunk[0].shape[1] / (batch.shape[1] - 1)
        (loss * share).backward()
        total += loss.item() * share
    return total, state


def gradients(model):
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 20])
def test_the_loss_in_chunks_is_that_of_the_whole_sequence(length, window):
    model, batch = Silent(**SMALL, window=window), only_batch(small_tokens())
    loss, (positions, _) = in_chunks(model, batch, length)
    assert loss == pytest.approx(model.loss(batch).item(), rel=1e-6)
    assert positions == 8


def test_a_chunk_is_tokens_and_those_that_follow_them_none_lost():
    batch = torch.arange(18).reshape(2, 9)
    chunks = Silent(**SMALL).sequence_chunks(batch, 3)
    assert [tokens.shape[1] for tokens, _ in chunks] == [3, 3, 2]
    for place, whole in enumerate((batch[:, :-1], batch[:, 1:])):
        assert torch.equal(torch.cat([chunk[place] for chunk in chunks], dim=1), whole)


def test_a_window_is_all_that_its_state_holds():
    model, batch = Silent(**SMALL, window=3), only_batch(small_tokens())
    _, (_, seen) = in_chunks(model, batch, 5)
    assert [part.shape for of_block in seen for part in of_block] == [(16, 2, 2, 8)] * 4
    _, (_, seen) = in_chunks(Silent(**SMALL), batch, 5)
    assert [part.shape for of_block in seen for part in of_block] == [(16, 2, 8, 8)] * 4


def test_the_gradient_in_one_chunk_is_that_of_the_whole_sequence_and_in_two_it_ends_at_the_state():
    model, batch = Silent(**SMALL), only_batch(small_tokens())
    model.loss(batch).backward()
    whole = gradients(model)
    in_chunks(model, batch, 8)
    for one, other in zip(gradients(model), whole, strict=True):
        torch.testing.assert_close(one, other)
    _, (_, seen) = in_chunks(model, batch, 4)
    assert not any(part.requires_grad for of_block in seen for part in of_block)
    by_name = dict(
        zip([name for name, _ in model.named_parameters()], zip(gradients(model), whole, strict=True), strict=True)
    )
    cut, full = by_name["blocks.0.queries_keys_values.weight"]
    assert not torch.allclose(cut[16:], full[16:], rtol=1e-2)  # keys and values are taught by their own chunk only
    cut, full = by_name["blocks.1.perceptron.2.weight"]
    torch.testing.assert_close(cut, full)  # after the last attention nothing is cut


def test_chunks_beyond_the_context_are_refused_as_whole_sequences_are():
    model = Silent(**SMALL)
    with pytest.raises(ConfigError, match="8 tokens, .* 9;"):
        in_chunks(model, torch.zeros(1, 10, dtype=torch.int64), 3)
