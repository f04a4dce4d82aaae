"""The book: the notebooks of a course, executed, as pages that open offline from a folder.

    python -m kit.course.book [00 03 ...] [--executed FOLDER] [--to artifacts/book]

Every notebook, or those whose names begin as given, runs in a copy of the project, as a reader would run it, unless
`--executed` names a folder of notebooks that ran already. Where a cell fails, its page ends with the error, the others
are made all the same, and the exit status is 1. Each page holds its pictures and needs no script, no style sheet and no
network; live views show the still picture that stands beside them. `index.html` lists the questions. It is made with
nbconvert: MyST and Jupyter Book fetch their themes from the network when they build.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from kit.registry import REPOSITORY
from kit.units import format_seconds

LIMIT_SECONDS = 1800
_SHOWN = ("text/html", "image/png", "text/markdown", "text/plain")
"""Kinds of output, the first that there is; a widget's view is dead without its kernel."""
_VIEW = "application/vnd.jupyter.widget-view+json"
_STYLE = """
body { margin: 0 auto; max-width: 72rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: #222; }
@media (prefers-color-scheme: dark) {
  body { background: #1b1b1b; color: #ddd; } img { background: #fff; } a { color: #8ab4f8; }
  :root { /* by these, what kit shows follows the theme of a notebook */
    --jp-ui-font-color1: #ddd; --jp-ui-font-color2: #aaa; --jp-layout-color0: #1b1b1b; --jp-layout-color2: #333;
    --jp-border-color2: #555; --jp-warn-color1: #f0a030; --jp-error-color1: #f28b82; }
}
nav { border-bottom: 1px solid #8886; padding-bottom: .5rem; margin-bottom: 1.5rem; }
pre { background: #8882; padding: .6rem; overflow-x: auto; font-size: 13px; line-height: 1.35; }
table { border-collapse: collapse; font-size: 14px; } td, th { padding: 2px 8px; }
img { max-width: 100%; height: auto; }
.jp-InputPrompt, .jp-OutputPrompt, .anchor-link { display: none; } div { max-width: 100%; }
.jp-OutputArea-output { overflow-x: auto; }
"""


def execute(path: Path, project: Path) -> tuple[Any, str]:
    """The notebook with its outputs, run in the folder of notebooks, and the error that ended it, if one did."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook, timeout=LIMIT_SECONDS, kernel_name="python3",
        resources={"metadata": {"path": str(project / "notebooks")}},
        extra_arguments=["--log-level=ERROR"],  # else every kernel warns that nothing is encrypted
    )  # fmt: skip
    try:
        client.execute()
    except CellExecutionError as error:
        return notebook, f"{error.ename}: {error.evalue}"
    except (CellTimeoutError, DeadKernelError) as error:
        return notebook, str(error)
    return notebook, ""


def page(notebook: Any, title: str, before: str, after: str) -> str:
    """One notebook as HTML, with links to its neighbours (names of files, empty for none)."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)  # type: ignore[no-untyped-call]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = list(filter(None, map(_shown, cell.outputs)))
    body, _ = exporter.from_notebook_node(notebook)
    links = [f'<a href="{escape(name)}.html">{words}</a>' for name, words in ((before, "before"), (after, "next"))
             if name]  # fmt: skip
    return _whole(title, f'<nav><a href="index.html">all questions</a> {" · ".join(["", *links])}</nav>{body}')


def _shown(output: Any) -> Any:
    """An output with the one kind of it that is shown; None for a view that has nothing else."""
    if "data" not in output:
        return output
    kinds = [kind for kind in _SHOWN if kind in output["data"]]
    if "image/png" in kinds:
        kinds = ["image/png"]
    elif _VIEW in output["data"]:
        return None
    if not kinds:
        return None
    output["data"] = {kinds[0]: output["data"][kinds[0]]}
    return output


def _whole(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def bind(notebooks: dict[str, Any], folder: Path) -> Path:
    """Write the pages and their index; notebooks by the name of their file, in order."""
    names = list(notebooks)
    titles = {name: notebook.cells[0].source.splitlines()[0].removeprefix("# ") for name, notebook in notebooks.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for before, name, after in zip(["", *names], names, [*names[1:], ""], strict=False):
        (folder / f"{name}.html").write_text(page(notebooks[name], titles[name], before, after), encoding="utf-8")
    items = "".join(f'<li><a href="{escape(name)}.html">{escape(titles[name])}</a></li>' for name in names)
    index = folder / "index.html"
    index.write_text(_whole("kit: a course", f"<h1>kit: a course</h1><ol>{items}</ol>"), encoding="utf-8")
    return index


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what has not run, and write the book; the exit status."""
    import nbformat

    asked = argparse.ArgumentParser(prog="python -m kit.course.book", description=(__doc__ or "").splitlines()[0])
    asked.add_argument("names", nargs="*", help="notebooks, by the beginning of their names; all when left out")
    asked.add_argument("--executed", type=Path, help="a folder of notebooks that ran already")
    asked.add_argument("--to", type=Path, default=Path("artifacts/book"), help="the folder of the book")
    given = asked.parse_args(arguments)
    folder, names = given.executed or REPOSITORY / "notebooks", tuple(given.names) or ""
    sources = [path for path in sorted(folder.glob("*.ipynb")) if path.name.startswith(names)]
    if not sources:
        sys.stderr.write(f"{folder} has no such notebooks\n")
        return 2
    failed = 0
    if given.executed:
        notebooks = {}
        for path in sources:
            notebooks[path.stem] = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    else:
        with tempfile.TemporaryDirectory() as temporary:
            project = Path(temporary)
            (project / "pyproject.toml").touch()
            for name in ("notebooks", "datasets"):
                shutil.copytree(REPOSITORY / name, project / name, ignore=shutil.ignore_patterns("runs", "data"))
            notebooks = {}
            for path in sources:
                sys.stdout.write(f"running {path.stem} … ")
                sys.stdout.flush()
                begun = time.monotonic()
                notebooks[path.stem], error = execute(project / "notebooks" / path.name, project)
                failed += bool(error)
                sys.stdout.write(f"{error or format_seconds(time.monotonic() - begun)}\n")
    sys.stdout.write(f"{bind(notebooks, given.to)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
