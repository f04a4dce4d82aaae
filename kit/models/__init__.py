"""Small honest models whose size is one dial. Importing this package imports torch and lightning."""

from kit.models.gpt import GPT, Tokens
from kit.models.topics import Corpus, PoissonNMF
from kit.models.unet import UNet
from kit.models.zoo import Encoder, Field, RandomData, Recommender, Recurrent, ResNet, Sketches, SketchModel

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
