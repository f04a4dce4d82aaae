"""Learn by guessing: a number of your own beside what kit predicts and what a run measures.

`guess` asks for one, `score` shows all. Names are loaded when first used.
"""

from typing import TYPE_CHECKING

from kit.registry import lazy

if TYPE_CHECKING:
    from kit.course.guesses import guess as guess
    from kit.course.guesses import score as score

__getattr__, __dir__ = lazy(__name__)
