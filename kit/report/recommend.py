"""recommend: the smallest change of a config that fits a target and is fast enough, with what is predicted and why.

The rungs of `kit.plan.ladder` are tried in order; each is dry-run once (`kit.memory_model`), and every other batch
follows from that at once. All devices of the target are used, or, where time or money is limited, the fewest that keep
within it. Time comes from a trial on the same kind of device through `kit.predict_run`; without one, times are factors
of the config's own. A module that optimizes manually is offered no accumulation. Nothing is trained, nothing changed:
`config` is a changed copy, and where nothing fits, it is refused, with what the smallest rung is short of.
"""

from __future__ import annotations

from typing import Any, overload

from kit.config import Config
from kit.errors import ConfigError, PlanError
from kit.plan.ladder import target_from
from kit.report.ladder_search import LadderSearch
from kit.report.recommendation import Recommendation


@overload
def recommend(config: Config, target: Any, /, *, trial: Any = None) -> Recommendation: ...
@overload
def recommend(module: Any, data: Any, config: Config, target: Any, *, trial: Any = None) -> Recommendation: ...
def recommend(
    module: Any, data: Any = None, config: Config | None = None, target: Any = None, *, trial: Any = None
) -> Recommendation:
    """What to change of `config` so that it fits `target`.

    Args:
        module: What `kit.fit` takes as module.
        data: What `kit.fit` takes as data.
        config: Where to start. `recommend(config, target)` alone takes module and data from it.
        target: A device such as "H100-80GB" or "24 GiB", or a mapping: `{"device": "A100-40GB", "devices": 8, "hours":
            12, "money": 500, "prices": "AWS H100"}`; see `kit.plan.ladder.RunTarget`.
        trial: Trials of this config, as `kit.predict_run` takes them, for times; needed where time or money is limited.

    Raises:
        ConfigError, PlanError: for what is no config or target, and a limit without a trial.
        KitError: what `kit.predict_memory` raises about the config as it is.
    """
    if isinstance(module, Config) and config is None:
        module, data, config, target = None, None, module, data if data is not None else target
    if not isinstance(config, Config):
        raise ConfigError(f"recommend takes a Config and a target, got {type(config).__name__}")
    wanted = target_from(target)
    if wanted.limited and trial is None:
        raise PlanError(f"a limit of {wanted.limits} needs a trial to foretell times from; pass trial=kit.fit(...)")
    return LadderSearch(module, data, config, wanted, trial).answer()
