"""Configs of other tools: each setting goes where the table says, or says what takes its place; nothing is lost."""

import pytest

import kit
from kit.config import Config
from kit.errors import ConfigError
from kit.other_configs import _AIOS, _BASEMODEL, SECTIONS, Setting

DOCUMENTED = """
data_sources:
  - type: event
    name: transactions
    connection_params: {password: swordfish}
data_params:
  cache_path: cache
  split: {training: {start_date: 2023-01-01}}
data_loader_params: {num_workers: 5, drop_last: true}
training_params:
  accelerator: gpu
  devices: [0, 1]
  strategy: "fsdp:1:2"
  precision: "32"
  epochs: 3
  learning_rate: 0.0003
  limit_train_batches: null
  early_stopping: {patience: 3, min_delta: 0.1}
  entirely_new: 7
calibration_params: {enabled: true, candidate_workers: [0, 4, 6]}
memory_constraining_params: {hidden_dim: 1024, num_layers: 2, emde_quality: 0.5}
query_optimization: {cleora_num_query_chunks: 4, num_concurrent_features: 2}
"""
LONG_CONTEXT = """aios hrm-hf train-actv1 --model gpt2 --dataset-file training_data/test_sample.txt --steps 50 \\
  --batch-size 1 --gradient-checkpointing --amp --use-8bit-optimizer --window-size 2048 --log-file metrics.jsonl"""


@pytest.fixture
def basemodel(tmp_path):
    file = tmp_path / "pretrain.yaml"
    file.write_text(DOCUMENTED)
    return file


def test_a_basemodel_yaml_becomes_a_config(basemodel):
    found = Config.translate(basemodel).config
    assert found.hardware == Config().hardware.model_copy(
        update={"accelerator": "gpu", "devices": (0, 1), "strategy": "fsdp:1:2", "precision": "32-true"}
    )
    assert (found.training.max_epochs, found.training.early_stopping_patience) == (3, 3)
    assert found.training.monitor == "val_loss"
    assert (found.loader.batch_size, found.loader.num_workers, found.loader.drop_last) == (256, 5, True)
    assert (found.calibration.enabled, found.calibration.candidate_workers) == (True, (0, 4, 6))
    assert (found.queries.fit_query_chunks, found.queries.num_concurrent_features) == (4, 2)
    assert found.queries.cache_path == "cache"
    assert dict(found.model.arguments) == {
        "hidden_dim": 1024, "num_layers": 2, "sketch_quality": 0.5, "learning_rate": 0.0003,
    }  # fmt: skip
    assert found.data.arguments["sketch_quality"] == 0.5
    assert found.trial.max_steps == Config().trial.max_steps, "null leaves kit's own"


def test_what_kit_has_no_field_for_says_what_takes_its_place(basemodel):
    found = Config.translate(basemodel)
    left_out = {setting.name: setting.note for setting in found.left_out}
    assert left_out["training_params.entirely_new"] == "not known to kit"
    assert "sources.yaml" in left_out["data_sources"]
    assert "EventData" in left_out["data_params.split.training.start_date"]
    assert "swordfish" not in repr(found) + found._repr_html_()
    assert repr(found).startswith("18 of 23 settings of BaseModel")


def test_values_serve_as_well_as_a_file(basemodel):
    values = {"training_params": {"epochs": 2, "strategy": None}}
    assert Config.translate(values).config.training.max_epochs == 2
    assert Config.translate(str(basemodel)).config == Config.translate(basemodel).config


def test_a_command_line_of_ai_os_becomes_a_config():
    found = Config.translate(LONG_CONTEXT).config
    profile = Config.profile("long context")
    for path in ("loader.batch_size", "levers.gradient_checkpointing", "levers.optimizer", "model.target"):
        assert found.get(path) == profile.get(path)
    assert dict(found.model.arguments) == {"context": 128, "window": 2048, "learning_rate": 2e-4}
    assert dict(found.data.arguments) == {"files": "training_data/test_sample.txt", "context": 128}
    assert (found.trial.max_steps, found.training.max_steps) == (50, 50)


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        ("", "loader.batch_size", 8),
        ("--no-amp", "hardware.precision", "32-true"),
        ("--no-gradient-checkpointing", "levers.gradient_checkpointing", False),
        ("--ddp --cuda-ids 0,2", "hardware.devices", (0, 2)),
        ("--cuda-ids=1", "hardware.devices", (1,)),
        ("--zero-stage zero3 --world-size 4", "hardware.strategy", "fsdp"),
        ("--zero-stage zero3 --ddp --cuda-ids 2,3 --world-size 2", "hardware.strategy", "fsdp"),
        ("--zero-stage zero3 --ddp --cuda-ids 2,3 --world-size 2", "hardware.devices", (2, 3)),
        ("--zero-stage none --ddp --world-size 2", "hardware.strategy", "ddp"),
        ("--zero-stage zero2", "hardware.devices", -1),
        ("--use-chunked-training --chunk-size 1024", "levers.sequence_chunk", 1024),
        ("--use_chunked_training --chunk_size=512", "levers.sequence_chunk", 512),
        ("--model llama", "model.target", "kit.models.named:Transformer"),
    ],
)
def test_flags_and_defaults_of_ai_os(flags, path, value):
    assert Config.translate(f"aios hrm-hf train-actv1 {flags}").config.get(path) == value


