"""README as its reader takes it: its blocks of code by heading, and its inline code."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(language):
    """{heading: code} of the blocks in a language; a heading has one of each at most, or its last."""
    found = {}
    for match in _FENCE.finditer(TEXT):
        if match[1] == language:
            heading = re.findall(r"^## (.*)$", TEXT[: match.start()], re.MULTILINE)[-1]
            found[heading] = found.get(heading, "") + match[2]
    return found


def inline():
    """Every piece of code within the sentences and tables, once."""
    return sorted({code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", _FENCE.sub("", TEXT))})
