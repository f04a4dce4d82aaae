"""Config: strict, frozen, and the same after a journey through YAML."""

import contextlib
import json
import re
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.config import Config, project_folder, resolve_path
from kit.errors import ConfigError
from kit.yaml_text import read_yaml, write_yaml

PLAIN = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20)
NESTED = st.recursive(
    PLAIN | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=8)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "loader.batch_size": st.integers(1, 10**6),
        "training.gradient_clip_norm": st.none() | st.floats(1e-12, 1e12),
        "training.seed": st.integers(0, 2**32 - 1),
        "data.url": TEXT,
        "data.source": st.none() | TEXT,
        "data.variables": st.lists(NAMES, max_size=4),
        "data.patch": st.dictionaries(NAMES, st.integers(1, 10**6), max_size=4),
        "data.arguments": st.dictionaries(TEXT, NESTED, max_size=4),
        "model.arguments": st.dictionaries(TEXT, NESTED, max_size=4),
        "chunking.chunk": st.just("auto") | st.dictionaries(NAMES, st.integers(1, 10**6), min_size=1, max_size=3),
        "chunking.latency_seconds": st.floats(0, 60),
        "loader.shuffle": st.booleans(),
        "trial.start": st.sampled_from(["warm", "cold"]),
    },
)


@pytest.mark.slow
@given(CHANGES)
def test_a_config_survives_yaml_unchanged_with_and_without_comments(changes):
    config = Config().replace(changes)
    for comments in (True, False):
        again = Config.from_yaml(config.to_yaml(comments=comments))
        assert again == config
        assert again.fingerprint == config.fingerprint


@given(CHANGES, st.randoms())
def test_the_fingerprint_ignores_the_order_of_keys_and_sees_every_change(changes, random):
    config = Config().replace(changes)
    items = list(config.values().items())
    random.shuffle(items)
    assert Config.make(dict(items)).fingerprint == config.fingerprint
    other = config.replace({"loader.batch_size": config.loader.batch_size + 1})
    assert other.fingerprint != config.fingerprint
    assert config.diff(other) == {"loader.batch_size": (config.loader.batch_size, config.loader.batch_size + 1)}


