"""Studies: each asks one question with several short trials, or of trials that ran.

    what holds a trial up    `diagnose`, `try_change`, `profile`, `timing`, `open_trace`, `device_peaks`, `calibrate`
    what would be better     `compare`, `compare_cards`, `verify_levers`, `verify_sequences`, `placements`
    what fits                `find_batch_size`, `back_off`, and `kit.recommend`
    what the whole run takes `predict_run`

Names are loaded when first used; `help(kit.studies.diagnose)` explains one.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from kit.registry import lazy

if TYPE_CHECKING:
    from kit.records.timing import timing as timing
    from kit.speed.peaks import device_peaks as device_peaks
    from kit.studies.batch_size import back_off as back_off
    from kit.studies.batch_size import find_batch_size as find_batch_size
    from kit.studies.calibration.result import calibrate as calibrate
    from kit.studies.comparison import compare as compare
    from kit.studies.diagnosis.diagnose import diagnose as diagnose
    from kit.studies.levers import verify_levers as verify_levers
    from kit.studies.levers import verify_sequences as verify_sequences
    from kit.studies.placement import placements as placements
    from kit.studies.profiling.profile import profile as profile
    from kit.studies.profiling.viewer import open_trace as open_trace
    from kit.studies.repeats import try_change as try_change
    from kit.studies.scaling.cards import compare_cards as compare_cards
    from kit.studies.scaling.predict import predict_run as predict_run

_public, __dir__ = lazy(__name__)


def __getattr__(name: str) -> Any:
    if name != "recommend":
        return _public(name)
    from kit.studies.scaling.recommend import recommend

    warnings.warn("kit.studies.recommend is kit.recommend now", DeprecationWarning, stacklevel=2)
    return recommend
