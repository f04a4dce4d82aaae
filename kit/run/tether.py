"""Tether: a command that cannot outlive who asked for it, nor harm it, and leaves word of how it ended.

`python -m kit.run.tether PARENT FILE COMMAND...` leads a process group of its own, in which COMMAND and all that it
starts run. When COMMAND ends, its exit status and seconds are written to FILE; then, or when stdin closes, or when the
process PARENT is gone, the whole group is killed, the tether with it. No process is signalled but by this group, which
nobody else can have got meanwhile. The standard library only: it is there before what it starts has loaded anything.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_TICK_SECONDS = 0.1


def main() -> None:
    parent, file, *command = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    # A handler, as what is ignored would be ignored by the command too.
    signal.signal(signal.SIGTERM, lambda *_: None)
    began = time.monotonic()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while child.poll() is None and os.getppid() == parent and _is_held():
        pass
    if child.returncode is not None:
        draft = file.with_suffix(".tmp")
        draft.write_text(json.dumps({"code": child.returncode, "seconds": time.monotonic() - began}))
        draft.replace(file)
    os.killpg(0, signal.SIGKILL)


def _is_held() -> bool:
    """Whether the other end of stdin is still open, after a moment."""
    ready, _, _ = select.select([0], [], [], _TICK_SECONDS)
    return not ready or bool(os.read(0, 4096))


if __name__ == "__main__":
    main()
