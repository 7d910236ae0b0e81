""" TDRG: a transformer over three scales that guides a graph of labels

Paper: `Transformer-based Dual Relation Graph for Multi-label Image Recognition` - https://arxiv.org/abs/2110.04722
"""
from typing import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import UsageError
from .base import Criterion, Head, PerClassLinear, batch_norm, check_counts, check_numbers
from .graph import shared_and_own
from .transformer import EncoderLayer, check_heads, init_xavier


class TDRG(Head):
    """ Combine a prediction of a transformer over three scales with one of a graph of labels.

    The scales are the feature maps of strides 16 and 32 and a convolution of stride 2 on the latter. Attention is over
    the positions of each image, as in the paper. The published code attends over the images of the batch instead, at
    each position, so that the scores of an image depend on the other images; scores therefore differ from those of
    published weights. Like the published code, the encoder gets no positions.

    The logits are 0.7 * transformer + 0.3 * graph. Both predictions, and one from the largest scores of each class
    map, have losses of their own.

    Args:
        in_channels: Channels of the two feature maps.
        num_classes: Number of classes.
        dim: Channels of the transformer.
        graph_dim: Channels of the graph, beside those of the transformer.
        heads: Number of attention heads.
        layers: Number of encoder layers.
        ffn: Channels of the feed-forward parts.
        top: Part of the positions whose scores are averaged for the third prediction; at least one position.
        aux_weight: Weight of each of the three auxiliary losses.
    """
    num_maps = 2
    supports_cells = False
    cells_reason = 'it predicts from the feature maps of two strides, of which only the last one is split into cells'

    def __init__(
            self,
            in_channels: Sequence[int],
            num_classes: int,
            *,
            dim: int = 512,
            graph_dim: int = 512,
            heads: int = 4,
            layers: int = 3,
            ffn: int = 2048,
            top: float = 0.05,
            aux_weight: float = 1.,
    ):
        super().__init__(in_channels, num_classes)
        check_counts('tdrg', dim=dim, graph_dim=graph_dim, heads=heads, layers=layers, ffn=ffn)
        check_numbers('tdrg', maximum=1., top=top)
        check_numbers('tdrg', aux_weight=aux_weight)
        check_heads('tdrg', dim, heads, "see option 'dim'")
        self.top, self.aux_weight = top, aux_weight
        middle, last = self.in_channels
        self.transform_middle = nn.Conv2d(middle, dim, 1)
        self.transform_last = nn.Conv2d(last, dim, 1)
        self.transform_small = nn.Conv2d(last, dim, 3, stride=2)
        self.encoder = nn.ModuleList(EncoderLayer(dim, heads, ffn, gelu=True) for _ in range(layers))
        self.trans_classifier = nn.Linear(3 * dim, num_classes)
        self.score_map = nn.Conv2d(last, num_classes, 1, bias=False)
        self.node_transform = nn.Conv2d(last, graph_dim, 1)
        self.guidance_transform = nn.Linear(dim, dim)
        self.guidance_weight = nn.Linear(3 * dim, 3 * dim)
        self.guidance_norm = nn.BatchNorm1d(3 * dim)
        self.matrix = nn.Linear(3 * dim + graph_dim + dim, num_classes)
        self.graph_weight = nn.Linear(graph_dim + dim, graph_dim + dim)
        self.graph_classifier = PerClassLinear(num_classes, graph_dim + dim)
        init_xavier(self.encoder)

    def forward(self, maps: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.forward_train(maps)[0]

    def forward_train(
            self,
            maps: Sequence[torch.Tensor],
            weights: None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        middle, last = maps
        if min(last.shape[2:]) < 3:
            raise UsageError(
                f"Expected a last feature map of at least 3 x 3 positions for head 'tdrg', but got {last.shape[2]} x "
                f'{last.shape[3]}: use larger images.')
        scales = [self.encode(scale) for scale in self.scales(middle, last)]  # (B, positions, dim) each
        trans = self.trans_classifier(torch.cat([scale.amax(dim=1) for scale in scales], dim=1))
        scores = self.score_map(last).flatten(2)  # (B, num_classes, h * w)
        count = max(1, round(self.top * int(scores.shape[2])))  # int, as a traced shape is a tensor
        largest = scores.topk(count, dim=2).values.mean(dim=2)
        graph = self.graph(last, scores.sigmoid(), scales)
        return 0.7 * trans + 0.3 * graph, {'transformer': trans, 'graph': graph, 'score_map': largest}

    def scales(self, middle: torch.Tensor, last: torch.Tensor) -> list[torch.Tensor]:
        """Three maps of decreasing size, each plus the product of all three."""
        maps = [self.transform_middle(middle), self.transform_last(last), self.transform_small(last)]
        size = maps[0].shape[2:]
        resized = [maps[0], *(_resize(x, size) for x in maps[1:])]
        product = resized[0] * resized[1] * resized[2]
        return [
            resized[0] + product, *(_resize(x + product, old.shape[2:]) for x, old in zip(resized[1:], maps[1:]))]

    def encode(self, scale: torch.Tensor) -> torch.Tensor:
        x = scale.flatten(2).transpose(1, 2)
        for layer in self.encoder:
            x = layer(x)
        return x

    def graph(self, last: torch.Tensor, masks: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
        """The prediction of the graph; it sends no gradient to the transformer."""
        own = masks @ self.node_transform(last).flatten(2).transpose(1, 2)  # (B, num_classes, graph_dim)
        guided = self.guidance_transform((masks @ scales[1]).detach())  # (B, num_classes, dim)
        nodes = torch.cat([own, guided], dim=2)
        whole = torch.cat([scale.mean(dim=1) for scale in scales], dim=1).detach()
        whole = F.leaky_relu(batch_norm(self.guidance_norm, self.guidance_weight(whole)), 0.2)
        matrix = shared_and_own(self.matrix, whole, nodes).sigmoid()  # (B, num_classes, num_classes)
        output = F.leaky_relu(self.graph_weight(F.leaky_relu(matrix @ nodes, 0.2)), 0.2) + nodes
        return self.graph_classifier(output)

    def losses(
            self,
            task_loss: torch.Tensor,
            aux: Mapping[str, torch.Tensor],
            criterion: Criterion,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        terms = {name: self.aux_weight * criterion(logits) for name, logits in aux.items()}
        return task_loss + sum(terms.values()), terms


def _resize(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return F.interpolate(x, size=tuple(size), mode='bilinear', align_corners=True)
