""" The classifier of a timm model: which parameters it has, and how a new one starts """
import math
from typing import Optional, Union

import torch
from torch import nn

from ..errors import UsageError


def _classifiers(model: nn.Module) -> list[nn.Module]:
    """Layers that give logits; models with a distilled head have two."""
    found = model.get_classifier()
    heads = found if isinstance(found, (tuple, list)) else [found]
    return [head for head in heads if isinstance(head, nn.Module)]


def classifier_parameters(model: nn.Module) -> list[nn.Parameter]:
    """ Parameters of the classifier; all others are the backbone.

    Args:
        model: A timm model.
    """
    parameters = [parameter for head in _classifiers(model) for parameter in head.parameters()]
    if not parameters:
        raise UsageError(f'Expected a model with a classifier, but got {type(model).__name__}, which has none.')
    return parameters


def _output_layers(model: nn.Module) -> list[nn.Module]:
    """Layers that give logits; heads of several branches (crossvit, efficientvim, repvit) have some in one module."""
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
    """ Start the classifier anew.

    Args:
        model: A timm model.
        std: Draw weights from a normal distribution with this deviation; None leaves them as they are.
        scale: Multiply weights and biases by a number.
        bias: Value of the biases, one for all classes or one for each.
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
                raise UsageError('Expected a classifier with biases to set them, but got one without.')
            layer_bias.copy_(torch.as_tensor(bias, dtype=layer_bias.dtype).expand_as(layer_bias))


def prior_bias(targets: torch.Tensor) -> torch.Tensor:
    """ Biases with which a classifier predicts each class as often as it occurs, log(p / (1 - p)).

    A class counts as half an image more often present and half more often absent, so that none is impossible or sure.

    Args:
        targets: (N, classes), 1 present, 0 absent, -1 unknown.
    """
    present, absent = (targets == 1).sum(dim=0).double(), (targets == 0).sum(dim=0).double()
    return ((present + 0.5).log() - (absent + 0.5).log()).float()


def mean_prior_bias(targets: torch.Tensor) -> float:
    """ One bias for all classes, with which a classifier predicts as many classes as an image has.

    Args:
        targets: (N, classes), 1 present, 0 absent, -1 unknown.
    """
    present, absent = int((targets == 1).sum()), int((targets == 0).sum())
    return math.log((present + 0.5) / (absent + 0.5))


def freeze_batch_norm(model: nn.Module) -> int:
    """ Let every BatchNorm use its running statistics and keep them; its scale and shift are still trained.

    Args:
        model: Any model; call this again after each `model.train()`.

    Returns:
        Number of layers.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for layer in layers:
        layer.eval()
    return len(layers)
