""" Consistency loss of SpliceMix-CL, between the predictions of a cell of a mixed image and of its regular image """
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import UsageError

MEANS = ('visible', 'all')


def consistency_loss(
        cell_logits: torch.Tensor,
        image_logits: torch.Tensor,
        dropped: Optional[torch.Tensor] = None,
        *,
        detach: bool = True,
        mean: str = 'visible',
) -> torch.Tensor:
    """ Binary cross entropy of each cell's prediction against the prediction of its regular image.

    With p' = sigmoid(cell_logits), p = sigmoid(image_logits) and the K of N cells that are not dropped,

        loss = 1 / (K * C) * sum over these cells and C classes of -p * log(p') - (1 - p) * log(1 - p')

    which is equation 3.5 of the SpliceMix paper, a sum, as a mean. The paper's reference code divides by all N cells
    (`mean='all'`), so that dropping cells makes the loss smaller. The minimum over p' is at p' = p, where the loss is
    the entropy of p, not 0.

    The loss is computed from logits in float32 (float64 if given), with and without autocast. No decision depends on a
    tensor's value, so it never waits for a GPU.

    Args:
        cell_logits: (N, C), one row for each cell.
        image_logits: (N, C), the logits of the regular image of each cell, such as `logits[record.sources.flatten()]`.
        dropped: (N,) or (M, cells) bool, row-major as the cells; these cells are ignored, whatever their logits are.
        detach: Treat p as a constant. If False, the gradient also reaches the predictions of regular images.
        mean: Divide by the number of 'visible' cells, or of 'all' cells, dropped ones too.

    Returns:
        The loss, a scalar; 0 with gradients of 0 if no cell remains.

    Example:
        >>> import torch
        >>> cell_logits, image_logits = torch.tensor([[0., 2.], [9., 9.]]), torch.tensor([[1., 2.], [0., 0.]])
        >>> consistency_loss(cell_logits, image_logits, torch.tensor([False, True]))
        tensor(0.5292)
        >>> consistency_loss(cell_logits, image_logits, torch.tensor([False, True]), mean='all')
        tensor(0.2646)
    """
    _check_mean(mean)
    if dropped is None:
        dropped = torch.zeros(len(cell_logits), dtype=torch.bool, device=cell_logits.device)
    _check_input(cell_logits, image_logits, dropped)
    dropped = dropped.to(cell_logits.device, non_blocking=True).reshape(-1, 1)  # (N, 1)
    dtype = torch.promote_types(torch.promote_types(cell_logits.dtype, image_logits.dtype), torch.float32)
    # Mask before the loss too, since a gradient of 0 times an infinite derivative is nan.
    student = cell_logits.to(dtype).masked_fill(dropped, 0.)
    teacher = image_logits.to(dtype).masked_fill(dropped, 0.)
    if detach:
        teacher = teacher.detach()
    losses = F.binary_cross_entropy_with_logits(student, teacher.sigmoid(), reduction='none')  # (N, C)
    total = losses.masked_fill(dropped, 0.).sum()
    if mean == 'all':
        return total / max(losses.numel(), 1)
    num_terms = (~dropped).sum() * losses.shape[1]
    return total / num_terms.clamp(min=1)


class ConsistencyLoss(nn.Module):
    """ `consistency_loss` as a module.

    Args:
        detach: Treat the predictions of regular images as constants, as in the paper.
        mean: Divide by the number of 'visible' cells, or of 'all' cells, as the paper's reference code does.
    """

    def __init__(self, detach: bool = True, mean: str = 'visible'):
        super().__init__()
        _check_mean(mean)
        self.detach = detach
        self.mean = mean

    def forward(
            self,
            cell_logits: torch.Tensor,
            image_logits: torch.Tensor,
            dropped: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        return consistency_loss(cell_logits, image_logits, dropped, detach=self.detach, mean=self.mean)

    def extra_repr(self) -> str:
        return f'detach={self.detach}, mean={self.mean!r}'


def _check_mean(mean: str) -> None:
    if mean not in MEANS:
        raise UsageError(f'Expected mean to be one of {", ".join(MEANS)}, but got {mean!r}.')


def _check_input(cell_logits: torch.Tensor, image_logits: torch.Tensor, dropped: torch.Tensor) -> None:
    if cell_logits.ndim != 2:
        raise UsageError(f'Expected cell_logits of shape (N, classes), but got {tuple(cell_logits.shape)}.')
    if image_logits.shape != cell_logits.shape:
        raise UsageError(
            f'Expected image_logits of shape {tuple(cell_logits.shape)}, those of the regular image of each cell, '
            f'but got {tuple(image_logits.shape)}: gather them by image_logits[record.sources.flatten()].')
    for name, logits in (('cell_logits', cell_logits), ('image_logits', image_logits)):
        if not logits.is_floating_point():
            raise UsageError(f'Expected {name} of a floating point type, but got {logits.dtype}.')
    if dropped.dtype != torch.bool:
        raise UsageError(f'Expected dropped to be a mask of type torch.bool, but got {dropped.dtype}.')
    if dropped.ndim not in (1, 2) or dropped.numel() != len(cell_logits):
        raise UsageError(
            f'Expected dropped to have one value for each of {len(cell_logits)} cells, in shape (N,) or (M, cells), '
            f'but got shape {tuple(dropped.shape)}.')
