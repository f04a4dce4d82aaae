"""The order of arguments: config, module, data; without a config; and, with a warning, that of kit 0.1."""

import numpy
import pytest

import kit
from kit.arguments import config_first
from kit.errors import ConfigError, KitWarning
from kit.studies.repeats import RunSource
from kit.trial.payload import Part, warn_of_unused

CONFIG = kit.Config().replace({"name": "given"})


@config_first
def run(config=None, module=None, data=None, extra=None, *, more=0):
    return config, module, data, extra, more


@pytest.mark.parametrize(
    ("given", "named", "expected"),
    [
        ((), {}, (kit.Config(), None, None, None, 0)),
        ((CONFIG,), {}, (CONFIG, None, None, None, 0)),
        ((CONFIG, "module", "data"), {"more": 3}, (CONFIG, "module", "data", None, 3)),
        ((CONFIG,), {"data": "data"}, (CONFIG, None, "data", None, 0)),
        (("module", "data"), {}, (kit.Config(), "module", "data", None, 0)),
        (("module",), {"config": CONFIG}, (CONFIG, "module", None, None, 0)),
        ((), {"config": CONFIG, "module": "module"}, (CONFIG, "module", None, None, 0)),
        ((None, "module"), {}, (kit.Config(), "module", None, None, 0)),
        (("module", "data", None), {}, (kit.Config(), "module", "data", None, 0)),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_config_comes_first_or_not_at_all(given, named, expected):
    assert run(*given, **named) == expected


def test_the_order_of_before_warns_and_works():
    with pytest.warns(DeprecationWarning, match=r"run\(config, module, data\)"):
        assert run("module", "data", CONFIG, "extra") == (CONFIG, "module", "data", "extra", 0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((), {"config": "my.yaml"}),
        (("module",), {"config": {"name": "a"}}),
        (("my.yaml", "module", "data", "extra"), {}),
    ],
)
def test_what_is_no_config_is_refused(given, named):
    with pytest.raises(ConfigError, match="Config first"):
        run(*given, **named)


@pytest.mark.parametrize(
    "asked",
    [kit.plan_chunks, kit.build, kit.commit, kit.panel, kit.predict_memory, kit.data.statistics, kit.data.plan_build],
)
def test_a_path_in_place_of_a_config_is_told_how_it_is_read(asked):
    with pytest.raises(ConfigError, match=r"Config.load\('recipe.yaml'\)"):
        asked("recipe.yaml")


@pytest.mark.parametrize("given", [(object(), CONFIG), (CONFIG, object()), (CONFIG, int)])
def test_what_is_no_module_is_refused_before_a_process_starts(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="Config first|no LightningModule"):
        kit.fit(*given)
    assert not (tmp_path / "runs").exists()


def test_a_fit_without_a_config_takes_the_defaults(tmp_path, monkeypatch):
    from kit.testing import TinyData, TinyModule

    monkeypatch.chdir(tmp_path)
    trial = kit.fit(TinyModule(), TinyData()).wait()
    assert trial.state == "COMPLETE"
    assert trial.config.name == kit.Config().name


@pytest.mark.parametrize(("shown", "batch_size"), [(kit.panel, 4), (kit.memory.panel, kit.Config().loader.batch_size)])
def test_a_panel_without_a_config_takes_the_defaults(shown, batch_size, tmp_path, monkeypatch):
    """And the batches of the data itself, where it shows what a fit would run."""
    from kit.testing import TinyData, TinyModule

    monkeypatch.chdir(tmp_path)
    panel = shown(TinyModule, TinyData)
    held = panel.config, panel._module, panel._data
    panel.close()
    assert held == (kit.Config().replace({"loader.batch_size": batch_size}), TinyModule, TinyData)


def test_a_recommendation_in_the_order_of_before_warns_and_works():
    from kit.testing import TinyData, TinyModule

    with pytest.warns(DeprecationWarning, match="order of kit 0.1"):
        found = kit.recommend(TinyModule, TinyData, kit.Config(), "H100-80GB")
    assert found.config == kit.Config()


@pytest.mark.parametrize(
    ("given", "named", "expected"),
    [
        ((CONFIG, "module", "data"), {}, ("module", "data")),
        ((CONFIG,), {"data": "data"}, (None, "data")),
        ((CONFIG, "module"), {"data": "data"}, ("module", "data")),
        ((CONFIG,), {"module": "module", "data": None}, ("module", None)),
    ],
)
def test_what_takes_a_trial_or_a_config_also_takes_data_by_name(given, named, expected):
    source = RunSource.of(given, **named)
    assert (source.module, source.data) == expected


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"device": "cuda"}, r"hardware\.accelerator or hardware\.devices.*config\.replace"),
        ({"batch_size": 3}, r"loader\.batch_size"),
        ({"max_epochs": 3}, r"training\.max_epochs"),
        ({"model": 3}, "module="),
        ({"train_dataloaders": 3}, "data="),
        ({"val_dataloaders": 3}, r"\(training, validation\)"),
        ({"deterministic": True}, r"trainer=\{'deterministic'"),
        ({"callback": 3}, "mean 'callbacks'"),
        ({"lr": 3}, r"model\.arguments"),
    ],
)
def test_an_argument_that_fit_does_not_have_is_answered_with_what_was_meant(named, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=words) as caught:
        kit.fit(CONFIG, **named)
    assert isinstance(caught.value, ConfigError)
    assert [problem.path for problem in caught.value.problems] == [*named]


