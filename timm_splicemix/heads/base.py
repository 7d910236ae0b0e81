""" The interface of all heads

A head predicts classes from feature maps and knows nothing of the backbone. A caller uses it in three ways:

    logits = head(maps)                                     # evaluation and export

    weights = head.class_weights()                          # once per step; None for most heads
    logits, aux = head.forward_train(maps, weights)         # training: images
    cell_logits = head.forward_cells(cell_maps, weights)    # training: parts of the feature maps (SpliceMix-CL)

    loss, terms = head.losses(criterion(logits), aux, criterion)

The first three calls of a training step use parameters, so they belong into the one `forward` of the module that DDP
wraps. That module returns `aux`, a dictionary of tensors, with the logits. `losses` is called outside, as the targets
are known there: it uses no parameter or buffer, only the tensors that it gets. `criterion` is a function of logits
alone, with the targets of the batch bound. `loss` is what to minimise: the loss of the logits plus the sum of `terms`,
the weighted auxiliary losses by name, which are to be logged.

`maps` is a tensor (B, C, h, w), or a sequence of tensors if `num_maps` is above 1, in the order of decreasing size.
Nothing is decided from values of tensors, so a head never waits for the device.
"""
import math
from typing import Any, Callable, Mapping, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import UsageError

Maps = Union[torch.Tensor, Sequence[torch.Tensor]]
Criterion = Callable[[torch.Tensor], torch.Tensor]

SIDE_INPUTS = ('class_vectors', 'cooccurrence')


class Head(nn.Module):
    """ Base class of heads.

    A subclass defines `__init__(in_channels, num_classes, side inputs by name, options by name)` and `forward(maps)`.
    If a part of its prediction depends on no image, it defines `compute_class_weights()` and
    `forward(maps, weights=None)`. If it contains a BatchNorm layer, it calls `batch_norm` and defines `forward_cells`.

    Args:
        in_channels: Channels of the feature map; a sequence if the head needs several maps.
        num_classes: Number of classes.
    """
    num_maps = 1  # 2: the maps of strides 16 and 32
    side_inputs: tuple[str, ...] = ()  # names among SIDE_INPUTS
    stored_options: tuple[str, ...] = ()  # options whose effect is stored in buffers, so that it comes from checkpoints
    supports_cells = True
    cells_reason = ''  # why the head cannot predict parts of feature maps

    def __init__(self, in_channels: Union[int, Sequence[int]], num_classes: int):
        super().__init__()
        channels = (in_channels,) if isinstance(in_channels, int) else tuple(in_channels)
        if len(channels) != self.num_maps:
            raise UsageError(
                f'Expected the channels of {self.num_maps} feature map(s) for {type(self).__name__}, but got '
                f'{in_channels}.')
        if num_classes < 1:
            raise UsageError(f'Expected at least 1 class for {type(self).__name__}, but got {num_classes}.')
        self.in_channels = channels[0] if self.num_maps == 1 else channels
        self.num_classes = num_classes
        self.register_buffer('folded_weights', None, persistent=False)

    def compute_class_weights(self) -> Optional[torch.Tensor]:
        """The part of the prediction that depends on no image, or None."""
        return None

    def class_weights(self) -> Optional[torch.Tensor]:
        """What `forward`, `forward_train` and `forward_cells` take as `weights`, to compute it once per step."""
        return self.compute_class_weights() if self.folded_weights is None else self.folded_weights

    def fold_class_weights(self) -> None:
        """ Replace the computation of the class weights by its present result.

        Call this before an export: ONNX has no operator for the matrix inverse of DSDL, for example. The head cannot
        be trained afterwards.
        """
        weights = self.class_weights()
        self.folded_weights = None if weights is None else weights.detach()

    def forward_train(
            self,
            maps: Maps,
            weights: Optional[torch.Tensor] = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """ Predict images and return what the auxiliary losses need.

        Args:
            maps: (B, C, h, w) feature map, or a sequence of maps.
            weights: The result of `class_weights`, computed here if None.

        Returns:
            Logits (B, num_classes), and auxiliary tensors by name, for `losses`.
        """
        return self._logits(maps, weights), {}

    def forward_cells(self, maps: Maps, weights: Optional[torch.Tensor] = None) -> torch.Tensor:
        """ Predict parts of feature maps, without a change of the statistics of BatchNorm layers.

        Args:
            maps: (N, C, h, w) parts of the feature map.
            weights: The result of `class_weights`, computed here if None.

        Returns:
            Logits (N, num_classes).
        """
        if not self.supports_cells:
            raise UsageError(f'{type(self).__name__} cannot predict cells: {self.cells_reason}.')
        return self._logits(maps, weights)

    def _logits(self, maps: Maps, weights: Optional[torch.Tensor]) -> torch.Tensor:
        return self(maps) if weights is None else self(maps, weights)

    def losses(
            self,
            task_loss: torch.Tensor,
            aux: Mapping[str, torch.Tensor],
            criterion: Criterion,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """ Add the auxiliary losses of the head to the loss of its logits.

        Args:
            task_loss: Loss of the logits.
            aux: The auxiliary tensors that `forward_train` returned.
            criterion: Function of logits (B, num_classes) that computes their loss with the targets of the batch.

        Returns:
            The loss to minimise, and the weighted auxiliary losses by name, whose sum was added.
        """
        return task_loss, {}

    def extra_repr(self) -> str:
        return f'{self.in_channels}, num_classes={self.num_classes}'


def check_option(valid: bool, head: str, option: str, expected: str, value: Any) -> None:
    """ Raise an error about an option of a head.

    Args:
        valid: Whether the value is valid.
        head: Name of the head.
        option: Name of the option.
        expected: What the option should be.
        value: What it is.
    """
    if not valid:
        raise UsageError(f"Expected {expected} for option '{option}' of head '{head}', but got {value!r}.")


def check_counts(head: str, minimum: int = 1, **options: Any) -> None:
    """Raise an error unless all options are whole numbers of at least a minimum."""
    for option, value in options.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        check_option(whole and value >= minimum, head, option, f'a whole number of at least {minimum}', value)


def check_numbers(head: str, minimum: float = 0., maximum: float = math.inf, **options: Any) -> None:
    """Raise an error unless all options are finite numbers in a range."""
    expected = f'a number of at least {minimum:g}' if maximum == math.inf else f'a number in {minimum:g} to {maximum:g}'
    for option, value in options.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        check_option(
            number and math.isfinite(value) and minimum <= value <= maximum, head, option, expected, value)


def batch_norm(layer: nn.Module, x: torch.Tensor, update_stats: bool = True) -> torch.Tensor:
    """ Apply a BatchNorm layer of a head to vectors.

    In training mode, running statistics are used and kept in two cases. Cells of feature maps are few and some of them
    are dropped, so their own statistics would be poor, and those of the images must not change because of them. A
    single image has no variance.

    Args:
        layer: `nn.BatchNorm1d`, or `nn.SyncBatchNorm` that replaced it.
        x: (B, C) vectors.
        update_stats: False for cells.
    """
    if layer.training and (not update_stats or (x.shape[0] < 2 and not isinstance(layer, nn.SyncBatchNorm))):
        # Copies, as the statistics may be updated before the backward pass
        mean, var = layer.running_mean.clone(), layer.running_var.clone()
        return F.batch_norm(x, mean, var, layer.weight, layer.bias, training=False, eps=layer.eps)
    return layer(x)


def uniform_parameter(*shape: int) -> nn.Parameter:
    """Values between -1 / sqrt(n) and 1 / sqrt(n), where n is the last size."""
    bound = 1 / math.sqrt(shape[-1])
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


class PerClassLinear(nn.Module):
    """ One linear classifier per class, each for the feature of its class alone.

    First values are those of `nn.Linear`: uniform up to 1 / sqrt(dim).

    Args:
        num_classes: Number of classes.
        dim: Channels of the features.
    """

    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.weight = uniform_parameter(num_classes, dim)
        self.bias = nn.Parameter(torch.empty(num_classes).uniform_(-dim ** -0.5, dim ** -0.5))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return (features * self.weight).sum(dim=2) + self.bias  # (B, num_classes, dim) -> (B, num_classes)
