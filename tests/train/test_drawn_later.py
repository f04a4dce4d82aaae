"""torchmetrics without matplotlib until something is drawn, as the warm process imports it."""

import subprocess
import sys

import pytest

CODE = """
import sys
from kit.train.one_lightning import drawn_later
with drawn_later():
    import torchmetrics
assert not any(name.split(".")[0] == "matplotlib" for name in sys.modules)
assert not any(type(finder).__name__ == "_DrawsLater" for finder in sys.meta_path)
metric = torchmetrics.MeanMetric()
metric.update(2.0)
import matplotlib
matplotlib.use("Agg")
figure, axes = metric.plot()
from matplotlib.axes import Axes
from matplotlib.figure import Figure
assert isinstance(figure, Figure) and isinstance(axes, Axes)
print(len(axes.lines))
"""


@pytest.mark.slow
def test_a_metric_draws_with_a_matplotlib_that_was_not_there_when_it_was_imported():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr
