import copy
import doctest
import io

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import make_batch, raises_error, rng
from timm_splicemix.mix import Grid, split_cells
from timm_splicemix.models import (
    FeatureMap,
    check_consistency,
    create_model,
    describe_features,
    feature_map,
    is_max_pooled,
    pooling,
)

NATIVE, BEFORE_HEAD = ('test_vit', {'img_size': 64}), ('xcit_nano_12_p16_224', {'img_size': 64, 'depth': 2})


def make_model(name='xcit_nano_12_p16_224', global_pool='max', num_classes=5, size=64, **kwargs):
    torch.manual_seed(0)
    overlay = {'input_size': (3, size, size), **kwargs.pop('pretrained_cfg_overlay', {})}
    if name.startswith('xcit'):
        kwargs = {'depth': 2, **kwargs}
    return create_model(
        name, num_classes=num_classes, global_pool=global_pool, pretrained_cfg_overlay=overlay, **kwargs)


@pytest.mark.parametrize('module', [feature_map, pooling])
def test_the_examples_of_the_docstrings(module):
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.attempted and not result.failed


# create_model

@pytest.mark.parametrize('pool', [None, 'avg', 'avgmax', 'catavgmax', ''])
def test_other_poolings_are_those_of_timm(pool):
    kwargs = {'num_classes': 0 if pool == '' else 5, 'global_pool': pool, 'in_chans': 1}
    torch.manual_seed(0)
    model = create_model('test_resnet', **kwargs).eval()
    torch.manual_seed(0)
    of_timm = timm.create_model('test_resnet', **kwargs).eval()
    images, _ = make_batch(2, channels=1, height=64, width=64)
    assert type(model) is type(of_timm) and not is_max_pooled(model, 64)
    assert torch.equal(model(images), of_timm(images))


@pytest.mark.parametrize('name', ['test_resnet', 'test_vit', 'xcit_nano_12_p16_224', 'shufflenetv2_x0_5'])
@pytest.mark.parametrize('num_classes', [0, 5])
def test_max_pooling_of_a_model_with_and_without_a_classifier(name, num_classes):
    kwargs = {'img_size': 64} if name in ('test_vit', 'xcit_nano_12_p16_224') else {}
    model = make_model(name, num_classes=num_classes, **kwargs)
    assert is_max_pooled(model, 64)
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, num_classes or model.num_features)
    assert model.num_classes == num_classes and model.training


def test_timm_options_reach_the_model():
    model = make_model('xcit_nano_12_p16_224', in_chans=1, img_size=(64, 96), drop_rate=0.25)
    assert model.head_drop.p == 0.25
    assert describe_features(model, (64, 96)) == FeatureMap('NLC', 128, (4, 6), 1)
    assert model(torch.zeros(1, 1, 64, 96)).shape == (1, 5)
    model = make_model('shufflenetv2_x0_5', in_chans=2)
    assert model(torch.zeros(2, 2, 64, 64)).shape == (2, 5)


@pytest.mark.parametrize('name', ['test_resnet', 'test_vit', 'swin_tiny_patch4_window7_224', 'xcit_nano_12_p16_224'])
def test_max_pooling_changes_neither_weights_nor_random_numbers(name):
    kwargs = {'img_size': 64} if name != 'test_resnet' else {}
    model = make_model(name, **kwargs)
    after = torch.rand(3)
    of_timm = make_model(name, None, **kwargs)
    assert torch.equal(after, torch.rand(3))
    state = of_timm.state_dict()
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())


@pytest.mark.parametrize(
    'name', ['test_vit', 'deit_tiny_patch16_224', 'eva02_tiny_patch14_224', 'beit_base_patch16_224'])
def test_all_pretrained_weights_are_kept_including_the_final_norm(name, tmp_path):
    kwargs = {'img_size': 28 if name.startswith('eva') else 32, 'depth': 2}
    if name.startswith('beit'):
        kwargs.update(embed_dim=48, num_heads=3)
    pretrained = timm.create_model(name, num_classes=7, **kwargs)
    generator = rng()
    state = {key: torch.randn(value.shape, generator=generator) for key, value in pretrained.state_dict().items()}
    torch.save(state, tmp_path / 'weights.pth')
    overlay = {'file': str(tmp_path / 'weights.pth'), 'num_classes': 7, 'custom_load': False}
    model = create_model(name, pretrained=True, global_pool='max', pretrained_cfg_overlay=overlay, **kwargs)
    assert is_max_pooled(model, kwargs['img_size'])
    assert any('norm' in key and 'blocks' not in key for key in state)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    # With another number of classes, only the classifier is new.
    model = create_model(
        name, pretrained=True, num_classes=3, global_pool='max', pretrained_cfg_overlay=overlay, **kwargs)
    different = {key for key, value in model.state_dict().items() if not torch.equal(value, state[key])}
    assert different == {'head.weight', 'head.bias'}


