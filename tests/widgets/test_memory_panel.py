"""The memory panel without a kernel or a browser: move, wait, read; its models replay recordings made by hand."""

import html
import pickle
import re
import threading
from types import SimpleNamespace

import pytest
from recordings import training_recording
from waiting import PATIENCE_SECONDS

from kit.config import Config
from kit.errors import ConfigError, HardwareError, PlanError, Problem, TrialError
from kit.memory.batch_model import MOST_SAMPLES
from kit.memory.replay.cards import target_of
from kit.memory.replay.estimate import estimate
from kit.memory.replay.scaling import BatchScaling
from kit.widgets.memory_panel import MemoryPanel, StepsSlider, marks, memory_panel
from kit.widgets.memory_view import CardAnswer, cards_html, headline, largest_replayed, sentence

MIB = 1 << 20
WAIT = PATIENCE_SECONDS
CARDS = ("T4-16GB", "H100-80GB")


class Replays:
    """Answers from two recordings: what a MemoryModel does once its dry runs are done."""

    reason = ""

    def __init__(self, config, device, **facts):
        self.target = target_of(device)
        width = 8 * MIB if config.hardware.precision == "bf16-mixed" else 16 * MIB
        rounding = self.target.rounding_bytes
        pair = (training_recording(size, 12, width, rounding_bytes=rounding, **facts) for size in (2, 3))
        self.scaling = BatchScaling(*pair)
        self.asked = []

    def estimate(self, batch_size=None, *, accumulate=None):
        self.asked.append(batch_size)
        return estimate(self.scaling.at(batch_size), self.target)

    def knows(self, *, accumulate=None):
        return True


class Bench:
    """Makes models, counts them, and holds them back while `gate` is closed."""

    def __init__(self, error=None, **facts):
        self.made, self.gate, self.error, self.facts = [], threading.Event(), error, facts
        self.started = threading.Event()
        self.gate.set()

    def __call__(self, config, device):
        self.started.set()
        assert self.gate.wait(WAIT)
        if self.error is not None:
            raise self.error
        self.made.append((config.hardware.precision, device))
        return Replays(config, device, **self.facts)

    def panel(self, device="T4", **changes):
        config = Config().replace({"loader.batch_size": 4, **changes})
        return MemoryPanel(config, "kit.models:GPT", device=device, cards=CARDS, make_model=self)


@pytest.fixture
def bench():
    return Bench()


def words(view):
    return re.search(r"role='status'[^>]*>([^<]*)<", view.status.value)[1]


def slide(panel, value, path="loader.batch_size"):
    panel.sliders[path].widget.value = value


# -- asking and answering


def test_it_answers_as_soon_as_it_is_made_and_says_the_verdict_and_the_peak(bench):
    panel = bench.panel().wait(WAIT)
    assert panel.estimate.batch_size == 4
    assert not panel.view.waiting
    verdict, _, peak = headline(panel.estimate)
    assert verdict.startswith("fits on T4-16GB: ")
    assert verdict in panel.view.headline.value
    assert re.fullmatch(r"peak: [\d.]+ [MG]iB in \w+, at \w+ in layer11", peak)
    assert "activations" in panel.view.bar.value
    assert "The peak is" in panel.view.timeline.value
    assert words(panel.view).startswith("recorded and answered")
    slide(panel, 5)
    panel.wait(WAIT)
    assert words(panel.view).startswith("answered in")


def test_a_slider_needs_no_new_model_and_the_last_value_wins(bench):
    panel = bench.panel().wait(WAIT)
    for size in (8, 16, 32, 64, 128):
        slide(panel, size)
    panel.wait(WAIT)
    assert panel.estimate.batch_size == panel.config.loader.batch_size == 128
    assert bench.made == [("auto", "T4-16GB"), ("auto", "H100-80GB")]