@given(CHANGES)
def test_the_code_shown_for_a_config_makes_an_equal_config(changes):
    import kit

    config = Config().replace(changes)
    assert eval(config.as_code(), {"kit": kit}) == config  # the text a reader would paste into a cell


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
def test_any_text_is_a_config_or_one_clear_error(text):
    with contextlib.suppress(ConfigError):
        Config.from_yaml(text)


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("loader: {batchsize: 3}", "loader.batchsize", "mean loader.batch_size"),
        ("batch_size: 3", "batch_size", "mean loader.batch_size"),
        ("wibble: 3", "wibble", "sections .*name, hardware"),
        ("loader: {batch_size: 0}", "loader.batch_size", "greater .* 1, got 0"),
        ("loader: {batch_size: '3'}", "loader.batch_size", "integer, got '3'"),
        ("loader: {batch_size: true}", "loader.batch_size", "integer, got True"),
        ("loader: {pin_memory: NO}", "loader.pin_memory", "got 'NO'"),
        ("loader: 3", "loader", "mapping of fields"),
        ("name: 017", "name", "got 17"),
        ("name: ../x", "name", "lower-case letters"),
        ("hardware: {strategy: dpp}", "hardware.strategy", "did you mean 'ddp'"),
        ("hardware: {strategy: DDP}", "hardware.strategy", "did you mean 'ddp'"),
        ("hardware: {precision: bf16}", "hardware.precision", "did you mean 'bf16-mixed'"),
        ("hardware: {precision: 16-true}", "hardware.precision", "nan; use 16-mixed"),
        ("hardware: {devices: foo}", "hardware.devices", "'foo' .*accepted"),
        ("hardware: {devices: 0}", "hardware.devices", "0 devices"),
        ("hardware: {devices: [0, 0], strategy: ddp}", "hardware.devices", "twice"),
        ("hardware: {devices: 2}", "hardware.strategy", "ddp or fsdp"),
        ("hardware: {strategy: ddp}", "hardware.strategy", "at least 2 devices, .*auto"),
        ("hardware: {strategy: fsdp, devices: 1}", "hardware.strategy", "at least 2 devices"),
        ("hardware: {strategy: 'fsdp:2:4', devices: 4}", "hardware.strategy", "2 replicas × 4 devices each = 8"),
        ("hardware: {strategy: 'fsdp:2:0', devices: 2}", "hardware.strategy", "'fsdp:2:0' is not accepted"),
        ("chunking: {chunk: {lat: 0}}", "chunking.chunk", "{'lat': 0} is not accepted"),
        ("chunking: {target_shard_bytes: 5 parsecs}", "chunking.target_shard_bytes", "'5 parsecs' .*size"),
        ("training: {gradient_clip_norm: .nan}", "training.gradient_clip_norm", "finite"),
        ("data: {patch: {lat: x}}", "data.patch.lat", "integer, got 'x'"),
        ("data: {stride: {lat: 2}, patch: {time: 1}}", "data.stride", r"'lat' .*data\.patch \(time\)"),
        ("trial: {max_steps: 3}", "trial.warmup_steps", "nothing to measure"),
    ],
)
def test_a_wrong_value_is_named_by_its_path_with_the_way_out(text, path, words):
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(text)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert re.search(words, problem.message)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", "line 2, column 1: found duplicate key"),
        ("loader: {batch_size: 1, batch_size: 2}", "duplicate key"),
        ("x: [", "line 1, column"),
        ("[" * 3000, "nested deeper than 20"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("loader: !!python/object/apply:os.system ['true']", "line 1"),
        ("- 1", "mapping of sections"),
        ("a" * (1 << 21), "larger than 1 MiB"),
    ],
)
def test_broken_yaml_is_refused_with_its_place(text, words):
    with pytest.raises(ConfigError, match=r"config\.yaml") as caught:
        Config.from_yaml(text, where="config.yaml")
    assert words in str(caught.value)


def test_equal_values_of_other_types_are_written_each_as_it_is():
    for value in (1, 1.0, True, "1", [1], [True], {"b": 1}, {"b": 1.0}, "true", None, "null"):
        for _ in range(2):  # the second time from what was kept
            assert repr(read_yaml(write_yaml({"a": value, "c": 0}))) == repr({"a": value, "c": 0})
    assert read_yaml(write_yaml({})) == {}


def test_yaml_1_2_reads_numbers_and_words_as_written():
    config = Config.from_yaml(
        "training: {gradient_clip_norm: 1e-3}\ndata: {arguments: {country: NO, time: '12:30:00'}}"
    )
    assert config.training.gradient_clip_norm == 0.001
    assert config.data.arguments == {"country": "NO", "time": "12:30:00"}


def test_sizes_are_read_from_text_and_kept_as_bytes():
    assert Config.from_yaml("chunking: {target_shard_bytes: 5 MB}").chunking.target_shard_bytes == 5_000_000


def test_every_mistake_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml("loader: {batch_size: 0, nope: 1}\ntraining: {seed: -1}")
    assert {problem.path for problem in caught.value.problems} == {"loader.batch_size", "loader.nope", "training.seed"}


