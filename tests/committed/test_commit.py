"""commit: what its files settle and say, what they are started with, and what is refused before one is written."""

import json
import linecache
import re
import shlex
import subprocess
import sys
import types

import committed_parts as parts
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

import kit
from kit.committed.file import git_state
from kit.committed.job import dotted, draft_text
from kit.committed.run import LaunchLines
from kit.config import Config
from kit.errors import ConfigError, HardwareError, TargetError
from kit.testing import TinyData, TinyModule
from kit.trial.payload import is_manual, shards_itself


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The config of two ranks in a project folder of its own, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    return parts.make_project(tmp_path)


def gpus(config, **changes):
    asked = {"accelerator": "gpu", "devices": 8, "strategy": "fsdp:2:4", "precision": "bf16-mixed"}
    return config.replace({f"hardware.{name}": value for name, value in {**asked, **changes}.items()})


# -- the file


def test_a_file_leaves_nothing_open_and_is_read_back_as_the_config(small):
    committed = kit.commit(small)
    values = yaml.safe_load(committed.text)
    assert "auto" not in {str(value) for value in values["trainer"].values()}
    assert values["trainer"]["precision"] == "32-true"
    assert values["trainer"]["strategy"]["class_path"] == "lightning.pytorch.strategies.DDPStrategy"
    assert (values["trainer"]["devices"], values["trainer"]["num_nodes"]) == (2, 1)
    assert re.search("# 32-true: .*CPU", committed.text)
    assert "# 2 samples x 2 ranks x 1 micro-batch = 4 samples" in committed.text
    assert Config.load(committed.file) == small == kit.Committed.open(committed.file).config
    carried = values["trainer"]["callbacks"][-1]["init_args"]
    assert carried["resolved"] == {"chunking.chunk": {"time": 4, "lat": 8, "lon": 8}, "chunking.shard": "none"}


def test_the_same_config_gives_the_same_file_and_another_one_another(small):
    first = kit.commit(small)
    text = first.text
    assert kit.commit(small).text == text
    assert kit.commit(small.replace({"training.seed": 1})).file != first.file


def test_a_file_that_was_changed_is_not_replaced_unless_asked(small):
    committed = kit.commit(small)
    committed.file.write_text(committed.text + "# mine\n")
    with pytest.raises(ConfigError, match="replace=True"):
        kit.commit(small)
    assert committed.text.endswith("# mine\n")
    assert "# mine" not in kit.commit(small, replace=True).text


@examples(40)
@given(st.sampled_from(Config.fields()), st.data())
def test_any_setting_is_read_back(info, data):
    from kit.committed.yaml import Job, committed_yaml

    values = {"bool": st.booleans(), "text": st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=9)}
    values["arguments"] = st.dictionaries(st.text("abno", max_size=3), values["text"] | st.floats(-1e9, 1e9))
    try:
        config = Config().replace({info.path: data.draw(values.get(info.kind, st.just(info.default)))})
    except ConfigError:
        return
    part = {"class_path": "kit.train.CommittedData"}
    job = Job(config=config, accelerator="cpu", devices=1, precision="32-true", batch_size=None, model=part, data=part)
    text = committed_yaml(job, {})
    assert Config.from_yaml(text) == config
    assert Config.from_yaml(yaml.safe_load(text)["trainer"]["callbacks"][-1]["init_args"]["config"]) == config


def test_what_the_config_says_outright_is_committed_for_a_machine_that_is_not_here(small):
    values = kit.commit(gpus(small)).values["trainer"]
    assert (values["accelerator"], values["devices"], values["precision"]) == ("gpu", 8, "bf16-mixed")
    assert values["strategy"] == {
        "class_path": "kit.train.ShardStrategy",
        "init_args": {"replicas": 2, "shard_size": 4, "process_group_backend": "nccl"},
    }


def test_what_is_left_open_needs_the_machine(small):
    with pytest.raises(HardwareError, match=r"hardware\.accelerator"):
        kit.commit(gpus(small, precision="auto"))


def test_nodes_multiply_replicas_and_keep_shards_within_a_machine(small):
    committed = kit.commit(gpus(small).replace({"commit.nodes": 3}))
    strategy = committed.values["trainer"]["strategy"]["init_args"]
    assert (strategy["replicas"], strategy["shard_size"], committed.launch.world_size) == (6, 4, 24)
    with pytest.raises(ConfigError, match=r"commit\.nodes: 2 nodes .*one device"):
        kit.commit(small.replace({"commit.nodes": 2, "hardware.strategy": "none", "hardware.devices": 1}))


def test_16_bit_numbers_of_a_sharded_model_are_computed_by_a_plugin(small):
    values = kit.commit(gpus(small, precision="16-mixed")).values["trainer"]
    assert values["plugins"][0]["init_args"] == {"precision": "16-mixed", "device": "cuda"}
    assert "precision" not in values
    assert kit.commit(gpus(small, precision="16-mixed", strategy="ddp")).values["trainer"]["precision"] == "16-mixed"


