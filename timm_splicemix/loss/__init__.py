""" What is minimised """
from .consistency import ConsistencyLoss, consistency_loss

__all__ = ['ConsistencyLoss', 'consistency_loss']
