"""The page about a device that ran out of memory, from real trials under a limit on the CPU."""

import ast
import re
from html import unescape

import pytest
import torch
from lightning.pytorch import LightningModule
from test_report_page import Page
from torch import nn
from torch.utils.data import Dataset

import kit
from kit.config import Config
from kit.errors import TrialError
from kit.memory.replay.snapshot import load_snapshot
from kit.testing import TinyData, TinyModule
from kit.units import parse_bytes

pytestmark = pytest.mark.slow
MIB = 1 << 20
WAIT_SECONDS = 240


class Noise(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        return torch.full((16,), float(index))


class Wide(LightningModule):
    """Activations of 64 KiB a sample at a line of their own, little else."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 8192), nn.Linear(8192, 1)

    def training_step(self, batch, batch_idx):
        hidden = self.one(batch)
        return self.two(torch.tanh(hidden)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Leaking(Wide):
    """Keeps 4 MiB of every batch, which no dry run of two steps can tell."""

    def training_step(self, batch, batch_idx):
        if batch_idx >= 2:
            self.__dict__.setdefault("kept", []).append(torch.ones(MIB))
        return super().training_step(batch, batch_idx)


def ran_out(folder, module, limit_mib, **changes):
    values = {
        "hardware": {"accelerator": "cpu", "threads_per_rank": 1, "device_memory_bytes": limit_mib * MIB},
        "loader": {"batch_size": 128, "num_workers": 0},
        "trial": {"max_steps": 8, "warmup_steps": 1, "folder": str(folder), "predict_memory": False},
    }
    trial = kit.fit(Config.make(values).replace(changes), module, Noise)
    with pytest.raises(TrialError) as caught:
        trial.wait(WAIT_SECONDS)
    return trial, str(caught.value)


def table_of(text):
    """Owner to (blocks, predicted, held, ratio) as they stand on the page."""
    body = re.search(r"When memory ran out.*?<tbody>(.*?)</tbody>", text, re.DOTALL)[1]
    rows = re.findall(r"<tr.*?>(.*?)</tr>", body, re.DOTALL)
    cells = [[unescape(re.sub(r"<[^>]+>", "", cell)) for cell in re.findall(r"<t[dh].*?</t[dh]>", row)] for row in rows]
    return {name: rest for name, *rest in cells}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    trial, message = ran_out(tmp_path_factory.mktemp("wide"), Wide, 8)
    return trial, message, trial.memory_report(timeout_seconds=WAIT_SECONDS).read_text(encoding="utf-8")


def test_the_failure_names_the_file_and_the_page(wide):
    trial, message, _ = wide
    assert trial.cause == "device_oom"
    assert "trial.memory_report()" in message
    assert trial.paths.memory_snapshot(0).name in message
    assert "trial.memory_report()" in kit.results(trial.run_directory.parent, kind="all")[0]["message"]
    failed = trial.event("out_of_memory")
    assert failed["device_allocated_bytes"] <= 8 * MIB < failed["device_allocated_bytes"] + failed["asked_bytes"]


def test_what_was_held_is_that_of_the_prediction_line_by_line(wide):
    trial, _, text = wide
    table = table_of(text)
    line = Wide.training_step.__code__.co_firstlineno + 1
    assert table[f"test_memory_report.py, line {line}, in training_step"][1:] == ["4 MiB", "4 MiB", "1.00"]
    assert table["together"][3] == "1.00"
    memory = load_snapshot(trial.paths.memory_snapshot(0))
    assert parse_bytes(table["together"][2]) == pytest.approx(memory.allocated_bytes, rel=0.01)
    assert parse_bytes(table["parameters and buffers"][2]) == pytest.approx((17 * 8192 + 8193) * 4, rel=0.01)


def test_the_smallest_change_is_a_line_that_runs_and_fits(wide):
    trial, _, text = wide
    advice = unescape(text).partition("The smallest change that fits")[2]
    changes = re.search(r"kit\.fit\(trial\.config\.replace\((\{.*?\})\), module, data\)", advice)
    assert changes, advice
    config = trial.config.replace(ast.literal_eval(changes[1]))
    assert kit.fit(config, Wide, Noise).wait(WAIT_SECONDS).state == "COMPLETE"


def test_the_page_opens_offline_in_light_and_dark(wide):
    _, _, text = wide
    page = Page(text)
    assert [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe")] == []
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert len(page.all("svg")) == 1
    assert str(kit.registry.REPOSITORY) not in text


def test_what_no_prediction_knows_is_named_with_its_line(tmp_path):
    trial, _ = ran_out(tmp_path, Leaking, 28)
    text = unescape(trial.memory_report(tmp_path / "own.html").read_text(encoding="utf-8"))
    line = Leaking.training_step.__code__.co_firstlineno + 2
    assert f"test_memory_report.py, line {line}, in training_step" in re.search(r"not predicted: (.*?)</li>", text)[1]
    assert table_of(text)[f"test_memory_report.py, line {line}, in training_step"][1] == "–"
    assert "taken off" in text


def test_a_trial_found_again_has_its_page_and_without_its_code_a_shorter_one(wide, tmp_path):
    trial, _, text = wide
    again = kit.Trial.open(trial.run_directory)
    assert table_of(again.memory_report(tmp_path / "new" / "again.html").read_text()) == table_of(text)
    payload = trial.paths.payload.read_bytes()
    trial.paths.payload.unlink()
    try:
        shorter = again.memory_report(tmp_path / "shorter.html").read_text()
    finally:
        trial.paths.payload.write_bytes(payload)
    assert "nothing is predicted" in shorter
    assert table_of(shorter)["together"][1:] == ["–", table_of(text)["together"][2], "–"]


def test_a_trial_that_did_not_run_out_has_no_page_and_no_file(tmp_path):
    values = {"hardware": {"accelerator": "cpu"}, "trial": {"max_steps": 2, "warmup_steps": 1, "folder": str(tmp_path)}}
    trial = kit.fit(Config.make(values).replace({"trial.predict_memory": False}), TinyModule, TinyData)
    trial.wait(WAIT_SECONDS)
    with pytest.raises(TrialError, match="no snapshot"):
        trial.memory_report()
    assert not trial.paths.memory_snapshot(0).exists()
