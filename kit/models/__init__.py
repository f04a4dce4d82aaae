"""Small honest models whose size is one dial. Importing this package imports torch and lightning."""

from kit.models.unet import UNet

__all__ = ["UNet"]
