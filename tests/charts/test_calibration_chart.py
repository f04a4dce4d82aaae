from kit.charts.compare import calibration_figure
from kit.charts.style import VERMILION, svg
from kit.studies.calibration.result import Calibration
from kit.studies.calibration.rules import ENOUGH, LoaderSetting, Measurement


def calibration(*speeds, chosen=None):
    items = tuple(
        Measurement(
            setting=LoaderSetting(num_workers=workers, prefetch_factor=2), batches_per_second=speed, batches=9,
            seconds=1.0, error=0.1, first_batch_seconds=0.1, whole_seconds=1.2,
        )
        for workers, speed in enumerate(speeds)
    )  # fmt: skip
    return Calibration(chosen=None if chosen is None else items[chosen].setting, measured=items)


def test_every_setting_has_a_bar_from_zero_and_the_chosen_one_is_marked():
    figure = calibration_figure(calibration(10.0, 28.0, 30.0, chosen=1))
    (axes,) = figure.axes
    bars = [bar for bars in axes.containers if hasattr(bars, "patches") for bar in bars]
    assert [bar.get_width() for bar in bars] == [10.0, 28.0, 30.0]
    assert axes.get_xlim()[0] == 0
    texts = [text.get_text() for text in axes.texts]
    assert [text for text in texts if "chosen" in text] == ["28 ← chosen"]
    import matplotlib.colors

    assert [matplotlib.colors.to_hex(bar.get_facecolor()).upper() for bar in bars].count(VERMILION) == 1
    (line,) = (line for line in axes.lines if line.get_linestyle() == "--")
    assert line.get_xdata()[0] == ENOUGH * 30.0


def test_without_a_measurement_there_is_an_empty_chart():
    assert "<svg" in svg(calibration_figure(calibration()), "nothing")
