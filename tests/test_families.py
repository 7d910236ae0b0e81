""" A small model of every family of timm: max pooling is a true maximum, and a step of SpliceMix-CL works """
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import SelectAdaptivePool2d

from tests.conftest import REPOSITORY
from tests.helpers import make_batch, raises_error, rng
from timm_splicemix.loss import consistency_loss
from timm_splicemix.mix import Grid, SpliceMix, split_cells
from timm_splicemix.models import check_consistency, create_model, is_max_pooled

CLASSES = 3
TIMM_1_0_30 = timm.__version__ == '1.0.30'
# A small model of each family and its arguments. `size` is the image size, 64 by default; `img_size` is also passed to
# the model.
FAMILIES = {
    'beit': ('beit_base_patch16_224', {'img_size': 64, 'depth': 2, 'embed_dim': 96, 'num_heads': 3}),
    'byoanet': ('lambda_resnet26t', {}),
    'byobnet': ('test_byobnet', {'img_size': 64}),
    'cait': ('cait_xxs24_224', {'img_size': 64, 'depth': 2}),
    'coat': ('coat_tiny', {'img_size': 64}),
    'convit': ('convit_tiny', {'img_size': 64, 'depth': 2, 'local_up_to_layer': 1}),
    'convmixer': ('convmixer_768_32', {}),
    'convnext': ('test_convnext', {}),
    'cpubone': ('cpubone_nano', {}),
    'crossvit': ('crossvit_tiny_240', {'size': 240}),
    'csatv2': ('csatv2', {'size': 128}),
    'cspnet': ('cs3darknet_focus_s', {}),
    'cspnext': ('cspnext_tiny', {}),
    'davit': ('davit_tiny', {}),
    'deepseek_vit': ('deepseek_vit_412m', {'img_size': 56, 'depth': 2, 'embed_dim': 96, 'num_heads': 3}),
    'deit': ('deit_tiny_patch16_224', {'img_size': 64}),
    'densenet': ('densenet121', {}),
    'dla': ('dla46x_c', {}),
    'dpn': ('dpn48b', {}),
    'edgenext': ('edgenext_xx_small', {}),
    'efficientformer': ('efficientformer_l1', {'size': 224}),
    'efficientformer_v2': ('efficientformerv2_s0', {'img_size': 64}),
    'efficientnet': ('test_efficientnet', {}),
    'efficientvim': ('efficientvim_m1', {'size': 128}),
    'efficientvit_mit': ('efficientvit_b0', {}),
    'efficientvit_msra': ('efficientvit_m0', {'img_size': 128}),
    'eva': ('vit_tiny_patch16_dinov3_qkvb', {'img_size': 64}),
    'fasternet': ('fasternet_t0', {}),
    'fastvit': ('fastvit_t8', {}),
    'focalnet': ('focalnet_tiny_srf', {}),
    'gcvit': ('gcvit_xxtiny', {'img_size': 64}),
    'gemma4_vit': ('gemma4_vit_167m', {'img_size': 96, 'depth': 2}),
    'ghostnet': ('ghostnet_050', {}),
    'hardcorenas': ('hardcorenas_b', {}),
    'hgnet': ('hgnetv2_b0', {}),
    'hiera': ('hiera_tiny_224', {'img_size': 64}),
    'hieradet_sam2': ('sam2_hiera_tiny', {}),
    'hrnet': ('hrnet_w18_small', {}),
    'iformer': ('iformer_t', {}),
    'inception_next': ('inception_next_atto', {}),
    'inception_resnet_v2': ('inception_resnet_v2', {'size': 128}),
    'inception_v3': ('inception_v3', {'size': 128}),
    'inception_v4': ('inception_v4', {'size': 128}),
    'lcnetv2': ('lcnetv2_small', {}),
    'levit': ('levit_128s', {'img_size': 128}),
    'lowformer': ('lowformer_b0', {}),
    'mambaout': ('test_mambaout', {}),
    'maxxvit': ('maxvit_pico_rw_256', {'img_size': 64}),
    'metaformer': ('poolformerv2_s12', {}),
    'mlp_mixer': ('gmlp_ti16_224', {'img_size': 64}),
    'mobilenetv3': ('mobilenetv3_small_050', {}),
    'mobilenetv5': ('mobilenetv5_base', {}),
    'mobilevit': ('mobilevit_xxs', {'img_size': 64}),
    'mvitv2': ('mvitv2_tiny', {'img_size': 64}),
    'naflexvit': ('naflexvit_base_patch16_parfac_gap', {'img_size': 64, 'depth': 2}),
    'nasnet': ('nasnetalarge', {}),
    'nest': ('nest_tiny', {'img_size': 64}),
    'nextvit': ('nextvit_small', {}),
    'nfnet': ('test_nfnet', {}),
    'pit': ('pit_ti_224', {'img_size': 64}),
    'pnasnet': ('pnasnet5large', {}),
    'pvt_v2': ('pvt_v2_b0', {}),
    'qwen3_vit': ('qwen3_vit_88m', {'img_size': 64, 'depth': 2}),
    'rdnet': ('rdnet_tiny', {}),
    'regnet': ('regnetx_002', {}),
    'repghost': ('repghostnet_050', {}),
    'repvit': ('repvit_m1', {'img_size': 64}),
    'res2net': ('res2next50', {}),
    'resnest': ('resnest14d', {}),
    'resnet': ('test_resnet', {}),
    'resnetv2': ('resnetv2_18', {}),
    'rexnet': ('rexnet_100', {}),
    'selecsls': ('selecsls42', {'size': 128}),
    'senet': ('legacy_seresnet18', {}),
    'sequencer': ('sequencer2d_s', {'img_size': 64}),
    'shvit': ('shvit_s1', {'size': 128}),
    'sknet': ('skresnet18', {}),
    'starnet': ('starnet_s050', {}),
    'swiftformer': ('swiftformer_xs', {'img_size': 64}),
    'swin_transformer': ('swin_tiny_patch4_window7_224', {'img_size': 64}),
    'swin_transformer_v2': ('swinv2_tiny_window8_256', {'img_size': 64}),
    'swin_transformer_v2_cr': ('swinv2_cr_tiny_224', {'img_size': 64}),
    'tiny_vit': ('tiny_vit_5m_224', {}),
    'tnt': ('tnt_s_legacy_patch16_224', {'img_size': 64, 'depth': 2}),
    'tresnet': ('tresnet_m', {}),
    'twins': ('twins_svt_small', {'img_size': 64}),
    'vgg': ('vgg11', {'mlp_ratio': 0.02}),
    'visformer': ('visformer_tiny', {'img_size': 64}),
    'vision_transformer': ('test_vit', {'img_size': 64}),
    'vision_transformer_hybrid': ('vit_tiny_r_s16_p8_224', {'img_size': 64}),
    'vision_transformer_relpos': ('vit_srelpos_small_patch16_224', {'img_size': 64, 'depth': 2}),
    'vision_transformer_sam': (
        'samvit_base_patch16_224', {'img_size': 64, 'depth': 2, 'embed_dim': 96, 'num_heads': 3}),
    'vitamin': ('vitamin_small_224', {'img_size': 64}),
    'volo': ('volo_d1_224', {'img_size': 64}),
    'vovnet': ('ese_vovnet19b_slim_dw', {}),
    'xception': ('legacy_xception', {}),
    'xception_aligned': ('xception41p', {}),
    'xcit': ('xcit_nano_12_p16_224', {'img_size': 64, 'depth': 2}),
}
if TIMM_1_0_30:
    del FAMILIES['cspnext']  # new in 1.0.31
