import copy
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from dry_parts import asserted, peak
from torch import nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from kit.memory.record.batches import TensorShape
from kit.memory.record.dry_run import VALUE_CHECKS
from kit.memory.record.fake_mode import FakeMode
from kit.memory.record.fakes import KNOWN_NUMEL, fake_values, not_traced
from kit.memory.record.recorder import BlockRecorder
from kit.memory.record.value_sizes import same_number
from kit.memory.replay.replay import MASKED

HERE = Path(__file__).name


@pytest.fixture
def answers():
    with fake_values() as answers, FakeTensorMode(allow_non_fake_inputs=True), BlockRecorder(observers=VALUE_CHECKS):
        yield answers


def test_a_condition_is_false_and_says_where_it_was_asked(answers):
    taken = bool(torch.rand(()) > 0)
    assert taken is False
    (guess,) = answers.guesses
    assert f"condition at {HERE}:" in guess
    assert guess.endswith("False")


def test_numbers_and_counts_are_benign_and_noted(answers):
    assert torch.rand(3).sum().item() == 1.0
    assert (torch.rand(3) > 0).sum().item() == 1
    number, count = answers.guesses
    assert "number" in number
    assert number.endswith("1.0")
    assert "count" in count
    assert f" at {HERE}" in number
    assert f" at {HERE}" in count


def test_numbers_that_are_known_are_read(answers):
    assert torch.tensor(7).item() == 7
    assert not answers.guesses


def test_what_is_computed_from_constants_is_computed(answers):
    rates = [rates.tolist() for rates in torch.linspace(0, 0.5, 6).split([2, 4])]
    assert np.allclose(sum(rates, []), np.linspace(0, 0.5, 6))  # noqa: RUF017
    assert (torch.arange(3) * 2 + torch.ones_like(torch.rand(3))).tolist() == [1, 3, 5]
    assert torch.full((2, 3), 7).new_full((2,), 3).numpy().tolist() == [3, 3]
    assert torch.nonzero(torch.eye(3)).shape == (3, 2)
    assert torch.tensor([2, 1, 3]).repeat_interleave(torch.tensor([1, 0, 2])).tolist() == [2, 3, 3]
    assert not answers.guesses
    assert torch.ones(KNOWN_NUMEL + 1).sum().item() == 1
    assert "is 1.0" in next(iter(answers.guesses))


@pytest.mark.parametrize("write", [
    lambda known: known.add_(torch.rand(3)),
    lambda known: known[1:].copy_(torch.rand(2)),
    lambda known: torch._foreach_add_([known], [torch.rand(3)]),
    lambda known: known.uniform_(),
    nn.init.normal_,
    lambda known: setattr(known, "data", torch.rand(3)),
])  # fmt: skip
def test_what_something_unknown_is_written_to_is_not_known(answers, write):
    known = torch.zeros(3)
    known += 2
    assert known.tolist() == [2, 2, 2]
    write(known)
    assert known.tolist() == [1, 1, 1]


def _random_places(count):
    places = torch.randperm(10_000)[:count].unsqueeze(0)
    mask = torch.zeros(100, 100).to(torch.bool).view(1, -1)
    return mask.scatter_(1, places, torch.ones(1, count, dtype=torch.bool)).view(100, 100)


def test_a_mask_of_random_places_selects_as_many(answers):
    assert torch.where(_random_places(40) == 1.0)[0].shape == (40,)
    assert torch.rand(100, 100)[_random_places(40)].shape == (40,)
    assert not answers.guesses


def test_a_mask_of_any_places_selects_as_many_at_most(answers):
    mask = torch.zeros(1, 10_000).scatter_(1, torch.randint(10_000, (1, 40)), 1.0)
    assert torch.nonzero(mask).shape == (40, 2)
    assert all("upper bound" in guess for guess in answers.guesses)


@pytest.mark.parametrize("write", [
    lambda mask: mask[0].fill_(True),
    lambda mask: mask.view(-1).logical_or_(torch.rand(10_000) > 0.5),
    lambda mask: mask.copy_(torch.rand(100, 100) > 0.5),
])  # fmt: skip
def test_a_mask_that_something_else_is_written_to_may_select_all(answers, write):
    mask = _random_places(40)
    write(mask)
    assert torch.nonzero(mask).shape == (10_000, 2)


