"""The script of datasets/topics: in one process and in two, it finds the topics that a fit from Python finds."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from properties import nightly

import kit

SCRIPT = Path(kit.__file__).parents[1] / "datasets" / "topics" / "train.py"
SIZES = {"documents": 400, "terms": 120, "topics": 4}
LENGTH, EPOCHS, SEED = 150.0, 12, 3
STEPS = 300
"""Of 16 documents."""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the script on CPUs alone, in a process of its own at night; what it writes to its output."""

    def start(**options):
        asked = {**SIZES, "length": LENGTH, "epochs": EPOCHS, "seed": SEED, "folder": tmp_path, **options}
        line = [str(part) for name, value in asked.items() for part in (f"--{name.replace('_', '-')}", value)]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        if not nightly():
            monkeypatch.setattr(sys, "argv", [str(SCRIPT), *line])
            runpy.run_path(str(SCRIPT), run_name="__main__")
            return capsys.readouterr().out
        environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(SCRIPT), *line]
        how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 300}
        return subprocess.run(command, check=True, **how).stdout

    return start


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_one_process_and_two_find_the_topics_that_a_fit_from_python_finds(run, tmp_path):
    said = run(batch_size=16)
    one = kit.open_topics(tmp_path / "topics.npz")
    (source,) = tmp_path.glob("corpus-*.npy")
    corpus = kit.Corpus(**SIZES, length=LENGTH, seed=SEED)
    assert np.array_equal(np.load(source), corpus.rows(0, SIZES["documents"]))
    recovery = kit.compare_topics(one, corpus.truth)
    assert recovery.median_cosine > 0.95
    for word in (f"COMPLETE, step {STEPS}", "at the peak", "GiB", str(recovery).splitlines()[0]):
        assert word in said
    figures = [tmp_path / f"{name}.png" for name in ("loss", "structure", "terms")]
    assert all(figure.read_bytes().startswith(b"\x89PNG") for figure in figures)

    config = kit.Config.load(SCRIPT.with_name("recipe.yaml")).replace({
        "loader.batch_size": 16, "data.arguments": {"source": str(source)}, "training.seed": SEED,
        "model.arguments": {**SIZES, "save_path": str(tmp_path / "here.npz")},
        "trial.max_steps": STEPS, "trial.folder": str(tmp_path / "runs"),
        "trial.predict_memory": False,
    })  # fmt: skip
    kit.fit(config, None, "kit.data:RowData").wait()
    here = kit.open_topics(tmp_path / "here.npz")
    np.testing.assert_allclose(one.terms, here.terms, atol=1e-4)
    np.testing.assert_allclose(one.shares, here.shares, atol=1e-3)

    written = source.stat().st_mtime_ns
    assert "2 ranks share them" in run(batch_size=8, devices=2)
    assert source.stat().st_mtime_ns == written  # the corpus of the same settings is used again
    two = kit.open_topics(tmp_path / "topics.npz")
    np.testing.assert_allclose(two.terms, one.terms, atol=1e-2)
    assert kit.compare_topics(two, corpus.truth).median_cosine > 0.95
    assert sorted(path.name for path in tmp_path.glob("*.npz")) == ["here.npz", "topics.npz"]


def test_what_is_wrong_with_the_command_line_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--topics", "0", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code.startswith("ConfigError: topics: ")
    assert not [*tmp_path.iterdir()]
