""" DSDL: a dictionary of classes

Paper: `Deep Semantic Dictionary Learning for Multi-label Image Classification` - https://arxiv.org/abs/2012.12509
"""
from typing import Mapping, Optional

import torch
import torch.nn.functional as F

from .base import Criterion, Head, check_counts, check_numbers, uniform_parameter

MIN_SIMILARITY = 0.01  # The published code divides by any number, also by negative ones


class DSDL(Head):
    """ Represent the feature of an image by a dictionary with one atom per class.

    The atoms S are computed from word vectors. The logits are the codes of ridge regression,
    (S S^T + alpha I)^-1 S f, where f is the maximum of the feature map over all positions. A decoder with the same
    weights reconstructs the word vectors from the atoms.

    The loss is [loss of the logits + beta (||codes S - f|| + lam ||codes||)] / similarity, with Frobenius norms over
    the batch, and the average cosine similarity of the word vectors and their reconstructions, which is at least 0.01.

    Args:
        in_channels: Channels of the feature map.
        num_classes: Number of classes.
        class_vectors: (num_classes, D) word vectors; they are not trained.
        hidden: Channels between the two layers.
        alpha: Weight of the ridge regression's penalty.
        beta: Weight of the reconstruction of features.
        lam: Weight of the norm of the codes.
    """
    side_inputs = ('class_vectors',)

    def __init__(
            self,
            in_channels: int,
            num_classes: int,
            *,
            class_vectors: torch.Tensor,
            hidden: int = 1024,
            alpha: float = 0.01,
            beta: float = 0.01,
            lam: float = 0.01,
    ):
        super().__init__(in_channels, num_classes)
        check_counts('dsdl', hidden=hidden)
        check_numbers('dsdl', beta=beta, lam=lam)
        check_numbers('dsdl', minimum=1e-6, alpha=alpha)
        self.alpha, self.beta, self.lam = alpha, beta, lam
        self.register_buffer('class_vectors', class_vectors.detach().clone())
        self.weight1 = uniform_parameter(class_vectors.shape[1], hidden)
        self.weight2 = uniform_parameter(hidden, in_channels)

    def compute_class_weights(self) -> torch.Tensor:
        """The matrix that computes codes from features, and the dictionary: (2, num_classes, in_channels)."""
        dtype = torch.promote_types(self.weight1.dtype, torch.float32)  # for the equations
        with torch.autocast(self.weight1.device.type, enabled=False):
            words = self.class_vectors.to(self.weight1.dtype)
            atoms = (F.leaky_relu(words @ self.weight1, 0.2) @ self.weight2).to(dtype)
            penalty = self.alpha * torch.eye(self.num_classes, dtype=dtype, device=atoms.device)
            # solve_ex does not wait for the device to report a singular matrix; with the penalty there is none
            solution = torch.linalg.solve_ex(atoms @ atoms.T + penalty, atoms).result
            return torch.stack([solution, atoms]).to(self.weight1.dtype)

    def forward(self, maps: torch.Tensor, weights: Optional[torch.Tensor] = None) -> torch.Tensor:
        weights = self.class_weights() if weights is None else weights
        return F.linear(maps.amax(dim=(2, 3)), weights[0])

    def forward_train(
            self,
            maps: torch.Tensor,
            weights: Optional[torch.Tensor] = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weights = self.class_weights() if weights is None else weights
        features, atoms = maps.amax(dim=(2, 3)), weights[1]
        codes = F.linear(features, weights[0])
        decoded = F.leaky_relu(atoms @ self.weight2.T, 0.2) @ self.weight1.T
        words = self.class_vectors.to(self.weight1.dtype)
        return codes, {
            'reconstruction': _norm(codes @ atoms - features),
            'code_norm': _norm(codes),
            'similarity': F.cosine_similarity(_wide(words), _wide(decoded), dim=1).mean(),
        }

    def losses(
            self,
            task_loss: torch.Tensor,
            aux: Mapping[str, torch.Tensor],
            criterion: Criterion,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        similarity = aux['similarity'].clamp(min=MIN_SIMILARITY)
        terms = {
            'reconstruction': self.beta * aux['reconstruction'] / similarity,
            'code_norm': self.beta * self.lam * aux['code_norm'] / similarity,
            'dissimilarity': task_loss / similarity - task_loss,
        }
        return task_loss + sum(terms.values()), terms


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(_wide(x))
