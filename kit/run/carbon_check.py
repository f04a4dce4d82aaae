"""Whether codecarbon can be asked about a trial: it is an extra, and knows the grids of most countries."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from typing import Any

from kit.config import Config
from kit.errors import ConfigError, Problem
from kit.json_text import read_json

_FIELD = "trial.codecarbon"
_MIX = Path("data", "private_infra", "global_energy_mix.json")


def check_codecarbon(config: Config) -> None:
    """Refuse a trial that asks for what codecarbon cannot tell.

    Raises:
        ConfigError: when it is not installed, or has no grid of that country.
    """
    country = config.trial.codecarbon
    if not country:
        return
    found = importlib.util.find_spec("codecarbon")
    if found is None or found.origin is None:
        message = (
            f"{country}: codecarbon is not installed (pip install 'kit[co2]'); left empty, energy is what NVML counts "
            "or rated watts, and CO2 that of kit's table of grids"
        )
        raise ConfigError([Problem(_FIELD, message)])
    known: dict[str, Any] = read_json((Path(found.origin).parent / _MIX).read_bytes())
    if country not in known:
        names = {str(grid.get("country_name")).lower(): code for code, grid in known.items()}
        close = difflib.get_close_matches(country.lower(), [*names, *map(str.lower, known)], n=1)
        hint = f"; did you mean {names.get(close[0], close[0].upper())}?" if close else ""
        raise ConfigError([Problem(_FIELD, f"codecarbon has no grid of {country}; give a code such as DEU{hint}")])
