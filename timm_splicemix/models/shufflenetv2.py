""" ShuffleNetV2 for timm: the modules and weights of torchvision with timm's interface

Importing this module registers `shufflenetv2_x0_5`, `shufflenetv2_x1_0`, `shufflenetv2_x1_5` and `shufflenetv2_x2_0`.
Modules, initialisation and state dict keys are torchvision's, so its checkpoints load and give the same outputs.

Paper: `ShuffleNet V2: Practical Guidelines for Efficient CNN Architecture Design` - https://arxiv.org/abs/1807.11164
"""
from typing import Any, Optional, Sequence, Union

import torch
import torch.nn.functional as F
import torchvision.models as tvm
from timm.layers import create_classifier, get_device_dtype
from timm.models import build_model_with_cfg, checkpoint_seq, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices  # private, but used by all of timm's models; tested
from torch import nn

from ..errors import UsageError

__all__ = ['ShuffleNetV2']  # register_model adds the functions


class ShuffleNetV2(tvm.ShuffleNetV2):
    """ ShuffleNetV2 with timm's interface.

    Args:
        stages_repeats: Number of blocks of stages 2, 3 and 4.
        stages_out_channels: Channels of the stem, of stages 2, 3 and 4, and of the last convolution.
        num_classes: Number of classes, 0 for no classifier.
        in_chans: Number of input channels.
        global_pool: Pooling of timm's `SelectAdaptivePool2d`; '' for none, only without a classifier.
        output_stride: Only 32 is supported.
        drop_rate: Dropout rate before the classifier.
        device: Device of the parameters.
        dtype: Type of the parameters.
    """
    _STAGES = ('stage2', 'stage3', 'stage4')

    def __init__(
            self,
            stages_repeats: Sequence[int] = (4, 8, 4),
            stages_out_channels: Sequence[int] = (24, 116, 232, 464, 1024),
            num_classes: int = 1000,
            in_chans: int = 3,
            global_pool: str = 'avg',
            output_stride: int = 32,
            drop_rate: float = 0.,
            device: Optional[torch.device] = None,
            dtype: Optional[torch.dtype] = None,
    ):
        if output_stride != 32:
            raise UsageError(f'Expected output_stride of 32, but got {output_stride}.')
        super().__init__(list(stages_repeats), list(stages_out_channels), num_classes=1)  # fc is replaced
        stem_chs, *stage_chs, self.num_features = stages_out_channels
        if in_chans != 3:
            self.conv1[0] = nn.Conv2d(in_chans, stem_chs, kernel_size=3, stride=2, padding=1, bias=False)
        self.to(device=device, dtype=dtype)
        self.head_hidden_size = self.num_features
        self.drop_rate = drop_rate
        self.grad_checkpointing = False
        # As in timm's EfficientNets, the last level is the map before the last convolution.
        self.feature_info = [
            {'num_chs': stem_chs, 'reduction': 2, 'module': 'conv1'},
            {'num_chs': stem_chs, 'reduction': 4, 'module': 'maxpool'},
            *({'num_chs': num_chs, 'reduction': reduction, 'module': stage}
              for num_chs, reduction, stage in zip(stage_chs, (8, 16, 32), self._STAGES)),
        ]
        self.reset_classifier(num_classes, global_pool)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {
            'stem': r'^conv1',
            'blocks': [(r'^stage(\d+)' if coarse else r'^stage(\d+)\.(\d+)', None), (r'^conv5', (99999,))],
        }

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self, name_only: bool = False) -> Union[str, nn.Module]:
        return 'fc' if name_only else self.fc

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        if global_pool is None:
            global_pool = self.global_pool.pool_type
        if num_classes and not global_pool:
            raise UsageError(
                f"Expected a global_pool for {num_classes} classes, but got '': set it, or num_classes=0.")
        self.num_classes = num_classes
        self.global_pool, self.fc = create_classifier(
            self.num_features, num_classes, pool_type=global_pool, **get_device_dtype(self))
        self.global_pool.train(self.training)
        self.fc.train(self.training)

    def forward_intermediates(
            self,
            x: torch.Tensor,
            indices: Optional[Union[int, Sequence[int]]] = None,
            norm: bool = False,
            stop_early: bool = False,
            output_fmt: str = 'NCHW',
            intermediates_only: bool = False,
    ) -> Union[list[torch.Tensor], tuple[torch.Tensor, list[torch.Tensor]]]:
        """ Compute the feature maps of several levels of `feature_info`.

        Args:
            x: (B, C, H, W) images.
            indices: Levels to return: the last n if an int, all if None.
            norm: Ignored, as there is no final norm.
            stop_early: Skip the layers after the last requested level.
            output_fmt: Only 'NCHW' is supported.
            intermediates_only: Return only the list of maps.

        Returns:
            The output of `forward_features` (the last computed map with `stop_early`), and the list of maps.
        """
        if output_fmt != 'NCHW':
            raise UsageError(f"Expected output_fmt of 'NCHW', but got {output_fmt!r}.")
        take_indices, max_index = feature_take_indices(len(self.feature_info), indices)
        last = len(self.feature_info) - 1
        intermediates = []
        for index, info in enumerate(self.feature_info[:max_index + 1] if stop_early else self.feature_info):
            x = self._forward_level(info['module'], x)
            if index in take_indices:
                intermediates.append(x)
        if intermediates_only:
            return intermediates
        return self.conv5(x) if index == last else x, intermediates

    def prune_intermediate_layers(
            self,
            indices: Union[int, Sequence[int]] = 1,
            prune_norm: bool = False,
            prune_head: bool = True,
    ) -> list[int]:
        """Remove the layers that the given levels do not need; returns the indices of the kept levels."""
        take_indices, max_index = feature_take_indices(len(self.feature_info), indices)
        for info in self.feature_info[max_index + 1:]:
            setattr(self, info['module'], nn.Identity())
        if prune_head:
            self.conv5 = nn.Identity()
            self.reset_classifier(0, '')
        return take_indices

    def _forward_level(self, name: str, x: torch.Tensor) -> torch.Tensor:
        module = getattr(self, name)
        if self.grad_checkpointing and isinstance(module, nn.Sequential) and name in self._STAGES:
            return checkpoint_seq(module, x)
        return module(x)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        if self.grad_checkpointing and not torch.jit.is_scripting():
            for info in self.feature_info:
                x = self._forward_level(info['module'], x)
        else:  # TorchScript cannot compile the loop
            x = self.maxpool(self.conv1(x))
            x = self.stage4(self.stage3(self.stage2(x)))
        return self.conv5(x)  # (B, num_features, H / 32, W / 32)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        x = self.global_pool(x)
        if self.drop_rate:
            x = F.dropout(x, p=float(self.drop_rate), training=self.training)
        return x if pre_logits else self.fc(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


def _cfg(weights: tvm.WeightsEnum) -> dict[str, Any]:
    """timm's configuration for weights of torchvision, with their preprocessing."""
    preprocessing = weights.transforms()
    crop_size, resize_size = preprocessing.crop_size[0], preprocessing.resize_size[0]
    return {
        'url': weights.url,
        'num_classes': len(weights.meta['categories']),
        'input_size': (3, crop_size, crop_size),
        'pool_size': (crop_size // 32, crop_size // 32),
        'crop_pct': crop_size / resize_size,
        'interpolation': preprocessing.interpolation.value,
        'mean': tuple(preprocessing.mean),
        'std': tuple(preprocessing.std),
        'first_conv': 'conv1.0',
        'classifier': 'fc',
        'license': 'bsd-3-clause',
        'origin_url': 'https://github.com/pytorch/vision',
        'paper_ids': 'arXiv:1807.11164',
    }


_CHANNELS = {
    'shufflenetv2_x0_5': (24, 48, 96, 192, 1024),
    'shufflenetv2_x1_0': (24, 116, 232, 464, 1024),
    'shufflenetv2_x1_5': (24, 176, 352, 704, 1024),
    'shufflenetv2_x2_0': (24, 244, 488, 976, 2048),
}

default_cfgs = generate_default_cfgs({
    f'{name}.tv_in1k': _cfg(tvm.get_model_weights(name.replace('shufflenetv2', 'shufflenet_v2')).IMAGENET1K_V1)
    for name in _CHANNELS})


def _create_shufflenetv2(variant: str, pretrained: bool, **kwargs: Any) -> ShuffleNetV2:
    model_args = {'stages_out_channels': _CHANNELS[variant], **kwargs}
    return build_model_with_cfg(ShuffleNetV2, variant, pretrained, **model_args)


@register_model
def shufflenetv2_x0_5(pretrained: bool = False, **kwargs: Any) -> ShuffleNetV2:
    return _create_shufflenetv2('shufflenetv2_x0_5', pretrained, **kwargs)


@register_model
def shufflenetv2_x1_0(pretrained: bool = False, **kwargs: Any) -> ShuffleNetV2:
    return _create_shufflenetv2('shufflenetv2_x1_0', pretrained, **kwargs)


@register_model
def shufflenetv2_x1_5(pretrained: bool = False, **kwargs: Any) -> ShuffleNetV2:
    return _create_shufflenetv2('shufflenetv2_x1_5', pretrained, **kwargs)


@register_model
def shufflenetv2_x2_0(pretrained: bool = False, **kwargs: Any) -> ShuffleNetV2:
    return _create_shufflenetv2('shufflenetv2_x2_0', pretrained, **kwargs)
