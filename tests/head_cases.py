""" Heads with small options, on small models of six families, for several test files """
import torch

from timm_splicemix.heads import head_class, head_options, list_heads
from timm_splicemix.models import create_model

# A small model of each family and its arguments; those with `img_size` are created for one image size.
FAMILIES = {
    'resnet': ('test_resnet', {}),
    'convnext': ('test_convnext', {}),
    'vit': ('test_vit', {'img_size': True}),
    'swin': ('swin_tiny_patch4_window7_224', {
        'img_size': True, 'embed_dim': 16, 'depths': (1, 1, 1, 1), 'num_heads': (1, 1, 1, 1)}),
    'efficientnet': ('test_efficientnet', {}),
    'shufflenetv2': ('shufflenetv2_x0_5', {}),
}
HEADS = list_heads()
ONE_MAP = [name for name in HEADS if head_class(name).num_maps == 1]
TWO_MAPS = [name for name in HEADS if head_class(name).num_maps == 2]
STRIDES_16_AND_32 = [family for family in FAMILIES if family != 'vit']
# (head, family) that fit together
PAIRS = [(head, family) for head in HEADS for family in FAMILIES if head in ONE_MAP or family in STRIDES_16_AND_32]


def size_of(head='csra'):
    """The image size: TDRG needs feature maps of at least 3 x 3 at stride 32."""
    return 96 if head in TWO_MAPS else 64


def model_of(family, head='csra'):
    """The name of the model and its arguments."""
    name, kwargs = FAMILIES[family]
    return name, {**kwargs, 'img_size': size_of(head)} if 'img_size' in kwargs else kwargs


def small_options(head):
    """Options that make a head narrow, in place of widths that fit a ResNet-101."""
    widths = {'hidden': 16, 'node_dim': 16, 'dim': 16, 'output_dim': 16, 'graph_dim': 16, 'ffn': 32}
    return {name: widths[name] for name in head_options(head) if name in widths}


def make_side_inputs(num_classes, dim=6):
    generator = torch.Generator().manual_seed(1)
    labels = (torch.rand(40, num_classes, generator=generator) < 0.5).double()
    return {
        'class_vectors': torch.randn(num_classes, dim, generator=generator),
        'cooccurrence': (labels.sum(dim=0), labels.T @ labels)}


def make_model(family, head='csra', num_classes=5, **kwargs):
    name, family_kwargs = model_of(family, head)
    torch.manual_seed(0)
    return create_model(
        name, num_classes=num_classes, head=head, head_kwargs={**small_options(head), **kwargs},
        side_inputs=make_side_inputs(num_classes), **family_kwargs)
