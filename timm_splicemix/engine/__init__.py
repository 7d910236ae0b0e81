""" One epoch of training, one evaluation """
from .evaluate import AccuracyMeter, create_meter, evaluate
from .progress import Averages
from .step import Step
from .train import StopTraining, loader_length, train_one_epoch

__all__ = [
    'AccuracyMeter',
    'Averages',
    'Step',
    'StopTraining',
    'create_meter',
    'evaluate',
    'loader_length',
    'train_one_epoch',
]
