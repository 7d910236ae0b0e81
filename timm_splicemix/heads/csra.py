""" CSRA: class-specific residual attention

Paper: `Residual Attention: A Simple but Effective Method for Multi-Label Recognition` -
https://arxiv.org/abs/2108.02456
"""
import torch
import torch.nn.functional as F
from torch import nn

from .base import Head, check_numbers, check_option

TEMPERATURES = {  # of each number of heads
    1: (1.,),
    2: (1., 99.),
    4: (1., 2., 4., 99.),
    6: (1., 2., 3., 4., 5., 99.),
    8: (1., 2., 3., 4., 5., 6., 7., 99.),
}
MAX_TEMPERATURE = 99.  # stands for the maximum


class CSRA(Head):
    """ Add to the average score of a class its score where the class is, in several heads.

    The scores s of a class at all positions are those of a linear classifier without bias, divided by the norm of its
    weights. The logit is mean(s) + lam * sum(softmax(T s) s), with the maximum of s in the place of the sum for the
    last of several heads. The logits of the heads are added.

    Args:
        in_channels: Channels of the feature map.
        num_classes: Number of classes.
        heads: Number of heads: 1, 2, 4, 6 or 8. Each has a temperature T.
        lam: Weight of the attention.
    """

    def __init__(self, in_channels: int, num_classes: int, *, heads: int = 1, lam: float = 0.1):
        super().__init__(in_channels, num_classes)
        check_option(type(heads) is int and heads in TEMPERATURES, 'csra', 'heads', '1, 2, 4, 6 or 8', heads)
        check_numbers('csra', lam=lam)
        self.temperatures = TEMPERATURES[heads]
        self.lam = lam
        self.classifiers = nn.ModuleList(nn.Conv2d(in_channels, num_classes, 1, bias=False) for _ in range(heads))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        weight = torch.cat([F.normalize(layer.weight.flatten(1)) for layer in self.classifiers])
        scores = F.conv2d(maps, weight[:, :, None, None]).flatten(2)  # (B, heads * num_classes, h * w)
        return sum(
            self._pool(head_scores, temperature)
            for head_scores, temperature in zip(scores.split(self.num_classes, dim=1), self.temperatures))

    def _pool(self, scores: torch.Tensor, temperature: float) -> torch.Tensor:
        if temperature == MAX_TEMPERATURE:
            attended = scores.amax(dim=2)
        else:
            attended = (scores * (scores * temperature).softmax(dim=2)).sum(dim=2)
        return scores.mean(dim=2) + self.lam * attended
