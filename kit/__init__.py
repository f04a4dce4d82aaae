"""kit: know what a training run will need, and how fast it will go, before paying for it.

The public map. Every name is loaded when first used, so `import kit` costs neither torch nor matplotlib nor zarr. The
parts that a Trainer of one's own takes are in `kit.train`, the models in `kit.models`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kit.registry import register

if TYPE_CHECKING:
    from kit.cloud.simulated_cloud import simulated_cloud as simulated_cloud
    from kit.config import Config as Config
    from kit.data.build import build as build
    from kit.data.build_plan import plan_build as plan_build
    from kit.data.dataset import open_dataset as open_dataset
    from kit.data.downloads import download_once as download_once
    from kit.data.downloads import fetch_checkpoint as fetch_checkpoint
    from kit.data.layout import plan_chunks as plan_chunks
    from kit.data.measuring import measure_reading as measure_reading
    from kit.data.module import PatchData as PatchData
    from kit.data.probe import probe as probe
    from kit.data.rows.module import RowData as RowData
    from kit.data.rows.rows import open_rows as open_rows
    from kit.data.rows.size import array_bytes as array_bytes
    from kit.data.rows.write import write_rows as write_rows
    from kit.data.size import expected_bytes as expected_bytes
    from kit.data.tables.declared import open_table as open_table
    from kit.data.tables.declared import read_sources as read_sources
    from kit.data.tables.event_data import EventData as EventData
    from kit.data.tables.fitting import fit_features as fit_features
    from kit.data.tables.partition import plan_partitions as plan_partitions
    from kit.data.tables.query_cache import QueryCache as QueryCache
    from kit.data.tables.query_memory import measure_queries as measure_queries
    from kit.data.unfinished import unfinished_uploads as unfinished_uploads
    from kit.data.uploads import latest_checkpoint as latest_checkpoint
    from kit.data.uploads import upload_checkpoint as upload_checkpoint
    from kit.data.verify import verify as verify
    from kit.errors import KitError as KitError
    from kit.machine import hardware as hardware
    from kit.models.corpus import Corpus as Corpus
    from kit.plan.chunks import chunk_table as chunk_table
    from kit.plan.schedule import advise_schedule as advise_schedule
    from kit.plan.topic_recovery import compare_topics as compare_topics
    from kit.plan.topics import open_topics as open_topics
    from kit.report.batch_map import batch_figure as batch_figure
    from kit.report.calibration_chart import calibration_figure as calibration_figure
    from kit.report.chunk_chart import chunk_figure as chunk_figure
    from kit.report.commit import Committed as Committed
    from kit.report.commit import commit as commit
    from kit.report.comparison import compare as compare
    from kit.report.comparison_chart import comparison_figure as comparison_figure
    from kit.report.comparison_chart import roofline_figure as roofline_figure
    from kit.report.diagnosis import diagnose as diagnose
    from kit.report.html_report import html_report as html_report
    from kit.report.levers_chart import levers_figure as levers_figure
    from kit.report.levers_chart import sequence_figure as sequence_figure
    from kit.report.loss_chart import loss_figure as loss_figure
    from kit.report.memory_charts import breakdown_figure as breakdown_figure
    from kit.report.memory_charts import memory_figure as memory_figure
    from kit.report.memory_charts import timeline_figure as timeline_figure
    from kit.report.pipeline_chart import pipeline_figure as pipeline_figure
    from kit.report.placements import placements as placements
    from kit.report.placements_chart import placements_figure as placements_figure
    from kit.report.predict_run import predict_run as predict_run
    from kit.report.profile import Profile as Profile
    from kit.report.profile import profile as profile
    from kit.report.profile_chart import profile_figure as profile_figure
    from kit.report.query_chart import query_figure as query_figure
    from kit.report.recommend import recommend as recommend
    from kit.report.results import results as results
    from kit.report.scaling_chart import scaling_figure as scaling_figure
    from kit.report.timing import timing as timing
    from kit.report.timing_chart import timing_figure as timing_figure
    from kit.report.topic_charts import structure_figure as structure_figure
    from kit.report.topic_charts import terms_figure as terms_figure
    from kit.report.trace_viewer import TraceViewer as TraceViewer
    from kit.run.back_off import back_off as back_off
    from kit.run.batch_search import find_batch_size as find_batch_size
    from kit.run.calibration.calibrate import calibrate as calibrate
    from kit.run.levers_check import verify_levers as verify_levers
    from kit.run.memory.foresight import fit as fit
    from kit.run.memory.largest_batch import largest_batch as largest_batch
    from kit.run.memory.model import memory_model as memory_model
    from kit.run.memory.prediction import predict_memory as predict_memory
    from kit.run.memory.residuals import residuals as residuals
    from kit.run.memory.what_if import what_if as what_if
    from kit.run.model_dials import model_dials as model_dials
    from kit.run.peaks import device_peaks as device_peaks
    from kit.run.repeats import try_change as try_change
    from kit.run.sequence_check import verify_sequences as verify_sequences
    from kit.run.trial import Trial as Trial
    from kit.tables import table as table
    from kit.widgets.build_panel import build_panel as build_panel
    from kit.widgets.chunk_panel import chunk_panel as chunk_panel
    from kit.widgets.memory_panel import memory_panel as memory_panel
    from kit.widgets.panel import panel as panel

_HOMES = {
    "Committed": "kit.report.commit",
    "Config": "kit.config",
    "Corpus": "kit.models.corpus",
    "EventData": "kit.data.tables.event_data",
    "KitError": "kit.errors",
    "PatchData": "kit.data.module",
    "Profile": "kit.report.profile",
    "RowData": "kit.data.rows.module",
    "QueryCache": "kit.data.tables.query_cache",
    "TraceViewer": "kit.report.trace_viewer",
    "Trial": "kit.run.trial",
    "advise_schedule": "kit.plan.schedule",
    "array_bytes": "kit.data.rows.size",
    "back_off": "kit.run.back_off",
    "batch_figure": "kit.report.batch_map",
    "breakdown_figure": "kit.report.memory_charts",
    "build": "kit.data.build",
    "build_panel": "kit.widgets.build_panel",
    "calibrate": "kit.run.calibration.calibrate",
    "calibration_figure": "kit.report.calibration_chart",
    "chunk_figure": "kit.report.chunk_chart",
    "chunk_panel": "kit.widgets.chunk_panel",
    "chunk_table": "kit.plan.chunks",
    "commit": "kit.report.commit",
    "compare": "kit.report.comparison",
    "compare_topics": "kit.plan.topic_recovery",
    "comparison_figure": "kit.report.comparison_chart",
    "device_peaks": "kit.run.peaks",
    "diagnose": "kit.report.diagnosis",
    "download_once": "kit.data.downloads",
    "expected_bytes": "kit.data.size",
    "fetch_checkpoint": "kit.data.downloads",
    "find_batch_size": "kit.run.batch_search",
    "fit": "kit.run.memory.foresight",
    "fit_features": "kit.data.tables.fitting",
    "hardware": "kit.machine",
    "html_report": "kit.report.html_report",
    "largest_batch": "kit.run.memory.largest_batch",
    "latest_checkpoint": "kit.data.uploads",
    "levers_figure": "kit.report.levers_chart",
    "loss_figure": "kit.report.loss_chart",
    "measure_queries": "kit.data.tables.query_memory",
    "measure_reading": "kit.data.measuring",
    "memory_figure": "kit.report.memory_charts",
    "memory_model": "kit.run.memory.model",
    "memory_panel": "kit.widgets.memory_panel",
    "model_dials": "kit.run.model_dials",
    "open_dataset": "kit.data.dataset",
    "open_rows": "kit.data.rows.rows",
    "open_table": "kit.data.tables.declared",
    "open_topics": "kit.plan.topics",
    "panel": "kit.widgets.panel",
    "pipeline_figure": "kit.report.pipeline_chart",
    "placements": "kit.report.placements",
    "placements_figure": "kit.report.placements_chart",
    "plan_build": "kit.data.build_plan",
    "plan_chunks": "kit.data.layout",
    "plan_partitions": "kit.data.tables.partition",
    "predict_memory": "kit.run.memory.prediction",
    "predict_run": "kit.report.predict_run",
    "probe": "kit.data.probe",
    "profile": "kit.report.profile",
    "profile_figure": "kit.report.profile_chart",
    "query_figure": "kit.report.query_chart",
    "read_sources": "kit.data.tables.declared",
    "recommend": "kit.report.recommend",
    "residuals": "kit.run.memory.residuals",
    "results": "kit.report.results",
    "roofline_figure": "kit.report.comparison_chart",
    "scaling_figure": "kit.report.scaling_chart",
    "sequence_figure": "kit.report.levers_chart",
    "simulated_cloud": "kit.cloud.simulated_cloud",
    "structure_figure": "kit.report.topic_charts",
    "table": "kit.tables",
    "terms_figure": "kit.report.topic_charts",
    "timeline_figure": "kit.report.memory_charts",
    "timing": "kit.report.timing",
    "timing_figure": "kit.report.timing_chart",
    "try_change": "kit.run.repeats",
    "unfinished_uploads": "kit.data.unfinished",
    "upload_checkpoint": "kit.data.uploads",
    "verify": "kit.data.verify",
    "verify_levers": "kit.run.levers_check",
    "verify_sequences": "kit.run.sequence_check",
    "what_if": "kit.run.memory.what_if",
    "write_rows": "kit.data.rows.write",
}

register({
    "job.fit": "kit.run.jobs.fit:fit",
    "job.predict": "kit.run.jobs.predict:predict",
    "job.calibrate": "kit.run.jobs.calibrate:calibrate",
    "job.peaks": "kit.run.jobs.peaks:peaks",
    "fit.calibrate": "kit.run.jobs.calibrate:calibrated",
    "fit.profile": "kit.run.profilers:beside",
    "trial.row": "kit.report.row_file:keep_row",
    "trial.display": "kit.widgets.trial_view:display",
    "attempts.display": "kit.widgets.attempts_view:display",
    "profile.figure": "kit.report.profile_chart:profile_figure",
    "diagnosis.display": "kit.widgets.diagnosis_view:display",
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
