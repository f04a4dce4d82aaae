"""A disk that is full when a trial is submitted: a named error with what is free, and no torn run directory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from properties import at_night

from kit.errors import ConfigError
from kit.events import EventWriter
from kit.memory.alongside import fit
from kit.trial import directory, submit
from kit.trial.submit import prepare

WRITES = ("mkdir", "touch", "write_text", "write_bytes")
WRITES_OF_A_RUN = 9


class Full:
    """A disk on which the write of this number fails, and all after it, as one that is full does."""

    def __init__(self, monkeypatch, first):
        self.left = first
        for name in WRITES:
            monkeypatch.setattr(Path, name, self.limited(getattr(Path, name)))
        monkeypatch.setattr(EventWriter, "write", self.limited(EventWriter.write))

    def limited(self, write):
        def limited_write(target, *arguments, **options):
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(target, *arguments, **options)

        return limited_write


@pytest.fixture(scope="module", autouse=True)
def key_is_there():
    """It is made once and then kept in memory: without it, the first run of all would write it too."""
    directory._key(directory.key_path())


@pytest.mark.filterwarnings("ignore:module and data are")
@pytest.mark.parametrize("first", range(20))
def test_whichever_write_fails_leaves_no_run_behind(own, monkeypatch, first):
    asked = own()
    monkeypatch.setattr(submit, "LARGE_BYTES", 1)  # so that a warning is written too
    disk = Full(monkeypatch, first)
    if first >= WRITES_OF_A_RUN:
        assert prepare(None, None, asked).config.exists()
        assert disk.left >= 0
        return
    with pytest.raises(ConfigError, match=r"trial.folder: .*No space left .*free"):
        prepare(None, None, asked)
    folder = Path(asked.trial.folder)
    assert not folder.exists() or list(folder.iterdir()) == []


def test_the_last_note_before_a_process_begins_may_find_the_disk_full_too(own, monkeypatch):
    asked = own()
    Full(monkeypatch, WRITES_OF_A_RUN - 1)  # after all of prepare, which here has nothing to warn of
    with pytest.raises(ConfigError, match=r"needed, .*free"):
        fit(asked)
    assert list(Path(asked.trial.folder).iterdir()) == []


SMALL = """
import sys
from pathlib import Path
from kit.config import Config
from kit.errors import ConfigError
from kit.trial.submit import prepare
config = Config.from_yaml(sys.stdin.read()).replace({"trial.folder": sys.argv[1]})
try:
    prepare(None, None, config)
    print("done")
except ConfigError as error:
    print(error, [path.name for path in Path(sys.argv[1]).rglob("*")])
"""


@pytest.mark.parametrize("pages", at_night([2, 3, 4, 5, 6, 7, 8, 64], [2, 4, 6, 64]))
def test_a_real_disk_of_a_few_pages_is_never_left_with_half_a_run(own, tmp_path, pages):
    small = tmp_path / "small"
    small.mkdir()
    mount = f'mount -t tmpfs -o size={pages * 4096} tmpfs "$0" && exec "$1" -c "$2" "$0"'
    line = ["unshare", "-m", "sh", "-c", mount, str(small), sys.executable, SMALL]
    done = subprocess.run(
        line, input=own().to_yaml(comments=False), capture_output=True, text=True, timeout=120, check=False
    )
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("this user may not mount")
    assert done.returncode == 0, done.stderr
    if pages == 64:
        assert done.stdout == "done\n"
    elif done.stdout != "done\n":
        assert "No space left" in done.stdout
        assert "needed" in done.stdout
        assert "free" in done.stdout
        assert done.stdout.rstrip().endswith("[]")