@pytest.mark.parametrize(
    ("made", "path", "words"),
    [
        (lambda: Config(batch_size=3), "batch_size", r"mean loader\.batch_size\? .*'loader\.batch_size'"),
        (lambda: Config(memory_bytes=3), "memory_bytes", r"loader\.memory_bytes or build\.memory_bytes"),
        (lambda: Config(loader={"batchsize": 3}), "loader.batchsize", r"mean loader\.batch_size"),
        (lambda: Config(**{"loader.batch_size": 3}), "loader.batch_size", r"mean loader\.batch_size"),
        (lambda: Config(epochs=3), "epochs", r"mean training\.max_epochs"),
        (lambda: Config(gradient_accumulation_steps=3), "gradient_accumulation_steps", "accumulate_grad_batches"),
        (lambda: Config(model={"lr": 3}), "model.lr", r"model\.arguments\.learning_rate.*UNet takes .*width"),
        (lambda: Config().replace({"model.lr": 3}), "model.lr", r"model\.arguments\.learning_rate.*UNet takes"),
        (lambda: Config().replace({"hardware.gpus": 3}), "hardware.gpus", r"mean hardware\.devices"),
        (lambda: Config().replace({"training.lr": 3}), "training.lr", r"model\.arguments"),
        (lambda: Config().replace(batch_size=3), "batch_size", r"mean loader\.batch_size"),
        (lambda: Config().replace({3: 3}), "3", "sections"),
        (lambda: Config("recipe.yaml"), "", r"Config\.load"),
        (lambda: Config({"loader.batch_size": 3}), "", r"replace"),
        (lambda: Config.make(None), "", r"Config\.load"),
        (lambda: Config.make({1: 2}), "1", "text"),
        (lambda: Config().replace([("loader.batch_size", 3)]), "", "mapping"),
        (lambda: Config().diff({}), "", "compared"),
        (lambda: Config.from_yaml("recipe.yaml"), "", r"Config\.load"),
        (lambda: Config.load(None), "", "no path"),
    ],
)
def test_what_others_write_is_answered_with_where_it_lives(made, path, words):
    with pytest.raises(ConfigError) as caught:
        made()
    (problem,) = caught.value.problems
    assert problem.path == path
    assert re.search(words, problem.message)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("hardware.accelerator", "cuda", "mean 'gpu'"),
        ("hardware.accelerator", "mps", "NVIDIA"),
        ("hardware.devices", "2", r"mean 2\?"),
        ("hardware.devices", "cuda:1", r"mean \[1\]\?"),
        ("hardware.devices", "all", r"mean -1\?"),
        ("hardware.devices", "0,1", r"mean \[0, 1\]\?"),
        ("hardware.devices", 2.0, r"mean 2\?"),
        ("hardware.strategy", "auto", "mean 'none'"),
        ("hardware.strategy", "deepspeed_stage_2", "mean 'fsdp'"),
        ("hardware.precision", 16, "mean '16-mixed'"),
        ("data.patch", (1, 64, 64), r"\{'time': 1, .*got \[1, 64, 64\]"),
        ("chunking.chunk", 64, r"\{'time': 1"),
        ("data.patch", {"time": 0}, r"data\.patch\.time: .*got 0"),
        ("model.target", dict, r"kit\.fit\(config, MyModule"),
        ("name", "My Run!", "mean 'my-run'"),
        ("trial.max_steps", 3, r"2 at most"),
    ],
)
def test_a_value_as_others_write_it_is_answered_with_kits(path, value, words):
    with pytest.raises(ConfigError, match=words):
        Config().replace({path: value})


def test_what_is_plainly_meant_is_taken():
    numbers = {"loader.batch_size": np.int64(8), "data.patch": {"lat": np.int32(4)}, "training.gradient_clip_norm": 1}
    config = Config().replace({
        **numbers, "data.variables": "sst", "data.url": Path("a/b.zarr"), "loader.memory_bytes": 4e9,
        "model.arguments.width": np.float32(2), "data.patch.lon": 3,
    })  # fmt: skip
    assert config.get("data.patch") == {"lat": 4, "lon": 3}
    assert (config.data.variables, config.data.url, config.model.arguments) == (("sst",), "a/b.zarr", {"width": 2.0})
    assert Config.from_yaml(config.to_yaml()) == config


def test_a_name_that_is_no_field_is_answered_where_it_is_read():
    with pytest.raises(AttributeError, match=r"mean loader\.batch_size"):
        Config().batch_size  # noqa: B018
    assert not hasattr(Config().loader, "seed")


def test_a_file_that_is_not_there_is_named_with_what_is(tmp_path):
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(ConfigError, match=rf"no file {tmp_path}/recpie\.yaml.*mean 'recipe\.yaml'"):
        Config.load(tmp_path / "recpie.yaml")
    with pytest.raises(ConfigError, match=rf"no folder {tmp_path}/conf"):
        Config.load(tmp_path / "conf" / "recipe.yaml")


