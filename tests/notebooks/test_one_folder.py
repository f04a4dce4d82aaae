"""All notebooks share one folder, as somebody's does who goes through them: in any order, again and again.

What they share is data below `data/` and trials below `runs/`. In CI only the statements that make data run, there
and back: each must be served what it made, whoever was there before. At night all cells do.
"""

import ast
import json
import shutil
from pathlib import Path

import nbformat
import pytest
import readme
from nbclient import NotebookClient
from properties import at_night, nightly

import kit

NOTEBOOKS = sorted((readme.ROOT / "notebooks").glob("*.ipynb"))
MAKES = ("kit.build", "kit.data.write_rows", "kit.data.read_sources", "run_line_magic")
ELSEWHERE = "kit.cloud"
"""A notebook that makes its data in a simulated cloud leaves none in the folder."""
LIMIT_SECONDS = 900
CHECKSUM = """import zlib, numpy, kit
def checksum(made):
    if hasattr(made, "open_array"):
        return {name: zlib.crc32(numpy.ascontiguousarray(made.open_array(name)[...])) for name in made.arrays}
    if hasattr(made, "take"):
        return zlib.crc32(made.take(numpy.arange(len(made))).numpy())
    return None if made is None else repr(sorted(made.value_counts("customer_id")))
"""


def names_of(node, kind):
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, kind)}


def making(path):
    """The statements of a notebook that make data, and those before that give what they need."""
    cells = nbformat.read(path, as_version=4).cells
    statements = [node for cell in cells if cell.cell_type == "code" for node in ast.parse(cell.source).body]
    statements = [node for node in statements if not isinstance(node, ast.If)]  # what installs kit makes no data
    kept, needed = [], set()
    for node in reversed(statements):
        given = names_of(node, ast.Store) | {name.asname or name.name for name in getattr(node, "names", ())}
        if any(f"{call}(" in ast.unparse(node) for call in MAKES) or given & needed:
            kept.append(node)
            needed = (needed - given) | names_of(node, ast.Load)
    return kept[::-1]


def told(node):
    """A statement, and a line that says under the notebook's own name what it made."""
    text = ast.unparse(node)
    if not any(f"{call}(" in text for call in MAKES):
        return text
    value = node.value if isinstance(node, ast.Expr) else None
    name = "made_now" if value else node.targets[0].id
    return f"{f'{name} = ' if value else ''}{text}\nmade.append(checksum({name}))"


def fresh(folder):
    """A project of its own in `folder`, as a user has it."""
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    for name in ("notebooks", "datasets"):
        shutil.copytree(readme.ROOT / name, folder / name, ignore=shutil.ignore_patterns("runs", ".ipynb_checkpoints"))
    return folder


def execute(notebook, project):
    options = {"timeout": LIMIT_SECONDS, "kernel_name": "python3"}
    NotebookClient(notebook, resources={"metadata": {"path": str(project / "notebooks")}}, **options).execute()


def made_by(paths, project):
    """[(notebook, what it made)] of one kernel that makes the data of all of them in this order."""
    cells = ["everything = []"]
    for path in paths:
        lines = [told(node) for node in making(path)]
        cells += ["%reset_selective -f ^(?!everything$).*", CHECKSUM, "made = []", *lines]
        cells.append(f"everything.append([{path.stem!r}, made])")
    cells.append("import json; print(json.dumps(everything))")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    execute(notebook, project)
    return json.loads(notebook.cells[-1].outputs[0].text)


def local():
    """Notebooks that make data in the folder."""
    sources = {path: "\n".join(map(ast.unparse, making(path))) for path in NOTEBOOKS}
    return [path for path, source in sources.items() if source and ELSEWHERE not in source]


def test_what_makes_data_is_found_with_what_it_needs():
    assert {path.stem for path in local()} >= {"00_start", "06_profile", "07_commit", "08_larger_than_memory"}
    text = "\n".join(map(ast.unparse, making(NOTEBOOKS[0])))
    assert "kit.plan_chunks" in text
    assert "kit.fit" not in text


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS)
def test_each_notebook_is_served_what_it_makes_whoever_was_there_before(tmp_path):
    there_and_back, back = [*local(), *reversed(local())], [*reversed(local())]
    served = {}
    for number, order in enumerate(at_night([there_and_back, back], [there_and_back])):
        for name, made in made_by(order, fresh(tmp_path / str(number))):
            assert [one for one in made if one]
            assert served.setdefault(name, made) == made, name


@pytest.mark.timeout(12 * LIMIT_SECONDS)
@pytest.mark.skipif(not nightly(), reason="an hour; what they share is tested above")
@pytest.mark.parametrize("order", [list, lambda paths: [*reversed(paths)]], ids=["in order", "reversed"])
def test_all_notebooks_run_in_one_folder_twice(tmp_path, order, monkeypatch):
    project = fresh(tmp_path / "project")
    for path in 2 * order(NOTEBOOKS):
        notebook = nbformat.read(project / "notebooks" / path.name, as_version=4)
        execute(notebook, project)
    monkeypatch.chdir(project)
    found = kit.results()
    assert {Path(row["run_directory"]).parent for row in found} == {project / "runs"}
    shown = found._repr_html_()
    assert all(name in shown for name in {row["name"] for row in found}), "each row says whose it is"
