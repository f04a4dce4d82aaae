"""What README calls by name is there: functions take the arguments shown, and files, targets and settings exist.

Its blocks of code are run by `notebooks/test_readme_blocks.py`; here stand the shell lines and the code in sentences.
Nothing is run here but `--help`: names are resolved, calls are bound to signatures, settings are read as a Config.
"""

import ast
import inspect
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib

import house
import pytest
import readme

from kit.config import Config

PATHS = {info.path for info in Config.fields()}
PUBLIC = {name for names in house.public().values() for name in names}
NAMES = {info.name for info in Config.fields()}
EXTRAS = tomllib.loads((readme.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SOURCE = "\n".join(path.read_text() for path in sorted((readme.ROOT / "kit").rglob("*.py")))
ELSEWHERE = ("apt-get install ", "help(kit)", "import lightning", "torch.compile", "~/.pgpass", "password: env:NAME")
"""Of others, or of a file of others; the last is how `kit.data.read_sources` is told a password."""
WORDS = {"(values, rows)", ".npy", "chunk_step", "row.json", "runs/", "kit"}
"""What kit writes, reads or asks for under that name."""


def calls(code):
    return [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]


def bind(call):
    """That a call of kit's public functions names one, and gives it what it takes."""
    found = pkgutil.resolve_name(ast.unparse(call.func))
    given = [object()] * len(call.args), {word.arg: object() for word in call.keywords if word.arg}
    inspect.signature(found).bind(*given[0], **given[1])


def help_of(words):
    if words[0].endswith(".py"):  # others would begin their work
        assert "ArgumentParser" in (readme.ROOT / words[0]).read_text()
    done = subprocess.run([sys.executable, *words, "--help"], capture_output=True, text=True, cwd=readme.ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_shell(line):
    """A line of a shell: its target, script, module, extra or file is there, with every flag."""
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (readme.ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "pip":
        assert re.fullmatch(r"kit\[(.*)\]", words[2])[1] in EXTRAS
    elif words[0] == "conda":
        assert (readme.ROOT / words[-1]).is_file()
    else:
        assert words[0] == "python"
        told = help_of(words[1:4] if words[1] == "-m" else words[1:2])
        assert [word for word in words if word.startswith("--") and word not in told] == []


def check_setting(code):
    """`section.field`, with its value or without."""
    path, _, value = code.partition(": ")
    assert path in PATHS
    if value:
        section, _, name = path.partition(".")
        assert Config.from_yaml(f"{section}:\n  {name}: {value}\n").get(path) is not None


def check(code):
    if code.startswith(ELSEWHERE):
        return
    if code.startswith(("make ", "pip ", "conda ", "python ")):
        check_shell(code)
    elif code.startswith("kit.") and code.endswith(")"):
        bind(calls(code)[0])
    elif code.startswith("kit."):
        pkgutil.resolve_name(code)
    elif re.fullmatch(r"[a-z]+\.[a-z_]+(: .*)?", code) and code.partition(".")[0] in Config.model_fields:
        check_setting(code)
    elif "/" in code.strip("/") or code.endswith((".toml", ".py", ".md")):
        assert (readme.ROOT / code).exists()
    elif code.startswith("--"):
        assert code.split()[0] in help_of(["tests/gpu/memory_grid.py"])
    elif re.fullmatch(r"\w+=\w+", code):
        assert re.search(rf"\b{code.partition('=')[0]}: bool", SOURCE)
    elif code in WORDS:
        assert code in ("kit", "(values, rows)") or re.search(rf"[\"'`.]?{re.escape(code)}\b|{re.escape(code)}", SOURCE)
    else:
        assert code in NAMES or code in PUBLIC or f'"{code}"' in SOURCE, f"what is {code}?"


@pytest.mark.parametrize("code", readme.inline())
def test_code_in_a_sentence_is_as_it_is_written(code):
    check(code)


@pytest.mark.parametrize("line", [line for block in readme.blocks("sh").values() for line in block.splitlines()])
def test_a_line_for_the_shell_names_what_is_there(line):
    check_shell(line)


def test_every_folder_of_the_layout_is_there():
    layout = readme.blocks("")["How it is laid out"]
    inside = re.findall(r"^  ([\w.]+/?) ", layout, re.MULTILINE)
    outside = re.findall(r"^([\w.]+/)", layout, re.MULTILINE)
    assert len(inside) >= 10
    assert [name for name in inside if not (readme.ROOT / "kit" / name).exists()] == []
    assert [name for name in outside if not (readme.ROOT / name).is_dir()] == []
    folders = {path.name for path in (readme.ROOT / "kit").iterdir() if (path / "__init__.py").exists()}
    assert folders == {name.rstrip("/") for name in inside if name.endswith("/")}


@pytest.mark.parametrize(
    "code",
    ["kit.nothing", "kit.fit(1, 2, 3, four=5)", "make nothing", "loader.nothing", "kit/nothing.py",
     "data.order: nothing", "pip install 'kit[nothing]'", "python tests/gpu/memory_grid.py --nothing", "nothing_here"],
)  # fmt: skip
def test_what_is_not_there_is_found(code):
    with pytest.raises((AssertionError, AttributeError, ImportError, TypeError, ValueError)):
        check(code)


# -- what messages and docstrings of kit name


def texts():
    for path in sorted((readme.ROOT / "kit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.relative_to(readme.ROOT), node.value


MARKS = {"kit.batch", "kit.gone", "kit.start"}
"""What kit/memory/record/truth.py calls moments in a recording."""


def named():
    """(name, file) of each `kit.name` that a text mentions, modules of a `kit.name:Class` left out."""
    return {(name.rstrip("."), file.as_posix()) for file, text in texts()
            for name in re.findall(r"(?<![\w/.@-])kit\.[A-Za-z_]\w*(?:\.\w+)*(?![\w-]*[:/])", text)}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:kit\..* (is|are) .*:DeprecationWarning")  # names of before, which files hold
def test_every_name_of_kit_that_a_message_advises_is_there():
    found = named()
    assert len({name for name, _ in found}) > 80
    lost = []
    for name, file in sorted(found):
        if name in MARKS:
            continue
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            lost.append((name, file))
    assert lost == []


@pytest.mark.slow
def test_every_call_of_kit_that_a_message_advises_takes_what_it_is_given():
    found = {call for _, text in texts() for call in re.findall(r"(?<![\w.])kit\.\w+\([^()\n]*\)", text)}
    assert len(found) > 15
    wrong = []
    for code in sorted(found):
        try:
            bind(calls(code)[0])
        except (SyntaxError, TypeError) as error:
            wrong.append((code, str(error)))
    assert wrong == []