# Families without GMP, with the reason; only cpubone supports consistency learning.
NO_MAX = {
    'coat': 'its head combines 3 feature maps of several scales, branches or stages',
    'cpubone': 'processes the map before or during pooling',
    'crossvit': 'its head combines 2 feature maps of several scales, branches or stages',
    'efficientvim': 'its head combines 4 feature maps of several scales, branches or stages',
    'pit': 'its features are class tokens only',
    'volo': 'it reads class tokens',
}
NO_CONSISTENCY = {
    'coat': 'its head combines 3 feature maps of several scales, branches or stages',
    'crossvit': 'its head combines 2 feature maps of several scales, branches or stages',
    'efficientvim': 'its head combines 4 feature maps of several scales, branches or stages',
    'pit': 'its features are class tokens only',
    'volo': 'its head reads the class token',
}
# The maximum is taken before the average pooling of the head, as timm has no max pooling.
MAX_BEFORE_HEAD = {
    'beit', 'cait', 'convit', 'deepseek_vit', 'efficientformer', 'efficientformer_v2', 'gemma4_vit', 'iformer', 'levit',
    'mlp_mixer', 'mvitv2', 'pvt_v2', 'qwen3_vit', 'repvit', 'swiftformer', 'tnt', 'twins', 'vision_transformer_relpos',
    'xcit',
}
if TIMM_1_0_30:
    MAX_BEFORE_HEAD.add('efficientvit_msra')
