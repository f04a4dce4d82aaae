"""A committed file run from here: as its trial, beside the kernel, and from the cloud when its machine is lost."""

import os
import re
import shlex
import shutil

import committed_parts as parts
import pytest

import kit
from kit.charts.trial import Losses, loss_figure, loss_info
from kit.checkpoints.uploading import BundleStore
from kit.errors import ConfigError, HardwareError, TrialError
from kit.machine.endpoints import VARIABLE

pytestmark = pytest.mark.timeout(400)
ALONE = {"hardware.devices": 1, "hardware.strategy": "none", "training.max_epochs": 2, "data.samples_per_epoch": 16}
SECONDS = 300


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """The config of one rank, 16 batches in 2 epochs, in a project folder that is the working folder."""
    monkeypatch.chdir(tmp_path)
    return parts.make_project(tmp_path).replace({**ALONE, "trial.max_steps": 16})


@pytest.mark.slow
def test_it_runs_as_the_trial_did_and_says_what_it_does(alone, monkeypatch, capsys):
    trial = kit.fit(alone).wait()
    committed = kit.commit(alone, trial)
    monkeypatch.setenv("SLURM_NTASKS", "7")  # of an allocation that is not this run's
    run = committed.run().wait(SECONDS)
    assert run.state == "COMPLETE"
    assert (run.steps, len(run.losses), run.first_batch) == (16, 16, 0)
    parts.assert_exact(loss_info(trial, run), 16)
    assert 0 < run.training_seconds < run.seconds
    shown = capsys.readouterr().out
    assert "epoch 2, step 16, loss" in shown
    assert "COMPLETE, 16 steps" in repr(run)
    assert committed.launch.python in repr(run)
    assert run.log.name in repr(run)
    assert str(kit.config.project_folder()) not in repr(run)
    assert f"{run.losses[-1]:.4g}" in repr(run)
    assert "Tip" not in shown
    assert "Warning" not in shown


@pytest.mark.slow
def test_what_fails_says_why_and_the_kernel_goes_on(alone, capsys):
    committed = kit.commit(alone)
    committed.file.write_text(committed.text.replace("depth: 1\ndata:", "dept: 1\ndata:", 1))
    run = committed.run()
    with pytest.raises(TrialError, match=r"model.init_args.dept: .*depth.*exit status 1") as error:
        run.wait(SECONDS)
    assert run.state == "FAILED"
    assert str(run.log) in error.value.details


def test_one_that_is_stopped_before_it_began_ends(alone):
    run = kit.commit(alone).run()
    run.kill()
    assert run.wait(SECONDS, echo=False).state == "STOPPED"
    assert run.losses == []


def test_a_file_of_several_nodes_is_refused_with_the_line_for_each(alone):
    committed = kit.commit(alone.replace({"commit.nodes": 2, "hardware.strategy": "ddp", "hardware.devices": 2}))
    with pytest.raises(HardwareError, match=r"is for 2 nodes.*torchrun_nodes"):
        committed.run()


def test_what_an_earlier_run_left_is_moved_aside_and_not_lost(alone):
    committed = kit.commit(alone)
    output = committed.file.parents[1] / "output" / committed.file.stem
    for text in ("first", "second"):
        output.mkdir(parents=True)
        (output / "kept.txt").write_text(text)
        run = committed.run(anew=True)
        run.kill()
        run.wait(SECONDS, echo=False)
    found = sorted(path.read_text() for path in output.parent.glob("*/kept.txt"))
    assert found == ["first", "second"]
    assert not output.exists()


# -- a machine is lost


@pytest.mark.slow
def test_on_another_machine_the_same_file_goes_on_from_the_copy_of_its_last_checkpoint(
    alone, cloud, tmp_path, monkeypatch, capsys
):
    url = cloud.url("copies/run")
    changes = {"checkpoint.url": url, "checkpoint.every_seconds": 0, "commit.checkpoint_every_steps": 2}
    config = alone.replace(changes)
    unbroken = kit.fit(config).wait()
    committed = kit.commit(config, unbroken)
    lost = [*parts.QUIET, "--trainer.callbacks+=losses.Lost", "--trainer.callbacks.step=11"]
    line = [*shlex.split(committed.launch.python), *lost, f"--trainer.callbacks.url={url}"]
    victim = parts.start(line, tmp_path, **{VARIABLE: os.environ[VARIABLE]})
    assert victim.wait(SECONDS) == -9, victim.communicate()
    victim.stdout.close()

    other = tmp_path / "other"
    shutil.copytree(
        tmp_path, other, ignore=lambda folder, names: {"output", "runs", "other"} if folder == str(tmp_path) else set()
    )
    monkeypatch.chdir(other)
    run = kit.Committed.open(other / committed.file.relative_to(tmp_path)).run().wait(SECONDS)
    assert 0 < run.first_batch < 11
    assert run.first_batch + len(run.losses) == 16
    info = loss_info(unbroken, run)
    assert info.difference(info.runs[1]) == 0
    assert f"over {16 - run.first_batch} batches" in info.sentence
    assert "Restored all states" in capsys.readouterr().out
    assert [bundle.name for bundle in BundleStore.open(url).all()] == ["last.ckpt"]


# -- the chart


def test_losses_are_compared_where_both_have_them():
    info = loss_info([1.0, 2.0, 4.0], [1.0, 2.0], [1.0, 2.2, 4.0])
    two, three = info.sentence.splitlines()
    assert re.search("run 2 .*exactly.* run 1, over 2 batches", two)
    assert re.search("run 3 .* 0.1 .*away.* run 1, over 3 batches", three)
    assert info.difference(info.runs[2]) == pytest.approx(0.1)


def test_a_loss_that_is_none_is_only_like_another_that_is_none():
    nan = float("nan")
    assert "exactly" in loss_info([1.0, nan], [1.0, nan]).sentence
    assert "up to inf" in loss_info([1.0, nan], [1.0, 2.0]).sentence


def test_a_trial_of_many_epochs_has_their_means_on_top():
    values = tuple(float(batch) for batch in range(32))
    found = Losses("the trial", values, first=2, epochs=tuple(batch // 4 for batch in range(32)))
    assert found.means[:2] == [(3, 6, 1.5), (7, 10, 5.5)]
    assert len(found.means) == 8
    for epochs in ((), (0,) * 32, tuple(batch // 8 for batch in range(32)), tuple(range(32))):
        assert Losses("the trial", values, epochs=epochs).means == []


def test_one_run_alone_is_drawn_and_none_is_refused():
    (axes,) = loss_figure([1.0, 0.5]).axes
    assert list(axes.lines[0].get_ydata()) == [1.0, 0.5]
    with pytest.raises(ConfigError, match="none to draw"):
        loss_figure()
    with pytest.raises(ConfigError, match="run 2 has no losses"):
        loss_figure([1.0], [])
