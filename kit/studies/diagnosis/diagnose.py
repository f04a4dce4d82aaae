"""diagnose: what limits a trial, in sentences, with what to change, the gain predicted, and how to try it.

The evidence is the trial's own (`kit.studies.diagnosis.evidence`), the rules are data (`kit.studies.diagnosis.rules`).
A finding names one thing that is wrong. Rules that found nothing are listed too, and so are those that the trial could
not answer, with what they need. Findings are settled before they are told: what another one explains is left out, and
of two that would turn the same setting in different ways only the first keeps its change; `settled` says so. The
largest effect comes first. No finding is a clean result. Where only a trial can tell an effect (a number format, a
larger batch), the module itself runs for a few steps (`kit.studies.diagnosis.gains`). Nothing is changed by itself:
`finding.try_it()` runs the change beside the config as it is, and says whether it helped (`kit.studies.try_change`).

The roofline compares the achieved FLOP/s with the peak of the device and says what bounds the step:

    achieved  = FLOPs of a sample × samples a second
    MFU       = Σ FLOPs in a format ÷ its peak, over the time of a step: model FLOPs utilisation (Chowdhery et al.
                2022); FLOPs of recomputation, if any, are counted, as the device does them too
    roof      = min(peak, intensity × bandwidth), intensity = FLOPs ÷ bytes (Williams, Waterman, Patterson 2009)

FLOPs and bytes are counted operation by operation (`kit.trial.meters`). Bytes are an upper bound, so the intensity is a
lower one, and "memory bandwidth" is named too often rather than too seldom where caches are large enough. Peaks are
measured, or stated by the maker where known (`kit.speed.peaks`). What bounds the step is the largest of
waiting for data, communication and work; work is bound by compute or memory bandwidth, whichever roof needs more time,
or by neither where both together explain less than `EXPLAINED` of it: then it is calls and Python, or nothing that can
be told where it queued for cores as long.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, Literal

from kit.errors import ConfigError, KitError, Problem, TrialError
from kit.records.trace import PHASE_LABELS, PHASES
from kit.registry import Drawable, display
from kit.speed.peaks import Peaks, device_peaks
from kit.studies.diagnosis.evidence import BUSY_FRACTION, MUCH_SEEN, Evidence, NoStepError, evidence_of, most_seen
from kit.studies.diagnosis.gains import measured_gains, training_alone, without_drawing
from kit.studies.diagnosis.rule import Change, Range, Rule, bounded, limited, middle, most_gain, show, widened
from kit.studies.diagnosis.rules import RULES
from kit.studies.diagnosis.sampler import MAKING
from kit.studies.profiling.profile import Profile
from kit.studies.repeats import MOST, RunSource, Tried, try_change
from kit.tables import FRAME, html_list, html_table, text_table
from kit.trial.trial import Trial, try_out
from kit.units import format_bytes, format_count, format_seconds, plural

_RULE_NAMES = tuple(rule.name for rule in RULES)
_COLUMNS = ("rule", "found", "threshold", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    rule: Rule
    value: float
    sentence: str
    setting: str
    """What to change, in words."""
    change: Change
    """Fields of the config that do it; empty where none does."""
    batch_size: int | None = None
    """Samples per batch that do it, where the caller's own data makes the batches."""
    predicted: Range | None
    """Throughput after over before, from and to; None where it is not about time, or not known."""
    predicted_gain: float | None
    """The one number to expect."""
    example: str = ""
    """The change in code, where it is the user's own that changes."""
    limit_next: str
    """The part of the step that is longest after the change, and its share; empty where not known."""
    is_part: bool
    """Whether the value is the share of a part of a step, which the bar of the step shows."""
    explains: tuple[str, ...]
    """Findings that are not told beside it."""
    source: RunSource

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def evidence(self) -> str:
        """What was looked at, and the value."""
        return f"{self.rule.looks_at}: {show(self.rule.unit, self.value)}"

    @property
    def threshold(self) -> str:
        """From which value on it is a finding, and who says so."""
        return f"a finding from {show(self.rule.unit, self.rule.threshold)} on ({self.rule.source})"

    @property
    def is_doubtful(self) -> bool:
        """Whether the change may also bring nothing."""
        return self.predicted is not None and self.predicted[0] < 1

    @property
    def effect(self) -> str:
        if self.predicted is None:
            return "not known before it is tried"
        low, high = self.predicted
        none = ", so perhaps no faster" if self.is_doubtful else ""
        then = f"; then {self.limit_next}" if self.limit_next else ""
        start, end = (f"{one:.1f}" if one < 10 else f"{one:.0f}" for one in (low, high))
        return f"{start} to {end} × as fast{none}{then}"

    @property
    def reasons(self) -> dict[str, str]:
        """What to change, what that should bring, and why one may believe it."""
        code = {"in code": self.code or self.example} if self.code or self.example else {}
        effect = {"predicted": self.effect} if self.can_try or self.predicted is not None else {}
        return {
            "change": self.setting, **code, **effect, "evidence": self.evidence, "threshold": self.threshold,
        }  # fmt: skip

    @property
    def can_try(self) -> bool:
        """Whether `try_it` can make the change."""
        return bool(self.change) or self.batch_size is not None

    @property
    def code(self) -> str:
        """The change as one line; empty where no field of the config does it."""
        changed = self.source.config.replace(self.change) if self.change else None
        return changed.as_code(self.source.config) if changed is not None else ""

    def try_it(
        self, repeats: int = MOST, on_run: Callable[[Trial], object] | None = None, trust: bool = False
    ) -> Tried:
        """Run before and after in turn until it is decided, `repeats` times each at most, and wait.

        `trust` as `kit.studies.try_change` takes it.

        Raises:
            ForeignRunError: for a trial that this user did not write here.
            ConfigError: where no field of the config makes the change; `kit.studies.try_change` takes a new module or
                new data.
        """
        given = (self.source.earlier,) if self.source.earlier else (
            self.source.config, self.source.module, self.source.data)  # fmt: skip
        if not self.can_try:
            message = (
                f"no setting does it ({self.setting}); try kit.studies.try_change(..., new_module=...) or new_data"
            )
            raise ConfigError([Problem(self.name, message)])
        return try_change(
            *given, change=self.change, new_batch_size=self.batch_size, repeats=repeats, predicted=self.predicted,
            on_run=on_run, trust=trust,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diagnosis(Drawable):
    """What the rules say of one trial."""

    evidence: Evidence
    findings: tuple[Finding, ...]
    """The largest effect first."""
    values: dict[str, float]
    """The value that each applied rule measured, by its name."""
    unasked: tuple[Rule, ...]
    """Rules that the trial could not answer."""
    roofline: Roofline | None
    notes: tuple[str, ...] = ()
    settled: tuple[str, ...] = ()
    """What was left out because a finding explains it, and which change another one overrules."""

    @property
    def clean(self) -> bool:
        return not self.findings

    def __getitem__(self, name: str) -> Finding:
        """The finding of a rule.

        Raises:
            KeyError: when there is none of that name, with those there are.
        """
        for finding in self.findings:
            if finding.name == name:
                return finding
        there_are = f"there are {', '.join(self.names) or 'none'}"
        found, rules = ([one for one in names if str(name).lower() in one] for names in (self.names, _RULE_NAMES))
        found = found or difflib.get_close_matches(str(name), self.names, n=1)
        if found:
            raise KeyError(f"no finding {name!r}; did you mean {' or '.join(map(repr, found))}?")
        for rule in rules or difflib.get_close_matches(str(name), _RULE_NAMES, n=1):
            asked = "found nothing" if rule in self.values else "could not be asked of this trial"
            there_are = f"the rule {rule!r} {asked}; {there_are}"
        raise KeyError(f"no finding {name!r}; {there_are}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(finding.name for finding in self.findings)

    @property
    def headline(self) -> str:
        """One sentence: how much is wrong, and what comes first. What it brings to mend that stands at the finding."""
        if self.clean:
            queued = self.evidence.queued_fraction or 0.0
            but = f", but it waited {queued:.0%} of the time for a core" if queued >= BUSY_FRACTION else ""
            applied = f"{len(self.values)} of {len(RULES)} rules applied"
            return f"Nothing was found that holds this training up{but} ({applied})."
        first, count = self.findings[0], len(self.findings)
        slow, may = first.predicted is not None, first.is_doubtful
        if count == 1:
            slows = "may hold this training up" if may else "holds this training up"
            return f"One thing {slows if slow else 'is wrong with this training'}: {first.name}."
        wrong = f"{'may ' * may}hold this training up" if slow else "are wrong with this training"
        return f"{count} things {wrong}, {first.name} most of all."

    @property
    def sentences(self) -> list[str]:
        """What is wrong, how far the step is from what the device can do, and what could not be learned."""
        return [*(f"{finding.name}: {finding.sentence}" for finding in self.findings), *self._rest]

    @property
    def _rest(self) -> list[str]:
        return [*([self.roofline.sentence] if self.roofline else []), *self.settled, *self.notes]

    @property
    def rows(self) -> list[list[str]]:
        """Every rule: what was found, from which value on it is a finding, and who says so."""
        rows = []
        for rule in RULES:
            value = self.values.get(rule.name)
            found = f"unknown: needs {rule.needs}" if value is None else show(rule.unit, value)
            rows.append([rule.name, found, show(rule.unit, rule.threshold), rule.source])
        return rows

    @property
    def table(self) -> str:
        return text_table(_COLUMNS, self.rows)

    def __repr__(self) -> str:
        lines = [self.headline]
        for finding in self.findings:
            lines += [f"- {finding.name}: {finding.sentence}"]
            reasons = finding.reasons.items()
            lines += [f"    {name}:{chr(10) if chr(10) in text else ' '}{text}" for name, text in reasons]
        return "\n".join([*lines, *(f"- {text}" for text in self._rest)])

    def _repr_html_(self) -> str:
        return self.findings_html + self.details_html

    @property
    def findings_html(self) -> str:
        return self.head_html + "".join(map(finding_html, self.findings))

    @property
    def head_html(self) -> str:
        """The headline, and the parts of a step as one bar."""
        return f'<div style="{FRAME}"><b>{escape(self.headline)}</b></div>{shares_html(self.evidence.shares)}'

    @property
    def details_html(self) -> str:
        """The roofline in a sentence, notes, and all rules, behind a fold."""
        table = html_table(_COLUMNS, self.rows, dense=True)
        rest = html_list(self._rest) if self._rest else ""
        summary = f"<summary>{len(self.values)} of {len(RULES)} rules applied: thresholds and sources</summary>"
        return f'<details style="{FRAME}">{summary}{rest}{table}</details>'

    def _ipython_display_(self) -> None:
        display("diagnosis.display", self)


_COLOURS = {
    "wait": "#d55e00", "transfer": "#cc79a7", "forward": "#56b4e9", "backward": "#0072b2", "optimizer": "#009e73",
    "communication": "#e69f00", "validation": "#8c6bb1", "checkpoint": "#a65628", "logging": "#999999",
    "other": "#bbbbbb",
}  # fmt: skip
_LEAST_LABEL, _LEAST_SHOWN = 0.13, 0.004


def shares_html(shares: Mapping[str, float]) -> str:
    """The parts of a step as one bar, each as wide as its share."""
    parts = [(name, shares[name]) for name in PHASES if shares.get(name, 0.0) >= _LEAST_SHOWN]
    if not parts:
        return ""
    cells = ""
    for name, share in parts:
        label = escape(f"{PHASE_LABELS.get(name, name)} {share:.0%}")
        ink = "#000" if name in ("forward", "communication", "other") else "#fff"
        look = f"width: {share:.2%}; background: {_COLOURS.get(name, '#bbb')}; color: {ink}; overflow: hidden; "
        look += "white-space: nowrap; padding: 1px 0; text-align: center"
        cells += f'<span title="{label}" style="{look}">{label if share >= _LEAST_LABEL else ""}</span>'
    words = escape(", ".join(f"{name} {share:.0%}" for name, share in parts))
    frame = "display: flex; width: 100%; max-width: 720px; font-size: 0.8em; margin: 4px 0 2px"
    return f'<div role="img" aria-label="a step: {words}" style="{FRAME}; {frame}">{cells}</div>'


def finding_html(finding: Finding) -> str:
    """One finding: the sentence, what to change and what that brings; behind a fold why one may believe it."""
    frame = (
        f"{FRAME}; border-left: 4px solid var(--jp-warn-color1, #c77700); padding: 2px 8px 2px 10px; margin: 10px 0 2px"
    )
    columns = "display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 1px 12px; margin-top: 3px"
    rows, folded = "", ""
    for name, text in finding.reasons.items():
        shown = f'<code style="white-space: pre-wrap">{escape(text)}</code>' if name == "in code" else escape(text)
        if name in ("evidence", "threshold"):
            folded += f"<div>{shown}</div>"
            shown = _evidence_html(finding) if name == "evidence" else ""
        if shown:
            rows += f'<span style="opacity: 0.75">{name}</span><span style="overflow-wrap: anywhere">{shown}</span>'
    return (
        f'<div style="{frame}; line-height: 1.45"><b>{escape(finding.name)}</b>: {escape(finding.sentence)}'
        f'<div style="{columns}; font-size: 0.92em">{rows}</div>'
        f'<details style="font-size: 0.92em; opacity: 0.85"><summary>why</summary>{folded}</details></div>'
    )


def _evidence_html(finding: Finding) -> str:
    """The value as a bar, with a mark where a finding begins; empty for a whole part of a step, whose bar is above.

    The sentence has the number.
    """
    rule, value = finding.rule, finding.value
    if finding.is_part:
        return ""
    whole = 1.0 if rule.unit == "fraction" else 1.1 * max(value, rule.threshold)
    bar, mark = (f"{min(1.0, one / whole):.1%}" for one in (value, rule.threshold))
    box = "position: relative; display: inline-block; width: 160px; height: 0.7em; background: rgba(128,128,128,0.25)"
    filled = f"width: {bar}; height: 100%; background: var(--jp-warn-color1, #c77700)"
    line = f"position: absolute; left: {mark}; top: -2px; bottom: -2px; border-left: 2px solid currentColor"
    words = escape(f"{finding.evidence}; {finding.threshold}", quote=True)
    return (
        f'<span role="img" aria-label="{words}" title="{words}" style="{box}"><span style="display: block; {filled}">'
        f'</span><span style="{line}"></span></span> <span style="opacity: 0.75">a finding from the mark on</span>'
    )


def diagnose(
    *given: Any, module: Any = None, data: Any = None, peaks: Peaks | bool = True, profile: Profile | None = None,
    short_trials: bool = True,
) -> Diagnosis:  # fmt: skip
    """Say what slows a trial, what to change, and what that would bring.

    Args:
        given: A trial or its run directory; or config, module and data as `kit.fit` takes them, to be run first.
        module: What is trained, where it is not given so.
        data: What it is trained on, where that is not given so.
        peaks: What the device can do, measured where it is not known yet (two seconds). False leaves out the rules
            that need it.
        profile: A finished profile of the same config, for the rules that need traces and functions.
        short_trials: Whether the module may run for a few steps more, where only that tells an effect: in 16 bits,
            with four times a small batch, without its slowest hook; and, where data is waited for, or cores beside a
            loader, on one batch again and again. False leaves out the first two rules, takes a hook for as long as it
            was seen to be, and the training for as slow without reading as beside it.

    Returns:
        The findings, the largest gain first. `diagnosis["no prefetch"].try_it()` tries one.

    Raises:
        TrialError: when the trial has failed, or has not measured a step.
        TrialStopped: after an interrupt.
        ConfigError: for arguments that are none of these.

    Example:
        >>> diagnosis = kit.studies.diagnose(trial, peaks=False, short_trials=False)
    """
    if len(given) == 1 and isinstance(given[0], str | Path):
        given = (Trial.open(given[0]),)
    source = RunSource.of(given, module=module, data=data)
    trial, notes = source.earlier, list[str]()
    if trial is None:
        trial = try_out(source.module, source.data, source.config, "trial").wait()
    elif trial.poll() in ("FAILED", "LOST"):
        raise trial.failure()
    found = peaks if isinstance(peaks, Peaks) else None
    if peaks is True:
        try:
            found = device_peaks(trial.config)
        except KitError as error:
            notes.append(f"the peak of the device was not measured: {error}")
    try:
        evidence = evidence_of(trial, found, profile)
    except NoStepError as error:
        more = "" if trial.ended else "; it has not ended: wait for it with trial.wait()"
        raise TrialError(f"{trial.name} cannot be diagnosed: {error}{more}") from error
    if short_trials:
        (gains, said), (drawing, unsaid) = measured_gains(evidence, source), without_drawing(evidence, source)
        alone, unknown = training_alone(evidence, source)
        evidence = replace(evidence, measured_gains={**gains, **drawing}, alone_seconds=alone)
        notes += [*said, *unsaid, *unknown]
    return judge(evidence, source, notes)


_SLOWED = 1.25
"""Times as long as alone, from which on it is told that a loader takes the cores of the training."""


def judge(evidence: Evidence, source: RunSource, notes: Sequence[str] = ()) -> Diagnosis:
    """What the rules say of this evidence; `source` is what a change is tried on."""
    measured = {rule: rule.measure(evidence) for rule in RULES}
    known = {rule: value for rule, value in measured.items() if value is not None and math.isfinite(value)}
    found = [_finding(rule, value, evidence, source) for rule, value in known.items() if value >= rule.threshold]
    findings, settled = settle(found)
    remarks = [*evidence.notes]
    share, where, _ = most_seen(line for line in evidence.host.get("lines", ()) if line["part"] not in MAKING)
    if not findings and share >= MUCH_SEEN and not evidence.on_gpu:  # whose time is not the host's
        remarks.append(f"the code seen most is {where}: {share:.0%} of the time")
    threads, asked = evidence.compute_threads, evidence.asked_threads
    if asked and threads != asked and not evidence.on_gpu:
        remarks.append(
            f"the step computed with {plural(threads, 'thread')}, though hardware.threads_per_rank gave it {asked}: "
            "the module, or a library that it uses, has called torch.set_num_threads"
        )
    # The rules hold on a busy machine too: what is wrong there is seldom right on a quiet one.
    if (queued := evidence.queued_fraction or 0.0) >= BUSY_FRACTION:
        remarks.append(
            f"the machine was busy: training waited {queued:.0%} of the time for a core; figures and predicted effects "
            "are of that time, so run it again when less else runs"
        )
        train, alone = evidence.train_seconds, evidence.alone_seconds
        if evidence.reads_on_its_cores and alone and train >= _SLOWED * alone:
            remarks.append(
                f"with nothing read the training takes {format_seconds(alone)} a step, beside its loader "
                f"{format_seconds(train)}: making batches holds cores that it computes with, and kit.studies.calibrate "
                "looks for settings that take less of them"
            )
        if threads > 1 and not evidence.on_gpu:
            remarks.append(
                f"{threads} compute threads wait for the slowest of them in each operator: where a core is taken, "
                f"hardware.threads_per_rank: {threads - 1} may be faster; kit.studies.try_change tells"
            )
    return Diagnosis(
        evidence=evidence, findings=tuple(findings), roofline=roofline_of(evidence),
        values={rule.name: value for rule, value in known.items()},
        unasked=tuple(rule for rule in RULES if rule not in known), notes=(*remarks, *notes), settled=tuple(settled),
    )  # fmt: skip


_FAILS = ("device memory near its limit", "host memory near its limit")
"""Findings that come first and whose change wins: without them a step fails."""


def settle(findings: Sequence[Finding]) -> tuple[list[Finding], list[str]]:
    """Findings without those that another explains or mends, the largest effect first; and what was left out."""
    explained = {name for one in findings for name in one.explains}
    kept = [one for one in findings if one.name not in explained]
    kept.sort(key=lambda one: (one.name not in _FAILS, one.is_doubtful, -(one.predicted_gain or 0.0)))
    words, mends = list[str](), dict[str, list[str]]()
    turned, changes = dict[str, tuple[str, Any]](), dict[str, str]()
    for one in [*kept]:
        if one.change and changes.setdefault(repr(sorted(one.change.items())), one.name) != one.name:
            mends.setdefault(changes[repr(sorted(one.change.items()))], []).append(one.name)
            kept.remove(one)
            continue
        place = kept.index(one)
        against = [path for path, value in one.change.items() if path in turned and turned[path][1] != value]
        if against:
            kept[place] = replace(one, change={})
            words.append(f"{one.name} would turn {against[0]} otherwise than {turned[against[0]][0]}, which is first")
        else:
            turned |= {path: (one.name, value) for path, value in one.change.items()}
    by_name, told = {one.name: one for one in findings}, {one.name for one in kept}
    for one in kept:
        also = mends.get(one.name, [])
        because = [name for name in _consequences([one.name, *also], by_name) if name not in (*also, *told)]
        told |= {*also, *because}
        words += [_not_listed(one.name, because, also)] if because or also else []
    return kept, words


def _not_listed(name: str, because: Sequence[str], also: Sequence[str]) -> str:
    """Why findings are not listed: they may come from one that is, or what mends that mends them."""
    causes, mends = (_listed([repr(one) for one in names]) for names in (because, also))
    said = [f"may be the cause of {causes}"] if because else []
    said += [f"has a change that also mends {mends}"] if also else []
    they = "these are" if len(because) + len(also) > 1 else "that is"
    return f"{name!r} {' and '.join(said)}: {they} not listed"


def _consequences(names: Sequence[str], findings: Mapping[str, Finding]) -> list[str]:
    """What these findings explain, and what that explains, of those that are there."""
    found = [*names]
    for name in found:  # which grows meanwhile
        found += [one for one in findings[name].explains if one in findings and one not in found]
    return found[len(names) :]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _limit_next(rule: Rule, gain: float | None, evidence: Evidence) -> str:
    """What is longest once the rule's part is as much shorter as the gain says."""
    if gain is None or rule.part not in evidence.shares or not gain > 1:
        return ""
    left, gone = dict(evidence.shares), 1 - 1 / gain
    if gone > left[rule.part] + _LEAST_LABEL:  # it takes more than that part, and nobody knows from which others
        return ""
    left[rule.part] = max(0.0, left[rule.part] - gone)
    part = max(left, key=left.__getitem__)
    return f"{PHASE_LABELS.get(part, part)} is longest, {left[part] / (math.fsum(left.values()) or 1):.0%} of a step"


def _finding(rule: Rule, value: float, evidence: Evidence, source: RunSource) -> Finding:
    change, config, alone = dict(rule.change(evidence)), evidence.config, evidence.alone_seconds
    effect = bounded(rule.effect(evidence), evidence, rule.part)
    predicted = limited(widened(effect, evidence, rule.part), effect, most_gain(rule, value, evidence))
    bound = f" The training alone takes {format_seconds(alone)}." if alone and rule.part == "wait" else ""
    try:  # leave out a change that the config refuses or has already
        change = change if config.diff(config.replace(change)) else {}
    except ConfigError:
        change = {}
    return Finding(
        rule=rule, value=value, sentence=rule.sentence(evidence, value) + bound, setting=rule.setting(evidence),
        change=change, batch_size=rule.batch_size(evidence), source=source,
        predicted=predicted, predicted_gain=middle(effect),
        example=rule.example(evidence), limit_next=_limit_next(rule, middle(effect), evidence),
        explains=rule.explains(evidence) if callable(rule.explains) else rule.explains,
        is_part=rule.unit == "fraction" and abs(evidence.shares.get(rule.part, math.inf) - value) < _LEAST_SHOWN,
    )  # fmt: skip


Bound = Literal["data", "communication", "compute", "memory bandwidth", "calls and Python", "a busy machine"]
EXPLAINED = 0.25
"""Of the working time, what compute or memory traffic at full speed must explain to be called the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One trial, all its devices together."""

    device: str
    dtype: str
    """The number format most FLOPs were in."""
    flops_per_second: float
    """Achieved, waits included."""
    peak_flops_per_second: float
    bytes_per_second: float
    """The memory traffic of a step over its time, at most."""
    peak_bytes_per_second: float
    mfu_fraction: float
    intensity: float
    """FLOPs for each byte moved."""
    compute_fraction: float
    """Of the step, what its FLOPs take at the peak."""
    memory_fraction: float
    """Of the step, what its bytes take at the peak; above 1 where caches served them."""
    wait_fraction: float
    communication_fraction: float
    bound: Bound

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which compute is the roof."""
        return self.peak_flops_per_second / self.peak_bytes_per_second

    @property
    def roof_flops_per_second(self) -> float:
        """The most that is possible at this intensity."""
        return min(self.peak_flops_per_second, self.intensity * self.peak_bytes_per_second)

    @property
    def sentence(self) -> str:
        bound = {
            "data": "the step is bound by data: faster arithmetic would not help",
            "communication": "the step is bound by communication between the ranks",
            "compute": "the step is bound by compute: what helps is less arithmetic, or a faster number format",
            "memory bandwidth": "the step is bound by memory bandwidth: what helps is smaller numbers, or fewer passes",
            "calls and Python": "neither compute nor memory explains the step: it is bound by calls and Python, and "
            "larger batches or fewer, larger operations help",
            "a busy machine": "what binds the step is not known: it waited for cores that others held, or its loader",
        }
        rate, peak = format_count(self.flops_per_second), format_count(self.peak_flops_per_second)
        return (
            f"{rate}FLOP/s of {peak}FLOP/s in {self.dtype}: MFU {self.mfu_fraction:.1%}, at "
            f"{self.intensity:.3g} FLOP per byte (the ridge is at {self.ridge:.3g}; memory gives "
            f"{format_bytes(self.peak_bytes_per_second)}/s); {bound[self.bound]}"
        )


def roofline_of(evidence: Evidence) -> Roofline | None:
    """Where the trial stands; None where its work was not counted, its peaks are not known or it had no FLOPs."""
    work, peaks, rate = evidence.work, evidence.peaks, evidence.samples_per_second
    if work is None or peaks is None or not rate or not sum(work.flops.values()) or not work.bytes:
        return None
    devices = evidence.world_size if evidence.on_gpu else 1
    flops = sum(work.flops.values())
    dtype = max(work.flops, key=lambda name: work.flops[name])
    step_seconds = work.samples / rate  # of one global batch
    compute = sum(count / (devices * peaks.peak(name)) for name, count in work.flops.items()) / step_seconds
    memory = work.bytes / (devices * peaks.bytes_per_second) / step_seconds
    wait, communication = evidence.shares.get("wait", 0.0), evidence.shares.get("communication", 0.0)
    return Roofline(
        device=peaks.device, dtype=dtype, flops_per_second=flops / step_seconds,
        peak_flops_per_second=devices * peaks.peak(dtype), bytes_per_second=work.bytes / step_seconds,
        peak_bytes_per_second=devices * peaks.bytes_per_second, mfu_fraction=compute, intensity=flops / work.bytes,
        compute_fraction=compute, memory_fraction=memory, wait_fraction=wait, communication_fraction=communication,
        bound=_bound(wait, communication, compute, memory, evidence.queued_fraction or 0.0),
    )  # fmt: skip


def _bound(wait: float, communication: float, compute: float, memory: float, queued: float) -> Bound:
    working = max(0.0, 1 - wait - communication)
    if wait >= max(communication, working):
        return "data"
    if communication >= working:
        return "communication"
    if max(compute, memory) < EXPLAINED * working:
        return "a busy machine" if queued >= max(BUSY_FRACTION, EXPLAINED * working) else "calls and Python"
    return "compute" if compute >= memory else "memory bandwidth"
