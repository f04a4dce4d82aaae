"""The last notebook as a learner meets it: guesses of one's own, the table of a book, and one file to hand in."""

import json
import re

import pytest
from playwright.sync_api import expect
from waiting import wait_until

from kit.units import parse_bytes

pytestmark = pytest.mark.browser

GUESSES = {"plain": "4 GiB", "bf16": "2 GiB", "native": "2 GiB", "fused": "1 GiB"}


def test_guesses_stand_beside_predictions_and_published_figures(notebook, project, artifacts):
    file = project / "notebooks" / "12_published.ipynb"
    book = json.loads(file.read_text())
    for cell in book["cells"]:
        source = "".join(cell["source"])
        for name, size in GUESSES.items():
            source = re.sub(rf'^({name} = kit.course.guess\(".*?", )None', rf'\1"{size}"', source, flags=re.MULTILINE)
        cell["source"] = source
    file.write_text(json.dumps(book))
    opened = notebook("notebooks/12_published.ipynb", width=1280, height=1400)
    opened.run_all(wait=False)
    page = opened.page
    chart = page.locator(".jp-OutputArea-output img:visible")
    expect(chart).to_have_count(1)
    assert opened.errors() == []
    compared = page.locator("table", has_text="your guess")
    rows = [row.locator("th, td").all_inner_texts() for row in compared.last.locator("tbody tr").all()]
    assert [row[1] for row in rows] == [*GUESSES.values(), "–"]
    predicted = [parse_bytes(row[2]) for row in rows[:4]]
    assert predicted == sorted(predicted, reverse=True), "each lever saves"
    assert [row[3] for row in rows[:4]] == ["26.3 GiB", "13.8 GiB", "11.6 GiB", "5.9 GiB"]
    expect(page.locator("table caption", has_text="4 of 5 questions guessed")).to_be_visible()

    (handed_in,) = wait_until(lambda: [path.read_text() for path in project.rglob("guesses.html")])
    assert json.loads(re.search('id="guesses">(.*?)</script>', handed_in)[1])["guesses"][0]["first"] == 4 << 30
    solution = page.locator("details", has_text="Solution 1")
    expect(solution.locator("pre")).to_be_hidden()
    solution.locator("summary").click()
    expect(solution.locator("pre")).to_be_visible()
    opened.pictures({"score": chart, "rows": compared.last}, "course", artifacts)
    assert opened.errors() == []
