""" The classifier of a timm model: its parameters and its initialisation """
import math
from typing import Optional, Union

import torch
from torch import nn

from ..errors import UsageError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _classifiers(model: nn.Module) -> list[nn.Module]:
    found = model.get_classifier()
    heads = found if isinstance(found, (tuple, list)) else [found]  # models with a distilled head have two
    return [head for head in heads if isinstance(head, nn.Module)]


def classifier_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the classifier; all others belong to the backbone."""
    parameters = [parameter for head in _classifiers(model) for parameter in head.parameters()]
    if not parameters:
        raise UsageError(f'Expected a model with a classifier, but {type(model).__name__} has none.')
    return parameters


def _output_layers(model: nn.Module) -> list[nn.Module]:
    """Layers that return logits; the heads of crossvit, efficientvim and repvit contain several."""
    layers = [module for head in _classifiers(model) for module in head.modules()]
    weights = [getattr(layer, 'weight', None) for layer in layers]
    return [
        layer for layer, weight in zip(layers, weights)
        if weight is not None and weight.ndim >= 2 and len(weight) == model.num_classes]


@torch.no_grad()
def init_classifier(
        model: nn.Module,
        std: Optional[float] = None,
        scale: Optional[float] = None,
        bias: Union[float, torch.Tensor, None] = None,
) -> None:
    """ Initialise the classifier.

    Args:
        model: A timm model.
        std: Standard deviation of normally distributed weights, None to keep the weights.
        scale: Factor of weights and biases.
        bias: Biases, one for all classes or one per class.
    """
    for layer in _output_layers(model):
        layer_bias = getattr(layer, 'bias', None)
        if std is not None:
            nn.init.normal_(layer.weight, std=std)
        if scale is not None:
            layer.weight.mul_(scale)
            if layer_bias is not None:
                layer_bias.mul_(scale)
        if bias is not None:
            if layer_bias is None:
                raise UsageError('Cannot set the bias of a classifier that has none.')
            layer_bias.copy_(torch.as_tensor(bias, dtype=layer_bias.dtype).expand_as(layer_bias))


def prior_bias(targets: torch.Tensor) -> torch.Tensor:
    """ Biases log(p / (1 - p)) with which a classifier predicts each class with its frequency p.

    Half an image is added to the positives and the negatives of each class, so that all biases are finite.

    Args:
        targets: (N, classes): 1 present, 0 absent, -1 unknown.
    """
    present, absent = (targets == 1).sum(dim=0).double(), (targets == 0).sum(dim=0).double()
    return ((present + 0.5).log() - (absent + 0.5).log()).float()


def mean_prior_bias(targets: torch.Tensor) -> float:
    """ One bias for all classes, with which a classifier predicts the average number of labels.

    Args:
        targets: (N, classes): 1 present, 0 absent, -1 unknown.
    """
    present, absent = int((targets == 1).sum()), int((targets == 0).sum())
    return math.log((present + 0.5) / (absent + 0.5))


def freeze_batch_norm(model: nn.Module) -> int:
    """ Switch BatchNorm layers to evaluation mode: running statistics are used and kept, scale and shift still train.

    Call this again after each `model.train()`. Returns the number of layers.
    """
    layers = [module for module in model.modules() if isinstance(module, _BATCH_NORMS)]
    for layer in layers:
        layer.eval()
    return len(layers)
