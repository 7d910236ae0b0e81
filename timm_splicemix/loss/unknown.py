""" Whether a loss ignores unknown labels """
from typing import Callable, Union

import torch
from torch import nn


def ignores_unknown(criterion: Union[nn.Module, Callable], num_classes: int) -> bool:
    """ Whether the logits of unknown labels (-1) have no effect on a loss; shown by its gradient.

    `torch.nn.BCEWithLogitsLoss`, softmax losses, and losses that treat unknown labels as negative do not ignore them.

    Args:
        criterion: Loss of logits and targets, (N, classes) each.
        num_classes: Number of classes.
    """
    buffers = criterion.buffers() if isinstance(criterion, nn.Module) else ()
    device = next((buffer.device for buffer in buffers), None)
    logits = torch.linspace(-1, 1, 2 * num_classes, device=device).view(2, -1).requires_grad_()
    targets = torch.full_like(logits, -1, requires_grad=False)
    targets[0, 0] = 1.  # a known label
    with torch.enable_grad():
        gradient, = torch.autograd.grad(criterion(logits, targets).sum(), logits)
    return bool((gradient[targets < 0] == 0).all())
