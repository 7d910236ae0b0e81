""" What timm's model zoo lacks """
from .shufflenetv2 import ShuffleNetV2

__all__ = ['ShuffleNetV2']
