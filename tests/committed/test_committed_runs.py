"""A committed file in real processes: Python, torchrun on one node and on two, and after the death of a rank."""

import shlex
import socket

import committed_parts as parts
import pytest
from properties import at_night

import kit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder, the trial that ran in it, and what was committed from it."""
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = parts.make_project(folder).replace(
            {
                "levers.accumulate_grad_batches": 2,
                "levers.gradient_checkpointing": True,
                "levers.optimizer": "adamw",
                "training.max_epochs": 2,
            }
        )
        trial = kit.fit(config).wait()
        yield folder, trial, kit.commit(config, trial)


def losses_of(project, name, *lines, **more):
    """Run the lines in a folder, each a rank or more, and give the losses of rank 0."""
    folder, _, committed = project
    options = [*parts.QUIET, "--trainer.callbacks+=losses.Losses", f"--trainer.callbacks.folder={name}"]
    _forget(folder / committed.config.commit.output)
    parts.finish(*(parts.start([*shlex.split(line), *options], folder, **more) for line in lines))
    return parts.lines_of(folder / f"{name}.0.jsonl")


def _forget(output):
    """The checkpoints of another start, from which this one would go on."""
    for path in sorted(output.rglob("*"), reverse=True) if output.exists() else ():
        path.rmdir() if path.is_dir() else path.unlink()


def losses_of_trial(trial):
    return [event["loss"] for event in trial.steps if event["rank"] == 0]


def two_nodes(committed):
    """The line of a node, twice: on loopback, where no name needs to be looked up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = committed.launch.spread(2).torchrun_nodes.replace("$HEAD:29500", f"127.0.0.1:{port}")
    return [line.replace(" -m ", " --local-addr 127.0.0.1 -m ", 1)] * 2


def test_the_trial_kept_the_loss_of_every_batch(project):
    assert len(losses_of_trial(project[1])) == 16  # 8 steps of 2 batches, in 2 epochs


@pytest.mark.parametrize("how", at_night(["python", "torchrun"], ["python"]))  # two nodes are torchrun's in CI
def test_one_machine_trains_as_the_trial_did(project, how):
    _, trial, committed = project
    assert losses_of(project, how, getattr(committed.launch, how)) == exactly(losses_of_trial(trial))


def test_two_nodes_train_as_the_trial_did_and_pass_over_what_slurm_says(project):
    _, trial, committed = project
    slurm = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NAME": "small", "SLURM_PROCID": "0"}
    losses = losses_of(project, "nodes", *two_nodes(committed), **slurm)
    assert losses == exactly(losses_of_trial(trial))


def exactly(losses):
    return pytest.approx(losses, rel=1e-6, abs=0)


@pytest.mark.fault
def test_a_killed_rank_is_started_again_and_every_sample_of_the_epoch_is_seen_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = parts.make_project(tmp_path).replace(
        {
            "data.order": "grid",
            "training.max_epochs": 2,
            "model.target": "tracer:Tracer",
            "model.arguments": {"rank": 1, "step": 3},
            "commit.checkpoint_every_steps": 2,
            "commit.restarts": 1,
        }
    )
    committed = kit.commit(config)
    parts.finish(parts.start([*shlex.split(committed.launch.torchrun), *parts.QUIET], tmp_path))
    rows = [row for rank in range(2) for row in parts.lines_of(tmp_path / f"samples.{rank}.jsonl")]
    resumed = min(step for again, _, step, _ in rows if again)
    assert resumed == 2  # the last checkpoint before step 3
    kept = [row for row in rows if row[0] or row[2] < resumed]
    everything = sorted(float(t * 256 + y * 16 + x) for t in (0, 2, 4, 6) for y in (0, 8) for x in (0, 8))
    for epoch in range(2):
        assert sorted(sample for _, of, _, samples in kept for sample in samples if of == epoch) == everything


def test_a_trial_inside_a_slurm_allocation_is_none_of_slurms_tasks(project, monkeypatch):
    """What a notebook in an allocation of two nodes sees; ranks that believed it would wait for five others."""
    _, trial, _ = project
    allocation = {
        "JOB_ID": "123", "JOB_NAME": "notebook", "NTASKS": "7", "NTASKS_PER_NODE": "4", "NNODES": "2", "PROCID": "3",
        "LOCALID": "3", "NODEID": "1", "STEP_NODELIST": "node[1-2]", "NODELIST": "node[1-2]",
    }  # fmt: skip
    for name, value in allocation.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    again = kit.fit(trial.config).wait()
    assert losses_of_trial(again) == losses_of_trial(trial)