@pytest.mark.parametrize(
    ("given", "named", "words"),
    [
        ((), {}, "source"),
        (("x.npy",), {"batchsize": 8}, "mean 'batch_size'"),
        (("x.npy",), {"batch_size": "8"}, "whole number"),
        (("x.npy", None, None, None), {}, "positional"),
    ],
)
@pytest.mark.parametrize("kind", [kit.data.RowData, kit.data.EventData])
def test_data_that_is_made_with_wrong_arguments_says_what_it_takes(kind, given, named, words):
    with pytest.raises(TypeError, match=words) as caught:
        kind(*given, **named)
    assert isinstance(caught.value, ConfigError)
    assert kind.__name__ in str(caught.value) or caught.value.problems[0].path in named
    with pytest.raises(ConfigError, match="PatchData"):
        kit.data.PatchData()


def test_arguments_beside_data_that_is_made_already_are_said_to_be_unused(tmp_path, monkeypatch):
    from kit.testing import TinyData, TinyModule

    monkeypatch.chdir(tmp_path)
    with pytest.warns(KitWarning, match=r"data\.arguments .*batch_size.* not used"):
        kit.predict_memory(CONFIG.replace({"data.arguments": {"batch_size": 3}}), TinyModule, TinyData())
    recipe = kit.Config().replace({"data.arguments": {"source": "recipe.npy"}})
    warn_of_unused(Part.of(TinyModule), Part.of(kit.data.RowData(numpy.ones((40, 3)))), recipe)  # another place


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (kit.studies.find_batch_size, {"resolution": "0.1"}),
        (kit.studies.find_batch_size, {"start": 2.5}),
        (kit.studies.find_batch_size, {"most": True}),
        (kit.predict_memory, {"timeout_seconds": "1 min"}),
        (kit.studies.verify_sequences, {"lengths": [1, 2], "chunk": "128"}),
    ],
)
def test_what_is_no_number_is_refused_by_its_name(asked, named):
    with pytest.raises(TypeError, match=f"{[*named][-1]}: .* number") as caught:
        asked(CONFIG, **named)
    assert isinstance(caught.value, ConfigError)


