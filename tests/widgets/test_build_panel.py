"""The build panel without a kernel or a browser: edit, wait, read; plans, builds and advice are real."""

import html
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from waiting import PATIENCE_SECONDS

import kit
from kit.config import Config
from kit.data.build.plan import plan_build
from kit.data.build.schedulers import advise_schedule
from kit.errors import BuildError, ConfigError
from kit.widgets.build_panel import ANOTHER, THIS_MACHINE, build_panel

WAIT = PATIENCE_SECONDS
TINY = Path(__file__).parents[1] / "data" / "tiny_source.py"
GIB = 1 << 30


@pytest.fixture
def config(tmp_path):
    return Config.make(
        {
            "data": {
                "source": f"{TINY}:Tiny", "arguments": {"time": 16, "lat": 32, "lon": 32},
                "url": str(tmp_path / "tiny.zarr"), "patch": {"time": 1, "lat": 8, "lon": 8},
            },
            "chunking": {"chunk": {"time": 1, "lat": 16, "lon": 16}, "shard": "none"},
            "build": {"threads": 2, "memory_bytes": "256 MiB"},
        }
    )  # fmt: skip


@pytest.fixture
def panel(config):
    return build_panel(config).wait(WAIT)


def text(widget):
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", widget.value)))


def called(widget):
    """The line of code that a widget shows."""
    return html.unescape(re.search(r"<pre[^>]*>(.*)</pre>", widget.value, re.DOTALL)[1])


def test_it_shows_the_plan_with_its_reasons_before_anything_is_written(panel, config, tmp_path):
    plan = plan_build(config)
    assert str(panel.plan) == str(plan)
    assert all(reason in text(panel.view.reasons) for reason in plan.reasons)
    assert "not built yet" in text(panel.view.summary)
    assert "chunks of time 1 × lat 16 × lon 16" in text(panel.view.layout)
    assert not (tmp_path / "tiny.zarr").exists()


def test_every_scheduler_stands_in_the_table_and_the_chosen_one_is_marked(panel):
    rows = re.findall(r"<tr style=\"([^\"]*)\"><th[^>]*>(.*?)</th>", panel.view.table.value)
    assert [re.sub(r"<[^>]+>", "", name).split()[0] for _, name in rows] == [
        "single-threaded", "threads", "distributed",
    ]  # fmt: skip
    assert [bool(style) for style, _ in rows] == [False, True, False]


def test_choosing_another_scheduler_plans_anew_and_the_code_says_so(panel, config):
    panel.form.controls["build.scheduler"].value = "distributed"
    panel.form.controls["build.workers"].value = 2
    panel.wait(WAIT)
    assert (panel.plan.scheduler, panel.plan.slots.processes) == ("distributed", 2)
    code = called(panel.code)
    assert code.startswith("kit.build(config.replace(")
    assert eval(code.replace("kit.build(", "(", 1), {"config": config}) == panel.config


def test_build_writes_the_store_says_how_far_it_is_and_ends_with_it_open(panel):
    said = []
    panel.control.progress.observe(lambda change: said.append(text(panel.control.progress)), "value")
    panel.control.button.click()
    assert panel.wait(WAIT).dataset.open_array("wind").shape == (16, 32, 32)
    assert any(re.search(r"building: \d+ of \d+ objects", words) for words in said)
    assert "built in" in said[-1]
    assert "is built" in text(panel.view.summary)
    assert panel.control.button.description == "Build"


def test_a_stopped_build_goes_on_where_it_was(panel):
    begun = threading.Event()

    def stop(_):
        if " of " in panel.control.progress.value and not begun.is_set():
            begun.set()
            panel.control.button.click()

    panel.control.progress.observe(stop, "value")
    panel.build()
    panel.wait(WAIT)
    assert "stopped; Build resumes" in text(panel.control.progress)
    assert panel.dataset is None
    assert panel.build().wait(WAIT).dataset is not None


@pytest.mark.slow
def test_a_build_on_a_local_cluster_shows_its_dashboard_while_it_runs(panel):
    links = []
    panel.control.link.observe(lambda change: links.append(change["new"]), "value")
    panel.config = panel.config.replace({"build.scheduler": "distributed", "build.workers": 1})
    assert panel.build().wait(WAIT).dataset is not None
    assert re.search(r"href='http://127\.0\.0\.1:\d+/status'", links[0])
    assert links[-1] == ""


def test_an_array_in_hand_is_built_and_the_code_names_it(tmp_path):
    values = np.arange(4 * 8 * 8, dtype="f4").reshape(4, 8, 8)
    config = Config.make({"data": {"url": str(tmp_path / "hand.zarr"), "patch": {"dim_1": 4}}})
    panel = build_panel(config, source=values).wait(WAIT)
    assert called(panel.code) == "kit.build(config, source=source)"
    dataset = panel.build().wait(WAIT).dataset
    (name,) = dataset.arrays
    np.testing.assert_array_equal(dataset.open_array(name)[...], values)