def test_nothing_in_a_config_can_be_changed():
    config = Config().replace({"data.patch": {"lat": 4}, "data.arguments": {"sizes": [1, 2]}})
    with pytest.raises(ValueError, match="frozen"):
        config.loader.batch_size = 3
    with pytest.raises(TypeError, match="replace"):
        config.data.patch["lat"] = 5
    assert config.data.arguments["sizes"] == (1, 2)


def test_replace_refuses_an_unknown_path_and_leaves_the_config_alone():
    config = Config()
    with pytest.raises(ConfigError, match=r"mean loader\.batch_size"):
        config.replace({"loader.batchsize": 3})
    assert config == Config()
    with pytest.raises(ConfigError) as refused:
        config.replace({"loader.batchsize": 3, "name": "other", "loader.workers": 1})
    assert [one.path for one in refused.value.problems] == ["loader.batchsize", "loader.workers"]


def test_every_field_has_a_sentence_and_its_bounds_are_shown():
    fields = {info.path: info for info in Config.fields()}
    assert all(info.description.endswith(".") for info in fields.values())
    assert len(fields) == len(Config.fields())
    help_text = fields["loader.num_workers"].help
    assert "processes" in help_text
    assert "at most 256" in help_text
    assert fields["hardware.precision"].choices[0] == "auto"
    yaml = Config().to_yaml()
    assert all(info.description in yaml for info in fields.values())


def test_no_field_is_named_like_a_secret():
    assert not [f.path for f in Config.fields() if any(w in f.path for w in ("token", "password", "secret", "_key"))]


def test_saving_replaces_the_file_in_one_move(tmp_path):
    file = tmp_path / "deep" / "config.yaml"
    config = Config().replace({"name": "mine"})
    config.save(file)
    assert Config.load(file) == config
    assert [path.name for path in file.parent.iterdir()] == ["config.yaml"]


def test_no_value_is_said_to_mean_itself():
    with pytest.raises(ConfigError, match="-2 is not accepted") as raised:
        Config.make({"hardware": {"devices": -2}})
    assert "did you mean" not in str(raised.value)


def test_a_place_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        Config().save(tmp_path / "file" / "config.yaml")


def test_a_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        Config.load(tmp_path / "nothing.yaml")


def test_relative_paths_start_at_the_project_folder(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert project_folder() == tmp_path
    assert resolve_path("data/x.zarr") == tmp_path / "data/x.zarr"


def test_a_config_is_json_too():
    assert Config.make(json.loads(json.dumps(Config().values()))) == Config()


def test_the_conservative_profile_takes_one_sample_at_a_time_and_every_lever():
    config = Config.profile("conservative memory")
    assert (config.loader.batch_size, config.levers.accumulate_grad_batches, config.trial.max_steps) == (1, 8, 50)
    assert config.levers.gradient_checkpointing
    assert config.levers.optimizer == "adamw-8bit"
    assert config.hardware.precision == "auto"


def test_the_long_context_profile_is_a_model_with_a_window():
    config = Config.profile("long context")
    assert config.model.arguments["window"] == 2048
    assert config.model.arguments["context"] > 2048
    assert config.loader.batch_size == 1


def test_a_profile_by_another_name_is_refused_with_the_close_one():
    with pytest.raises(ConfigError, match="did you mean 'long context'"):
        Config.profile("long contxt")


def test_candidates_of_a_calibration_are_lists_of_numbers_within_bounds():
    text = "calibration:\n  candidate_workers: [0, 4, 6]\n  candidate_prefetch: [2]\n"
    config = Config.from_yaml(text)
    assert config.calibration.candidate_workers == (0, 4, 6)
    assert Config.from_yaml(config.to_yaml()) == config
    assert not config.calibration.enabled
    for wrong in ([-1], [300], ["4"]):
        with pytest.raises(ConfigError, match="candidate_workers"):
            Config().replace({"calibration.candidate_workers": wrong})
    for wrong in ([0], [65], []):
        with pytest.raises(ConfigError, match="candidate_prefetch"):
            Config().replace({"calibration.candidate_prefetch": wrong})