def test_numbers_that_numpy_reads_differ(answers):
    assert len(np.unique(torch.rand(50, 3).numpy(), axis=0)) == 50
    assert "random" in next(iter(answers.guesses))
    assert torch.randint(9, (50,)).numpy().tolist() == [0] * 50


def test_a_converted_constant_has_the_new_type(answers):
    scale = nn.ParameterList([nn.Parameter(torch.ones(3))]).to(torch.bfloat16)[0]
    assert (scale * 2).dtype == torch.bfloat16


def _check(good):
    if not good:
        raise ValueError


def _raised(x):
    if not (x.abs().sum() > 0):
        raise ValueError


def _raised_otherwise(x):
    if x.shape[0] == 3 and (x > 0).any():
        return
    else:  # noqa: RET505
        raise ValueError


def _refused(x):
    if (x < 0).any() or not torch.allclose(x, x + 1):
        raise ValueError


@pytest.mark.parametrize("guard", [
    lambda x: _check((x > 0).all()), asserted, _raised, _raised_otherwise, _refused,
    lambda x: torch.distributions.Normal(x, x),
])  # fmt: skip
def test_a_guard_lets_the_code_go_on(answers, guard):
    guard(torch.rand(3))


def test_a_loop_that_waits_ends(answers):
    rounds = 0
    while not torch.rand(()) > 0.5:
        rounds += 1
    assert rounds == 1000


def test_a_long_loop_that_waits_ends_sooner_in_each_call_of_a_module_and_is_told(answers):
    for call in range(2):
        rounds = 0
        answers.progress = lambda: (200 * rounds, call)  # noqa: B023 - asked inside this round
        while not torch.rand(()) > 0.5:
            rounds += 1
        assert rounds == 50
    [said] = answers.waits
    assert "goes on no longer than 50 rounds" in said


def test_a_condition_of_many_layers_is_no_loop(answers):
    for call in range(200):
        answers.progress = lambda: (1_000_000 * call, call)  # noqa: B023 - asked inside this round
        assert not torch.rand(()) > 0.5
    assert not answers.waits


@pytest.mark.parametrize("shape", [(), (3, 4)])
def test_a_check_for_finite_numbers_finds_them_finite(answers, shape):
    loss = torch.ones(shape)
    assert torch.isfinite(loss).all()
    assert not torch.isnan(loss).any()
    assert not (torch.isnan(loss) | torch.isinf(loss)).any()
    assert not (~torch.isfinite(loss)).any()
    assert torch.logical_not(loss.isnan()).all()
    assert not answers.guesses


def test_a_condition_that_mixes_in_something_else_is_not_known(answers):
    x = torch.rand(())
    found = bool(torch.isfinite(x) & (x > 0))  # in an `assert` it would be what lets the code go on
    assert not found
    assert len(answers.guesses) == 1


def test_what_holds_for_all_numbers_drawn_is_known(answers):
    drawn = torch.rand([])
    for _ in range(2):
        never = [bool(found) for found in (drawn < 0.0, drawn <= -0.1, drawn >= 1, drawn > 1.0)]
        always = [bool(found) for found in (drawn >= 0, drawn < 1, drawn <= 1.0, drawn > -1)]
        assert (never, always) == ([False] * 4, [True] * 4)
        drawn = torch.rand_like(drawn, dtype=torch.bfloat16)
    everywhere = bool((torch.rand(3, 4, generator=torch.Generator()) < 1).all())
    assert everywhere
    assert not answers.guesses


@pytest.mark.parametrize("compare", [lambda x: x > 0, lambda x: x <= 0, lambda x: x < 0.1, lambda x: x - 1 < 0,
                                     lambda x: x.sub_(1) < 0, lambda x: x < torch.rand(())])  # fmt: skip
def test_what_differs_between_numbers_drawn_is_a_guess(answers, compare):
    taken = bool(compare(torch.rand([])))
    assert not taken
    assert len(answers.guesses) == 1


def test_a_selection_takes_everything(answers):
    x = torch.rand(3, 4)
    assert x[x > 0].shape == (12,)
    assert torch.nonzero(x).shape == (12, 2)
    assert x.masked_select(x > 0).shape == (12,)
    assert torch.unique(x).shape == (12,)
    assert all("an upper bound" in guess for guess in answers.guesses)
    assert len(answers.guesses) == 4


def test_numpy_sees_zeros_that_take_no_memory(answers):
    array = torch.ones(1 << 40).numpy()
    assert array.shape == (1 << 40,)
    assert array[0] == 0
    assert array.dtype == np.float32