def test_timm_and_this_package_load_each_others_checkpoints(tmp_path):
    model = make_model(img_size=64)
    torch.save(model.state_dict(), tmp_path / 'weights.pth')
    loaded = timm.create_model(
        'xcit_nano_12_p16_224', num_classes=5, img_size=64, depth=2, checkpoint_path=tmp_path / 'weights.pth')
    assert not is_max_pooled(loaded)
    again = make_model(img_size=64, checkpoint_path=tmp_path / 'weights.pth')
    images, _ = make_batch(2, height=64, width=64)
    assert torch.equal(again.eval()(images), model.eval()(images))
    assert not torch.equal(loaded.eval()(images), model(images))


def test_an_attention_pool_is_replaced():
    name, kwargs = 'vit_base_patch16_siglip_224', {'img_size': 32, 'depth': 1, 'embed_dim': 48, 'num_heads': 3}
    model = make_model(name, size=32, **kwargs)
    assert is_max_pooled(model, 32)
    of_timm = make_model(name, None, size=32, **kwargs)
    left_out = of_timm.state_dict().keys() - model.state_dict().keys()
    assert left_out and all(key.startswith('attn_pool.') for key in left_out)
    assert model.state_dict().keys() < of_timm.state_dict().keys()


@pytest.mark.parametrize('name, message', [
    ('resnet5', 'did you mean .*resnet50'),
    ('vit_tiny_patch16_244.augreg_in21k', 'did you mean .*vit_tiny_patch16_224'),
    ('shufflenetv2_x1_1', 'did you mean .*shufflenetv2_x1_0'),
    ('qqqqqqqqqqqqqqqqq', 'timm.list_models'),
])
def test_an_unknown_name_raises_an_error_with_the_nearest_one(name, message):
    for pool in (None, 'max'):
        with raises_error(f'Expected the name of a timm model, but got .*{message}'):
            create_model(name, global_pool=pool)


def test_an_unknown_tag_raises_an_error_with_the_known_ones():
    with raises_error("Expected a tag of test_resnet .*r160_in1k.*, but got 'nothing'"):
        create_model('test_resnet.nothing')


def test_names_with_a_tag_and_local_folders_work(tmp_path):
    assert is_max_pooled(create_model('test_resnet.r160_in1k', global_pool='max'), 64)
    (tmp_path / 'config.json').write_text(
        '{"architecture": "test_resnet", "num_classes": 4, "pretrained_cfg": {"input_size": [3, 64, 64]}}')
    model = create_model(f'local-dir:{tmp_path}', global_pool='max')
    assert is_max_pooled(model, 64) and model.num_classes == 4


@pytest.mark.parametrize('name', ['deit_tiny_distilled_patch16_224', 'cpubone_nano', 'resnet50_clip'])
def test_a_model_without_max_pooling_raises_an_error(name):
    size = {'img_size': 64} if name.startswith('deit') else {}
    with raises_error(f'--gp max is not possible for {name}: .*. Leave out --gp or choose another model'):
        make_model(name, **size)


# The model behaves like any other

@pytest.mark.parametrize('name, kwargs', [NATIVE, BEFORE_HEAD])
def test_copies_and_pickles_are_equal_and_independent(name, kwargs):
    model = make_model(name, **kwargs).eval()
    images, _ = make_batch(2, height=64, width=64)
    expected = model(images)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    pickled = torch.load(buffer, weights_only=False)
    copied = copy.deepcopy(model)
    average = timm.utils.ModelEmaV3(model).module
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for other in (pickled, copied, average):
        assert torch.equal(other(images), expected)
        assert isinstance(other, timm.create_model(name, **kwargs).__class__)
        assert is_max_pooled(other, 64)
        assert copy.deepcopy(other).state_dict().keys() == model.state_dict().keys()


def test_a_new_classifier_keeps_max_pooling_and_another_pooling_replaces_it():
    model = make_model(img_size=64)
    model.reset_classifier(3)
    assert is_max_pooled(model) and model(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    model.reset_classifier(4, 'max')
    assert is_max_pooled(model) and model(torch.zeros(1, 3, 64, 64)).shape == (1, 4)
    model.reset_classifier(5, 'token')
    assert not is_max_pooled(model) and type(model) is type(timm.create_model('xcit_nano_12_p16_224', depth=2))


@pytest.mark.parametrize('name, kwargs', [('repvit_m1', {}), BEFORE_HEAD])
def test_channels_last_and_autocast(name, kwargs):
    model = make_model(name, **kwargs).eval()
    images, _ = make_batch(2, height=64, width=64)
    expected = model(images)
    last = model.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected, rtol=1e-3, atol=1e-3)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        logits = model(images)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), expected, rtol=0.1, atol=0.1)


