"""A report in a browser without network, opened as a file: nothing is asked for, nothing is wider than the page."""

import pytest

import kit
from kit.errors import TrialError
from kit.testing import TinyData, TinyModule

pytestmark = pytest.mark.browser

SIZES = ((1000, "light"), (800, "dark"))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Three configs, one of them on two ranks, and one that fails."""
    folder = tmp_path_factory.mktemp("report")
    asked = kit.Config().replace(
        {
            "name": "plain", "trial.folder": str(folder / "runs"), "trial.max_steps": 24, "hardware.accelerator": "cpu",
            "hardware.threads_per_rank": 1, "trial.predict_memory": False, "model.arguments": {"seconds": 0.004},
        }
    )  # fmt: skip
    for changes in (
        {}, {}, {"name": "accumulate", "levers.accumulate_grad_batches": 4},
        {"name": "two-ranks", "hardware.devices": 2, "hardware.strategy": "ddp"},
    ):  # fmt: skip
        kit.fit(asked.replace(changes), TinyModule, TinyData).wait()
    with pytest.raises(TrialError):
        kit.fit(asked.replace({"name": "faulty"}), "faulty:FaultyModule", TinyData).wait()
    return kit.html_report(folder / "runs", folder / "report.html", title="Trials of a workshop")


@pytest.fixture
def open_report(chromium, report):
    """A function that opens it offline; what was asked for and what went wrong is looked at in the end."""
    contexts, asked, wrong = [], [], []

    def opened(width, scheme="light"):
        context = chromium.new_context(viewport={"width": width, "height": 1400}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(report.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert set(asked) == {report.as_uri()}
    assert wrong == []


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_a_report_opens_offline_and_fits_the_page(open_report, width, scheme, artifacts):
    page = open_report(width, scheme)
    assert page.title() == "Trials of a workshop"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for box in page.locator("svg").all():
        place = box.bounding_box()
        assert place["width"] > 300
        assert place["x"] + place["width"] <= width
    page.screenshot(path=artifacts / f"html_report_{width}_{scheme}.png", full_page=True)


def test_tables_fit_a_narrow_page_without_scrolling(open_report):
    page = open_report(800)
    too_wide = "boxes => boxes.filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.innerText)"
    assert page.locator(".wide").evaluate_all(too_wide) == []


def test_text_stands_out_from_the_page_on_light_and_on_dark(open_report):
    colours = "([a, b]) => [getComputedStyle(document.querySelector(a)).color, getComputedStyle(document.body)[b]]"
    for scheme in ("light", "dark"):
        page = open_report(1000, scheme)
        for place in ("h1", "td", "figcaption", "svg text", "summary"):
            text, ground = page.evaluate(colours, [place, "backgroundColor"])
            assert contrast(numbers(text), numbers(ground)) >= 4.5, (scheme, place, text, ground)


def test_on_paper_it_is_dark_on_white_whatever_the_screen(open_report, artifacts):
    page = open_report(800, "dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('svg')).color") == "rgb(0, 0, 0)"
    page.screenshot(path=artifacts / "html_report_print.png", full_page=True)


def test_what_is_folded_opens_by_keyboard(open_report):
    page = open_report(1000)
    summary = page.locator("summary", has_text="the whole config of plain").first
    summary.focus()
    summary.press("Enter")
    page.get_by_text("accumulate_grad_batches: 1").first.wait_for()


def numbers(colour):
    return [int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]


def contrast(one, other):
    """As WCAG 2 defines it."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour):
    parts = [value / 255 for value in colour]
    red, green, blue = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