def test_loaders_in_the_order_of_lightning_are_refused_with_the_pair():
    from kit.testing import TinyModule

    for given in ((TinyModule, [1], [2]), (CONFIG, TinyModule, [1], [2])):
        with pytest.raises(TypeError, match=r"\(training, validation\)"):
            kit.fit(*given)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (lambda: kit.build(CONFIG, "auto"), "plan: str .*plan_chunks"),
        (lambda: kit.build(CONFIG, source="nowhere.npy"), r"data\.source: .*nowhere\.npy"),
        (lambda: kit.commit(CONFIG, CONFIG), "trial: Config .*module="),
        (lambda: kit.html_report([], None), "path: NoneType"),
        (lambda: kit.table(None), "label"),
        (lambda: kit.table({"a": 3}), "label"),
        (lambda: kit.cloud.simulate("same regoin"), "mean 'same region'"),
        (lambda: kit.cloud.simulate(None), "same region, "),
        (lambda: kit.Trial.open(None), "no path"),
        (lambda: kit.Trial("runs/a"), r"Trial\.open\('runs/a'\)"),
        (lambda: kit.results(None), "folder: NoneType"),
        (lambda: kit.results(CONFIG), "folder: Config"),
        (lambda: kit.build(), "Config first"),
        (lambda: kit.plan_chunks(None), "Config first"),
        (lambda: kit.hardware("cuda"), "device="),
        (lambda: kit.recommend(CONFIG, "T4", devices="8"), "devices: '8'"),
        (lambda: kit.data.join("a.zarr"), "at least two"),
        (lambda: kit.data.verify(None), "NoneType"),
        (lambda: kit.data.expected_bytes(CONFIG, "auto"), "plan: str"),
        (lambda: kit.data.measure_reading([CONFIG], seconds="2"), "seconds: '2'"),
        (lambda: kit.data.measure_networks(CONFIG, None), r"cloud: .*simulate"),
        (lambda: kit.data.RowData([[1.0]]), "numpy.asarray"),
        (lambda: kit.data.RowData(numpy.ones((3, 2)), row_block="2"), "row_block: '2'"),
    ],
)
def test_what_a_first_hour_gives_wrong_is_a_clear_error_of_kits(asked, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(kit.KitError, match=words):
        asked()


def test_settings_in_place_of_a_config_are_told_what_takes_them():
    with pytest.raises(ConfigError, match=r"replace"):
        kit.fit(config={"loader.batch_size": 3})
    with pytest.raises(ConfigError, match=r"build\.workers"):
        kit.build(CONFIG, workers=3)
    with pytest.raises(ConfigError, match=r"Config\.load"):
        kit.data.measure_reading("recipe.yaml")


def test_what_is_given_twice_is_refused():
    with pytest.raises(ConfigError, match="data="):
        RunSource.of((CONFIG, "module", "data"), data="other")


@pytest.mark.parametrize("given", ["8", -1, 0, 2.5, True, "all"])
def test_a_count_that_is_none_is_refused_by_the_name_it_was_given_by(given):
    from kit.testing import TinyData, TinyModule

    with pytest.raises(ConfigError, match=f"^devices: .*{given!s}.*from 1 to 1,024"):
        kit.predict_speed(TinyModule, TinyData, device="T4-16GB", devices=given)
    with pytest.raises(ConfigError, match=f"^world_size: .*{given!s}.*from 1 to 1,024"):
        kit.predict_memory(TinyModule, TinyData, device="T4-16GB", world_size=given)
    for several in (given, [1, given]):
        with pytest.raises(ConfigError, match=f"^devices: .*{given!s}.*from 1 to 4,096"):
            kit.studies.predict_run(None, devices=several)


@pytest.mark.parametrize(
    ("asked", "given", "named", "words"),
    [
        (kit.data.probe, ("there.zarr",), {"seconds": 3}, r"^seconds: probe"),
        (kit.data.probe, (), {}, r"missing.*store.*it takes store, credentials, most_bytes"),
        (kit.data.chunk_table, ((64, 64), [8]), {"itemsize": "float32"}, r"^itemsize: 'float32' is no whole number"),
        (kit.data.chunk_table, ((64, 64), [8], 2.5), {}, r"^itemsize: 2\.5"),
        (kit.data.advise_schedule, (), {"cores": 20.5}, r"^cores: 20\.5"),
        (kit.data.measure_reading, (CONFIG,), {"second": 3}, "did you mean 'seconds'"),
        (kit.data.measure_networks, (CONFIG, None), {"epochs": "2"}, r"^epochs: '2'"),
        (kit.data.array_bytes, ((2, 3),), {"pth": "x"}, "did you mean 'path'"),
        (kit.memory.sizes, (CONFIG,), {"module_": 3}, "did you mean 'module'"),
        (kit.results, (), {"nme": "x"}, "did you mean 'name'"),
        (kit.plan_chunks, (CONFIG, "x"), {}, "too many.*it takes config, order"),
        (kit.fit, (CONFIG, "kit.models:GPT"), {"module": "kit.models:GPT"}, "multiple values.*'module'"),
        (kit.studies.try_change, (CONFIG,), {"repeats": "2"}, r"^repeats: '2'"),
    ],
)
def test_what_a_function_does_not_take_is_told_by_kit_with_what_it_takes(asked, given, named, words):
    with pytest.raises(TypeError, match=words) as caught:
        asked(*given, **named)
    assert isinstance(caught.value, kit.KitError)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (lambda: kit.data.chunk_table((64, 64), None), "chunk_table"),
        (lambda: kit.data.array_bytes(None), "shape: None"),
        (lambda: kit.Config.profile(None), "profile: .*None"),
        (lambda: kit.Config.profile("long contxt"), "did you mean 'long context'"),
        (lambda: kit.data.plan_build(CONFIG, 3), "plan: int is no plan"),
        (lambda: kit.data.probe("there.zarr", most_bytes="a lot"), "most_bytes: 'a lot'"),
        (lambda: kit.data.write_rows("x.npy", numpy.ones((2, 2)), memory_bytes="a lot"), "memory_bytes: 'a lot'"),
        (lambda: kit.data.advise_schedule(memory_bytes="a lot"), "memory_bytes: 'a lot'"),
        (lambda: kit.data.chunk_table((64, 64), [32, 64]).figure("timeline"), "no picture 'timeline'"),
        (lambda: kit.data.chunk_table((64, 64), [32, 64]).figure(measure=3), "figure: .*it takes measured"),
        (lambda: kit.course.score().hand_in(None), "path: NoneType"),
        (lambda: kit.course.score().hand_in("me.pdf"), r"path: me\.pdf.*me\.html"),
        (lambda: kit.html_report(kit.results("none"), "a.pdf"), r"path: a\.pdf.*a\.html"),
        (lambda: kit.commit(CONFIG, slurm="torchrn"), "slurm: 'torchrn'.*mean 'torchrun'"),
        (lambda: kit.commit(CONFIG, slurm=True), "slurm: True.*torchrun, python"),
        (lambda: kit.data.write_rows("x.npy", numpy.ones((2, 2)), -3), "shape: -3"),
        (lambda: kit.data.write_rows("x.npy", numpy.ones, "200"), "shape: '200'"),
        (lambda: kit.data.write_rows("x.npy", numpy.ones((2, 2)), row_block=-1), "row_block: -1"),
        (lambda: kit.data.write_rows(None, numpy.ones((2, 2))), "path: NoneType"),
        (lambda: kit.studies.placements(CONFIG, data=3), "source: int"),
        (lambda: kit.memory.panel(CONFIG, sizes=["widht"]), "also: 'widht'.*mean 'width'"),
        (lambda: kit.Corpus("200"), "documents: '200'"),
        (lambda: kit.Corpus(200, 50, 4.5), r"topics: 4\.5"),
        (lambda: kit.compare_topics("found.npz", None), "str holds no topics.*open_topics"),
    ],
)
def test_a_slip_that_python_answered_from_the_inside_is_named(asked, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        asked()
    assert isinstance(caught.value, kit.KitError)
    assert not [*tmp_path.iterdir()]


def test_numbers_and_arrays_of_numpy_are_taken_where_python_has_its_own():
    sides = numpy.array([64, 64]), numpy.array([32, 64])
    assert [row.chunk for row in kit.data.chunk_table(*sides)] == [(32, 32), (64, 64)]
    large = kit.data.array_bytes((numpy.int32(500_000), numpy.int32(100_000)))
    assert large.memory_bytes == 200_000_000_000
    schedule = kit.data.advise_schedule(cores=numpy.int64(20), ranks=1, memory_bytes=numpy.int64(10**11))
    assert schedule.reasons == kit.data.advise_schedule(cores=20, ranks=1, memory_bytes=1e11).reasons


def test_blocks_that_are_not_checkpointed_are_told():
    from kit.testing import TinyModule

    blocks = kit.Config().replace({"levers.checkpoint_blocks": ["0-3"]})
    with pytest.warns(KitWarning, match="checkpoint_blocks"):
        warn_of_unused(Part.of(TinyModule), Part.of(TinyModule), blocks)
    warn_of_unused(Part.of(TinyModule), Part.of(TinyModule), blocks.replace({"levers.gradient_checkpointing": True}))
