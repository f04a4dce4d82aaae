"""Trials on the config's own data and model: nothing given but the config."""

import re
import subprocess
import sys

import pytest
from trial_fixtures import last_steps
from waiting import PATIENCE_SECONDS

from kit.config import Config
from kit.errors import ConfigError
from kit.memory.alongside import fit
from kit.records.results import results
from kit.trial.directory import find_runs

SECONDS = PATIENCE_SECONDS


@pytest.mark.parametrize(
    ("ranks", "strategy", "workers"),
    [(1, None, 0), (1, None, 2), (2, "ddp", 0), pytest.param(2, "fsdp", 1, marks=pytest.mark.slow)],
)
def test_a_config_alone_makes_a_trial_of_its_own_model_and_data(own, ranks, strategy, workers):
    trial = fit(own(ranks, strategy, **{"loader.num_workers": workers})).wait(SECONDS)
    assert trial.state == "COMPLETE"
    assert last_steps(trial) == [8] * ranks
    counters = trial.event("fit_ended", "counters")
    assert counters["samples"] >= 16
    assert counters["requests"] > 0
    assert counters["bytes_read"] > 0


@pytest.mark.slow
def test_absent_chunks_of_another_writer_are_counted_over_ranks_and_processes_up_to_the_row(own, tmp_path):
    changes = {
        "loader.num_workers": 1, "loader.batch_size": 1, "data.patch": {"time": 8, "lat": 16, "lon": 16},
        "data.samples_per_epoch": 2, "trial.max_steps": 1, "trial.warmup_steps": 0,
    }  # fmt: skip
    config = own(2, "ddp", **changes)
    (tmp_path / "store.zarr" / "sst" / "c" / "0" / "1" / "1").unlink()
    (tmp_path / "store.zarr" / "ssh" / "c" / "1" / "0" / "1").unlink()
    trial = fit(config).wait(SECONDS)
    (row,) = results(config.trial.folder)
    assert (row["chunks_filled"], row["chunks_decoded"]) == (2 * 2, 2 * 14)
    assert any("4 of the 32 chunks read" in line for line in repr(trial).splitlines())
    assert any("data.strict" in sentence for sentence in trial.warnings)


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


@pytest.mark.slow
def test_the_kernel_needs_no_torch_for_a_trial_of_its_own(own):
    code = (
        "import sys; from kit.config import Config; from kit.memory.alongside import fit\n"
        f"state = fit(Config.from_yaml(sys.stdin.read())).wait({SECONDS}).state\n"
        "print(state, 'torch' in sys.modules)"
    )
    text = own().to_yaml(comments=False)
    assert Config.from_yaml(text) == own()
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["COMPLETE", "False"], done.stderr
