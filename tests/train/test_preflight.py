"""Preflight: everything wrong with a committed run is one clear error before anything is trained."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import committed_parts as parts
import pytest

import kit
from kit.errors import ConfigError, HardwareError, StoreError, TargetError
from kit.train.cli import check_files, check_run, check_values, format_warning

HOME = str(Path(kit.__file__).parents[1])


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """A file of two ranks, in a project folder that is the working folder."""
    monkeypatch.chdir(tmp_path)
    return kit.commit(parts.make_project(tmp_path))


def torchrun(world, here):
    return {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(here), "RANK": "0"}


def changed(committed, before, after):
    text = committed.text
    assert before in text
    committed.file.write_text(text.replace(before, after, 1))
    return ["fit", "--config", str(committed.file)]


# -- the file


def test_a_committed_file_passes(committed):
    check_files(["fit", "--config", str(committed.file)])
    check_files(["fit", f"--config={committed.file}"])
    for variables in ({}, torchrun(2, 2)):
        check_run(committed.values, variables)


@pytest.mark.parametrize(
    ("before", "after", "error", "says"),
    [
        ("trainer:", "trainer: [", ConfigError, "line"),
        ("\nmodel:", "\nmodle:", ConfigError, "modle: .*mean 'model'"),
        ("kit.models.UNet", "kit.models.UNett", TargetError, "did you mean 'UNet'"),
        ("kit.models.UNet", "absent_package.Net", TargetError, "no package 'absent_package'"),
        ("kit.models.UNet", "UNet", ConfigError, "write package.module.Name"),
        (
            "depth: 1\ndata:",
            "dept: 1\ndata:",
            ConfigError,
            "model.init_args.dept: kit.models.UNet .*depth",
        ),
        ("batch_size: 2", "batch_size: two", ConfigError, "loader.batch_size"),
        ("batch_size: 2", "batchsize: 2", ConfigError, "loader.batchsize: unknown key"),
        ("kit.train.CommittedConfig", "kit.train.WholeEpochs", ConfigError, "kit.commit wrote"),
        ("kit.train.WholeEpochs", "kit.train.WholeEpoch", TargetError, r"trainer.callbacks\[0\].class_path"),
        ("model:\n  class_path", "model:\n  - class_path", ConfigError, "."),
        ("trainer:\n", "trainer: 3\nother:\n", ConfigError, "."),
    ],
)
def test_a_file_that_was_edited_into_nonsense_is_refused(committed, before, after, error, says):
    with pytest.raises(error, match=says) as caught:
        check_files(changed(committed, before, after))
    assert committed.file.name in str(caught.value)


def test_a_file_that_is_not_there_is_refused(committed):
    with pytest.raises(ConfigError, match=r"cannot read nowhere.yaml"):
        check_files(["fit", "-c", "nowhere.yaml"])


def test_a_file_of_a_few_settings_is_fine_beside_a_whole_one(committed):
    assert check_values({"trainer": {"max_epochs": 3}}, "more.yaml") is None


# -- ranks and devices


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (torchrun(4, 4), r" 2 ranks.*torchrun started 4.*--nproc-per-node 2"),
        (torchrun(2, 1), r"--trainer.num_nodes=2 --trainer.devices=1"),
        ({"SLURM_NTASKS": "7", "SLURM_PROCID": "0"}, r"SLURM .* 7 tasks.*--ntasks-per-node=2"),
    ],
)
def test_other_ranks_than_were_committed_are_refused(committed, variables, says):
    with pytest.raises(HardwareError, match=says):
        check_run(committed.values, variables)


def test_slurm_is_passed_over_where_torchrun_or_a_shell_starts_the_ranks(committed):
    slurm = {"SLURM_NTASKS": "7", "SLURM_PROCID": "3", "SLURM_NTASKS_PER_NODE": "7"}
    check_run(committed.values, {**slurm, **torchrun(2, 2)})
    check_run(committed.values, {**slurm, "SLURM_JOB_NAME": "interactive"})
    check_run(committed.values, {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "1"})


def with_trainer(committed, **changes):
    return {**committed.values, "trainer": {**committed.values["trainer"], **changes}}


def test_several_nodes_need_a_launcher(committed):
    with pytest.raises(HardwareError, match=r"2 on each of 2 nodes.*torchrun --nnodes 2 --nproc-per-node 2"):
        check_run(with_trainer(committed, num_nodes=2), {})


def test_shards_that_do_not_use_every_rank_are_refused(committed):
    strategy = {"class_path": "kit.train.ShardStrategy", "init_args": {"replicas": 2, "shard_size": 2}}
    with pytest.raises(ConfigError, match=r"2 × 2 = 4 devices, .*has 2"):
        check_run(with_trainer(committed, strategy=strategy), {})
    single = {"class_path": "lightning.pytorch.strategies.SingleDeviceStrategy", "init_args": {"device": "cpu"}}
    with pytest.raises(HardwareError, match="for one device"):
        check_run(with_trainer(committed, strategy=single), {})


def test_gpus_that_are_not_here_are_refused(committed):
    with pytest.raises(HardwareError, match="needs 900 GPUs"):
        check_run(with_trainer(committed, accelerator="gpu", devices=900), {})


@pytest.mark.parametrize("devices", [0, -3])
def test_no_devices_are_refused(committed, devices):
    with pytest.raises(ConfigError, match="trainer.devices"):
        check_run(with_trainer(committed, devices=devices), {})


# -- stores


def test_a_store_that_is_gone_is_refused(committed, tmp_path):
    (tmp_path / "store.zarr").rename(tmp_path / "moved.zarr")
    with pytest.raises(StoreError, match="store.zarr"):
        check_run(committed.values, {})


def test_a_patch_that_no_longer_fits_is_refused(committed, tmp_path):
    text = committed.text.replace("              time: 2\n", "              time: 20\n")
    committed.file.write_text(text)
    with pytest.raises(ConfigError, match=r"data.patch"):
        check_run(kit.Committed(committed.file).values, {})


def checkpoints(committed, dirpath):
    entry = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": dirpath}}
    return with_trainer(committed, callbacks=[*committed.values["trainer"]["callbacks"], entry])


def test_checkpoints_that_cannot_be_written_are_refused(committed, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"checkpoint .*written .*file/inside"):
        check_run(checkpoints(committed, str(tmp_path / "file" / "inside")), {})


def test_a_bucket_without_permission_is_refused(committed, monkeypatch):
    with kit.cloud.simulate() as cloud:
        url = cloud.upload("store.zarr", "data/store.zarr")
        values = kit.commit(committed.config.replace({"data.url": url})).values
        check_run(values, {})
        cloud.script("data/*", [403] * 50)
        with pytest.raises(StoreError, match=r"data/store.zarr.*(403|credentials)"):
            check_run(values, {})
        for name, value in cloud.variables.items():
            monkeypatch.setenv(name, value)
        cloud.script("kept/*", [403] * 50, kind="write")
        with pytest.raises(StoreError, match="checkpoint .*written .*gs://kept/run"):
            check_run(checkpoints(committed, "gs://kept/run"), {})


def test_writing_is_tried_by_one_rank_and_leaves_nothing(committed, tmp_path):
    check_run(checkpoints(committed, str(tmp_path / "new")), {**torchrun(2, 2), "RANK": "1"})
    assert not (tmp_path / "new").exists()
    check_run(checkpoints(committed, str(tmp_path / "new")), torchrun(2, 2))
    assert list((tmp_path / "new").iterdir()) == []


# -- the command


@pytest.mark.slow
def test_the_command_says_one_line(committed, tmp_path):
    changed(committed, "kit.models.UNet", "kit.models.UNett")
    done = run_cli(tmp_path, "--config", str(committed.file))
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("TargetError: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_option_that_is_none_is_one_line(committed, tmp_path):
    done = run_cli(tmp_path, "--config", str(committed.file), "--trainer.no_such=3")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "no_such" in done.stderr


@pytest.mark.slow
def test_a_run_that_goes_on_from_another_with_other_arguments_says_so(committed, tmp_path):
    ranks = "--trainer.devices=1", "--trainer.strategy=auto"
    first = run_cli(tmp_path, "--config", str(committed.file), *ranks, "--trainer.max_epochs=1")
    assert first.returncode == 0, first.stderr
    again = run_cli(tmp_path, "--config", str(committed.file), *ranks, "--trainer.max_epochs=2")
    other = tmp_path / "other.yaml"
    shutil.copy(committed.file, other)
    changed = "--model.init_args.learning_rate=0.5"
    third = run_cli(tmp_path, "--config", str(other), *ranks, "--trainer.max_epochs=3", changed)
    for run in (again, third):
        assert run.returncode == 0, run.stderr
    assert "of another" not in again.stderr
    assert "learning_rate was 0.001 there and is 0.5 here" in third.stderr
    assert f"the file was {committed.file.name} there and is other.yaml here" in third.stderr


def run_cli(folder, *options):
    return subprocess.run(
        [sys.executable, "-m", "kit.train.cli", "fit", *options], cwd=folder, env={**os.environ, "PYTHONPATH": HOME},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


# -- warnings in its log


def test_a_warning_of_a_package_tells_no_path_and_one_of_the_project_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own, package = tmp_path / "mine" / "model.py", tmp_path / ".venv" / "lib" / "site-packages" / "other.py"
    told = {file: format_warning("no loader", UserWarning, str(file), 7) for file in (own, package, Path(sys.prefix))}
    assert told[own] == "mine/model.py:7: no loader\n"
    assert told[package] == told[Path(sys.prefix)] == "no loader\n"
