""" A small model of every family of timm with a multi-label head """
import pytest
import torch

from tests.helpers import make_batch, raises_error
from tests.test_families import CLASSES, FAMILIES, NO_CONSISTENCY
from timm_splicemix.mix import SpliceMix
from timm_splicemix.models import create_model
from timm_splicemix.task import SpliceMixTask

pytestmark = pytest.mark.slow
NO_MAP = {family: reason for family, reason in NO_CONSISTENCY.items() if family != 'volo'}  # volo has a map, too
# Families that have no feature maps of strides 16 and 32
NO_TWO_MAPS = {
    *NO_MAP, 'beit', 'cait', 'convit', 'convmixer', 'deepseek_vit', 'deit', 'eva', 'gemma4_vit', 'mlp_mixer',
    'naflexvit', 'nest', 'qwen3_vit', 'sequencer', 'tnt', 'vision_transformer', 'vision_transformer_hybrid',
    'vision_transformer_relpos', 'vision_transformer_sam', 'vitamin', 'volo', 'xcit',
}


def make_model(family, head):
    name, kwargs = FAMILIES[family]
    kwargs = dict(kwargs)
    size = kwargs.pop('size', kwargs.get('img_size', 64))
    torch.manual_seed(0)
    overlay = {'input_size': (3, size, size)}
    return create_model(name, num_classes=CLASSES, head=head, pretrained_cfg_overlay=overlay, **kwargs), size


@pytest.mark.parametrize('family', sorted(FAMILIES))
def test_a_step_with_a_head_and_consistency_learning_works_for_every_family_with_a_map(family):
    if family in NO_MAP:
        with raises_error(f'--head csra is not possible for .*{NO_MAP[family]}'):
            make_model(family, 'csra')
        return
    model, size = make_model(family, 'csra')
    mixer = SpliceMix('1x2', ratio=0.5, drop_prob=0.)
    task = SpliceMixTask(
        model, torch.nn.BCEWithLogitsLoss(), mixer, consistency_weight=1., input_size=(3, size, size), verbose=False)
    result = task.train()(*make_batch(4, height=size, width=size, classes=CLASSES))
    result['loss'].backward()
    assert result['consistency_loss'] > 0
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


@pytest.mark.parametrize('family', sorted(FAMILIES))
def test_two_maps_of_strides_16_and_32_are_found_or_refused(family):
    if family in NO_TWO_MAPS:
        with raises_error('--head tdrg is not possible for .*: it'):
            make_model(family, 'tdrg')
        return
    model, size = make_model(family, 'tdrg')
    with torch.no_grad():
        first, last = model.eval().head_maps(model.forward_features(torch.randn(2, 3, size, size)))
    assert first.shape[1:2] + last.shape[1:2] == model.multilabel_head.in_channels
    assert round(size / first.shape[3] / 16) == 1
    assert 1.5 <= first.shape[3] / last.shape[3] <= 3.  # some convolutions of inception have no padding
