"""Small honest models whose size is one dial. Importing this package imports torch and lightning."""

from kit.models.gpt import GPT, Tokens
from kit.models.random_data import Field, RandomData
from kit.models.unet import UNet
from kit.models.zoo import Encoder, Recommender, Recurrent, ResNet

__all__ = ["GPT", "Encoder", "Field", "RandomData", "Recommender", "Recurrent", "ResNet", "Tokens", "UNet"]
