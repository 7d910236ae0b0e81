""" What SpliceMix is compared with, for labels of several classes: Mixup, CutMix, ResizeMix, RecursiveMix

Batch augmentation, several copies of an image transformed each on its own, needs no mixer: the loader makes the copies
(`create_loader(batch_copies=...)`).
"""
from .mixup import Mixup, SpliceWith
from .pairs import PairPlan, mix_pairs
from .recursivemix import RecursiveMix, RecursivePlan, Remembered
from .resizemix import ResizeMix

__all__ = [
    'Mixup', 'PairPlan', 'RecursiveMix', 'RecursivePlan', 'Remembered', 'ResizeMix', 'SpliceWith', 'mix_pairs']
