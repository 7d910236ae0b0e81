""" Parts of transformers that several heads share """
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from .base import check_option


class Attention(nn.Module):
    """ Multi-head attention between sequences of vectors, (B, N, dim).

    Args:
        dim: Channels.
        heads: Number of heads, which divide the channels into consecutive parts.
        dropout: Dropout rate of the attention weights.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))  # query, key, value
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        projected = [
            F.linear(x, weight, bias).unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, heads, N, dim / heads)
            for x, weight, bias in zip(
                (query, key, value), self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3))]
        attended = F.scaled_dot_product_attention(*projected, dropout_p=self.dropout if self.training else 0.)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """ Two linear layers with an activation between.

    Args:
        dim: Channels.
        hidden: Channels between the layers.
        dropout: Dropout rate between the layers.
        gelu: Use the exact GELU instead of ReLU.
    """

    def __init__(self, dim: int, hidden: int, dropout: float = 0., gelu: bool = False):
        super().__init__()
        self.linear1 = nn.Linear(dim, hidden)
        self.act = nn.GELU() if gelu else nn.ReLU()
        self.drop = nn.Dropout(dropout)
        self.linear2 = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.drop(self.act(self.linear1(x))))


class EncoderLayer(nn.Module):
    """ Self-attention and feed-forward, each followed by a residual and a LayerNorm.

    Args:
        dim: Channels.
        heads: Number of attention heads.
        hidden: Channels of the feed-forward part.
        dropout: Dropout rate.
        gelu: Use the exact GELU instead of ReLU.
    """

    def __init__(self, dim: int, heads: int, hidden: int, dropout: float = 0., gelu: bool = False):
        super().__init__()
        self.attn = Attention(dim, heads, dropout)
        self.ffn = FeedForward(dim, hidden, dropout, gelu)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, position: Optional[torch.Tensor] = None) -> torch.Tensor:
        """ Encode a sequence.

        Args:
            x: (B, N, dim).
            position: Added to queries and keys.
        """
        placed = x if position is None else x + position
        x = self.norm1(x + self.drop(self.attn(placed, placed, x)))
        return self.norm2(x + self.drop(self.ffn(x)))


def init_xavier(module: nn.Module) -> None:
    """Initialise all matrices of a module with Xavier's uniform distribution."""
    for parameter in module.parameters():
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)


def check_heads(head: str, dim: int, heads: int, way_out: str) -> None:
    """Raise an error unless the attention heads divide the channels."""
    check_option(dim % heads == 0, head, 'heads', f'a divisor of its {dim} channels ({way_out})', heads)
