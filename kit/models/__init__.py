"""Small honest models whose size is one dial. Importing this package imports torch and lightning."""

from kit.models.corpus import Corpus
from kit.models.gpt import GPT, Tokens
from kit.models.random_data import Field, RandomData
from kit.models.sketch import Sketches, SketchModel
from kit.models.topics import PoissonNMF
from kit.models.unet import UNet
from kit.models.zoo import Encoder, Recommender, Recurrent, ResNet

__all__ = [
    "GPT",
    "Corpus",
    "Encoder",
    "Field",
    "PoissonNMF",
    "RandomData",
    "Recommender",
    "Recurrent",
    "ResNet",
    "SketchModel",
    "Sketches",
    "Tokens",
    "UNet",
]
