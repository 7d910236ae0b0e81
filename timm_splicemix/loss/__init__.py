""" Losses """
from .consistency import MEANS, ConsistencyLoss, consistency_loss
from .functional import (
    PARTIAL,
    REDUCTIONS,
    assume_negative_loss,
    asymmetric_loss,
    binary_cross_entropy,
    focal_loss,
    hill_loss,
    partial_asymmetric_loss,
    smoothed_binary_cross_entropy,
    splc_loss,
    union_cross_entropy,
    weak_negative_loss,
)
from .multilabel import (
    LOSSES,
    MultilabelLoss,
    create_loss,
    loss_parameters,
    positive_weights,
)
from .unknown import ignores_unknown

__all__ = [
    'LOSSES',
    'MEANS',
    'PARTIAL',
    'REDUCTIONS',
    'ConsistencyLoss',
    'MultilabelLoss',
    'assume_negative_loss',
    'asymmetric_loss',
    'binary_cross_entropy',
    'consistency_loss',
    'create_loss',
    'focal_loss',
    'hill_loss',
    'ignores_unknown',
    'loss_parameters',
    'partial_asymmetric_loss',
    'positive_weights',
    'smoothed_binary_cross_entropy',
    'splc_loss',
    'union_cross_entropy',
    'weak_negative_loss',
]
