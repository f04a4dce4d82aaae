"""kit: know what a training run will need, and how fast it will go, before paying for it.

The public map. Every name is loaded when first used, so `import kit` costs neither torch nor matplotlib nor zarr. The
parts that a Trainer of one's own takes are in `kit.train`, the models in `kit.models`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kit.registry import answer_to, register

if TYPE_CHECKING:
    from kit.charts.batch import batch_figure as batch_figure
    from kit.charts.chunks import chunk_figure as chunk_figure
    from kit.charts.compare import calibration_figure as calibration_figure
    from kit.charts.compare import comparison_figure as comparison_figure
    from kit.charts.compare import levers_figure as levers_figure
    from kit.charts.compare import roofline_figure as roofline_figure
    from kit.charts.compare import sequence_figure as sequence_figure
    from kit.charts.pipeline import pipeline_figure as pipeline_figure
    from kit.charts.profile import profile_figure as profile_figure
    from kit.charts.rows import placements_figure as placements_figure
    from kit.charts.rows import query_figure as query_figure
    from kit.charts.rows import scaling_figure as scaling_figure
    from kit.charts.rows import structure_figure as structure_figure
    from kit.charts.rows import terms_figure as terms_figure
    from kit.charts.timeline import breakdown_figure as breakdown_figure
    from kit.charts.timeline import memory_figure as memory_figure
    from kit.charts.timeline import timeline_figure as timeline_figure
    from kit.charts.trial import loss_figure as loss_figure
    from kit.charts.trial import timing_figure as timing_figure
    from kit.checkpoints.downloading import download_once as download_once
    from kit.checkpoints.downloading import fetch_checkpoint as fetch_checkpoint
    from kit.checkpoints.uploading import latest_checkpoint as latest_checkpoint
    from kit.checkpoints.uploading import unfinished_uploads as unfinished_uploads
    from kit.checkpoints.uploading import upload_checkpoint as upload_checkpoint
    from kit.chunks.reasons import chunk_table as chunk_table
    from kit.cloud.simulated import simulated_cloud as simulated_cloud
    from kit.committed.file import Committed as Committed
    from kit.committed.file import commit as commit
    from kit.config import Config as Config
    from kit.data.build.build import build as build
    from kit.data.build.layout import expected_bytes as expected_bytes
    from kit.data.build.layout import plan_chunks as plan_chunks
    from kit.data.build.plan import plan_build as plan_build
    from kit.data.build.schedulers import advise_schedule as advise_schedule
    from kit.data.build.verify import verify as verify
    from kit.data.dataset import open_dataset as open_dataset
    from kit.data.patches.module import PatchData as PatchData
    from kit.data.patches.probe import probe as probe
    from kit.data.patches.reading import measure_reading as measure_reading
    from kit.data.rows.loader import RowData as RowData
    from kit.data.rows.rows import open_rows as open_rows
    from kit.data.rows.write import array_bytes as array_bytes
    from kit.data.rows.write import write_rows as write_rows
    from kit.data.tables.cache import QueryCache as QueryCache
    from kit.data.tables.declare import open_table as open_table
    from kit.data.tables.declare import read_sources as read_sources
    from kit.data.tables.fit import fit_features as fit_features
    from kit.data.tables.loader import EventData as EventData
    from kit.data.tables.measure import measure_queries as measure_queries
    from kit.data.tables.source import plan_partitions as plan_partitions
    from kit.errors import KitError as KitError
    from kit.machine.machine import hardware as hardware
    from kit.memory.alongside import fit as fit
    from kit.memory.batch_model import largest_batch as largest_batch
    from kit.memory.batch_model import memory_model as memory_model
    from kit.memory.dials import model_dials as model_dials
    from kit.memory.prediction import predict_memory as predict_memory
    from kit.memory.residuals import residuals as residuals
    from kit.memory.variations import what_if as what_if
    from kit.models.topic_recovery import compare_topics as compare_topics
    from kit.models.topic_recovery import open_topics as open_topics
    from kit.models.topics import Corpus as Corpus
    from kit.records.results import results as results
    from kit.records.timing import timing as timing
    from kit.report.page import html_report as html_report
    from kit.studies.batch_size import back_off as back_off
    from kit.studies.batch_size import find_batch_size as find_batch_size
    from kit.studies.calibration.result import calibrate as calibrate
    from kit.studies.compare import compare as compare
    from kit.studies.diagnosis.diagnose import diagnose as diagnose
    from kit.studies.diagnosis.peaks import device_peaks as device_peaks
    from kit.studies.levers import verify_levers as verify_levers
    from kit.studies.levers import verify_sequences as verify_sequences
    from kit.studies.placement import placements as placements
    from kit.studies.profiling.profile import Profile as Profile
    from kit.studies.profiling.profile import profile as profile
    from kit.studies.profiling.viewer import TraceViewer as TraceViewer
    from kit.studies.repeats import try_change as try_change
    from kit.studies.scaling.predict import predict_run as predict_run
    from kit.studies.scaling.recommend import recommend as recommend
    from kit.tables import table as table
    from kit.trial.trial import Trial as Trial
    from kit.widgets.build_panel import build_panel as build_panel
    from kit.widgets.chunk_panel import chunk_panel as chunk_panel
    from kit.widgets.memory_panel import memory_panel as memory_panel
    from kit.widgets.panel import panel as panel

_HOMES = {
    "Committed": "kit.committed.file",
    "Config": "kit.config",
    "Corpus": "kit.models.topics",
    "EventData": "kit.data.tables.loader",
    "KitError": "kit.errors",
    "PatchData": "kit.data.patches.module",
    "Profile": "kit.studies.profiling.profile",
    "RowData": "kit.data.rows.loader",
    "QueryCache": "kit.data.tables.cache",
    "TraceViewer": "kit.studies.profiling.viewer",
    "Trial": "kit.trial.trial",
    "advise_schedule": "kit.data.build.schedulers",
    "array_bytes": "kit.data.rows.write",
    "back_off": "kit.studies.batch_size",
    "batch_figure": "kit.charts.batch",
    "breakdown_figure": "kit.charts.timeline",
    "build": "kit.data.build.build",
    "build_panel": "kit.widgets.build_panel",
    "calibrate": "kit.studies.calibration.result",
    "calibration_figure": "kit.charts.compare",
    "chunk_figure": "kit.charts.chunks",
    "chunk_panel": "kit.widgets.chunk_panel",
    "chunk_table": "kit.chunks.reasons",
    "commit": "kit.committed.file",
    "compare": "kit.studies.compare",
    "compare_topics": "kit.models.topic_recovery",
    "comparison_figure": "kit.charts.compare",
    "device_peaks": "kit.studies.diagnosis.peaks",
    "diagnose": "kit.studies.diagnosis.diagnose",
    "download_once": "kit.checkpoints.downloading",
    "expected_bytes": "kit.data.build.layout",
    "fetch_checkpoint": "kit.checkpoints.downloading",
    "find_batch_size": "kit.studies.batch_size",
    "fit": "kit.memory.alongside",
    "fit_features": "kit.data.tables.fit",
    "hardware": "kit.machine.machine",
    "html_report": "kit.report.page",
    "largest_batch": "kit.memory.batch_model",
    "latest_checkpoint": "kit.checkpoints.uploading",
    "levers_figure": "kit.charts.compare",
    "loss_figure": "kit.charts.trial",
    "measure_queries": "kit.data.tables.measure",
    "measure_reading": "kit.data.patches.reading",
    "memory_figure": "kit.charts.timeline",
    "memory_model": "kit.memory.batch_model",
    "memory_panel": "kit.widgets.memory_panel",
    "model_dials": "kit.memory.dials",
    "open_dataset": "kit.data.dataset",
    "open_rows": "kit.data.rows.rows",
    "open_table": "kit.data.tables.declare",
    "open_topics": "kit.models.topic_recovery",
    "panel": "kit.widgets.panel",
    "pipeline_figure": "kit.charts.pipeline",
    "placements": "kit.studies.placement",
    "placements_figure": "kit.charts.rows",
    "plan_build": "kit.data.build.plan",
    "plan_chunks": "kit.data.build.layout",
    "plan_partitions": "kit.data.tables.source",
    "predict_memory": "kit.memory.prediction",
    "predict_run": "kit.studies.scaling.predict",
    "probe": "kit.data.patches.probe",
    "profile": "kit.studies.profiling.profile",
    "profile_figure": "kit.charts.profile",
    "query_figure": "kit.charts.rows",
    "read_sources": "kit.data.tables.declare",
    "recommend": "kit.studies.scaling.recommend",
    "residuals": "kit.memory.residuals",
    "results": "kit.records.results",
    "roofline_figure": "kit.charts.compare",
    "scaling_figure": "kit.charts.rows",
    "sequence_figure": "kit.charts.compare",
    "simulated_cloud": "kit.cloud.simulated",
    "structure_figure": "kit.charts.rows",
    "table": "kit.tables",
    "terms_figure": "kit.charts.rows",
    "timeline_figure": "kit.charts.timeline",
    "timing": "kit.records.timing",
    "timing_figure": "kit.charts.trial",
    "try_change": "kit.studies.repeats",
    "unfinished_uploads": "kit.checkpoints.uploading",
    "upload_checkpoint": "kit.checkpoints.uploading",
    "verify": "kit.data.build.verify",
    "verify_levers": "kit.studies.levers",
    "verify_sequences": "kit.studies.levers",
    "what_if": "kit.memory.variations",
    "write_rows": "kit.data.rows.write",
}

register({
    "job.fit": "kit.trial.fit_job:fit",
    "job.predict": "kit.memory.predict_job:predict",
    "job.calibrate": "kit.studies.calibration.job:calibrate",
    "job.peaks": "kit.studies.diagnosis.peaks_job:peaks",
    "fit.calibrate": "kit.studies.calibration.job:calibrated",
    "fit.profile": "kit.studies.profiling.profilers:beside",
    "trial.row": "kit.records.row:keep_row",
    "trial.display": "kit.widgets.trial_view:display",
    "attempts.display": "kit.widgets.trial_view:display_attempts",
    "profile.figure": "kit.charts.profile:profile_figure",
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
})  # fmt: skip

__all__ = sorted(_HOMES)
_PACKAGES = ("models", "train")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"kit.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kit' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