def test_a_number_in_a_text_is_printed_and_decides_nothing(answers):
    assert f"{torch.rand(()):.2f} {torch.randint(5, ()):3d}" == "1.00   1"
    assert "size=(2,)" in f"{torch.rand(2)}"
    assert not answers.guesses


def test_torch_itself_may_ask_without_being_quoted(answers):
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    torch.optim.AdamW(module.parameters()).step()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    assert not answers.guesses


def test_a_branch_of_torchs_optimizer_is_a_guess(answers):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = module(torch.rand(1, 2)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert any("lbfgs.py" in guess for guess in answers.guesses)


def ask():
    x = torch.rand(4)
    picked = x[x > 0]
    return bool(x.sum() > 0), x.sum().item(), (x > 0).sum().item(), picked.shape[0]


def test_one_guess_at_a_time_is_answered_the_other_way():
    with fake_values() as usual, FakeTensorMode(allow_non_fake_inputs=True):
        answered = ask()
    for guess in usual.guesses:
        with fake_values(guess), FakeTensorMode(allow_non_fake_inputs=True):
            assert sum(one != other for one, other in zip(answered, ask(), strict=True)) == 1
    assert len(usual.guesses) == 4


def test_moves_do_nothing_and_conversions_convert(answers):
    module = nn.Linear(2, 2)
    weight = module.weight
    assert module.cpu() is module.to("cpu") is module.cuda() is module.to(torch.device("cuda", 1)) is module
    assert module.weight is weight
    assert module.to(torch.bfloat16).weight is weight
    assert weight.dtype == torch.bfloat16
    assert module.double().weight.dtype == torch.float64
    assert torch.zeros(2).cuda().pin_memory().device.type == "cpu"
    assert torch.zeros(2).to("cuda", torch.float16).dtype == torch.float16


def test_a_gradient_is_converted_with_its_parameter(answers):
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    module.bfloat16()
    assert module.weight.grad.dtype == torch.bfloat16


def test_a_module_leaves_the_meta_device_with_new_parameters(answers):
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    module.to_empty(device="cpu")
    assert module.weight.device.type == "cpu"
    assert isinstance(module.weight, nn.Parameter)


def test_a_copy_of_a_module_has_parameters_of_its_own_and_keeps_ties(answers):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    module[0].bias.requires_grad_(False)
    twin = copy.deepcopy(module)
    assert twin[0].weight is twin[1].weight
    assert twin[0].weight is not module[0].weight
    assert isinstance(twin[0].weight, nn.Parameter)
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in module.parameters()]
    twin[0].weight = nn.Parameter(torch.zeros(2, 2))


def test_initialising_weights_makes_nothing(answers):
    recorder = BlockRecorder()
    with recorder:
        recorder.begin_batch()
        nn.init.trunc_normal_(nn.init.orthogonal_(torch.empty(8, 8)))
    assert recorder.recording(1, 1).block_bytes.tolist() == [8 * 8 * 4]


def test_compiling_is_left_out_with_a_note(answers):
    module = nn.Linear(2, 2)
    assert torch.compile(module) is module
    assert torch.compile(mode="max-autotune")(module) is module
    module.compile()
    assert module(torch.ones(1, 2)).shape == (1, 2)
    (note,) = answers.notes
    assert note.startswith("torch.compile")
    assert "upper bound" in note


def test_afterwards_torch_is_as_it_was():
    owners = (torch, "compile"), (nn.init, "normal_"), (nn.Module, "_apply")
    before = [getattr(owner, name) for owner, name in owners]
    table = dict(fake_impls.op_implementations_dict)
    methods = [name for name in ("to", "cuda", "numpy", "pin_memory", "__deepcopy__") if name in vars(FakeTensor)]
    with fake_values():
        assert fake_impls.op_implementations_dict != table
    assert [getattr(owner, name) for owner, name in owners] == before
    assert fake_impls.op_implementations_dict == table
    assert [name for name in methods if name in vars(FakeTensor)] == methods
    assert "to" not in vars(FakeTensor)


