"""Trials on the config's own data and model: nothing given but the config."""

import re
import subprocess
import sys

import pytest
from trial_fixtures import last_steps
from waiting import PATIENCE_SECONDS

from kit.config import Config
from kit.errors import ConfigError
from kit.run.paths import find_runs
from kit.run.trial import fit

SECONDS = PATIENCE_SECONDS


@pytest.mark.parametrize(("ranks", "strategy", "workers"), [(1, None, 0), (1, None, 2), (2, "ddp", 0), (2, "fsdp", 1)])
def test_a_config_alone_makes_a_trial_of_its_own_model_and_data(own, ranks, strategy, workers):
    trial = fit(own(ranks, strategy, **{"loader.num_workers": workers})).wait(SECONDS)
    assert trial.state == "COMPLETE"
    assert last_steps(trial) == [8] * ranks
    counters = trial.event("fit_ended", "counters")
    assert counters["samples"] >= 16
    assert counters["requests"] > 0
    assert counters["bytes_read"] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"loader.batch_size": 100, "loader.drop_last": True},
        {"data.standardize": True},
        {"data.variables": ["salt"]},
        {"data.patch": {"time": 99}},
    ],
    ids=str,
)
def test_what_does_not_fit_the_data_is_refused_before_anything_is_started(own, changes):
    asked = own(**changes)
    with pytest.raises(ConfigError, match=re.escape(next(iter(changes)))):
        fit(asked)
    assert list(find_runs(asked.trial.folder)) == []


def test_the_kernel_needs_no_torch_for_a_trial_of_its_own(own):
    code = (
        "import sys; from kit.config import Config; from kit.run.trial import fit\n"
        f"state = fit(Config.from_yaml(sys.stdin.read())).wait({SECONDS}).state\n"
        "print(state, 'torch' in sys.modules)"
    )
    text = own().to_yaml(comments=False)
    assert Config.from_yaml(text) == own()
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["COMPLETE", "False"], done.stderr
