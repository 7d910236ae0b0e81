""" SSGRL: a feature per class, and a gated graph network between classes

Paper: `Learning Semantic-Specific Graph Representation for Multi-Label Image Recognition` -
https://arxiv.org/abs/1908.07325
"""
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from .base import Head, PerClassLinear, check_counts, check_option
from .graph import conditional_probabilities


class SSGRL(Head):
    """ Pool a feature per class by attention that depends on its word vector, and let the classes exchange messages.

    The feature map is first pooled by 2 x 2 averages, unless it is smaller. The attention scores of a class are
    fc_a(fc3(tanh(fc1 f * fc2 w))) for the features f and the word vector w. As there is no activation between fc3 and
    fc_a, both are applied as a single vector. The gated graph network uses the conditional probabilities of the labels
    of the training set; its reset gate shares a layer with its update gate, as in the published code.

    The buffer `adjacency` contains the conditional probabilities.

    Args:
        in_channels: Channels of the feature map.
        num_classes: Number of classes.
        class_vectors: (num_classes, D) word vectors; they are not trained.
        cooccurrence: Label counts and joint counts of the training set.
        hidden: Channels in the attention.
        steps: Number of steps of the graph network.
        output_dim: Channels before the classifier; those of the feature map if None.
        pool: Pool the feature map by 2 x 2 averages first.
        chunk: Number of classes whose attention is computed at the same time, which limits the memory of
            evaluation.
    """
    side_inputs = ('class_vectors', 'cooccurrence')

    def __init__(
            self,
            in_channels: int,
            num_classes: int,
            *,
            class_vectors: torch.Tensor,
            cooccurrence: tuple[torch.Tensor, torch.Tensor],
            hidden: int = 1024,
            steps: int = 3,
            output_dim: Optional[int] = None,
            pool: bool = True,
            chunk: int = 100,
    ):
        super().__init__(in_channels, num_classes)
        output_dim = in_channels if output_dim is None else output_dim
        check_counts('ssgrl', hidden=hidden, output_dim=output_dim, chunk=chunk, steps=steps)
        check_option(pool in (True, False), 'ssgrl', 'pool', 'True or False', pool)
        self.steps, self.pool, self.chunk = steps, pool, chunk
        self.register_buffer('class_vectors', class_vectors.detach().clone())
        self.register_buffer('adjacency', conditional_probabilities(*cooccurrence).to(class_vectors.dtype))
        self.fc1 = nn.Linear(in_channels, hidden, bias=False)
        self.fc2 = nn.Linear(class_vectors.shape[1], hidden, bias=False)
        self.fc3 = nn.Linear(hidden, hidden)
        self.fc_a = nn.Linear(hidden, 1)
        self.update_w = nn.Linear(2 * in_channels, in_channels)
        self.reset_w = nn.Linear(2 * in_channels, in_channels)
        self.gates_u = nn.Linear(in_channels, in_channels)  # of both gates
        self.state_w = nn.Linear(2 * in_channels, in_channels)
        self.state_u = nn.Linear(in_channels, in_channels)
        self.output = nn.Linear(2 * in_channels, output_dim)
        self.classifier = PerClassLinear(num_classes, output_dim)

    def class_features(self, maps: torch.Tensor) -> torch.Tensor:
        """The feature of each class: (B, num_classes, in_channels)."""
        if self.pool and maps.shape[2] >= 2 and maps.shape[3] >= 2:
            maps = F.avg_pool2d(maps, 2)
        features = maps.flatten(2).transpose(1, 2)  # (B, h * w, in_channels)
        positions = self.fc1(features)[:, None]  # (B, 1, h * w, hidden)
        vector = self.fc_a.weight @ self.fc3.weight  # (1, hidden)
        bias = F.linear(self.fc3.bias, self.fc_a.weight, self.fc_a.bias)
        scores = [
            F.linear(torch.tanh(positions * words[:, None]), vector, bias).squeeze(3)  # (B, chunk, h * w)
            for words in self.fc2(self.class_vectors.to(self.fc2.weight.dtype)).split(self.chunk)]
        return torch.cat(scores, dim=1).softmax(dim=2).to(features.dtype) @ features

    def propagate(self, state: torch.Tensor) -> torch.Tensor:
        """Run the graph network: (B, num_classes, in_channels) in and out."""
        adjacency = self.adjacency.to(self.gates_u.weight.dtype)
        for _ in range(self.steps):
            messages = torch.cat([adjacency @ state, adjacency.T @ state], dim=2)
            gates = self.gates_u(state)
            update = torch.sigmoid(self.update_w(messages) + gates)
            reset = torch.sigmoid(self.reset_w(messages) + gates)
            candidate = torch.tanh(self.state_w(messages) + self.state_u(reset * state))
            state = (1 - update) * state + update * candidate
        return state

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        features = self.class_features(maps)
        nodes = torch.cat([self.propagate(features), features], dim=2)
        return self.classifier(torch.tanh(self.output(nodes)))