def test_values_that_were_only_passed_are_left_out(bench):
    panel = bench.panel()
    panel.wait(WAIT)
    model = panel.part.answers._models[next(iter(panel.part.answers._models))]
    held, go_on = threading.Event(), threading.Event()
    real = model.estimate
    model.estimate = lambda *args, **named: (held.set(), go_on.wait(WAIT), real(*args, **named))[-1]
    slide(panel, 5)
    assert held.wait(WAIT)
    model.asked.clear()
    for size in (6, 7, 8, 9):
        slide(panel, size)
    go_on.set()
    panel.wait(WAIT)
    assert 5 in model.asked
    assert 9 in model.asked
    assert not {6, 7, 8} & set(model.asked)
    assert panel.estimate.batch_size == 9


def test_another_precision_is_recorded_anew_and_the_pictures_are_grey_meanwhile(bench):
    panel = bench.panel().wait(WAIT)
    before = panel.view.bar.value
    bench.gate.clear()
    bench.started.clear()
    panel.form.controls["hardware.precision"].value = "bf16-mixed"
    assert bench.started.wait(WAIT)
    assert panel.view.waiting
    assert re.search("^recording .*T4-16GB …$", words(panel.view))
    assert panel.view.bar.value == before
    bench.gate.set()
    panel.wait(WAIT)
    assert not panel.view.waiting
    assert panel.view.bar.value != before
    assert bench.made[-2:] == [("bf16-mixed", "T4-16GB"), ("bf16-mixed", "H100-80GB")]


def test_cards_stay_grey_until_they_are_judged_anew(bench):
    panel = bench.panel().wait(WAIT)
    assert not panel.view.cards_waiting
    seen = []
    panel.view.bar.observe(lambda _: seen.append(panel.view.cards_waiting), "value")
    slide(panel, 64)
    panel.wait(WAIT)
    assert seen == [True]
    assert not panel.view.cards_waiting


def test_going_back_costs_no_dry_run(bench):
    panel = bench.panel().wait(WAIT)
    for precision in ("bf16-mixed", "auto", "bf16-mixed"):
        panel.form.controls["hardware.precision"].value = precision
        panel.wait(WAIT)
    assert len(bench.made) == 4


def test_a_slider_moved_while_a_card_is_recorded_does_not_wait_for_it(bench):
    panel = bench.panel().wait(WAIT)
    bench.gate.clear()
    bench.started.clear()
    panel.part.answers._models.pop(next(key for key in panel.part.answers._models if key[1] == "H100-80GB"))
    shown = threading.Event()
    panel.view.bar.observe(lambda _: shown.set(), "value")
    slide(panel, 5)
    assert bench.started.wait(WAIT)  # the card's dry run has begun, and does not end
    shown.clear()
    slide(panel, 6)
    assert shown.wait(WAIT)
    assert panel.estimate.batch_size == 6
    bench.gate.set()
    panel.wait(WAIT)


# -- cards


def test_a_search_that_does_not_end_says_where_it_was_left():
    def fits_always(batch_size, accumulate):
        return SimpleNamespace(may_fit=True, complete=True)

    found = largest_replayed(SimpleNamespace(reason="", estimate=fits_always), 1)
    assert found == MOST_SAMPLES
    roomy = SimpleNamespace(verdict="fits")
    assert CardAnswer("H200-141GB", roomy, found).words == f"fits, largest batch {MOST_SAMPLES} or more"
    assert CardAnswer("H200-141GB", roomy, found - 1).words == f"fits, largest batch {MOST_SAMPLES - 1}"


def test_each_card_has_a_verdict_and_the_largest_batch_that_fits(bench):
    panel = bench.panel().wait(WAIT)
    t4, h100 = panel.cards
    assert (t4.name, h100.name) == CARDS
    assert t4.words == f"fits, largest batch {t4.largest_batch}"
    assert t4.largest_batch < h100.largest_batch
    panel.form.controls["loader.batch_size"].value = t4.largest_batch + 1
    panel.wait(WAIT)
    assert panel.cards[0].estimate.verdict != "fits"
    panel.form.controls["loader.batch_size"].value = t4.largest_batch
    panel.wait(WAIT)
    assert panel.estimate.fits


