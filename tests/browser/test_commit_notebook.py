"""The notebook on committing as its reader meets it: a file and its lines, a run beside it, and equal losses."""

import re

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


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
    ran = page.locator(".jp-OutputArea-output", has_text="COMPLETE, 32 steps").first
    expect(ran).to_contain_text("of them training")
    streamed = page.locator(".jp-OutputArea-output", has_text="epoch 1, step 32, loss").first
    committed.locator("summary").click()

    tables = page.locator(".jp-OutputArea-output table")
    places = {"results": tables.first, "committed": committed.locator("pre").first, "streamed": streamed.locator("pre")}
    places |= {"ran": ran.locator("pre"), "losses": charts.first, "big": charts.nth(1), "recommended": tables.last}
    opened.pictures(places, "commit", artifacts)
    assert opened.errors() == []
    assert wrong == []
    (report,) = project.glob("notebooks/forecast.html")
    assert "<svg" in report.read_text()
