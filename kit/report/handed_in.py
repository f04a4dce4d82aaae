"""The page that a learner hands in: every guess beside what was predicted and measured, as one file that opens offline.

It is a page of `html_report`'s kind and written under its rules. The guesses stand in it a second time as JSON, which a
teacher's script may read: `re.search('<script type="application/json" id="guesses">(.*?)</script>', text)`.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict
from html import escape
from pathlib import Path

from kit.charts import style as look
from kit.charts.course import score_figure
from kit.course.guesses import COLUMNS, Score
from kit.errors import ConfigError, Problem
from kit.json_text import write_whole
from kit.report.page import PageFile, html_page, refuse_folder, refuse_other_files
from kit.tables import html_list, html_table
from kit.trial.submit import versions


def score_page(score: Score, file: Path) -> Path:
    """Write the page that `Score.hand_in` promises.

    Raises:
        ConfigError: for a file that must not or cannot be written.
    """
    refuse_folder(file, "guesses.html")
    refuse_other_files(file)
    when = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    table = html_table(COLUMNS, score.rows())
    sections = {
        "Guess, prediction, measurement": f'<div style="overflow-x: auto">{table}</div>',
        "How far off": look.svg(score_figure(score), score.headline) if score.guesses else html_list(["nothing yet"]),
    }
    values = {"learner": score.learner, "points": score.points, "guesses": [asdict(one) for one in score.guesses]}
    kept = json.dumps(values).replace("</", "<\\/")
    page = html_page(escape(score.headline), f"Written {when} by kit {versions().get('kit', '')}.", sections)
    data = f'<script type="application/json" id="guesses">{kept}</script>\n</body>'
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return PageFile(write_whole(file, page.replace("</body>", data)))
    except OSError as error:
        raise ConfigError([Problem("path", f"cannot write {file}: {error.strerror or error}")]) from error
