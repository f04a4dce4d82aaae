"""The notebook on slow training as its reader meets it: mistakes named, one tried by its button, a clean bill."""

import re

import nbformat
import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

NAMED_FIRST = ("chunks that do not fit", "Python in the data", "sync in the step")
"""On every machine. Whether reading ahead would hide anything depends on what its cores do meanwhile."""
PANEL = """import kit
config = kit.Config.load("datasets/slow/recipe.yaml").replace({"trial.max_steps": 6, "trial.warmup_steps": 2})
kit.build(config)
panel = kit.panel(config, data="datasets/slow/parts.py:ValueByValue")
panel.fit()
panel"""
VERDICT = re.compile(r"(It (helps|hurts):|No difference was found|Equal runs differ)")


def test_what_is_planted_is_named_and_one_change_is_tried(notebook, artifacts):
    opened = notebook("notebooks/06_profile.ipynb", width=1400, height=1500)
    page, wrong = opened.page, []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    opened.run_all(wait=False)
    charts = page.locator(".jp-OutputArea-output img:visible")
    expect(charts).to_have_count(4)
    assert opened.errors() == []

    first, mended, healthy = (page.locator(".kit-live").nth(place) for place in range(3))
    for name in NAMED_FIRST:
        expect(first.locator("b", has_text=re.compile(f"^{name}$"))).to_have_count(1)
    # What a step of the module itself gains in 16 bits decides whether that is named: that differs with the machine.
    for name in ("chunks that do not fit", "sync in the step"):
        expect(mended.locator("b", has_text=re.compile(f"^{name}$"))).to_have_count(0)
    # A machine that others keep busy is said to be, beside what was found then; nor may it tell whether a change helps.
    expect(healthy).to_contain_text(re.compile("Nothing was found|the machine was busy"))
    expect(page.get_by_text(re.compile(f"^{VERDICT.pattern}"))).to_have_count(1)

    finding = first.locator(".widget-vbox", has=page.get_by_role("button", name="Try it")).filter(
        has_text="chunks that do not fit"
    ).last  # fmt: skip
    finding.get_by_role("button", name="Try it").click()
    expect(first.get_by_role("button", name="Try it").first).to_be_disabled()
    expect(finding.get_by_text(re.compile(r"run \d+, of 12 at most"))).to_be_visible()
    expect(finding.get_by_text(VERDICT)).to_be_visible()
    answer = finding.get_by_role("table")
    expect(answer).to_contain_text("before")
    expect(answer).to_contain_text("after")
    expect(first.get_by_role("button", name="Try it").first).to_be_enabled()
    page.frame_locator("iframe").get_by_role("tab", name="timeline").click()
    timeline = page.frame_locator("iframe").locator("#said")
    expect(timeline).to_contain_text("µs to")

    places = {"timing": charts.first, "findings": first, "tried": answer, "trace": page.locator("iframe")}
    places |= {"profile": charts.nth(1), "compared": charts.nth(2), "healthy": healthy}
    opened.pictures(places, "profile", artifacts)
    assert opened.errors() == []
    assert wrong == []


def test_a_panel_diagnoses_its_trial(notebook, project, artifacts):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(PANEL)])
    book.metadata.kernelspec = {"name": "kit", "display_name": "kit (training experiments)", "language": "python"}
    nbformat.write(book, project / "notebooks" / "diagnosed.ipynb")
    opened = notebook("notebooks/diagnosed.ipynb", width=1400, height=1500)
    opened.run_all()
    panel = opened.page.locator(".kit-live").first
    diagnose = panel.get_by_role("button", name="Diagnose")
    expect(diagnose).to_be_enabled()
    diagnose.click()
    expect(panel.get_by_text("kit.studies.diagnose(")).to_be_visible()
    expect(panel.locator("b", has_text=re.compile("^chunks that do not fit$"))).to_be_visible()
    expect(panel.get_by_role("button", name="Try it").first).to_be_enabled()
    expect(panel.get_by_role("tab", name=re.compile(r"^Advice \(\d+\)"))).to_have_attribute("aria-selected", "true")
    opened.pictures({"panel": panel}, "diagnosed", artifacts)
    panel.get_by_role("tab", name="Trials").click()
    export = panel.locator(".widget-vbox", has=opened.page.get_by_role("button", name="Export")).last
    expect(export).to_contain_text(re.compile(r"\d+ trials? of slow, newest first"))
    opened.pictures({"export": export}, "diagnosed", artifacts)
    assert opened.errors() == []
