""" Q2L: a query per class

Paper: `Query2Label: A Simple Transformer Way to Multi-Label Classification` - https://arxiv.org/abs/2107.10834
"""
import math
from typing import Optional

import torch
from torch import nn

from .base import Head, PerClassLinear, check_counts, check_numbers, check_option
from .transformer import Attention, EncoderLayer, FeedForward, check_heads, init_xavier

_KEPT = {'none': (False, False), 'first': (True, False), 'other': (False, True), 'all': (True, True)}


class DecoderLayer(nn.Module):
    """ Optional self-attention, attention to the memory, and feed-forward, each with a residual and a LayerNorm.

    Args:
        dim: Channels.
        heads: Number of attention heads.
        hidden: Channels of the feed-forward part.
        dropout: Dropout rate.
        self_attention: Let the classes attend to each other.
    """

    def __init__(self, dim: int, heads: int, hidden: int, dropout: float, self_attention: bool):
        super().__init__()
        self.self_attn = Attention(dim, heads, dropout) if self_attention else None
        self.norm1 = nn.LayerNorm(dim) if self_attention else None
        self.cross_attn = Attention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.ffn = FeedForward(dim, hidden, dropout)
        self.norm3 = nn.LayerNorm(dim)
        self.drop = nn.Dropout(dropout)

    def forward(
            self,
            hidden: torch.Tensor,
            queries: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
    ) -> torch.Tensor:
        if self.self_attn is not None:
            placed = hidden + queries
            hidden = self.norm1(hidden + self.drop(self.self_attn(placed, placed, hidden)))
        hidden = self.norm2(hidden + self.drop(self.cross_attn(hidden + queries, keys, values)))
        return self.norm3(hidden + self.drop(self.ffn(hidden)))


class Q2L(Head):
    """ Encode the feature map by a transformer; a trained query per class then attends to all positions.

    As published, the decoder has no self-attention between classes by default. Positions are encoded for the size of
    the feature map, whatever it is.

    Args:
        in_channels: Channels of the feature map.
        num_classes: Number of classes.
        dim: Channels of the transformer; those of the feature map if None.
        project: Project the feature map to `dim` channels; if None, only where the channels differ.
        heads: Number of attention heads.
        encoder_layers: Number of encoder layers.
        decoder_layers: Number of decoder layers.
        ffn: Channels of the feed-forward parts; 4 * dim if None.
        dropout: Dropout rate.
        self_attention: Decoder layers in which the classes attend to each other: 'none', 'first' (the first layer),
            'other' (all but the first) or 'all'.
    """

    def __init__(
            self,
            in_channels: int,
            num_classes: int,
            *,
            dim: Optional[int] = None,
            project: Optional[bool] = None,
            heads: int = 4,
            encoder_layers: int = 1,
            decoder_layers: int = 2,
            ffn: Optional[int] = None,
            dropout: float = 0.1,
            self_attention: str = 'none',
    ):
        super().__init__(in_channels, num_classes)
        dim = in_channels if dim is None else dim
        check_counts('q2l', dim=dim, heads=heads, decoder_layers=decoder_layers)
        check_counts('q2l', minimum=0, encoder_layers=encoder_layers)
        ffn = 4 * dim if ffn is None else ffn
        check_counts('q2l', ffn=ffn)
        check_numbers('q2l', maximum=1., dropout=dropout)
        check_heads('q2l', dim, heads, "set option 'dim' to project the feature map to other channels")
        check_option(dim % 2 == 0, 'q2l', 'dim', 'an even number', dim)
        check_option(
            self_attention in tuple(_KEPT), 'q2l', 'self_attention', 'none, first, other or all', self_attention)
        project = dim != in_channels if project is None else project
        check_option(
            project in (True, False) and (project or dim == in_channels), 'q2l', 'project',
            f"True or False, and True for a 'dim' other than {in_channels}", project)
        self.dim = dim
        self.project = nn.Conv2d(in_channels, dim, 1) if project else nn.Identity()
        self.encoder = nn.ModuleList(EncoderLayer(dim, heads, ffn, dropout) for _ in range(encoder_layers))
        first, other = _KEPT[self_attention]
        self.decoder = nn.ModuleList(
            DecoderLayer(dim, heads, ffn, dropout, other if index else first) for index in range(decoder_layers))
        self.norm = nn.LayerNorm(dim)
        self.queries = nn.Parameter(torch.randn(num_classes, dim))
        self.classifier = PerClassLinear(num_classes, dim)
        init_xavier(self.encoder)
        init_xavier(self.decoder)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        maps = self.project(maps)
        position = sine_position(self.dim, maps.shape[2], maps.shape[3], maps)
        memory = maps.flatten(2).transpose(1, 2)  # (B, h * w, dim)
        for layer in self.encoder:
            memory = layer(memory, position)
        keys = memory + position
        hidden = torch.zeros_like(self.queries).expand(maps.shape[0], -1, -1)
        for layer in self.decoder:
            hidden = layer(hidden, self.queries, keys, memory)
        return self.classifier(self.norm(hidden))


def sine_position(dim: int, height: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """ Sine and cosine codes of the positions of a map: (height * width, dim), rows in the first half of the channels.

    Args:
        dim: Channels.
        height: Rows of the map.
        width: Columns of the map.
        like: Has the device and type of the result.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    index = torch.arange(dim // 2, dtype=dtype, device=like.device)
    frequency = 10000 ** (2 * (index // 2) / (dim // 2))
    codes = []
    for size in (height, width):
        angle = torch.arange(1, size + 1, dtype=dtype, device=like.device) / (size + 1e-6) * (2 * math.pi)
        angle = angle[:, None] / frequency
        codes.append(torch.where(index % 2 == 0, angle.sin(), angle.cos()))  # (size, dim / 2)
    rows, columns = codes[0][:, None].expand(-1, width, -1), codes[1][None].expand(height, -1, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1).to(like.dtype)
