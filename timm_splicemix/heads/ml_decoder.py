""" ML-Decoder: queries for groups of classes

Paper: `ML-Decoder: Scalable and Versatile Classification Head` - https://arxiv.org/abs/2111.12933
"""
import torch
import torch.nn.functional as F
from torch import nn

from .base import Head, check_counts, check_numbers
from .transformer import Attention, FeedForward, check_heads


class MLDecoder(Head):
    """ Fixed random queries attend to all positions; each then predicts a group of classes.

    One decoder layer without self-attention: the first residual adds the queries to themselves, with dropout. Tokens
    (B, N, C) are accepted in place of a map.

    Args:
        in_channels: Channels of the feature map.
        num_classes: Number of classes.
        groups: Number of queries; at most one per class.
        dim: Channels of the decoder.
        heads: Number of attention heads.
        ffn: Channels of the feed-forward part.
        dropout: Dropout rate.
    """

    def __init__(
            self,
            in_channels: int,
            num_classes: int,
            *,
            groups: int = 100,
            dim: int = 768,
            heads: int = 8,
            ffn: int = 2048,
            dropout: float = 0.1,
    ):
        super().__init__(in_channels, num_classes)
        check_counts('ml-decoder', groups=groups, dim=dim, heads=heads, ffn=ffn)
        check_numbers('ml-decoder', maximum=1., dropout=dropout)
        check_heads('ml-decoder', dim, heads, "see option 'dim'")
        groups = min(groups, num_classes)
        group_size = -(-num_classes // groups)  # rounded up
        self.embed = nn.Linear(in_channels, dim)
        self.register_buffer('queries', torch.randn(groups, dim))
        self.attn = Attention(dim, heads, dropout)
        self.ffn = FeedForward(dim, ffn, dropout)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.norm3 = nn.LayerNorm(dim)
        self.drop = nn.Dropout(dropout)
        self.group_weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(groups, dim, group_size)))
        self.bias = nn.Parameter(torch.zeros(num_classes))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        tokens = maps if maps.ndim == 3 else maps.flatten(2).transpose(1, 2)
        memory = F.relu(self.embed(tokens))  # (B, h * w, dim)
        queries = self.queries.expand(maps.shape[0], -1, -1)
        hidden = self.norm1(queries + self.drop(queries))
        hidden = self.norm2(hidden + self.drop(self.attn(hidden, memory, memory)))
        hidden = self.norm3(hidden + self.drop(self.ffn(hidden)))  # (B, groups, dim)
        logits = torch.einsum('bkd,kdf->bkf', hidden, self.group_weight).flatten(1)  # the last ones may be unused
        return logits[:, :self.num_classes] + self.bias
