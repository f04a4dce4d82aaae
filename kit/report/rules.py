"""RULES: every rule of a diagnosis, in the order in which a table names them."""

from __future__ import annotations

from kit.report.data_rules import DATA_RULES
from kit.report.device_rules import DEVICE_RULES
from kit.report.rule import Rule
from kit.report.step_rules import STEP_RULES

RULES: tuple[Rule, ...] = (*DATA_RULES, *STEP_RULES, *DEVICE_RULES)