def test_too_much_is_said_in_bytes(bench):
    panel = bench.panel(**{"loader.batch_size": 300}).wait(WAIT)
    assert re.fullmatch(r"does not fit, [\d.]+ GiB .*, largest batch \d+", panel.cards[0].words)
    assert sentence(panel.cards).startswith("T4-16GB: does not fit, ")
    assert " · H100-80GB: fits, largest batch " in sentence(panel.cards)


def test_a_device_beside_the_cards_comes_first_among_them(bench):
    panel = bench.panel(device="24 GiB").wait(WAIT)
    assert [card.name for card in panel.cards] == ["24 GiB", *CARDS]
    panel.device = "h100"
    panel.wait(WAIT)
    assert panel.device == "H100-80GB"
    assert [card.name for card in panel.cards] == list(CARDS)


def test_boxes_are_told_by_sign_and_words_beside_colour(bench):
    panel = bench.panel(**{"loader.batch_size": 300}).wait(WAIT)
    boxes = cards_html(panel.cards)
    assert "✗" in boxes
    assert "✓" in boxes
    assert "does not fit" in boxes
    assert boxes.count("<li") == 2
    assert cards_html(panel.cards, "H100-80GB").count("aria-current") == 1


def test_a_card_that_cannot_be_asked_leaves_the_others():
    class Picky(Bench):
        def __call__(self, config, device):
            if device == "H100-80GB":
                raise HardwareError("no such format <there>")
            return super().__call__(config, device)

    panel = Picky().panel().wait(WAIT)
    assert panel.cards[0].largest_batch
    assert panel.cards[1].words == "HardwareError: no such format <there>"
    assert "<there>" not in panel.view.cards.value


def test_unknown_activations_have_no_largest_batch_and_are_never_said_to_fit():
    panel = Bench(unknown="operator mine::fused has no fake implementation").panel().wait(WAIT)
    assert panel.estimate.verdict == "unknown"
    assert panel.cards[0].words == "unknown"
    assert "activations unknown: operator mine::fused" in panel.view.headline.value
    assert "at least" in panel.view.headline.value


def test_the_largest_batch_is_not_searched_where_each_size_takes_a_dry_run():
    model = Replays(Config(), "T4")
    assert largest_replayed(model, 1) > 1
    model.reason = "the recordings differ"
    assert largest_replayed(model, 1) is None


def test_not_even_one_sample_is_said_so():
    answer = CardAnswer("T4-16GB", estimate(training_recording(1, 12, 1 << 30), target_of("T4")), 0)
    assert answer.words.endswith("even one sample")


# -- errors


def test_what_a_prediction_fails_on_is_said_and_the_pictures_stay_grey():
    panel = Bench(error=TrialError("ValueError: no such layer\nTraceback: line 1")).panel()
    with pytest.raises(TrialError, match="no such layer"):
        panel.wait(WAIT)
    assert panel.view.waiting
    assert words(panel.view) == "not predicted"
    shown, _, folded = panel.view.error.value.partition("<details")
    assert "no such layer" in shown
    assert "Traceback" in folded


def test_a_field_that_only_its_use_finds_wrong_has_the_reason_beside_it():
    bench = Bench(error=ConfigError([Problem("model.arguments", "GPT cannot be made: no argument 'widht'")]))
    panel = bench.panel()
    with pytest.raises(ConfigError, match="widht"):
        panel.wait(WAIT)
    assert "widht" in panel.form._notes["model.arguments"].value
    bench.error = None
    panel.device = "H100-80GB"
    panel.wait(WAIT)
    assert panel.form._notes["model.arguments"].value == ""
    assert panel.view.error.value == ""


class OnlyOnGpus(Bench):
    def __call__(self, config, device):
        if device == "this machine":
            raise HardwareError("16-mixed needs a GPU")
        return super().__call__(config, device)


def test_cards_are_judged_where_this_machine_computes_no_such_numbers():
    panel = OnlyOnGpus().panel("this machine", **{"hardware.precision": "16-mixed", "hardware.accelerator": "cpu"})
    with pytest.raises(HardwareError, match="16-mixed"):
        panel.wait(WAIT)
    verdicts = {answer.device: answer.estimate.verdict for answer in panel.cards if answer.estimate}
    assert set(verdicts) == set(CARDS)


