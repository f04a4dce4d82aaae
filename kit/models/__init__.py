"""Small honest models whose size is one dial. Importing this package imports torch and lightning.

`UNet` forecasts fields, `GPT` continues text; `Encoder`, `Recurrent`, `ResNet`, `Recommender` and `SketchModel` are of
other kinds. `Tokens`, `TextData` and `RandomData` of `Field`s are data for them.
"""

from typing import TYPE_CHECKING, Any

from kit.models.gpt import GPT, Tokens
from kit.models.unet import UNet
from kit.models.zoo import Encoder, Field, RandomData, Recommender, Recurrent, ResNet, SketchModel
from kit.registry import load_file

if TYPE_CHECKING:  # what opens stores is loaded when it is first used
    from kit.models.named import TextData as TextData

__all__ = [
    "GPT",
    "Encoder",
    "Field",
    "RandomData",
    "Recommender",
    "Recurrent",
    "ResNet",
    "SketchModel",
    "TextData",
    "Tokens",
    "UNet",
]

_BESIDE_DATASETS = {"Corpus": "datasets/topics/topics.py", "PoissonNMF": "datasets/topics/topics.py"}
"""Files of earlier versions name them here."""


def __getattr__(name: str) -> Any:
    if name == "TextData":
        from kit.models.named import TextData

        return TextData
    if name not in _BESIDE_DATASETS:
        raise AttributeError(f"module 'kit.models' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(load_file(_BESIDE_DATASETS[name]), name)