def test_the_model_compiles_without_graph_breaks():
    model = make_model('beit_base_patch16_224', img_size=64, depth=1, embed_dim=48, num_heads=3).eval()
    images, _ = make_batch(2, height=64, width=64)
    compiled = torch.compile(model, backend='eager', fullgraph=True)
    assert torch.equal(compiled(images), model(images))


# Layout

@pytest.mark.parametrize('layout, num_prefix', [('NCHW', 0), ('NHWC', 0), ('NLC', 0), ('NLC', 1), ('NLC', 5)])
def test_split_and_join_are_inverse(layout, num_prefix):
    maps = torch.randn(4, 6, 3, 5, generator=rng())
    prefix = torch.randn(4, num_prefix, 6, generator=rng(1)) if num_prefix else None
    described = FeatureMap(layout, 6, (3, 5), num_prefix)
    features = described.join(maps, prefix)
    for position in range(15):  # row by row
        row, col = divmod(position, 5)
        value = {
            'NCHW': lambda: features[:, :, row, col],  # noqa: B023
            'NHWC': lambda: features[:, row, col],  # noqa: B023
            'NLC': lambda: features[:, num_prefix + position],  # noqa: B023
        }[layout]()
        assert torch.equal(value, maps[:, :, row, col])
    maps_again, prefix_again = described.split(features)
    assert torch.equal(maps_again, maps)
    assert prefix_again is None if prefix is None else torch.equal(prefix_again, prefix)


def test_each_cell_gets_the_prefix_tokens_of_its_image():
    described = FeatureMap('NLC', 6, (4, 4), 2)
    features = torch.randn(3, 18, 6, generator=rng())
    maps, prefix = described.split(features)
    cells = split_cells(maps, Grid(2, 1))
    joined = described.join(cells, prefix)
    assert joined.shape == (6, 2 + 8, 6)
    for image in range(3):
        for cell in range(2):
            expected = torch.cat([features[image, :2], features[image, 2 + 8 * cell:10 + 8 * cell]])
            assert torch.equal(joined[2 * image + cell], expected)
    none = described.join(cells[:0], prefix[:0])
    assert none.shape == (0, 10, 6)


@pytest.mark.parametrize(
    'size, grid', [((96, 64), (6, 4)), ((64, 160), (4, 10)), ((48, 48), (3, 3)), ((80, 64), (5, 4))])
def test_the_grid_follows_the_size_of_the_images(size, grid):
    model = make_model('test_vit', img_size=64, dynamic_img_size=True)
    described = check_consistency(model, 64)
    assert described == FeatureMap('NLC', 64, (4, 4), 1) and describe_features(model, size).grid == grid
    features = model.forward_features(torch.zeros(1, 3, *size))
    maps, prefix = described.split(features, size)
    assert maps.shape[2:] == grid
    assert torch.equal(described.join(maps, prefix), features)


def test_prefix_tokens_are_found_without_the_attribute():
    model = make_model('cait_xxs24_224', img_size=64, depth=1)
    vars(model).pop('num_prefix_tokens', None)  # timm 1.0.30 does not set it
    assert describe_features(model, 64) == FeatureMap('NLC', 192, (4, 4), 1)
    model = make_model('levit_128s', img_size=(224, 160))  # 4 x 3 from 14 x 10: another aspect ratio than the image
    assert describe_features(model, (224, 160)) == FeatureMap('NLC', 384, (4, 3))
    model = make_model('vit_tiny_patch16_dinov3_qkvb', img_size=64, depth=1)
    assert check_consistency(model, 64).num_prefix == 5


# Consistency learning

