"""kit: know what a training run will need, and how fast it will go, before paying for it.

The config comes first everywhere, and module and data follow: `kit.fit(config, MyModule(), my_loader)`.

What is my machine, and what may a config say?
    hardware         devices, cores and memory of this machine
    Config           every setting; Config.load("recipe.yaml"), config.replace({"loader.batch_size": 32})

How should my data lie in the bucket?
    plan_chunks      the chunk and shard size for a sampling pattern, with reasons
    build            the Zarr store of a plan: resumable, verified
    open_dataset     a store, ready to read
    kit.data         PatchData, RowData, EventData and what makes, measures and checks their stores

Will it fit?
    predict_memory   the peak of each device, part by part, without the device
    kit.memory       largest_batch, what_if, model, sizes, panel, residuals

How fast is it, and why?
    predict_speed    seconds of a step on a card that is not here, and what binds them
    fit              starts a trial of a few steps and returns a Trial at once
    Trial            a trial that runs or has ended; Trial.open(folder)
    results          predicted, measured and their ratio: a row for each trial
    recommend        the smallest change that fits a device, or the fastest setting that does
    kit.studies      calibrate, find_batch_size, back_off, verify_levers, verify_sequences, profile, diagnose,
                     try_change, compare, compare_cards, predict_run, placements, device_peaks, timing

How do I go on from here?
    commit           a LightningCLI file that runs the same without kit's notebook
    Committed        such a file; Committed.open(path)
    html_report      one page with the charts of several trials
    kit.checkpoints  upload, download, latest, unfinished, CheckpointUpload
    kit.cloud        simulate: a bucket on this machine, with latency, bandwidth and faults
    kit.train        callbacks, strategies and levers for a Trainer of your own
    kit.course       guess, score: your own number beside both, for learning and teaching
    kit.models       small honest models whose size is one argument

As widgets
    panel            all of the above for one config
    table            numbers of several runs side by side

    KitError         the base of every error that kit raises on purpose

What has a picture draws it: `plan.figure()`, `estimate.figure()`, `trial.figure("timing")`. Every name is loaded when
it is first used, so `import kit` costs neither torch nor matplotlib nor zarr.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from kit.registry import answer_to, lazy, load_file, register

if TYPE_CHECKING:
    from kit.committed.file import Committed as Committed
    from kit.committed.file import commit as commit
    from kit.config import Config as Config
    from kit.data.build.build import build as build
    from kit.data.build.layout import plan_chunks as plan_chunks
    from kit.data.open_dataset import open_dataset as open_dataset
    from kit.data.patches.module import PatchData  # noqa: F401 - old names, which files hold: see kit.targets
    from kit.data.rows.loader import RowData  # noqa: F401
    from kit.data.tables.loader import EventData  # noqa: F401
    from kit.errors import KitError as KitError
    from kit.machine.machine import hardware as hardware
    from kit.memory.alongside import fit as fit
    from kit.memory.prediction import predict_memory as predict_memory
    from kit.records.results import results as results
    from kit.report.page import html_report as html_report
    from kit.speed.prediction import predict_speed as predict_speed
    from kit.studies.scaling.recommend import recommend as recommend
    from kit.tables import table as table
    from kit.trial.trial import Trial as Trial
    from kit.widgets.panel import panel as panel

_FIGURES = {
    "figure.BigRun": "kit.charts.rows:scaling_figure",
    "figure.Calibration": "kit.charts.compare:calibration_figure",
    "figure.CardComparison": "kit.charts.rows:cards_figure",
    "figure.ChunkPlan": "kit.charts.chunks:chunk_figure",
    "figure.ChunkTable": "kit.charts.chunks:chunk_figure",
    "figure.CommittedRun": "kit.charts.trial:loss_figure",
    "figure.Comparison": "kit.charts.compare:comparison_figure",
    "figure.Config": "kit.charts.maps:batch_figure",
    "figure.Diagnosis": "kit.charts.compare:roofline_figure",
    "figure.LeversCheck": "kit.charts.compare:levers_figure",
    "figure.MemoryEstimate": "kit.charts.timeline:memory_figure",
    "figure.MemoryEstimate.breakdown": "kit.charts.timeline:breakdown_figure",
    "figure.MemoryEstimate.timeline": "kit.charts.timeline:timeline_figure",
    "figure.Placements": "kit.charts.rows:placements_figure",
    "figure.Profile": "kit.charts.pipeline:profile_figure",
    "figure.QueryCheck": "kit.charts.rows:query_figure",
    "figure.Split": "kit.charts.maps:split_figure",
    "figure.SequenceCheck": "kit.charts.compare:sequence_figure",
    "figure.Score": "kit.charts.compare:score_figure",
    "breakdown.SpeedEstimate": "kit.charts.speed:breakdown_html",
    "figure.SpeedEstimate": "kit.charts.speed:speed_figure",
    "figure.SpeedEstimate.lines": "kit.charts.speed:lines_figure",
    "figure.SpeedPlan": "kit.charts.speed:plan_figure",
    "figure.Timing": "kit.charts.trial:timing_figure",
    "figure.Trial": "kit.charts.trial:loss_figure",
    "figure.Trial.breakdown": "kit.charts.timeline:breakdown_figure",
    "figure.Trial.loss": "kit.charts.trial:loss_figure",
    "figure.Trial.memory": "kit.charts.timeline:memory_figure",
    "figure.Trial.metrics": "kit.charts.compare:metrics_figure",
    "figure.Trial.pipeline": "kit.charts.pipeline:pipeline_figure",
    "figure.Trial.timeline": "kit.charts.timeline:timeline_figure",
    "figure.Trial.timing": "kit.charts.trial:timing_figure",
}
register(_FIGURES)
register({
    "dataset.join": "kit.data.joined:join_config",
    "file.module": "kit.targets:load_module_of_file",
    "target.signature": "kit.targets:signature_of",
    "job.fit": "kit.trial.fit_job:fit",
    "job.predict": "kit.memory.predict_job:predict",
    "job.calibrate": "kit.studies.calibration.job:calibrate",
    "job.time_calls": "kit.speed.timing_job:time_calls",
    "model.hf": "kit.models.named:Transformer",
    "model.timm": "kit.models.named:ImageModel",
    "fit.calibrate": "kit.studies.calibration.job:calibrated",
    "fit.host": "kit.studies.diagnosis.host:HostWatch",
    "fit.profile": "kit.studies.profiling.profilers:beside",
    "trial.row": "kit.records.row:keep_row",
    "score.page": "kit.report.page:score_page",
    "trial.speed": "kit.speed.prediction:leave_speed",
    "trial.memory_report": "kit.report.out_of_memory:memory_report",
    "trial.display": "kit.widgets.trial_view:display",
    "attempts.display": "kit.widgets.trial_view:display_attempts",
    "diagnosis.display": "kit.widgets.diagnose:display",
})  # fmt: skip

# What files of earlier versions name: pickles of what was sent to ranks, and sources and modules of users.
answer_to({
    "kit.run": "kit.trial",
    "kit.run.payload": "kit.trial.payload",
    "kit.data.source": "kit.data.build.source",
    "kit.data.module": "kit.data.patches.module",
    "kit.data.rows.module": "kit.data.rows.loader",
    "kit.data.tables.event_data": "kit.data.tables.loader",
    "kit.models.topics": "datasets/topics/topics.py",
    "kit.models.topic_recovery": "datasets/topics/topics.py",
})  # fmt: skip

_RENAMED = {
    "download_once": "data.download_once",
    "fetch_checkpoint": "checkpoints.download",
    "latest_checkpoint": "checkpoints.latest",
    "memory_model": "memory.model",
    "memory_panel": "memory.panel",
    "model_dials": "memory.sizes",
    "simulated_cloud": "cloud.simulate",
    "unfinished_uploads": "checkpoints.unfinished",
    "upload_checkpoint": "checkpoints.upload",
    **{
        name: f"{package}.{name}"
        for package, names in {
            "data": "EventData PatchData QueryCache RowData advise_schedule array_bytes build_panel chunk_panel "
            "chunk_table expected_bytes fit_features measure_queries measure_reading open_rows open_table plan_build "
            "plan_partitions probe read_sources verify write_rows",
            "memory": "largest_batch residuals what_if",
            "studies": "back_off calibrate compare device_peaks diagnose find_batch_size placements predict_run "
            "profile timing try_change verify_levers verify_sequences",
        }.items()
        for name in names.split()
    },
}
"""Names of kit 0.1 that live in a package below now."""
_DRAWN = dict(path.split(":")[::-1] for path in _FIGURES.values())
"""Functions of kit 0.1 that draw a result, which does so itself now, and their modules."""
_NOT_PUBLIC = {"Profile": "kit.studies.profiling.profile", "TraceViewer": "kit.studies.profiling.viewer"}

BESIDE_DATASETS = {
    "Corpus": "datasets/topics/topics.py",
    "compare_topics": "datasets/topics/topics.py",
    "open_topics": "datasets/topics/topics.py",
    "structure_figure": "datasets/topics/charts.py",
    "terms_figure": "datasets/topics/charts.py",
}
"""What lies with its dataset in a checkout of kit, and in no installed one."""

_public, __dir__ = lazy(__name__, "checkpoints", "cloud", "course", "data", "memory", "models", "studies", "train")


def __getattr__(name: str) -> Any:
    if name in BESIDE_DATASETS:
        return getattr(load_file(BESIDE_DATASETS[name]), name)
    if name in _RENAMED:
        package, _, attribute = _RENAMED[name].partition(".")
        module, use = f"kit.{package}", f"it is kit.{_RENAMED[name]} now"
    elif name in _DRAWN:
        module, attribute, use = _DRAWN[name], name, "results draw themselves now: result.figure()"
    elif name in _NOT_PUBLIC:
        module, attribute, use = _NOT_PUBLIC[name], name, f"it is in {_NOT_PUBLIC[name]}"
    else:
        return _public(name)
    warnings.warn(f"kit.{name} is a name of kit 0.1; {use}", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(module), attribute)
