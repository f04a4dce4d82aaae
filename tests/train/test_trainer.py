import shutil
import subprocess
import sys
import warnings

import pytest
import torch
import train_parts

from kit.config import Config
from kit.errors import HardwareError, KitWarning
from kit.train import make_trainer


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def config(**sections):
    return Config.make({"trial": {"max_steps": 6, "warmup_steps": 1}, **sections})


def trainer_for(settings, **more):
    return make_trainer(settings, **{"accelerator": "cpu", "world_size": 1, "precision": "32-true", **more})


def test_a_trial_ends_at_its_steps_and_repeats_short_epochs():
    trainer = trainer_for(config())
    trainer.fit(train_parts.Net(), train_parts.regression(32))
    assert trainer.global_step == 6
    assert trainer.current_epoch >= 2


def test_max_steps_can_be_given_for_one_run():
    trainer = trainer_for(config(), max_steps=2)
    trainer.fit(train_parts.Net(), train_parts.regression(8))
    assert trainer.global_step == 2


def test_a_trial_writes_and_prints_nothing(tmp_path, capsys):
    trainer = trainer_for(config(), default_root_dir=tmp_path)
    trainer.fit(train_parts.Net(), train_parts.regression(8))
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_accumulation_takes_several_batches_to_a_step():
    losses = train_parts.Losses()
    trainer = trainer_for(config(levers={"accumulate_grad_batches": 2}), callbacks=[losses])
    trainer.fit(train_parts.Net(), train_parts.regression(4))
    assert (trainer.global_step, len(losses.values)) == (6, 12)


def test_clipping_bounds_the_norm_of_the_gradient():
    class Norms(train_parts.Losses):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if gradients:
                self.values.append(float(torch.nn.utils.get_total_norm(gradients)))

        def on_train_batch_end(self, *_):
            pass

    largest = {}
    for bound in (None, 0.01):
        norms = Norms()
        trainer = trainer_for(config(training={"gradient_clip_norm": bound}), callbacks=[norms])
        trainer.fit(train_parts.Net(), train_parts.regression(8))
        largest[bound] = max(norms.values)
    assert largest[0.01] == pytest.approx(0.01, rel=1e-3)
    assert largest[None] > 0.01


def test_a_module_in_manual_optimization_is_told_what_it_does_not_get():
    settings = config(levers={"accumulate_grad_batches": 2}, training={"gradient_clip_norm": 1.0})
    module = train_parts.Manual()
    with pytest.warns(KitWarning, match=r"gradient_clip_norm: 1\.0 and levers.accumulate_grad_batches: 2 are left out"):
        trainer = trainer_for(settings, module=module)
    trainer.fit(module, train_parts.regression(8))
    assert trainer.global_step == 6


def test_a_module_in_manual_optimization_is_told_nothing_when_nothing_is_left_out():
    with warnings.catch_warnings():
        warnings.simplefilter("error", KitWarning)
        trainer_for(config(), module=train_parts.Manual())


def test_bf16_mixed_runs_and_learns():
    losses = train_parts.Losses()
    trainer = trainer_for(config(trial={"max_steps": 40}), precision="bf16-mixed", callbacks=[losses])
    trainer.fit(train_parts.Net(), train_parts.regression(64))
    assert trainer.precision == "bf16-mixed"
    assert losses.values[-1] < 0.9 * losses.values[0]


def test_16_mixed_on_the_cpu_becomes_bf16_mixed_and_says_so():
    with pytest.warns(KitWarning, match="16-mixed .*GPU; .*bf16-mixed"):
        trainer = trainer_for(config(), precision="16-mixed")
    assert trainer.precision == "bf16-mixed"


def test_callbacks_run_after_those_of_the_levers():
    losses = train_parts.Losses()
    trainer = trainer_for(config(levers={"gradient_checkpointing": True}), callbacks=[losses])
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert names.index("GradientCheckpointing") < names.index("Losses")


def test_callbacks_of_installed_packages_are_found_also_when_one_is_installed_later(tmp_path, monkeypatch):
    def theirs():
        made = trainer_for(config()).callbacks
        return [type(one).__name__ for one in made if type(one).__module__ == "watching"]

    def install(folder, factory):
        about = folder / "watching-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: watching\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[lightning.pytorch.callbacks_factory]\nw = watching:{factory}\n")

    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    for folder in (second, first):
        monkeypatch.syspath_prepend(str(folder))
    callbacks = "class Watch(Callback): pass\nclass Other(Callback): pass\n"
    (first / "watching.py").write_text(f"from lightning.pytorch import Callback\n{callbacks}")
    assert theirs() == []
    install(second, "Other")
    assert theirs() == ["Other"]
    install(first, "Watch")  # the first on the path is the one that is installed
    assert theirs() == ["Watch"]
    shutil.rmtree(first / "watching-1.0.dist-info")
    assert theirs() == ["Other"]


def test_a_process_that_is_no_rank_is_refused_before_it_waits_for_others(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    settings = config(hardware={"strategy": "ddp", "devices": 2})
    with pytest.raises(HardwareError, match=r"not one of 2 ranks \(RANK, .* unset\)"):
        trainer_for(settings, world_size=2)


def test_a_rank_of_another_run_is_refused(monkeypatch):
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HardwareError, match=r"not one of 1 ranks \(WORLD_SIZE=3\)"):
        trainer_for(config())


def test_one_process_does_not_ask_slurm_about_its_tasks(monkeypatch):
    for name, value in {"SLURM_NTASKS": "7", "SLURM_JOB_NAME": "notebook", "SLURM_NTASKS_PER_NODE": "7"}.items():
        monkeypatch.setenv(name, value)
    trainer = trainer_for(config(), max_steps=1)
    trainer.fit(train_parts.Net(), train_parts.regression(8))
    assert trainer.world_size == 1


def test_naming_the_package_loads_neither_torch_nor_lightning():
    code = "import sys, kit.train; assert not {'torch', 'lightning'} & set(sys.modules); dir(kit.train)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_is_not_there_is_refused_with_those_that_are():
    import kit.train

    with pytest.raises(AttributeError, match="ShardStrategy"):
        _ = kit.train.Sharding


def test_a_cpu_that_stands_in_for_a_gpu_keeps_16_mixed_and_its_scaler():
    losses = train_parts.Losses()
    trainer = trainer_for(config(), precision="16-mixed", stands_in=True, callbacks=[losses])
    trainer.fit(train_parts.Net(), train_parts.regression(32))
    assert trainer.precision == "16-mixed"
    assert trainer.precision_plugin.scaler is not None
    assert len(losses.values) == 6
