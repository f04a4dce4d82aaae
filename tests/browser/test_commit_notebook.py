"""The notebook on committing as its reader meets it: a file and its lines, a run beside it, and equal losses."""

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def test_a_winner_becomes_a_file_that_runs_as_it_did(notebook, project, artifacts):
    opened = notebook("notebooks/07_commit.ipynb", width=1400, height=1500)
    page, wrong = opened.page, []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    opened.run_all(wait=False)
    charts = page.locator(".jp-OutputArea-output img:visible")
    expect(charts).to_have_count(2)
    expect(page.get_by_text(re.compile("forecast.html"))).to_have_count(2)
    assert opened.errors() == []

    committed = page.locator(".jp-OutputArea-output", has_text="the job script").or_(
        page.locator(".jp-OutputArea-output", has=page.locator("summary", has_text=".evidence.json"))
    ).first  # fmt: skip
    expect(committed).to_contain_text("python -m kit.train.cli fit --config committed/forecast-")
    committed.locator("summary").click()
    expect(committed).to_contain_text("seed_everything")
    # Which batch size wins is a matter of speed; an epoch of it is as many steps as its samples take.
    ran = page.locator(".jp-OutputArea-output", has_text=re.compile(r"COMPLETE, \d+ steps")).first
    expect(ran).to_contain_text("of them training")
    steps = re.search(r"COMPLETE, (\d+) steps", ran.inner_text())[1]
    streamed = page.locator(".jp-OutputArea-output", has_text=f"epoch 1, step {steps}, loss").first
    committed.locator("summary").click()

    tables = page.locator(".jp-OutputArea-output table")
    places = {"results": tables.first, "committed": committed.locator("pre").first, "streamed": streamed.locator("pre")}
    places |= {"ran": ran.locator("pre"), "losses": charts.first, "big": charts.nth(1), "recommended": tables.last}
    opened.pictures(places, "commit", artifacts)
    assert opened.errors() == []
    assert wrong == []
    (report,) = project.glob("notebooks/forecast.html")
    assert "<svg" in report.read_text()
