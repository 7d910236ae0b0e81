""" Multi-label losses by name, and the module that binds a loss to its parameters """
import inspect
from typing import Any, Callable, Optional, Union

import torch
from torch import nn

from ..errors import UsageError
from .functional import (
    assume_negative_loss,
    asymmetric_loss,
    binary_cross_entropy,
    focal_loss,
    hill_loss,
    partial_asymmetric_loss,
    smoothed_binary_cross_entropy,
    splc_loss,
    weak_negative_loss,
)

LossFunction = Callable[..., torch.Tensor]

LOSSES: dict[str, LossFunction] = {
    'bce': binary_cross_entropy,
    'bce-ls': smoothed_binary_cross_entropy,
    'focal': focal_loss,
    'asl': asymmetric_loss,
    'hill': hill_loss,
    'splc': splc_loss,
    'an': assume_negative_loss,
    'wan': weak_negative_loss,
    'p-asl': partial_asymmetric_loss,
}


def _signature(loss: Union[str, LossFunction]) -> dict[str, Any]:
    """The parameters of a loss with their defaults, including the epoch."""
    if isinstance(loss, str) and loss not in LOSSES:
        raise UsageError(f"Expected a loss among {', '.join(LOSSES)}, but got '{loss}'.")
    parameters = list(inspect.signature(LOSSES.get(loss, loss)).parameters.values())[2:]  # after logits and targets
    return {parameter.name: parameter.default for parameter in parameters}


def loss_parameters(loss: Union[str, LossFunction]) -> dict[str, Any]:
    """ The parameters of a loss and their defaults, apart from the epoch, which `MultilabelLoss.set_epoch` sets.

    Args:
        loss: A name in `LOSSES`, or a function of logits, targets and parameters.
    """
    return {name: default for name, default in _signature(loss).items() if name != 'epoch'}


class MultilabelLoss(nn.Module):
    """ A loss with its parameters, which are checked when the loss is created.

    Tensor parameters are buffers, so they follow the module to its device. They are not part of the state dict.

    Args:
        loss: A name in `LOSSES`, or a function of logits, targets and parameters.
        num_classes: If given, per-class parameters are checked against it.
        **parameters: Parameters of the loss.
    """

    def __init__(self, loss: Union[str, LossFunction], num_classes: Optional[int] = None, **parameters: Any):
        super().__init__()
        known = loss_parameters(loss)
        self.function = LOSSES.get(loss, loss)
        self.name = loss if isinstance(loss, str) else loss.__name__
        unknown = [name for name in parameters if name not in known]
        if unknown:
            raise UsageError(
                f"Expected parameters of loss '{self.name}' ({', '.join(known)}), but got {', '.join(unknown)}.")
        self.settings = {**_signature(loss), **parameters}
        for name, value in parameters.items():
            if isinstance(value, torch.Tensor):
                if not (value.isfinite() & (value >= 0)).all():
                    raise UsageError(f'Expected {name} to be finite and not negative, but got {value.tolist()}.')
                self.register_buffer(name, self.settings.pop(name), persistent=False)
        if num_classes is None:
            num_classes = next((len(buffer) for buffer in self.buffers() if buffer.ndim), 1)
        # Wrong parameters are found by a call now, and not in the first step.
        values = torch.zeros(1, num_classes, device=next((buffer.device for buffer in self.buffers()), None))
        self(values, values)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of a loss that depends on it; call this at the start of each epoch and after resuming."""
        if 'epoch' in self.settings:
            self.settings['epoch'] = epoch

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.function(logits, targets, **self.settings, **dict(self.named_buffers()))

    def extra_repr(self) -> str:
        values = {**self.settings, **{name: f'<{buffer.numel()}>' for name, buffer in self.named_buffers()}}
        return ', '.join([self.name, *(f'{name}={value}' for name, value in values.items())])


def create_loss(name: str, num_classes: Optional[int] = None, **kwargs: Any) -> MultilabelLoss:
    """ Create a loss by name.

    Args:
        name: A name in `LOSSES`.
        num_classes: If given, per-class parameters are checked against it.
        **kwargs: Parameters of the loss.
    """
    return MultilabelLoss(name, num_classes, **kwargs)


def positive_weights(
        targets: torch.Tensor,
        num_images: Optional[int] = None,
        *,
        max_weight: float = 100.,
) -> torch.Tensor:
    """ Weights negatives / positives of each class, which balance its positives and negatives.

    A class without positives, or without negatives, is treated as if it had one.

    Args:
        targets: (N, C) of values between 0 and 1, or -1 for unknown, which counts as neither; or (C,), the number of
            images with each class.
        num_images: Number of images, with (C,) counts only.
        max_weight: The weights are limited to [1 / max_weight, max_weight], so that rare classes don't dominate.

    Returns:
        (C,) float32, for `pos_weight`.

    Example:
        >>> import torch
        >>> positive_weights(torch.tensor([[1., 0.], [0., 0.], [0., -1.], [0., 1.]]))
        tensor([3., 2.])
        >>> positive_weights(torch.tensor([1, 4]), num_images=8)
        tensor([7., 1.])
    """
    if targets.ndim not in (1, 2) or (targets.ndim == 1) != (num_images is not None):
        raise UsageError(
            'Expected targets of shape (N, classes), or counts of shape (classes,) together with num_images, but got '
            f'shape {tuple(targets.shape)} and num_images {num_images}.')
    if not max_weight >= 1:
        raise UsageError(f'Expected max_weight of at least 1, but got {max_weight}.')
    values = targets.double()
    if targets.ndim == 2:
        positives = values.clamp(min=0.).sum(dim=0)
        negatives = (values >= 0).sum(dim=0) - positives
    else:
        positives, negatives = values, num_images - values
        if (negatives < 0).any() or (positives < 0).any():
            raise UsageError(f'Expected counts between 0 and num_images {num_images}, but got {targets.tolist()}.')
    ratio = torch.where(negatives > 0, negatives, 1.) / torch.where(positives > 0, positives, 1.)
    return ratio.clamp(1 / max_weight, max_weight).float()