def test_a_mask_of_ones_alone_answers_as_one_that_was_read(answers):
    mask = TensorShape((512, 512), torch.int64, is_ones=True).make()
    hides_nothing = bool((mask == 1).all())
    also_in_part = bool(mask.bool()[:, :100].unsqueeze(1).expand(-1, 8, -1).all())
    of_some_columns = bool(mask[:, torch.arange(9)].bool().all())
    hides_something = bool((mask == 0).any()), bool((~mask.bool()).any())
    number, places = mask.t()[3, 4].item(), torch.nonzero(mask[2])
    assert same_number(~mask) is None
    assert (hides_nothing, also_in_part, of_some_columns, *hides_something) == (True, True, True, False, False)
    assert number == 1
    assert places.shape == (512, 1)
    assert not answers.guesses
    mask[:, 0] = torch.randint(2, (512,))
    after_a_write = bool(mask.bool().all())
    assert not after_a_write
    assert len(answers.guesses) == 1


def test_numbers_between_bounds_may_be_rounded_to_beyond_them(answers):
    drawn = torch.rand(8)
    is_below = bool((drawn.view(2, 4)[:, 1:] < 1.0).all())
    assert is_below
    assert not answers.guesses
    is_below = bool((drawn.bfloat16() < 1.0).all())
    assert not is_below
    assert len(answers.guesses) == 1


def test_a_package_that_asks_for_fake_tensors_takes_short_sequences_step_by_step(monkeypatch):
    """As transformers does for Mamba: fake tensors go another way there than real ones."""
    utils = types.ModuleType("transformers.utils.import_utils")
    utils.is_fake_tensor = is_fake = lambda value: isinstance(value, FakeTensor)
    monkeypatch.setitem(sys.modules, "transformers.utils.import_utils", utils)

    def asked_in(file):
        """A function of that file which asks as the package does."""
        lines = "def is_tracing(value): return utils.is_fake_tensor(value)\ndef ask(value): return is_tracing(value)"
        scope = {"utils": utils}
        exec(compile(lines, file, "exec"), scope)
        return scope["ask"]

    of_mask, of_padding = asked_in("transformers/masking_utils.py"), asked_in("transformers/modeling_utils.py")
    with fake_values() as answers, FakeMode(), not_traced(answers):
        mask, short, long = torch.empty(2, 8), torch.empty(2, 64, 512), torch.empty(2, 2048, 512)
        assert of_padding(mask.long()), "for a warning alone"
        assert not answers.notes
        assert [of_mask(value) for value in (mask.bool(), short)] == [True, False]
        known = torch.ones(2, 8).bool()
        assert known.all()
        assert not of_mask(known)
        (of_masks,) = answers.notes
        assert of_masks.startswith(MASKED)
        full = TensorShape((512, 512), torch.int64, is_ones=True).make()
        assert not of_mask(full)
        assert of_mask(long)
        assert [note.startswith(MASKED) for note in answers.notes] == [True, True, False]
    assert utils.is_fake_tensor is is_fake


def stepwise(factors, terms, weights):
    """As Mamba scans: states of (samples, channels, size), each multiplied as it comes."""
    state, found = torch.zeros_like(terms[:, :, 0]), []
    for step in range(terms.shape[2]):
        state = factors[:, :, step] * state + terms[:, :, step]
        found.append(torch.matmul(state, weights[:, step].unsqueeze(-1))[:, :, 0])
    return torch.stack(found, dim=-1)


def in_one_piece(factors, terms, weights):
    _, states = sys.modules[MAMBA].associative_scan(None, (factors, terms), dim=2)
    return torch.matmul(states.permute(0, 2, 1, 3), weights.unsqueeze(-1)).squeeze(-1).permute(0, 2, 1)


MAMBA = "transformers.models.mamba.modeling_mamba"


def test_a_scan_in_one_piece_holds_what_its_steps_do(monkeypatch):
    for name in ("transformers.utils.import_utils", MAMBA):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["transformers.utils.import_utils"].is_fake_tensor = sys.modules[MAMBA].associative_scan = lambda *_: (
        None
    )

    def peak_bytes(scan):
        with fake_values() as answers, FakeMode(), BlockRecorder() as recorder, not_traced(answers):
            recorder.begin_batch()
            factors, terms = (torch.rand(2, 64, 48, 16, requires_grad=True) for _ in range(2))
            scan(factors, terms, torch.rand(2, 48, 16, requires_grad=True)).square().mean().backward()
        return peak(recorder.recording(2, 1))

    assert peak_bytes(in_one_piece) == pytest.approx(peak_bytes(stepwise), rel=0.03)