def test_checkpoints_are_copied_where_the_config_says(small):
    classes = [entry["class_path"] for entry in kit.commit(small).values["trainer"]["callbacks"]]
    assert "kit.train.CheckpointUpload" not in classes
    committed = kit.commit(small.replace({"checkpoint.url": "gs://bucket/run", "checkpoint.keep": 2}))
    (copies,) = [e for e in committed.values["trainer"]["callbacks"] if e["class_path"] == "kit.train.CheckpointUpload"]
    assert (copies["init_args"]["url"], copies["init_args"]["keep"]) == ("gs://bucket/run", 2)


# -- a trial


def test_the_evidence_holds_what_the_trial_measured_and_how_it_differs(own, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = own()
    trial = kit.fit(config).wait()
    committed = kit.commit(config.replace({"loader.batch_size": 4}), trial)
    found = committed.evidence
    assert found["trial"]["run"] == trial.name
    assert found["measured"]["samples_per_second"] == found["trial"]["samples_per_second"] > 0
    assert found["measured"]["requests_per_sample"] == found["trial"]["requests_per_sample_measured"] > 0
    assert found["ratio"]["requests_per_sample"] > 0
    assert found["versions"]["torch"]
    assert found["hardware"]["trial"] == {"accelerator": "cpu", "device": "CPU", "world_size": 1}
    assert found["config"] == committed.config.values()
    (note,) = committed.notes
    assert re.search(r"loader\.batch_size was 2 .* 4 here", note)
    assert "batch_size was 2" in repr(committed)
    assert "torch" not in found["config"]


def test_a_trial_of_ones_own_module_needs_the_module_too(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trial = kit.fit(config(), TinyModule, TinyData).wait()
    with pytest.raises(ConfigError, match=r"module: .*of its own.*give the same"):
        kit.commit(config(), trial)
    values = kit.commit(config(), trial, module=TinyModule, data=TinyData).values
    assert values["model"] == {"class_path": "kit.testing.TinyModule"}
    assert values["data"] == {"class_path": "kit.testing.TinyData"}


def test_git_is_told_where_there_is_some(tmp_path):
    assert git_state(tmp_path) is None
    mine = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "a.py").touch()
    for line in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*mine, *line], check=True)
    clean = git_state(tmp_path)
    assert (clean["dirty"], clean["changed"], len(clean["commit"])) == (False, [], 40)
    (tmp_path / "b.py").touch()
    assert git_state(tmp_path)["changed"] == ["b.py"]


# -- module and data


def test_a_file_of_the_project_becomes_a_module(small, tmp_path):
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "one.py").write_text("class Net: pass\n")
    assert dotted("nets/one.py:Net") == "nets.one.Net"
    (tmp_path / "nets" / "2.py").write_text("class Net: pass\n")
    with pytest.raises(TargetError, match=r"2\.py.*no name"):
        dotted("nets/2.py:Net")
    (tmp_path / "json.py").write_text("class Net: pass\n")
    with pytest.raises(TargetError, match="json .*another package"):
        dotted("json.py:Net")


