"""`pytest --quick`: the tests of what changed, then all pure ones, for as long as somebody waits.

What changed is what differs from the branch's upstream (or from the last commit but one), committed or not. Its tests
are the changed files of tests, those named after a changed module, and those that import one. A file of tests is pure
when it needs no process, no server, no store and no torch. Slow tests and tests in a browser are left to `make check`,
and so is what has not begun after `SECONDS`; the last line counts it as skipped.
"""

import ast
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest

SECONDS = 60.0
ROOT = Path(__file__).parents[1]
_HEAVY = frozenset((
    "asyncio", "duckdb", "lightning", "multiprocessing", "nbclient", "nbformat", "playwright", "psutil", "socket",
    "subprocess", "threading", "torch", "zarr",
    "kit.cloud.simulated", "kit.data.build.build", "kit.data.dataset", "kit.data.open_dataset", "kit.trial.client",
    "kit.trial.trial", "kit.widgets",
))  # fmt: skip
_HEAVY_FIXTURES = frozenset((
    "cloud", "config", "folder_server", "gcs", "notebook", "own", "place", "postgres", "running_cloud", "s3", "small",
    "tiny_config",
))  # fmt: skip


def add_option(parser):
    parser.addoption("--quick", action="store_true", help="tests of what changed and all pure ones, for a minute")


class Quick:
    """Chooses and orders the tests of one session, and ends it when its time is over."""

    def __init__(self):
        self.began = time.monotonic()

    def choose(self, items):
        """Those to run and the others; the most likely to fail first."""
        ranks = {path: self._rank(path) for path in {item.path for item in items}}

        def is_chosen(item):
            is_long = item.get_closest_marker("slow") or item.get_closest_marker("browser")
            return ranks[item.path] is not None and not is_long

        chosen = sorted(filter(is_chosen, items), key=lambda item: ranks[item.path])
        return chosen, [item for item in items if not is_chosen(item)]

    def _rank(self, path):
        changed = changed_files()
        names = {f"test_{file.stem}" for file in changed if file.parts[0] == "kit"}
        modules = {".".join(file.with_suffix("").parts) for file in changed if file.parts[0] == "kit"}
        if path.relative_to(ROOT) in changed or path.stem in names:
            return 0
        if imports(path) & modules:
            return 1
        return 2 if is_pure(path) else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        if time.monotonic() - self.began > SECONDS:
            pytest.skip(f"not begun within {SECONDS:g} s; `make test` runs it")


@cache
def changed_files():
    """Paths of Python files, relative to the repository, that differ from upstream or from the last commit but one."""
    base = _git("merge-base", "HEAD", "@{upstream}") or ["HEAD~1"]
    if base == _git("rev-parse", "HEAD"):
        base = ["HEAD~1"]
    names = [*_git("diff", "--name-only", base[0]), *_git("ls-files", "--others", "--exclude-standard")]
    return frozenset(Path(name) for name in names if name.endswith(".py"))


def _git(*words):
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else []


@cache
def imports(path):
    """Full names of the modules that a file of tests imports, also by way of helpers beside it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    for name in list(names):
        for folder in (path.parent, ROOT / "tests"):
            if (helper := folder / f"{name}.py") != path and helper.exists():
                names |= imports(helper)
    return frozenset(names)


@cache
def is_pure(path):
    names = imports(path)
    prefixes = {".".join(name.split(".")[:count]) for name in names for count in (1, 2, 3)}
    arguments = {
        argument.arg
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        for argument in node.args.args
    }
    return not prefixes & _HEAVY and not arguments & _HEAVY_FIXTURES
