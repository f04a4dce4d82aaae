import pytest

from kit.config import Config
from kit.errors import ConfigError, HardwareError, PlanError, TargetError
from kit.memory.query import MOST_RANKS, make_query, ranks_of

MODULE, DATA = "kit.testing:TinyModule", "kit.testing:TinyData"


def query(changes=None, device="A100-80GB", world_size=None, module=MODULE, data=DATA):
    return make_query(module, data, Config().replace(changes or {}), device, world_size)[0]


# -- what auto is there


@pytest.mark.parametrize(
    ("device", "precision", "kind"),
    [
        ("A100-80GB", "bf16-mixed", "cuda"),
        ("T4", "16-mixed", "cuda"),
        ("24 GiB", "bf16-mixed", "cuda"),
        (24 << 30, "bf16-mixed", "cuda"),
    ],
)
def test_auto_precision_is_that_of_the_target(device, precision, kind):
    found = query(device=device)
    assert (found.precision, found.device_kind) == (precision, kind)


def test_a_cpu_is_asked_for_by_the_config():
    found = query({"hardware.accelerator": "cpu"}, device="this machine")
    assert (found.precision, found.device_kind, found.capability) == ("32-true", "cpu", None)


def test_a_precision_that_was_asked_for_stays():
    assert query({"hardware.precision": "32-true"}).precision == "32-true"


# -- ranks


@pytest.mark.parametrize(
    ("changes", "world_size", "ranks"),
    [
        ({}, None, 1),
        ({"hardware.strategy": "ddp", "hardware.devices": 8}, None, 8),
        ({"hardware.strategy": "ddp", "hardware.devices": [0, 1, 5]}, None, 3),
        ({"hardware.strategy": "fsdp:2:4", "hardware.devices": -1}, None, 8),
        ({"hardware.strategy": "fsdp", "hardware.devices": 2}, 1024, 1024),
        ({"hardware.strategy": "ddp", "hardware.devices": -1}, 4, 4),
    ],
)
def test_no_devices_need_be_there(changes, world_size, ranks):
    assert ranks_of(Config().replace(changes), world_size) == ranks


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        ({"hardware.strategy": "ddp", "hardware.devices": -1}, None, "give world_size="),
        ({}, 2, "one device, not 2"),
        ({}, 0, "is 0; .* 1 to 1,024"),
        ({"hardware.strategy": "fsdp", "hardware.devices": 2}, MOST_RANKS + 1, "from 1 to 1,024"),
        ({"hardware.strategy": "fsdp:2:4", "hardware.devices": 8}, 16, "2 × 4 = 8 ranks, not 16"),
        ({"hardware.strategy": "ddp", "hardware.devices": 2}, 1, "at least 2 ranks"),
    ],
)
def test_ranks_that_do_not_add_up_are_refused_with_the_arithmetic(changes, world_size, message):
    with pytest.raises(ConfigError, match=message):
        ranks_of(Config().replace(changes), world_size)


# -- what is refused


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"module": "kit.testing:TinyModul"}, TargetError, "did you mean"),
        ({"changes": {"model.arguments": {"hidth": 1}}, "module": None}, ConfigError, "hidth.*mean 'width'"),
        ({"device": "A1000"}, PlanError, "no GPU model"),
        ({"device": "M2 Max"}, PlanError, "Apple"),
        ({"device": "-3 GiB"}, PlanError, "-3 GiB"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_any_process(keywords, error, message):
    with pytest.raises(error, match=message):
        query(**keywords)


def test_something_else_than_a_config_is_refused_with_how_to_call():
    with pytest.raises(ConfigError, match=r"Config.* dict.*predict_memory\(config"):
        make_query(MODULE, DATA, {}, "A100-80GB")


def test_16_mixed_on_a_cpu_is_refused_with_the_way_out():
    config = Config().replace({"hardware.precision": "16-mixed"})
    cpu = make_query(MODULE, DATA, Config().replace({"hardware.accelerator": "cpu"}), "this machine")[1]
    with pytest.raises(HardwareError, match="GPU .*device="):
        make_query(MODULE, DATA, config, cpu)


@pytest.mark.parametrize("device", ["H100-80GB", "T4", "24 GiB"])
def test_16_mixed_on_a_card_is_answered_whatever_this_machine_trains_on(device):
    here = Config().replace({"hardware.accelerator": "cpu", "hardware.precision": "16-mixed"})
    found, target = make_query(MODULE, DATA, here, device)
    assert (found.precision, found.device_kind, found.capability) == ("16-mixed", "cuda", target.capability)


# -- equal questions


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"trial.max_steps": 7},
        {"training.seed": 1},
        {"loader.batches_ahead": 9},
        {"hardware.precision": "bf16-mixed"},
        {"hardware.threads_per_rank": 3},
        {"chunking.compression_level": 1},
    ],
)
def test_what_does_not_matter_does_not_count(changes):
    assert query(changes).key == query().key


@pytest.mark.parametrize(
    "changes",
    [
        {"loader.batch_size": 5},
        {"levers.gradient_checkpointing": True},
        {"levers.accumulate_grad_batches": 2},
        {"hardware.precision": "32-true"},
        {"training.gradient_clip_norm": 1.0},
        {"model.arguments": {"width": 9}},
        {"hardware.strategy": "ddp", "hardware.devices": 2},
    ],
)
def test_what_matters_counts(changes):
    assert query(changes).key != query().key


def test_the_size_of_a_device_does_not_count_but_its_generation_does():
    assert query(device="A100-40GB").key == query(device="A100-80GB").key
    assert query(device="H100-80GB").key != query(device="A100-80GB").key
    assert query(device="H100-80GB").any_card_key == query(device="A100-80GB").any_card_key


def test_the_threads_of_a_rank_count_where_the_cpu_computes():
    one, two = ({"hardware.accelerator": "cpu", "hardware.threads_per_rank": count} for count in (1, 2))
    assert query(two, device="this machine").threads == 2
    assert query(one, device="this machine").key != query(two, device="this machine").key
    assert query(one).key == query(two).key


def test_micro_batches_beyond_the_second_and_ranks_of_ddp_are_alike():
    ddp = {"hardware.strategy": "ddp", "hardware.devices": 2}
    fsdp = {"hardware.strategy": "fsdp", "hardware.devices": 2}
    two, five = ({"levers.accumulate_grad_batches": count} for count in (2, 5))
    assert query(two).key == query(five).key
    assert query(ddp).key == query(ddp, world_size=64).key
    assert query(fsdp).key != query(fsdp, world_size=64).key
    facts = {"world_size": 1, "accumulate_grad_batches": 5, "capability": (8, 0)}
    assert query(five, device="A100-80GB").facts == facts


def test_an_edited_source_file_makes_another_question(tmp_path):
    file = tmp_path / "models.py"
    file.write_text("class Mine: pass\n")
    before = query(module=f"{file}:Mine").key
    assert query(module=f"{file}:Mine").key == before
    file.write_text("class Mine: pass  # edited\n")
    import os

    os.utime(file, (1, 1))
    assert query(module=f"{file}:Mine").key != before
