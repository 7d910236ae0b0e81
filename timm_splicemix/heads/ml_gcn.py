""" ML-GCN: classifiers from a graph of labels

Paper: `Multi-Label Image Recognition with Graph Convolutional Networks` - https://arxiv.org/abs/1904.03582
"""
from typing import Optional

import torch
import torch.nn.functional as F

from .base import Head, check_counts, check_numbers, uniform_parameter
from .graph import binary_edges, normalized_adjacency, reweighted_matrix


class MLGCN(Head):
    """ Compute the classifier of each class from word vectors, by two layers of graph convolution.

    Two classes are connected if the conditional probability of their labels in the training set reaches a threshold.
    The logits are the products of the classifiers and the maximum of the feature map over all positions, without bias.
    (The published code pools 14 x 14 positions, which are all only for images of 448 pixels.)

    The buffer `adjacency` contains the edges as 0 and 1, which all floating-point types represent exactly; the graph
    layers multiply with the re-weighted and normalised matrix.

    Args:
        in_channels: Channels of the feature map.
        num_classes: Number of classes.
        class_vectors: (num_classes, D) word vectors; they are not trained.
        cooccurrence: Label counts and joint counts of the training set.
        hidden: Channels between the two graph layers.
        threshold: Smallest conditional probability of an edge.
        neighbor_weight: Weight of all neighbours of a class together, relative to the class itself; p / (1 - p) for
            the p of the paper.
    """
    side_inputs = ('class_vectors', 'cooccurrence')
    stored_options = ('threshold',)

    def __init__(
            self,
            in_channels: int,
            num_classes: int,
            *,
            class_vectors: torch.Tensor,
            cooccurrence: tuple[torch.Tensor, torch.Tensor],
            hidden: int = 1024,
            threshold: float = 0.4,
            neighbor_weight: float = 0.25,
    ):
        super().__init__(in_channels, num_classes)
        check_counts('ml-gcn', hidden=hidden)
        check_numbers('ml-gcn', maximum=1., threshold=threshold)
        check_numbers('ml-gcn', neighbor_weight=neighbor_weight)
        self.neighbor_weight = neighbor_weight
        self.register_buffer('class_vectors', class_vectors.detach().clone())
        self.register_buffer('adjacency', binary_edges(*cooccurrence, threshold).to(class_vectors.dtype))
        self.weight1 = uniform_parameter(class_vectors.shape[1], hidden)
        self.weight2 = uniform_parameter(hidden, in_channels)

    def compute_class_weights(self) -> torch.Tensor:
        words, edges = self.class_vectors.to(self.weight1.dtype), self.adjacency.to(self.weight1.dtype)
        adjacency = normalized_adjacency(reweighted_matrix(edges, self.neighbor_weight))
        nodes = adjacency @ (words @ self.weight1)  # (num_classes, hidden)
        return adjacency @ (F.leaky_relu(nodes, 0.2) @ self.weight2)  # (num_classes, in_channels)

    def forward(self, maps: torch.Tensor, weights: Optional[torch.Tensor] = None) -> torch.Tensor:
        return F.linear(maps.amax(dim=(2, 3)), self.class_weights() if weights is None else weights)