def test_edits_that_do_not_fit_wait_beside_their_control(bench):
    panel = bench.panel().wait(WAIT)
    panel.form.controls["hardware.strategy"].value = "ddp"
    with pytest.raises(ConfigError, match="at least 2 devices"):
        panel.wait(WAIT)
    assert "at least 2 devices" in panel.form._notes["hardware.strategy"].value
    panel.form.controls["hardware.devices"].value = "8"
    panel.wait(WAIT)
    assert (panel.config.hardware.strategy, panel.config.hardware.devices) == ("ddp", 8)


def test_an_unknown_device_is_refused_with_the_closest(bench):
    with pytest.raises(PlanError, match="did you mean 'H100-80GB'"):
        memory_panel(Config(), device="H100-88GB")
    panel = bench.panel()
    with pytest.raises(PlanError):
        panel.device = "none such"
    assert panel.device == "T4-16GB"


# -- the same without clicks


def test_setting_the_config_moves_the_controls(bench):
    panel = bench.panel()
    panel.config = panel.config.replace({"loader.batch_size": 37, "hardware.precision": "bf16-mixed"})
    panel.wait(WAIT)
    assert panel.estimate.batch_size == 37
    assert panel.sliders["loader.batch_size"].widget.value == 37


def test_the_line_of_code_says_the_same(bench):
    panel = bench.panel()
    slide(panel, 12)
    call = 'kit.predict_memory(config.replace({"loader.batch_size": 12}), module, device="T4-16GB")'
    assert call in html.unescape(panel.code.value)
    own = MemoryPanel(Config(), None, "kit.testing:TinyData", device="T4", cards=(), make_model=bench)
    assert ".estimate(16)" in own.code.value
    for each in (panel, own):
        each.wait(WAIT)


def test_the_still_is_a_sentence_and_a_picture(bench):
    panel = bench.panel().wait(WAIT)
    text, picture = panel._still()
    assert text.startswith("fits on T4-16GB")
    assert "H100-80GB: fits" in text
    assert picture.startswith(b"\x89PNG")


def test_exports_are_a_picture_and_a_snapshot_for_the_memory_viewer(bench, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    panel = bench.panel().wait(WAIT)
    panel.buttons["PNG"].click()
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert words(panel.view) == "written: memory.png"
    panel.buttons["snapshot"].click()
    assert {"segments", "device_traces"} <= set(pickle.loads((tmp_path / "memory.pickle").read_bytes()))
    panel.save(tmp_path / "config.yaml")
    assert Config.load(tmp_path / "config.yaml") == panel.config


def test_nothing_is_written_while_nothing_is_predicted():
    panel = Bench(error=TrialError("broken")).panel()
    with pytest.raises(TrialError, match="broken"):
        panel.wait(WAIT)
    panel.buttons["PNG"].click()
    assert re.search(r"not written: .*nothing .*wait\(\)", words(panel.view))
    assert panel._still() == ("nothing predicted yet", None)


def test_waiting_has_an_end(bench):
    bench.gate.clear()
    panel = bench.panel()
    with pytest.raises(TimeoutError, match="it goes on"):
        panel.wait(0.01)
    assert panel.busy
    bench.gate.set()
    panel.wait(WAIT)
    assert not panel.busy


# -- the slider


def test_marks_are_every_number_while_small_and_eight_to_each_doubling():
    assert marks(20) == [*range(1, 17), 18, 20]
    assert marks(512)[-9:] == [256, 288, 320, 352, 384, 416, 448, 480, 512]
    assert marks(1) == [1]
    with pytest.raises(ValueError, match="at least 1"):
        marks(0)


def test_a_number_between_the_marks_gets_one():
    import ipywidgets

    field = ipywidgets.BoundedIntText(value=4, min=1, max=10_000)
    slider = StepsSlider(field, marks(64))
    for value in (51, 1000, 1, 64):
        field.value = value
        assert (field.value, slider.widget.value) == (value, value)
    slider.widget.value = 24
    assert field.value == 24
