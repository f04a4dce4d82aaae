"""TraceViewer: a trace in the notebook, as a page that needs no network and no other program.

It has a row of bars for each thread of the host and each stream of the device, with nested bars below their parents,
and the allocated memory where the trace has it. Wheel or + and − zoom, dragging or arrow keys move, hovering shows the
name and length of a bar, and a name typed into the box is highlighted. The bars can be saved as a trace that
chrome://tracing and Perfetto open. Above `MOST_BARS` the shortest bars are left out, and the page says how many.
"""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.errors import TrialError
from kit.studies.profiling.trace import read_events

MOST_BARS = 40_000
_KINDS = ("cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy",
          "gpu_memset", "gpu_user_annotation")  # fmt: skip
_HEIGHT_PIXELS = 460
_STEPS = ("", "steps")
Bar = tuple[int, int, float, float, int]
"""Row, depth, begin and length in µs, and which name."""


class TraceViewer:
    """Shows itself in a notebook; `page` is the whole of it, `save` writes it."""

    def __init__(self, path: str | Path) -> None:
        """Read a trace.

        Raises:
            TrialError: when the file is no trace or has no bars.
        """
        self.path = Path(path)
        self.page = _page(read_events(path), self.path.name)

    def save(self, path: str | Path) -> Path:
        """Write the page as one HTML file."""
        file = Path(path)
        file.write_text(self.page, encoding="utf-8")
        return file

    def __repr__(self) -> str:
        return (
            f"Trace {self.path}\nA notebook shows it; save('trace.html') writes a page. chrome://tracing and Perfetto "
            "open the file itself."
        )

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {_HEIGHT_PIXELS}px; border: 1px solid #ccc"
        title = html.escape(f"trace {self.path.name}")
        # sandboxed: names of operations are not trusted
        return (
            f'<iframe title="{title}" sandbox="allow-scripts allow-downloads" style="{style}" '
            f'srcdoc="{html.escape(self.page)}"></iframe>'
        )


def _page(events: Sequence[Mapping[str, Any]], title: str) -> str:
    spans = [event for event in events if event.get("cat") in _KINDS and event.get("dur") is not None]
    if not spans:
        raise TrialError(f"{title} holds nothing that took time")
    left_out = max(0, len(spans) - MOST_BARS)
    kept = sorted(spans, key=lambda event: -float(event["dur"]))[:MOST_BARS] if left_out else spans
    data = json.dumps(_data(kept, events, left_out), separators=(",", ":"))
    safe = data.replace("<", "\\u003c").replace("\u2028", "\\u2028")  # cannot end the script it stands in
    return _TEMPLATE.replace("{{title}}", html.escape(title)).replace("{{data}}", safe)


def _data(spans: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], left_out: int) -> dict[str, Any]:
    zero = min(float(event["ts"]) for event in spans)
    threads: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for event in spans:  # steps have their own row: each begins in the middle of what Lightning does
        is_step = str(event["name"]).startswith("ProfilerStep#")
        threads[_STEPS if is_step else (str(event.get("pid")), str(event.get("tid")))].append(event)
    names: dict[tuple[str, str], int] = {}
    bars: list[Bar] = []
    rows = []
    # Steps first, then the host, the busiest thread first.
    ordered = sorted(threads.items(), key=lambda item: (item[0] != _STEPS, _is_device(item[1]), -len(item[1])))
    for place, ((process, thread), found) in enumerate(ordered):
        nested = _nested(found)
        title = f"GPU {process}, stream {thread.removeprefix('stream ')}" if _is_device(found) else f"thread {thread}"
        title = "steps" if (process, thread) == _STEPS else title
        rows.append([title, 1 + max(depth for _, depth in nested)])
        for event, depth in nested:
            shown = str(event["name"]).removeprefix("[pl][profile]")
            name = names.setdefault((shown, str(event["cat"])), len(names))
            bars.append((place, depth, round(float(event["ts"]) - zero, 3), round(float(event["dur"]), 3), name))
    return {"rows": rows, "bars": bars, "names": [*names], "memory": _memory(events, zero), "left_out": left_out}


def _is_device(events: Sequence[Mapping[str, Any]]) -> bool:
    return all(str(event["cat"]).startswith(("kernel", "gpu")) for event in events)


def _nested(events: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    """Each with how many others it lies in."""
    found, ends = [], list[float]()
    for event in sorted(events, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        begin = float(event["ts"])
        while ends and ends[-1] <= begin:
            ends.pop()
        found.append((event, len(ends)))
        ends.append(begin + float(event["dur"]))
    return found


def _memory(events: Sequence[Mapping[str, Any]], zero: float) -> list[tuple[float, float]]:
    """(µs, bytes) of the device that is trained on: of the GPU where the trace has any."""
    held = [event for event in events if event["name"] == "[memory]" and "Total Allocated" in (event.get("args") or {})]
    on_gpu = [event for event in held if event["args"].get("Device Type") != 0]
    chosen = sorted((float(e["ts"]) - zero, float(e["args"]["Total Allocated"])) for e in on_gpu or held)
    return [(round(moment, 1), value) for moment, value in chosen]


_TEMPLATE = (Path(__file__).with_name("trace_viewer.html")).read_text(encoding="utf-8")
