"""The book: every notebook as a page that asks nobody, with its pictures, and an index of questions."""

import re

import nbformat

from kit.course.book import bind

PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
VIEW = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "Run this cell again"}


def notebook(title, *bundles):
    outputs = [nbformat.v4.new_output("display_data", data=bundle) for bundle in bundles]
    cell = nbformat.v4.new_code_cell("kit.hardware()", outputs=outputs)
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"# {title}\n\nText."), cell])


def test_pages_have_their_pictures_their_neighbours_and_no_request(tmp_path):
    shown = [{"text/html": "<table><tr><td>7</td></tr></table>", "text/plain": "7"}, VIEW]
    first = notebook("How <fast>?", {"image/png": PICTURE, "text/plain": "a figure"}, *shown)
    index = bind({"00_a": first, "01_b": notebook("And then?")}, tmp_path / "book")
    page, last = (tmp_path / "book" / "00_a.html").read_text(), (tmp_path / "book" / "01_b.html").read_text()
    assert re.findall(r'href="(.*?)"', index.read_text()) == ["00_a.html", "01_b.html"]
    assert "How &lt;fast&gt;?" in index.read_text()
    assert PICTURE in page.replace("\n", "")
    assert "<td>7</td>" in page
    assert "Run this cell again" not in page
    assert 'href="01_b.html">next' in page
    assert 'href="00_a.html">before' in last
    assert "--jp-ui-font-color1: #ddd" in page, "what kit shows is read on a dark page"
    assert "<script" not in page
    assert "http://" not in page
    assert "https://" not in page
