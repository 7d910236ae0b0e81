""" What is minimised """
from .bce import (
    AssumeNegativeLoss,
    BinaryCrossEntropy,
    SmoothedBinaryCrossEntropy,
    WeakNegativeLoss,
    assume_negative_loss,
    binary_cross_entropy,
    smoothed_binary_cross_entropy,
    weak_negative_loss,
)
from .consistency import ConsistencyLoss, consistency_loss
from .focusing import (
    AsymmetricLoss,
    FocalLoss,
    HillLoss,
    SplcLoss,
    asymmetric_loss,
    focal_loss,
    hill_loss,
    splc_loss,
)
from .multilabel import (
    LOSSES,
    create_loss,
    loss_parameters,
    positive_weights,
)
from .partial import PARTIAL, PartialAsymmetricLoss, partial_asymmetric_loss
from .single_label import UnionCrossEntropy, union_cross_entropy
from .terms import REDUCTIONS, MultilabelLoss

__all__ = [
    'LOSSES',
    'PARTIAL',
    'REDUCTIONS',
    'AssumeNegativeLoss',
    'AsymmetricLoss',
    'BinaryCrossEntropy',
    'ConsistencyLoss',
    'FocalLoss',
    'HillLoss',
    'MultilabelLoss',
    'PartialAsymmetricLoss',
    'SmoothedBinaryCrossEntropy',
    'SplcLoss',
    'UnionCrossEntropy',
    'WeakNegativeLoss',
    'assume_negative_loss',
    'asymmetric_loss',
    'binary_cross_entropy',
    'consistency_loss',
    'create_loss',
    'focal_loss',
    'hill_loss',
    'loss_parameters',
    'partial_asymmetric_loss',
    'positive_weights',
    'smoothed_binary_cross_entropy',
    'splc_loss',
    'union_cross_entropy',
    'weak_negative_loss',
]