def test_a_file_outside_the_project_is_refused(small, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "net.py"
    other.write_text("class Net: pass\n")
    with pytest.raises(TargetError, match="outside the project"):
        kit.commit(small, module=f"{other}:Net")


@pytest.mark.parametrize("module", [TinyModule(), lambda: TinyModule()])
def test_an_object_or_a_function_is_no_name(small, module):
    with pytest.raises(ConfigError, match=r"module: .*give a class"):
        kit.commit(small, module=module)


CELL = """
import torch
from torch import nn
from torch.nn import functional as F
WIDTH = 16
class Block(nn.Module):
    size = WIDTH
    def forward(self, x): return F.relu(x)
def scale(x): return x * WIDTH
@torch.no_grad
def useless(): pass
LIVE = object()
class SeaNet(Block):
    def training_step(self, batch): return scale(batch) + np.pi, LIVE
"""


@pytest.fixture
def notebook(monkeypatch):
    """A main module with the definitions of a cell."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    file = "<ipython-input-7>"
    linecache.cache[file] = (len(CELL), None, CELL.splitlines(keepends=True), file)
    exec("import numpy as np", vars(main))
    exec(compile(CELL, file, "exec"), vars(main))
    yield main
    del linecache.cache[file]


@pytest.mark.slow
def test_a_class_of_a_notebook_gets_a_draft_of_its_module_and_a_way_on(small, notebook, tmp_path):
    with pytest.raises(ConfigError, match=r"notebook only.*sea_net\.py.*\"sea_net:SeaNet\""):
        kit.commit(small, module=notebook.SeaNet)
    text = (tmp_path / "sea_net.py").read_text()
    assert "from torch.nn import functional as F" not in text  # a module is imported as what it is
    for line in ("import numpy as np", "WIDTH = 16", "class Block(nn.Module):", "# LIVE was object in the notebook"):
        assert line in text
    assert "def useless" not in text
    checked = "import sea_net; print(sea_net.SeaNet().training_step.__name__, sea_net.Block.size)"
    done = subprocess.run([sys.executable, "-c", checked], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.split() == ["training_step", "16"]
    with pytest.raises(ConfigError, match=r"sea_net\.py"):
        kit.commit(small, module=notebook.SeaNet)
    assert not (tmp_path / "sea_net_2.py").exists()


def test_a_draft_never_takes_the_place_of_another_file(small, notebook, tmp_path):
    (tmp_path / "sea_net.py").write_text("mine = 1\n")
    with pytest.raises(ConfigError, match=r"sea_net_2\.py"):
        kit.commit(small, module=notebook.SeaNet)
    assert (tmp_path / "sea_net.py").read_text() == "mine = 1\n"


def test_a_class_without_source_gets_no_draft(small, notebook, tmp_path):
    exec("class Typed: pass", vars(notebook))
    assert draft_text(notebook.Typed) is None
    with pytest.raises(ConfigError, match="into a module"):
        kit.commit(small, module=notebook.Typed)


def test_what_a_module_does_for_itself_is_read_from_its_source(small, tmp_path):
    (tmp_path / "nets.py").write_text(
        "from lightning.pytorch import LightningModule\n"
        "class Plain(LightningModule): pass\n"
        "class Late(Plain):\n    def configure_model(self): self.net = None\n"
        "class Sharded(Plain):\n    def configure_model(self): fully_shard(self, mesh=self.device_mesh)\n"
        "class Manual(Plain):\n    def __init__(net):\n        net.automatic_optimization = False\n"
        "class Both(Sharded, Manual): pass\n"
    )
    traits = {
        name: (shards_itself(f"nets:{name}"), is_manual(f"nets:{name}"))
        for name in ("Plain", "Late", "Sharded", "Both")
    }
    assert traits.pop("Late") == (False, False)
    assert traits == {"Plain": (False, False), "Sharded": (True, False), "Both": (True, True)}
    asked = gpus(small).replace(
        {"model.target": "nets:Both", "training.gradient_clip_norm": 1.0, "model.arguments": {}}
    )
    values = kit.commit(asked).values["trainer"]
    assert values["strategy"]["class_path"] == "kit.train.SelfShardedStrategy"
    assert "gradient_clip_val" not in values


# -- launching

LAUNCH = LaunchLines(file="committed/a b.yaml", name="a", nodes=2, devices=4, restarts=3, gpu=True)


def test_lines_can_be_given_to_a_shell():
    for line in (LAUNCH.python, LAUNCH.torchrun, LAUNCH.torchrun_nodes):
        assert "committed/a b.yaml" in shlex.split(line)
    assert LAUNCH.python == "python -m kit.train.cli fit --config 'committed/a b.yaml'"
    for text in (LAUNCH.script(".."), LAUNCH.sbatch(), LAUNCH.sbatch("python")):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_slurm_gets_one_task_a_node_for_torchrun_and_one_a_rank_for_python():
    by_torchrun, by_python = LAUNCH.sbatch().splitlines(), LAUNCH.sbatch("python").splitlines()
    assert "#SBATCH --ntasks-per-node=1" in by_torchrun
    assert "#SBATCH --ntasks-per-node=4" in by_python
    for lines in (by_torchrun, by_python):
        assert "#SBATCH --nodes=2" in lines
        assert "#SBATCH --gpus-per-node=4" in lines
        last_option = max(place for place, line in enumerate(lines) if line.startswith("#SBATCH"))
        assert all(line.startswith("#") for line in lines[: last_option + 1])


def test_ranks_are_spread_over_other_nodes_without_changing_their_number():
    spread = LAUNCH.spread(4)
    assert (spread.nodes, spread.devices, spread.world_size) == (4, 2, 8)
    assert spread.job[-2:] == ["--trainer.num_nodes=4", "--trainer.devices=2"]
    assert LAUNCH.spread(2) is LAUNCH
    with pytest.raises(ConfigError, match="evenly over 3 nodes"):
        LAUNCH.spread(3)


def test_a_restart_never_shares_the_store_of_the_ranks_before():
    assert LAUNCH.torchrun.startswith("env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun ")
    assert LaunchLines(file="a", name="a", nodes=1, devices=2, restarts=0, gpu=False).torchrun.startswith("torchrun ")


# -- reading back


def test_a_file_that_is_none_of_kits_is_refused(small, tmp_path):
    (tmp_path / "other.yaml").write_text("trainer:\n  max_epochs: 1\n")
    with pytest.raises(ConfigError, match=r"other\.yaml.*kit\.commit"):
        kit.Committed.open("other.yaml")


def test_devices_that_are_no_number_are_refused(small):
    committed = kit.commit(small)
    committed.file.write_text(committed.text.replace("devices: 2\n  num", "devices: auto\n  num"))
    with pytest.raises(ConfigError, match=r"trainer\.devices: 'auto'.*number"):
        kit.Committed.open(committed.file)


def test_the_files_belong_together(small):
    committed = kit.commit(small, slurm="python")
    assert [path.suffix for path in committed.files] == [".yaml", ".json", ".sh", ".sbatch"]
    assert json.loads(committed.files[1].read_text())["notes"] == committed.notes
    assert committed.files[2].stat().st_mode & 0o100
    assert committed.launch.python in repr(committed)
    assert "&lt;" not in committed._repr_html_().split("<details>")[0]