def test_a_setting_that_another_one_overrules_says_so():
    found = Config.translate("aios hrm-hf train-actv1 --ddp --zero-stage zero3 --world-size 2")
    notes = {row.name: row.note for row in found.settings}
    assert "another setting decides" in notes["--ddp"]
    assert not [name for name, note in notes.items() if "another setting" in note and name != "--ddp"]


@pytest.mark.parametrize("end", ["\\\n", "`\n", "`\r\n", "` \r\n"])
def test_a_command_of_several_lines_is_one(end):
    command = f"aios hrm-hf train-actv1 --batch-size 2 {end}  --steps 50 {end}--no-amp"
    assert Config.translate(command).config == Config.translate(command.replace(end, " ")).config
    assert Config.translate(command).config.loader.batch_size == 2


@pytest.mark.parametrize(("written", "meant"), [
    (r"data\curated\sample.txt", r"data\curated\sample.txt"), (r'"C:\my data\sample.txt"', r"C:\my data\sample.txt"),
    (r"'C:\my data\sample.txt'", r"C:\my data\sample.txt"), (r"my\ data/sample.txt", "my data/sample.txt"),
    ('"my data/sample.txt"', "my data/sample.txt"), ("data/#1.txt", "data/#1.txt"),
])  # fmt: skip
def test_the_path_of_a_file_is_kept_as_it_was_written(written, meant):
    found = Config.translate(f"aios hrm-hf train-actv1 --dataset-file {written} --steps 50")
    assert found.config.data.arguments["files"] == meant


@pytest.mark.parametrize(
    "flags",
    ["", "--model llama", "--model llama --window-size 64", "--dataset-file a.txt --model llama", "--window-size 64"],
)
def test_every_row_is_true_of_the_config(flags):
    found = Config.translate(f"aios hrm-hf train-actv1 {flags}")
    for setting in found.settings:
        section, _, argument = setting.path.partition(".arguments.")
        if argument:
            assert found.config.get(f"{section}.arguments")[argument] == setting.here
        elif setting.path:
            assert found.config.get(setting.path) == setting.here


def test_every_row_names_a_field_that_there_is_or_says_why_there_is_none():
    known = {info.path for info in Config.fields()} | {"model.arguments", "data.arguments"}
    for name, rule in {**_BASEMODEL, **_AIOS}.items():
        assert rule.paths or rule.note, name
        assert {path.partition("s.")[0] + "s" if ".arguments." in path else path for path in rule.paths} <= known, name


@pytest.mark.parametrize(
    ("source", "word"),
    [("nowhere.yaml", "cannot read"), ({"loader": {"batch_size": 4}}, "BaseModel"), ("aios 'train", "quotation"),
     ({"training_params": {"devices": "all"}}, r"hardware\.devices")],
)  # fmt: skip
def test_what_is_neither_is_refused(source, word):
    with pytest.raises(ConfigError, match=word):
        Config.translate(source)


def test_loading_one_leads_to_its_translation(basemodel):
    with pytest.raises(ConfigError, match=r"Config\.translate") as caught:
        kit.Config.load(basemodel)
    assert {problem.path for problem in caught.value.problems} == SECTIONS


def test_a_setting_shows_no_text_that_went_nowhere():
    assert Setting("a", "secret", "", None, "").shown == "…"
    assert Setting("a", 3, "", None, "").shown == "3"


def test_a_short_command_leaves_a_step_to_measure():
    command = "aios hrm-hf train-actv1 --model gpt2 --dataset-file a.txt --steps 5"
    trial = Config.translate(command).config.trial
    assert (trial.max_steps, trial.warmup_steps) == (5, 4)


def test_a_slip_of_another_tool_is_told_what_it_is_near_to():
    found = Config.translate("aios hrm-hf train-actv1 --model gpt2 --batchsize 4")
    (row,) = (setting for setting in found.settings if setting.name == "--batchsize")
    assert "--batch-size" in row.note
