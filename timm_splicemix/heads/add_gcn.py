""" ADD-GCN: a graph of labels for each image

Paper: `Attention-Driven Dynamic Graph Convolutional Network for Multi-Label Image Recognition` -
https://arxiv.org/abs/2012.02994
"""
import torch
import torch.nn.functional as F
from torch import nn

from .base import Head, PerClassLinear, batch_norm, check_counts, uniform_parameter
from .graph import shared_and_own


class ADDGCN(Head):
    """ Pool a feature per class with the class's score map, and pass them through a static and a dynamic graph.

    The logits are the average of two predictions: the maximum of each score map, and the classifier after the graphs.
    The features are sums over all positions, so the second prediction depends on the size of the feature map.

    Args:
        in_channels: Channels of the feature map.
        num_classes: Number of classes.
        node_dim: Channels of the feature of a class.
    """

    def __init__(self, in_channels: int, num_classes: int, *, node_dim: int = 1024):
        super().__init__(in_channels, num_classes)
        check_counts('add-gcn', node_dim=node_dim)
        self.score_map = nn.Conv2d(in_channels, num_classes, 1, bias=False)
        self.transform = nn.Conv2d(in_channels, node_dim, 1)
        self.static_matrix = uniform_parameter(num_classes, num_classes)
        self.static_weight = nn.Linear(node_dim, node_dim)
        self.global_weight = nn.Linear(node_dim, node_dim)
        self.global_norm = nn.BatchNorm1d(node_dim)
        self.dynamic_matrix = nn.Linear(2 * node_dim, num_classes)
        self.dynamic_weight = nn.Linear(node_dim, node_dim)
        self.classifier = PerClassLinear(num_classes, node_dim)

    def branches(self, maps: torch.Tensor, update_stats: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Both predictions, (B, num_classes) each."""
        scores = self.score_map(maps).flatten(2)  # (B, num_classes, h * w)
        transformed = self.transform(maps).flatten(2)  # (B, node_dim, h * w)
        nodes = scores.sigmoid() @ transformed.transpose(1, 2)  # (B, num_classes, node_dim)
        static = F.leaky_relu(self.static_weight(F.leaky_relu(self.static_matrix @ nodes, 0.2)), 0.2)
        hidden = nodes + static
        hidden = F.leaky_relu(self.dynamic_adjacency(hidden, update_stats) @ hidden, 0.2)
        output = nodes + F.leaky_relu(self.dynamic_weight(hidden), 0.2)
        return scores.amax(dim=2), self.classifier(output)

    def dynamic_adjacency(self, nodes: torch.Tensor, update_stats: bool = True) -> torch.Tensor:
        """The matrix of each image that multiplies its nodes from the left: (B, num_classes, num_classes)."""
        whole = batch_norm(self.global_norm, self.global_weight(nodes.mean(dim=1)), update_stats)
        return shared_and_own(self.dynamic_matrix, F.leaky_relu(whole, 0.2), nodes).sigmoid()

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        scores, graph = self.branches(maps)
        return (scores + graph) / 2

    def forward_cells(self, maps: torch.Tensor, weights: None = None) -> torch.Tensor:
        scores, graph = self.branches(maps, update_stats=False)
        return (scores + graph) / 2
