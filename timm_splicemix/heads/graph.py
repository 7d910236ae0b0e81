""" Graphs of labels: matrices from their co-occurrence, and matrices of an image """
import torch
import torch.nn.functional as F
from torch import nn


def conditional_probabilities(label_counts: torch.Tensor, joint_counts: torch.Tensor) -> torch.Tensor:
    """ P[i, j], the part of the images with class i that also has class j, in float64; 0 on the diagonal.

    Args:
        label_counts: (C,) images with each class. A class without images has probabilities of 0.
        joint_counts: (C, C) images with both classes.
    """
    probabilities = joint_counts.double() / label_counts.double().clamp(min=1)[:, None]
    return probabilities.masked_fill(torch.eye(len(probabilities), dtype=torch.bool, device=probabilities.device), 0.)


def binary_edges(label_counts: torch.Tensor, joint_counts: torch.Tensor, threshold: float) -> torch.Tensor:
    """ Where the conditional probability is at least a threshold, (C, C) bool; with 0 also on the diagonal.

    Args:
        label_counts: (C,) images with each class.
        joint_counts: (C, C) images with both classes.
        threshold: Smallest probability of an edge.
    """
    return conditional_probabilities(label_counts, joint_counts) >= threshold


def reweighted_matrix(edges: torch.Tensor, neighbor_weight: float) -> torch.Tensor:
    """ Divide a weight among the edges of each column, and add 1 on the diagonal.

    Args:
        edges: (C, C) of 0 and 1.
        neighbor_weight: Weight of all edges of a column together.
    """
    shares = neighbor_weight * edges / (edges.sum(dim=0, keepdim=True) + 1e-6)
    return shares + torch.eye(len(edges), dtype=edges.dtype, device=edges.device)


def normalized_adjacency(matrix: torch.Tensor) -> torch.Tensor:
    """ The matrix that graph layers multiply with: D A^T D, where D is diagonal and has (row sum of A) ** -0.5.

    Args:
        matrix: (C, C) matrix A, not symmetric in general.
    """
    scale = matrix.sum(dim=1) ** -0.5
    return scale[:, None] * matrix.T * scale[None, :]


def shared_and_own(layer: nn.Linear, shared: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """ Apply a layer to the concatenation of a vector per image and the vectors of all classes, without repeating it.

    Args:
        layer: Its first inputs are those of the vector of the image.
        shared: (B, S) vectors of images.
        own: (B, num_classes, D) vectors of classes.
    """
    split = shared.shape[1]
    return F.linear(shared, layer.weight[:, :split])[:, None] + F.linear(own, layer.weight[:, split:], layer.bias)