CONV_BEFORE_POOL = {'efficientvit_mit', 'lowformer', 'vgg'}
# Features with channels last or as tokens, except where random weights mix positions too much
ROWS = {
    'beit', 'cait', 'convit', 'deepseek_vit', 'deit', 'efficientformer', 'eva', 'gemma4_vit', 'hiera', 'hieradet_sam2',
    'mambaout', 'mlp_mixer', 'mvitv2', 'naflexvit', 'qwen3_vit', 'sequencer', 'swin_transformer', 'swin_transformer_v2',
    'tnt', 'twins', 'vision_transformer', 'vision_transformer_hybrid', 'vision_transformer_relpos', 'vitamin', 'xcit',
}
QUICK = {
    'beit', 'convnext', 'cpubone', 'deit', 'efficientvit_mit', 'levit', 'mambaout', 'pit', 'repvit', 'resnet',
    'swin_transformer', 'vgg', 'vision_transformer', 'volo', 'xcit',
}

# timm loads the checkpoint, but does not rebuild the pooling, see docs/training.md.
NOT_BY_TIMM = {
    *MAX_BEFORE_HEAD, 'deit', 'vision_transformer', 'vision_transformer_hybrid',
}
NOT_BY_TIMM_1_0_30 = {'efficientvit_msra', 'sequencer', 'swin_transformer', 'swin_transformer_v2'}
if TIMM_1_0_30:
    NOT_BY_TIMM |= NOT_BY_TIMM_1_0_30


def families(names):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(names)]


def make_model(family, global_pool='max', create=create_model):
    name, kwargs = FAMILIES[family]
    kwargs = dict(kwargs)
    size = kwargs.pop('size', kwargs.get('img_size', 64))
    torch.manual_seed(0)
    overlay = {'input_size': (3, size, size)}
    model = create(name, num_classes=CLASSES, global_pool=global_pool, pretrained_cfg_overlay=overlay, **kwargs)
    return model, size


def random_maps(feature_map):
    shape = (2, feature_map.channels, *feature_map.grid)
    prefix = torch.randn(2, feature_map.num_prefix, feature_map.channels, generator=rng(1))
    return torch.randn(shape, generator=rng()), prefix if feature_map.num_prefix else None


def plain_loop_max(maps):
    """(N, C, h, w) to (N, C)."""
    pooled = [[float('-inf')] * maps.shape[1] for _ in maps]
    for image, channels in enumerate(maps.tolist()):
        for channel, rows in enumerate(channels):
            for row in rows:
                for value in row:
                    pooled[image][channel] = max(pooled[image][channel], value)
    return torch.tensor(pooled)


@torch.no_grad()
def inputs_of_pool(model, features):
    """Input and output of the pooling layer."""
    calls = []
    pools = [module for module in model.modules() if isinstance(module, SelectAdaptivePool2d)]
    hooks = [pool.register_forward_hook(lambda _, inputs, output: calls.append((inputs[0], output))) for pool in pools]
    model.forward_head(features)
    for hook in hooks:
        hook.remove()
    (maps, output), = calls
    return maps, output.flatten(1)


def step(model, images, targets, feature_map=None):
    """One step of SpliceMix, with consistency learning if there is a feature map; returns the trained parameters."""
    plan = SpliceMix('2x2', ratio=0.25, drop_prob=0.).plan(len(images))
    record, = plan.records
    assert record.num_mixed == 1
    mixed_images, mixed_targets = SpliceMix('2x2').apply(images, targets, plan)
    model.train()
    model.zero_grad()
    features = model.forward_features(mixed_images)
    logits = model.forward_head(features)
    loss = F.binary_cross_entropy_with_logits(logits, mixed_targets)
    if feature_map is not None:
        maps, prefix = feature_map.split(features[len(images):])
        cells = split_cells(maps, record.grid)
        cell_logits = model.forward_head(feature_map.join(cells, prefix))
        assert cell_logits.shape == (4, CLASSES)
        loss = loss + consistency_loss(cell_logits, logits[record.sources.flatten()], record.dropped)
    assert torch.isfinite(loss)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients and all(torch.isfinite(gradient).all() for gradient in gradients.values())
    return set(gradients)


def test_the_table_names_every_family_of_timm():
    ours = {'shufflenetv2'}
    assert set(FAMILIES) == set(timm.list_modules()) - ours
    assert all(name in timm.list_models(module=family) for family, (name, _) in FAMILIES.items())


