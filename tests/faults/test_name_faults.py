"""Names and texts of others: none leads out of its folder, none is a command, a formula or a tag that is believed."""

import re
import shutil
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kit
from kit.config import Config
from kit.errors import ConfigError
from kit.trial.directory import RunPaths

ROOT = Path(kit.__file__).parent
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
BAD = [
    "", ".", "..", "../x", "/abs", "a/b", "C:\\x", "a\\b", "a\0b", "x" * 65, "x" * 300, "-rf", ".hidden", "ünï",
    "ａｂｃ", "а", "CON ", "a b", "a\nb", "$(rm)", "`id`", "a;b", "<img src=x>", "name\u202etxt", "A",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD, ids=ascii)
def test_a_name_that_is_no_plain_word_is_refused_under_its_path(name):
    with pytest.raises(ConfigError) as caught:
        Config().replace({"name": name})
    assert [problem.path for problem in caught.value.problems] == ["name"]


@given(st.text(max_size=80) | st.text(string.ascii_lowercase + string.digits + "._-/", max_size=80))
def test_a_run_directory_lies_in_its_folder_whatever_the_name(tmp_path_factory, name):
    folder = tmp_path_factory.mktemp("runs")
    try:
        config = Config().replace({"name": name, "trial.folder": str(folder)})
    except ConfigError:
        assert NAME.fullmatch(name) is None
        return
    assert RunPaths.create(config).directory.resolve().parent == folder.resolve()
    shutil.rmtree(folder)


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system ['touch {}']", "!!python/name:os.system", "!mine 3"])
def test_a_tag_in_yaml_runs_nothing(tmp_path, text):
    canary = tmp_path / "canary"
    with pytest.raises(ConfigError, match="line 1"):
        Config.from_yaml(f"loader: {text.format(canary)}")
    assert not canary.exists()


def test_only_what_kit_itself_has_packed_is_unpickled():
    """The payload of a run, which a kernel packed for its ranks, and a question to a process of its own."""
    words = re.compile(r"pickle\.loads?\(|Unpickler\(|joblib|dill\.")
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if words.search(path.read_text())}
    assert found
    assert {path for path in found if not path.startswith(("memory/", "speed/", "studies/", "trial/"))} == {
        "data/tables/measure.py"
    }