@pytest.mark.parametrize('name, kwargs, pool', [
    ('test_resnet', {}, 'max'), ('test_resnet', {}, 'avg'), ('shufflenetv2_x0_5', {}, 'max'), (*NATIVE, 'avg'),
    (*NATIVE, 'max'), (*BEFORE_HEAD, 'avg'), (*BEFORE_HEAD, 'max'), ('coat_lite_tiny', {'img_size': 64}, 'max'),
    ('cpubone_nano', {}, 'avg'), ('vit_tiny_r_s16_p8_224', {'img_size': 64}, 'avg'),
])
def test_models_that_support_consistency_learning(name, kwargs, pool):
    model = make_model(name, pool, **kwargs)
    described = check_consistency(model, 64)
    assert is_max_pooled(model, 64) == (pool == 'max')
    maps, prefix = described.split(model.eval().forward_features(torch.randn(2, 3, 64, 64, generator=rng())))
    grid = Grid(2, 2) if described.grid >= (2, 2) else Grid(1, 2)
    cells = split_cells(maps, grid)
    logits = model.forward_head(described.join(cells, prefix))
    for cell in range(len(cells)):
        alone = described.join(cells[cell:cell + 1], None if prefix is None else prefix[cell // 4:cell // 4 + 1])
        torch.testing.assert_close(model.forward_head(alone)[0], logits[cell], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name, kwargs', [
    NATIVE, BEFORE_HEAD, ('deit_tiny_distilled_patch16_224', {'img_size': 64}), ('coat_lite_tiny', {'img_size': 64}),
])
def test_a_head_that_reads_a_class_token_is_an_error(name, kwargs):
    model = make_model(name, None, **kwargs)
    if name == 'test_vit':
        model.reset_classifier(5, 'token')
    with raises_error(f'{name} cannot .*: its head reads the class token.*Use --gp max or --gp avg'):
        check_consistency(model, 64)


def test_a_model_without_pooling_is_an_error():
    model = create_model('test_resnet', num_classes=0, global_pool='')
    with raises_error('its head does not return logits of shape'):
        check_consistency(model, 64)


class WholeMap(nn.Module):
    """Its classifier takes the whole 4 x 4 map."""

    def __init__(self, in_features=8 * 16):
        super().__init__()
        self.num_features = 8
        self.conv = nn.Conv2d(3, 8, 16, stride=16)
        self.fc = nn.Linear(in_features, 5)

    def forward_features(self, x):
        return self.conv(x)

    def forward_head(self, x, pre_logits=False):
        return x.flatten(1) if pre_logits else self.fc(x.flatten(1))


class FirstPosition(WholeMap):
    """Its classifier takes one position of the map."""

    def __init__(self):
        super().__init__(in_features=8)

    def forward_head(self, x, pre_logits=False):
        return super().forward_head(x[:, :, 0, 0], pre_logits)


def test_a_head_that_needs_the_whole_map_is_an_error():
    with raises_error('WholeMap cannot .*: its head does not accept a part of the feature map .*Use --gp max'):
        check_consistency(WholeMap(), 64)
    assert not is_max_pooled(WholeMap(), 64)


def test_unsupported_image_sizes_are_an_error():
    with raises_error('deit_tiny_patch16_224 does not accept images of 3 x 80 x 80: Input height'):
        describe_features(make_model('deit_tiny_patch16_224', img_size=64, depth=1), 80)
    with raises_error('its feature map has a single position'):
        check_consistency(make_model('test_resnet'), 32)


# The probe

@pytest.mark.parametrize('name, kwargs', [('test_resnet', {}), ('levit_128s', {'img_size': 128}), NATIVE, BEFORE_HEAD])
def test_the_probe_has_no_side_effects(name, kwargs):
    model = make_model(name, None if name == 'test_resnet' else 'max', drop_rate=0.5, **kwargs)
    frozen = next(module for module in model.modules() if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)))
    frozen.eval()
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before = torch.get_rng_state()
    size = kwargs.get('img_size', 64)
    describe_features(model, size)
    is_max_pooled(model, size)
    check_consistency(model, size)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes and not frozen.training and model.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize('name, kwargs', [('test_resnet', {}), ('efficientvit_b0', {}), NATIVE, BEFORE_HEAD])
def test_the_probe_works_with_other_dtypes(name, kwargs, dtype):
    model = make_model(name, None, **kwargs).to(dtype)
    assert not is_max_pooled(model, 64)
    model = make_model(name, **kwargs).to(dtype)
    assert is_max_pooled(model, 64)
    check_consistency(model, 64)


def test_the_probe_distinguishes_max_from_other_poolings():
    assert not is_max_pooled(timm.create_model('test_resnet'), 32)  # a map of one position
    assert is_max_pooled(timm.create_model('test_resnet', global_pool='max'), 32)
    assert not is_max_pooled(timm.create_model('test_resnet', global_pool='avgmax'), 64)
    assert not is_max_pooled(FirstPosition(), 64)
    assert not is_max_pooled(timm.create_model('vgg11', mlp_ratio=0.02), 224)  # one position remains to be pooled
    assert is_max_pooled(timm.create_model('vgg11', mlp_ratio=0.02, global_pool='max'), 224)


def test_the_probe_works_for_features_far_from_zero():
    model = make_model('levit_128s', img_size=128)
    for module in model.head.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_var.fill_(1e6)
            module.running_mean.fill_(100.)
    assert is_max_pooled(model, 128)
    check_consistency(model, 128)


def test_batch_norm_in_the_head_trains_on_the_cells_of_one_image():
    model = make_model('levit_128s', img_size=128)
    described = check_consistency(model, 128)
    model.train()
    maps, prefix = described.split(model.forward_features(make_batch(2, height=128, width=128)[0]))
    logits = model.forward_head(described.join(split_cells(maps[:1], Grid(1, 2)), prefix))
    F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits)).backward()
    assert torch.isfinite(next(model.parameters()).grad).all()