def test_a_budget_too_small_is_refused_with_its_arithmetic_and_no_button(panel, config):
    panel.config = config.replace({"build.memory_bytes": "2 MiB"})
    with pytest.raises(BuildError, match="where 2 MiB is allowed"):
        panel.wait(WAIT)
    assert "where 2 MiB is allowed" in text(panel.view.error)
    assert panel.control.button.disabled
    panel.config = config
    assert panel.wait(WAIT).view.error.value == ""
    assert not panel.control.button.disabled


def test_no_source_is_said_and_cannot_be_built():
    panel = build_panel()
    with pytest.raises(BuildError, match=r"data\.source: empty"):
        panel.wait(WAIT)
    assert panel.control.button.disabled


def test_a_build_that_fails_says_why_and_wait_raises_it(config):
    panel = build_panel(config.replace({"data.arguments": {**config.data.arguments, "fault": "raise"}})).wait(WAIT)
    with pytest.raises(BuildError, match="the instrument fell overboard"):
        panel.build().wait(WAIT)
    assert "the instrument fell overboard" in text(panel.control.progress)


def test_an_edit_that_is_no_config_waits_beside_its_field_and_is_not_built(panel):
    panel.form.controls["build.memory_bytes"].value = "much"
    with pytest.raises(ConfigError, match="much"):
        panel.build()
    panel.control.button.click()
    assert "not started" in text(panel.control.progress)


def test_automatic_numbers_say_what_they_came_to(config):
    panel = build_panel(config.replace({"build.threads": 0, "build.scheduler": "distributed"})).wait(WAIT)
    assert text(panel.form._notes["build.workers"]).strip() == f"0: {panel.plan.slots.processes} here"
    assert text(panel.form._notes["build.threads"]).strip() == "0: 1 here"


# -- advice


def test_advice_is_for_this_machine_with_its_reasons_and_the_code(panel, config):
    advice = advise_schedule(config)
    assert str(panel.schedule) == str(advice)
    assert all(reason in text(panel.machine.advice) for reason in advice.reasons)
    assert called(panel.advice_code) == "kit.data.advise_schedule(config)"


@pytest.mark.parametrize(("machine", "loading"), [("1 GPU, 20 cores", 18), ("8 GPUs, 160 cores", 144)])
def test_another_machine_is_one_choice_away(panel, machine, loading):
    panel.machine.machine.value = machine
    panel.machine.heavy.value = True
    assert f"{loading} for loading" in text(panel.machine.advice)
    again = eval(called(panel.advice_code), {"kit": kit, "config": panel.config})
    assert str(again) == str(panel.schedule)


def test_eight_processes_of_four_threads_on_twenty_cores_are_warned_of(panel):
    panel.machine.machine.value = "1 GPU, 20 cores"
    assert "warning" not in text(panel.machine.advice)
    panel.config = panel.config.replace({"loader.num_workers": 8, "loader.decode_threads": 4})
    assert "warning : 8 processes × 4 threads = 32 threads on 20 cores" in text(panel.machine.advice)


def test_typed_numbers_are_another_machine_and_typing_them_back_is_this_one(panel):
    cores = panel.machine.cores.value
    panel.machine.cores.value = cores + 5
    assert panel.machine.machine.value == ANOTHER
    assert panel.schedule.cores == cores + 5
    assert called(panel.advice_code) == f"kit.data.advise_schedule(config, cores={cores + 5})"
    panel.machine.cores.value = cores
    assert panel.machine.machine.value == THIS_MACHINE


def test_a_memory_that_is_no_size_is_said(panel):
    panel.machine.memory.value = "plenty"
    assert "'plenty'" in text(panel.machine.advice)
    assert panel.machine.button.disabled
    panel.machine.memory.value = "64 GiB"
    assert panel.schedule.memory_bytes == 64 * GIB


def test_advice_is_taken_over_by_a_button_and_then_warned_of_no_more(panel):
    panel.machine.machine.value = "8 GPUs, 160 cores"
    panel.machine.button.click()
    build = panel.config.build
    assert (build.scheduler, build.workers, build.threads) == ("distributed", 40, 4)
    assert "warning" not in text(panel.machine.advice)


def test_the_still_is_the_table_as_text_and_as_html(panel):
    words, page = panel._still()
    assert words.startswith("scheduler")
    assert all(reason in words for reason in panel.plan.reasons)
    assert page.count("<table") == 1
