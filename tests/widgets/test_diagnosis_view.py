import pytest
from diagnosis_parts import evidence, source, work
from waiting import wait_until

import kit
from kit.config import Config
from kit.studies.diagnosis.diagnose import judge
from kit.studies.diagnosis.unit_costs import VALUE
from kit.studies.repeats import RunSource
from kit.testing import TinyData, TinyModule
from kit.widgets.diagnose import DiagnosisView

SHORT = {"start_up_seconds": 4.0, "total_seconds": 10.0}


def test_a_clean_bill_has_no_buttons():
    found = evidence()
    view = DiagnosisView(judge(found, source(found)))
    assert view.findings == []
    assert "Nothing was found" in view.ui.children[0].value


def test_only_what_a_setting_mends_has_a_button():
    found = evidence(work=work(own_syncs=100), unit_costs={VALUE: 1e-3}, **SHORT)
    view = DiagnosisView(judge(found, source(found)))
    buttons = {item.finding.name: item.button in item.ui.children for item in view.findings}
    assert buttons == {"loader start-up": True, "sync in the step": False}


@pytest.fixture
def view(tmp_path):
    """Of a trial of four steps, which is advised to be longer."""
    config = Config.make({
        "hardware": {"accelerator": "cpu", "threads_per_rank": 1},
        "trial": {"folder": str(tmp_path / "runs"), "predict_memory": False, "max_steps": 4, "warmup_steps": 1},
    })  # fmt: skip
    trial = kit.fit(config, TinyModule, TinyData).wait()
    found = evidence({"trial.max_steps": 4, "trial.warmup_steps": 1}, **SHORT)
    return DiagnosisView(judge(found, RunSource(None, None, config, trial)))


@pytest.mark.slow
def test_a_click_tries_the_change_and_shows_before_and_after(view):
    (item,) = view.findings
    item.button.click()
    wait_until(lambda: item.tried is not None and not item.button.disabled)
    assert item.tried.after.config.trial.max_steps == 16
    text, page = view._still()
    assert item.tried._repr_html_() in item.answer.value
    assert repr(item.tried) in text
    assert item.tried._repr_html_() in page


def test_what_cannot_be_tried_says_why_and_can_be_clicked_again(view):
    (item,) = view.findings
    item.finding.source.earlier.paths.payload.unlink()
    item.button.click()
    wait_until(lambda: "not tried" in item.answer.value)
    assert "run again" in item.answer.value
    wait_until(lambda: not item.button.disabled)


@pytest.mark.slow
def test_the_code_of_a_foreign_folder_is_run_by_a_second_click_that_says_so(view):
    (item,) = view.findings
    item.finding.source.earlier.paths.signature.unlink()
    item.button.click()
    wait_until(lambda: "not tried" in item.answer.value and not item.button.disabled)
    assert item.tried is None
    assert "folder" in item.button.description
    item.button.click()
    wait_until(lambda: item.tried is not None and not item.button.disabled)
    assert item.tried.after.run_directories
