"""The chart helper: what it writes follows the page, leaks nothing, and leaves matplotlib as it found it."""

import io
import re
import threading
from xml.etree import ElementTree

import matplotlib as mpl
import matplotlib.image
import numpy as np
import pytest

from kit.charts.style import BLUE, INK, PAPER, add_axes, drawing, figure, png, still, svg


@pytest.fixture
def chart():
    made = figure(6.4, 2.6)
    axes = add_axes(made, (0.1, 0.2, 0.86, 0.7), title="memory", x="step", y="GiB")
    with drawing():
        axes.plot([0, 1, 2], [1, 3, 2], color=BLUE, marker="o", markeredgecolor=PAPER, label="rank 0")
        axes.legend()
    return made


def test_svg_is_well_formed_and_says_what_it_shows(chart):
    root = ElementTree.fromstring(svg(chart, 'peak < 2 "GiB" & rising'))
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == 'peak < 2 "GiB" & rising'
    assert (root.attrib["width"], root.attrib["height"]) == ("640", "260")


def test_svg_takes_its_colours_from_the_page(chart):
    text = svg(chart, "chart")
    assert INK not in text
    assert PAPER not in text
    assert "currentColor" in text
    assert "var(--jp-layout-color0, #fff)" in text
    assert BLUE.lower() in text.lower()
    assert "#000" not in text


def test_svg_keeps_text_as_text_and_carries_no_metadata_and_no_style_sheet(chart):
    text = svg(chart, "chart")
    assert ">memory</text>" in text
    assert "<metadata" not in text
    assert "<style" not in text


def test_the_same_chart_gives_the_same_svg_and_another_label_other_ids(chart):
    first, again, other = svg(chart, "one"), svg(chart, "one"), svg(chart, "two")
    assert first == again
    ids = [set(re.findall(r' id="([^"]+)"', text)) for text in (first, other)]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_every_id_of_a_chart_is_unique_and_every_reference_resolves(chart):
    text = svg(chart, "chart")
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)


def test_png_is_a_picture_on_white_of_the_size_asked_for(chart):
    from PIL import Image

    picture = Image.open(io.BytesIO(png(chart)))
    assert picture.size == (640, 260)
    assert picture.convert("RGBA").getpixel((1, 1)) == (255, 255, 255, 255)


def luminance(pixels):
    """As WCAG defines it."""
    linear = np.where(pixels <= 0.04045, pixels / 12.92, ((pixels + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def test_a_still_has_no_background_and_reads_on_white_and_on_black(chart):
    pixels = mpl.image.imread(io.BytesIO(still(chart)))
    assert pixels.shape == (260, 640, 4)
    assert pixels[0, 0, 3] == 0
    letters = pixels[(pixels[..., 3] == 1) & (np.ptp(pixels[..., :3], axis=-1) < 0.01)]
    assert len(letters), "solid grey: axes and letters"
    grey = luminance(letters[0, :3])
    assert min(1.05 / (grey + 0.05), (grey + 0.05) / (luminance(np.full(3, 0x11 / 255)) + 0.05)) > 4
    ink = np.array([int(INK[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    assert not (np.abs(pixels[..., :3] - ink) < 0.01).all(axis=-1).any()


def test_a_chart_is_drawn_alike_whatever_style_the_user_has_switched_on(chart):
    def draw():
        made = figure(3, 2)
        axes = add_axes(made, (0.2, 0.2, 0.7, 0.7), title="t", x="x")
        axes.set_xlim(0, 1)
        return svg(made, "chart")

    plain = draw()
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "black", "axes.grid": True, "lines.linewidth": 9}):
        assert draw() == plain


def test_settings_are_given_back_even_after_an_error(chart):
    before = dict(mpl.rcParams)
    with drawing():
        assert mpl.rcParams["text.color"] == INK
    with pytest.raises(KeyError), drawing():
        raise KeyError
    svg(chart, "chart")
    png(chart)
    assert dict(mpl.rcParams) == before


def test_ticks_that_appear_later_keep_the_house_colour(chart):
    svg(chart, "chart")
    chart.axes[0].set_xlim(0, 1000)
    chart.axes[0].set_ylim(0, 1000)
    text = svg(chart, "chart")
    assert "1000</text>" in text
    assert "#000000" not in text


def test_charts_drawn_from_many_threads_come_out_whole(chart):
    wanted, results = svg(chart, "chart"), []

    def draw():
        results.extend(svg(chart, "chart") for _ in range(4))

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [wanted] * 16


def test_a_notebook_shows_a_figure_as_a_sharp_picture():
    from IPython.core.formatters import DisplayFormatter

    data, metadata = DisplayFormatter().format(figure(4.0, 3.0))
    assert data["image/png"][:8] == b"\x89PNG\r\n\x1a\n"
    assert metadata["image/png"] == {"width": 400, "height": 300}
