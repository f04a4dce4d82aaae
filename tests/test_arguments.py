"""The order of arguments: config, module, data; without a config; and, with a warning, that of kit 0.1."""

import pytest

import kit
from kit.arguments import config_first
from kit.errors import ConfigError
from kit.studies.repeats import RunSource

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


@pytest.mark.parametrize("shown", [kit.panel, kit.memory.panel])
def test_a_panel_without_a_config_takes_the_defaults(shown, tmp_path, monkeypatch):
    from kit.testing import TinyData, TinyModule

    monkeypatch.chdir(tmp_path)
    panel = shown(TinyModule, TinyData)
    held = panel.config, panel._module, panel._data
    panel.close()
    assert held == (kit.Config(), TinyModule, TinyData)


def test_a_recommendation_in_the_order_of_before_warns_and_works():
    from kit.testing import TinyData, TinyModule

    with pytest.warns(DeprecationWarning, match="order of kit 0.1"):
        found = kit.studies.recommend(TinyModule, TinyData, kit.Config(), "H100-80GB")
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
