""" What multi-label losses share: their two terms, unknown targets, reductions, and the module around a function """
import math
from typing import Any, Callable, Optional, Union

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import UsageError

REDUCTIONS = ('mean', 'sum', 'batchmean')


def check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """ Refuse a parameter that is out of range, or no finite number.

    Args:
        name: Name of the parameter.
        value: Its value.
        low: Smallest value that is fine.
        high: Largest value that is fine.
    """
    if not (low <= value <= high and math.isfinite(value)):
        what = f'of at least {low}' if high == math.inf else f'between {low} and {high}'
        raise UsageError(f'Expected {name} {what}, but got {value}.')


def prepare(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ Bring logits and targets to one shape and to float32, or float64 if logits are.

    Args:
        logits: (N, C).
        targets: (N, C) of values between 0 and 1, or -1 for unknown; or (N,) class indices, which become one-hot.

    Returns:
        logits, targets and the mask of unknown targets, each (N, C).
    """
    if logits.ndim != 2 or not logits.is_floating_point():
        raise UsageError(
            f'Expected logits of shape (N, classes) and a floating point type, but got {tuple(logits.shape)} of '
            f'{logits.dtype}.')
    dtype = torch.promote_types(logits.dtype, torch.float32)
    is_index = targets.ndim == 1 and not targets.is_floating_point() and targets.dtype != torch.bool
    if is_index and len(targets) == len(logits):
        # Not F.one_hot, which reads the largest index and so waits for the GPU.
        targets = torch.zeros_like(logits, dtype=dtype).scatter_(1, targets.long().unsqueeze(1), 1.)
    if targets.shape != logits.shape:
        raise UsageError(
            f'Expected targets of shape {tuple(logits.shape)}, as the logits, or ({len(logits)},) class indices, '
            f'but got {tuple(targets.shape)} of {targets.dtype}.')
    targets = targets.to(dtype)
    return logits.to(dtype), targets, targets < 0


def positive_term(logits: torch.Tensor, gamma: float = 0., detach_focus: bool = False) -> torch.Tensor:
    """ -(1 - p)^gamma * log(p), the loss of a positive.

    Args:
        logits: Of any shape.
        gamma: Focusing exponent; 0 is plain cross entropy.
        detach_focus: Take (1 - p)^gamma as a constant.
    """
    loss = -F.logsigmoid(logits)
    if gamma == 0:
        return loss
    # A power by its logarithm: that of 0 has a derivative that is not finite if gamma < 1.
    focus = (gamma * F.logsigmoid(-logits)).exp()
    return loss * (focus.detach() if detach_focus else focus)


def negative_term(
        logits: torch.Tensor,
        gamma: float = 0.,
        clip: float = 0.,
        detach_focus: bool = False,
) -> torch.Tensor:
    """ -q^gamma * log(1 - q) with q = max(p - clip, 0), the loss of a negative.

    Args:
        logits: Of any shape.
        gamma: Focusing exponent; 0 is plain cross entropy.
        clip: Probability up to which there is no loss.
        detach_focus: Take q^gamma as a constant.
    """
    if clip == 0:
        return positive_term(-logits, gamma, detach_focus)
    p = logits.sigmoid()
    active = p > clip
    loss = -((-logits).sigmoid() + clip).clamp(max=1.).log()  # 1 - p as sigmoid(-x), which doesn't cancel
    if gamma != 0:
        # Where there is no loss any base will do, except 0, for the reason above.
        focus = torch.where(active, p - clip, 1.).pow(gamma)
        loss = loss * (focus.detach() if detach_focus else focus)
    return loss.masked_fill(~active, 0.)


def weigh_positives(
        loss: torch.Tensor,
        pos_weight: Optional[Union[torch.Tensor, float]],
) -> torch.Tensor:
    """ Multiply the loss of positives by the weight of their class.

    Args:
        loss: (N, C), the loss that each entry has as a positive.
        pos_weight: (C,), or one number for all classes; None is 1.
    """
    if pos_weight is None:
        return loss
    if not isinstance(pos_weight, torch.Tensor):
        check_range('pos_weight', pos_weight, 0.)
        return loss * pos_weight
    if pos_weight.shape not in ((), loss.shape[1:]):
        raise UsageError(
            f'Expected pos_weight of shape ({loss.shape[1]},), one for each class, but got {tuple(pos_weight.shape)}.')
    return loss * pos_weight.to(loss, non_blocking=True)


def reduce_losses(losses: torch.Tensor, ignored: Optional[torch.Tensor], reduction: str) -> torch.Tensor:
    """ Make one number of the losses of all entries.

    'mean' is the mean over all entries that count, 'sum' their sum, and 'batchmean' their sum over classes, averaged
    over the images that have such an entry.

    Args:
        losses: (N, C).
        ignored: (N, C) bool, the entries that don't count; None if all do.
        reduction: 'mean', 'sum' or 'batchmean'.

    Returns:
        A scalar; 0 if no entry counts, with gradients of 0.
    """
    if reduction not in REDUCTIONS:
        raise UsageError(f"Expected reduction to be one of {', '.join(REDUCTIONS)}, but got '{reduction}'.")
    if ignored is None:
        ignored = torch.zeros_like(losses, dtype=torch.bool)
    total = losses.masked_fill(ignored, 0.).sum()
    if reduction == 'sum':
        return total
    counted = ~ignored if reduction == 'mean' else (~ignored).any(dim=1)
    return total / counted.sum().clamp(min=1)


class MultilabelLoss(nn.Module):
    """ A loss function with its parameters.

    Tensors among the parameters are buffers, so they follow the module to its device; they are no part of its state,
    as they are given again when the loss is built again.

    Args:
        function: Called with logits, targets and the parameters.
        settings: The parameters.
    """

    def __init__(self, function: Callable[..., torch.Tensor], **settings: Any):
        super().__init__()
        self.function = function
        self.settings = {name: value for name, value in settings.items() if not isinstance(value, torch.Tensor)}
        num_classes = 1
        for name in [name for name in settings if name not in self.settings]:
            tensor = settings[name]
            if not (tensor.isfinite() & (tensor >= 0)).all():
                raise UsageError(f'Expected {name} to be finite and not negative, but got {tensor.tolist()}.')
            self.register_buffer(name, tensor, persistent=False)
            num_classes = tensor.shape[0] if tensor.ndim else num_classes
        self.check(num_classes)

    def check(self, num_classes: int) -> None:
        """ Find wrong parameters now, by a call, and not in the first step.

        Args:
            num_classes: Number of classes of that call.
        """
        device = next((buffer.device for buffer in self.buffers()), None)
        values = torch.zeros(1, num_classes, device=device)
        self(values, values)

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.function(logits, targets, **{**self.settings, **self._buffers})

    def extra_repr(self) -> str:
        values = {**self.settings, **{name: f'<{buffer.numel()}>' for name, buffer in self._buffers.items()}}
        return ', '.join(f'{name}={value}' for name, value in values.items())