@pytest.mark.parametrize('family', families(FAMILIES.keys() - NO_MAX))
def test_max_pooling_is_a_true_maximum_and_the_weights_are_those_of_timm(family):
    model, size = make_model(family)
    of_timm, _ = make_model(family, None, timm.create_model)
    state = of_timm.state_dict()
    assert (type(model) is not type(of_timm)) == (family in MAX_BEFORE_HEAD)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert is_max_pooled(model, size)
    feature_map = check_consistency(model, size)
    assert feature_map.grid > (1, 1)
    model.eval()
    with torch.no_grad():
        images, _ = make_batch(2, height=size, width=size)
        torch.testing.assert_close(model(images), model.forward_head(model.forward_features(images)))
    maps, prefix = random_maps(feature_map)
    if family in CONV_BEFORE_POOL:
        features = feature_map.join(maps.repeat(1, 1, 8, 8), prefix)
        pool_maps, pooled = inputs_of_pool(model, features)
        assert pool_maps.shape[2] > 1
        assert torch.equal(pooled, plain_loop_max(pool_maps))
        return

    @torch.no_grad()
    def head(maps):
        return model.forward_head(feature_map.join(maps, prefix), pre_logits=True)

    def same(a, b):
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5)

    pooled = head(maps)
    assert same(pooled, head(plain_loop_max(maps)[:, :, None, None].expand_as(maps)))
    assert same(pooled, head(maps.flip(2, 3)))
    # An average or a token would fail these.
    lower = torch.where(maps == maps.amax(dim=(2, 3), keepdim=True), maps, maps - 3)
    assert same(pooled, head(lower))
    higher = maps.clone()
    higher[:, 0, 0, 0] = maps[:, 0].amax(dim=(1, 2)) + 5
    expected = maps.amax(dim=(2, 3), keepdim=True).expand_as(maps).clone()
    expected[:, 0] += 5
    assert not same(pooled, head(higher)) and same(head(higher), head(expected))


@pytest.mark.parametrize('family', families(FAMILIES.keys() - NO_CONSISTENCY))
def test_a_step_with_consistency_learning_trains_the_same_parameters(family):
    model, size = make_model(family, None if family in NO_MAX else 'max')
    feature_map = check_consistency(model, size)
    images, targets = make_batch(4, height=size, width=size, classes=CLASSES)
    without = step(model, images, targets)
    assert without <= step(model, images, targets, feature_map)


@pytest.mark.parametrize('family', families(ROWS))
def test_the_layout_of_features_follows_the_image(family):
    model, size = make_model(family)
    feature_map = check_consistency(model, size)
    assert feature_map.layout != 'NCHW'
    model.eval()
    images = torch.randn(1, 3, size, size, generator=rng()) / 2
    noise = torch.randn(1, 3, size // 2, size // 2, generator=rng(1))
    for quarter in range(4):
        row, col = (size // 2 * index for index in divmod(quarter, 2))
        changed = images.clone()
        changed[:, :, row:row + size // 2, col:col + size // 2] += noise
        with torch.no_grad():
            maps, changed_maps = (feature_map.split(model.forward_features(x))[0] for x in (images, changed))
        changes = split_cells((maps - changed_maps).abs(), Grid(2, 2)).mean(dim=(1, 2, 3))
        assert changes.argmax() == quarter


@pytest.mark.parametrize('family', families(NO_MAX))
def test_a_family_without_max_pooling_raises_an_error_and_trains_with_plain_splicemix(family):
    with raises_error(f'--gp max is not possible for {FAMILIES[family][0]}: .*{NO_MAX[family]}'):
        make_model(family)
    model, size = make_model(family, None)
    assert not is_max_pooled(model, size)
    images, targets = make_batch(4, height=size, width=size, classes=CLASSES)
    step(model, images, targets)


@pytest.mark.parametrize('family', families(NO_CONSISTENCY))
def test_a_family_without_consistency_learning_raises_an_error_with_the_reason(family):
    model, size = make_model(family, None)
    with raises_error(f'{FAMILIES[family][0]} cannot be used for consistency learning: {NO_CONSISTENCY[family]}'):
        check_consistency(model, size)


@torch.no_grad()
@pytest.mark.parametrize('family', families(FAMILIES.keys() - NO_MAX.keys()))
def test_plain_timm_rebuilds_the_pooling_except_where_documented(family):
    model, size = make_model(family)
    try:
        theirs, _ = make_model(family, create=timm.create_model)
        theirs.load_state_dict(model.state_dict())
        images = torch.randn(2, 3, size, size, generator=rng())
        same = torch.allclose(theirs.eval()(images), model.eval()(images), atol=1e-5)
    except (AssertionError, RuntimeError, ValueError):
        same = False
    assert same == (family not in NOT_BY_TIMM)


def test_the_document_lists_the_families_that_plain_timm_does_not_rebuild():
    text = (REPOSITORY / 'docs' / 'training.md').read_text(encoding='utf-8')
    listed = text.partition('max pooling of these families: ')[2].partition('.')[0].split(', ')
    assert listed == sorted(NOT_BY_TIMM - NOT_BY_TIMM_1_0_30)
    listed = text.partition('timm 1.0.30 does not rebuild it for ')[2].partition(' either')[0]
    assert listed.replace(' and ', ', ').split(', ') == sorted(NOT_BY_TIMM_1_0_30)
