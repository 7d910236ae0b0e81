import copy
import os
import pickle
import sys
import warnings
from pathlib import Path

import pytest
import timm
import torch
import torchvision.models as tvm
from timm.data import create_transform, resolve_model_data_config
from timm.models import group_parameters

from tests.helpers import rng
from timm_splicemix.models import ShuffleNetV2

WIDTHS = {
    'shufflenetv2_x0_5': (tvm.shufflenet_v2_x0_5, tvm.ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1),
    'shufflenetv2_x1_0': (tvm.shufflenet_v2_x1_0, tvm.ShuffleNet_V2_X1_0_Weights.IMAGENET1K_V1),
    'shufflenetv2_x1_5': (tvm.shufflenet_v2_x1_5, tvm.ShuffleNet_V2_X1_5_Weights.IMAGENET1K_V1),
    'shufflenetv2_x2_0': (tvm.shufflenet_v2_x2_0, tvm.ShuffleNet_V2_X2_0_Weights.IMAGENET1K_V1),
}
SMALL = 'shufflenetv2_x0_5'


@pytest.fixture(autouse=True)
def no_downloads(monkeypatch):
    def refuse(url, *args, **kwargs):
        raise AssertionError(f'a test asked for {url}')
    monkeypatch.setattr('timm.models._builder.load_state_dict_from_url', refuse)


def make_images(size=2, channels=3, height=64, width=64, seed=0):
    return torch.randn(size, channels, height, width, generator=rng(seed))


def make_twins(name, **kwargs):
    """A model and torchvision's own with the same random weights, statistics included."""
    torch.manual_seed(0)
    theirs = WIDTHS[name][0](num_classes=7)
    for module in theirs.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.1, 0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    ours = timm.create_model(name, num_classes=7, **kwargs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


# --- torchvision's network ---


def test_timm_lists_the_models():
    assert timm.list_models('shufflenetv2*') == sorted(WIDTHS)
    assert timm.list_models('shufflenetv2*', pretrained=True) == [f'{name}.tv_in1k' for name in sorted(WIDTHS)]
    assert set(timm.list_models(module='shufflenetv2')) == set(WIDTHS)


@pytest.mark.parametrize('name', WIDTHS)
def test_keys_and_shapes_are_torchvisions(name):
    ours, theirs = timm.create_model(name).state_dict(), WIDTHS[name][0]().state_dict()
    assert list(ours) == list(theirs)
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
    assert {'conv1.0.weight', 'conv5.0.weight', 'fc.weight', 'fc.bias'} <= set(ours)


@pytest.mark.parametrize('name', WIDTHS)
@pytest.mark.parametrize('train', [False, True])
def test_outputs_gradients_and_statistics_are_exactly_torchvisions(name, train):
    ours, theirs = make_twins(name)
    images = make_images(4, height=96, width=64)
    outputs = []
    for model in (ours, theirs):
        model.train(train)
        outputs.append(model(images))
        outputs[-1].square().mean().backward()
    assert outputs[0].shape == (4, 7) and outputs[0].std() > 0
    assert torch.equal(*outputs)
    for (key, parameter), expected in zip(ours.named_parameters(), theirs.parameters()):
        assert torch.equal(parameter.grad, expected.grad), key
    for (key, buffer), expected in zip(ours.named_buffers(), theirs.buffers()):
        assert torch.equal(buffer, expected), key


@pytest.mark.parametrize('name', WIDTHS)
def test_the_default_cfg_is_that_of_torchvisions_weights(name):
    weights = WIDTHS[name][1]
    model = timm.create_model(name)
    cfg = model.default_cfg
    assert cfg == model.pretrained_cfg
    assert cfg['url'] == weights.url and cfg['url'].startswith('https://download.pytorch.org/models/shufflenetv2_x')
    assert (cfg['architecture'], cfg['tag'], cfg['license']) == (name, 'tv_in1k', 'bsd-3-clause')
    assert cfg['input_size'] == (3, 224, 224) and cfg['pool_size'] == (7, 7) and cfg['num_classes'] == 1000
    assert cfg['mean'] == (0.485, 0.456, 0.406) and cfg['std'] == (0.229, 0.224, 0.225)
    assert cfg['interpolation'] == 'bilinear'
    assert cfg['crop_pct'] == (0.875 if name in ('shufflenetv2_x0_5', 'shufflenetv2_x1_0') else 224 / 232)
    assert model.get_submodule(cfg['first_conv']).in_channels == 3
    assert model.get_submodule(cfg['classifier']) is model.get_classifier()
    resize, crop = create_transform(**resolve_model_data_config(model)).transforms[:2]
    assert [resize.size] == weights.transforms().resize_size
    assert list(crop.size) == weights.transforms().crop_size * 2


@pytest.mark.parametrize('name', WIDTHS)
def test_the_feature_map_has_the_size_in_the_cfg(name):
    model = timm.create_model(name, device='meta')
    maps = model.forward_features(torch.empty(1, 3, 224, 224, device='meta'))
    assert maps.shape == (1, model.num_features, *model.default_cfg['pool_size'])
    assert model.num_features == model.head_hidden_size == (2048 if name == 'shufflenetv2_x2_0' else 1024)


def test_pretrained_weights_are_loaded_and_adapted(tmp_path):
    torch.manual_seed(0)
    theirs = tvm.shufflenet_v2_x0_5()
    path = tmp_path / 'weights.pth'
    torch.save(theirs.state_dict(), path)
    overlay = {'file': str(path)}
    images = make_images()
    ours = timm.create_model(SMALL, pretrained=True, pretrained_cfg_overlay=overlay)
    assert torch.equal(ours.eval()(images), theirs.eval()(images))
    new_head = timm.create_model(SMALL, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=20, in_chans=1)
    assert new_head.fc.out_features == 20
    assert torch.equal(new_head.conv1[0].weight, theirs.conv1[0].weight.sum(dim=1, keepdim=True))
    assert torch.equal(new_head.stage4[3].branch2[0].weight, theirs.stage4[3].branch2[0].weight)
    features = timm.create_model(SMALL, pretrained=True, pretrained_cfg_overlay=overlay, features_only=True)
    assert torch.equal(features.eval()(images)[0], theirs.conv1(images))


# --- timm's interface ---


@pytest.mark.parametrize('pool, expected', [
    ('avg', lambda maps: maps.mean((2, 3))),
    ('max', lambda maps: maps.amax((2, 3))),
    ('avgmax', lambda maps: (maps.mean((2, 3)) + maps.amax((2, 3))) / 2),
    ('catavgmax', lambda maps: torch.cat([maps.mean((2, 3)), maps.amax((2, 3))], dim=1)),
    ('fastmax', lambda maps: maps.amax((2, 3))),
])
def test_pooling_gives_the_expected_values(pool, expected):
    model = timm.create_model(SMALL, num_classes=3, global_pool=pool).eval()
    maps = torch.randn(2, 1024, 3, 2, generator=rng())
    pooled = model.forward_head(maps, pre_logits=True)
    torch.testing.assert_close(pooled, expected(maps), atol=1e-6, rtol=1e-6)
    if pool.endswith('max') and 'avg' not in pool:
        assert torch.equal(pooled, expected(maps))
    assert torch.equal(model.forward_head(maps), model.fc(pooled))
    images = make_images(height=96)
    assert torch.equal(model(images), model.forward_head(model.forward_features(images)))
    assert model(images).shape == (2, 3)
    if pool != 'catavgmax':
        assert list(model.state_dict()) == list(tvm.shufflenet_v2_x0_5().state_dict())


def test_without_classes_the_output_is_the_pooled_map():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model = timm.create_model(SMALL, num_classes=0).eval()
    images = make_images()
    assert isinstance(model.get_classifier(), torch.nn.Identity)
    assert torch.equal(model(images), model.forward_head(model.forward_features(images), pre_logits=True))
    assert model(images).shape == (2, 1024)
    unpooled = timm.create_model(SMALL, num_classes=0, global_pool='').eval()
    unpooled.load_state_dict(model.state_dict())
    assert torch.equal(unpooled(images), model.forward_features(images))


def test_the_classifier_can_be_reset():
    model = timm.create_model(SMALL, num_classes=5, global_pool='max').eval()
    images = make_images()
    assert model.get_classifier() is model.fc
    assert model.get_classifier(name_only=True) == 'fc'
    model.reset_classifier(9)
    assert model.num_classes == 9 and model.global_pool.pool_type == 'max' and not model.fc.training
    assert torch.equal(model(images), model.fc(model.forward_features(images).amax((2, 3))))
    model.reset_classifier(4, 'catavgmax')
    assert model(images).shape == (2, 4) and model.fc.in_features == 2048
    model.reset_classifier(0, '')
    assert model(images).shape == (2, 1024, 2, 2)
    model.reset_classifier(3, 'avg')
    assert model(images).shape == (2, 3)
    model.double().reset_classifier(2)
    assert model.fc.weight.dtype == torch.float64


def test_a_classifier_needs_pooling():
    message = "Expected a global_pool for 6 classes, but got ''"
    with pytest.raises(ValueError, match=message):
        timm.create_model(SMALL, num_classes=6, global_pool='')
    model = timm.create_model(SMALL, num_classes=0, global_pool='')
    with pytest.raises(ValueError, match=message):
        model.reset_classifier(6)
    assert model.num_classes == 0


@pytest.mark.parametrize('in_chans', [1, 4])
def test_other_numbers_of_input_channels_work(in_chans):
    model = timm.create_model(SMALL, num_classes=2, in_chans=in_chans).eval()
    assert model.conv1[0].weight.shape == (24, in_chans, 3, 3)
    assert model(make_images(channels=in_chans)).shape == (2, 2)
    assert list(model.state_dict()) == list(tvm.shufflenet_v2_x0_5().state_dict())


def test_another_output_stride_is_an_error():
    assert timm.create_model(SMALL, output_stride=32)
    with pytest.raises(ValueError, match='Expected output_stride of 32, but got 16'):
        timm.create_model(SMALL, output_stride=16)


def test_device_and_dtype_are_supported():
    model = timm.create_model(SMALL, device='meta', dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {('meta', torch.bfloat16)}


def test_dropout_is_active_only_in_training():
    model = timm.create_model(SMALL, num_classes=0, drop_rate=0.5)
    maps = torch.ones(2, 1024, 2, 2)
    assert torch.equal(model.eval().forward_head(maps), torch.ones(2, 1024))
    torch.manual_seed(0)
    assert model.train().forward_head(maps).unique().tolist() == [0, 2]


# --- levels ---


@pytest.mark.parametrize('name', WIDTHS)
def test_feature_info_is_that_of_the_intermediate_maps(name):
    model = timm.create_model(name, device='meta')
    images = torch.empty(2, 3, 128, 64, device='meta')
    final, maps = model.forward_intermediates(images)
    assert final.shape == model.forward_features(images).shape
    assert [(m.shape[1], 128 // m.shape[2], 64 // m.shape[3]) for m in maps] == [
        (info['num_chs'], info['reduction'], info['reduction']) for info in model.feature_info]
    assert [info['reduction'] for info in model.feature_info] == [2, 4, 8, 16, 32]


def test_intermediate_maps_are_those_of_the_modules():
    model = timm.create_model(SMALL).eval()
    images = make_images()
    seen = []
    for info in model.feature_info:
        model.get_submodule(info['module']).register_forward_hook(lambda module, args, out: seen.append(out.clone()))
    features = model.forward_features(images)
    expected, seen[:] = list(seen), []
    final, maps = model.forward_intermediates(images)
    assert torch.equal(final, features)
    assert len(maps) == 5 and all(map(torch.equal, maps, expected))
    final, maps = model.forward_intermediates(images, indices=[1, -2])
    assert torch.equal(final, features)
    assert len(maps) == 2 and torch.equal(maps[0], expected[1]) and torch.equal(maps[1], expected[3])
    maps = model.forward_intermediates(images, indices=2, intermediates_only=True)
    assert len(maps) == 2 and torch.equal(maps[0], expected[3]) and torch.equal(maps[1], expected[4])


def test_stopping_early_skips_later_stages():
    model = timm.create_model(SMALL).eval()
    images = make_images()
    ran = []
    for name in ('stage3', 'stage4', 'conv5'):
        model.get_submodule(name).register_forward_hook(lambda module, args, out, name=name: ran.append(name))
    final, maps = model.forward_intermediates(images, indices=[0, 2], stop_early=True)
    assert len(maps) == 2 and final is maps[1] and not ran
    model.forward_intermediates(images, indices=[3], stop_early=True, intermediates_only=True)
    assert ran == ['stage3']
    final, _ = model.forward_intermediates(images, indices=1, stop_early=True)
    assert torch.equal(final, model.forward_features(images))


def test_other_layouts_are_an_error():
    with pytest.raises(ValueError, match="Expected output_fmt of 'NCHW', but got 'NLC'"):
        timm.create_model(SMALL).forward_intermediates(make_images(), output_fmt='NLC')


@pytest.mark.parametrize('feature_cls', ['list', 'getter', 'hook'])
@pytest.mark.parametrize('out_indices', [(0, 1, 2, 3, 4), (1, 3), (2,)])
def test_features_only_gives_the_same_maps(feature_cls, out_indices):
    torch.manual_seed(0)
    model = timm.create_model(SMALL, num_classes=0).eval()
    features = timm.create_model(SMALL, features_only=True, out_indices=out_indices, feature_cls=feature_cls).eval()
    state = model.state_dict()
    wrapped = features.state_dict()
    prefix = {'list': '', 'getter': 'model.', 'hook': 'body.'}[feature_cls]
    features.load_state_dict({key: state[key.removeprefix(prefix)] for key in wrapped})
    images = make_images()
    maps, expected = features(images), model.forward_intermediates(images, out_indices, intermediates_only=True)
    assert len(maps) == len(out_indices) and all(map(torch.equal, maps, expected))
    assert features.feature_info.channels() == [m.shape[1] for m in maps]
    assert features.feature_info.reduction() == [64 // m.shape[2] for m in maps]


def test_pruning_removes_layers_after_the_last_level():
    model = timm.create_model(SMALL).eval()
    images = make_images()
    expected = model.forward_intermediates(images, indices=[2], intermediates_only=True)[0]
    assert model.prune_intermediate_layers([2]) == [2]
    assert not any(key.startswith(('stage3', 'stage4', 'conv5', 'fc')) for key in model.state_dict())
    assert torch.equal(model.forward_intermediates(images, indices=[2], intermediates_only=True)[0], expected)
    assert torch.equal(model(images), expected)


# --- training ---


def test_checkpointing_gives_the_same_gradients():
    ours, _ = make_twins(SMALL)
    copied = copy.deepcopy(ours)
    copied.set_grad_checkpointing()
    assert copied.grad_checkpointing and not ours.grad_checkpointing
    calls = []
    copied.stage3[2].register_forward_pre_hook(lambda module, args: calls.append(1))
    images = make_images(4)
    for model in (ours, copied):
        model.train()(images).square().mean().backward()
    assert len(calls) == 2, 'a checkpointed block runs again in the backward pass'
    for (key, parameter), expected in zip(copied.named_parameters(), ours.parameters()):
        assert torch.equal(parameter.grad, expected.grad), key
    copied.set_grad_checkpointing(False)
    assert not copied.grad_checkpointing


@pytest.mark.parametrize('coarse, num_groups', [(True, 5), (False, 18)])
def test_parameters_are_grouped_by_depth(coarse, num_groups):
    model = timm.create_model(SMALL)
    groups = group_parameters(model, model.group_matcher(coarse=coarse))  # depth: names
    assert len(groups) == num_groups  # stem, 3 stages or 16 blocks, the last of them with conv5, fc
    assert sorted(name for names in groups.values() for name in names) == sorted(
        name for name, _ in model.named_parameters())
    layers = [sorted({name.split('.')[0] for name in groups[depth]}) for depth in sorted(groups)]
    assert layers[0] == ['conv1'] and layers[-2:] == [['conv5', 'stage4'], ['fc']]
    stages = [name for names in layers[1:-2] for name in names]
    assert set(stages) >= {'stage2', 'stage3'} and stages == sorted(stages)


def test_the_model_can_be_pickled_and_copied():
    model = timm.create_model(SMALL, num_classes=3, global_pool='max').eval()
    images = make_images()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(twin, ShuffleNetV2)
        assert torch.equal(twin(images), model(images))
        assert twin.default_cfg == model.default_cfg


def test_the_model_works_in_channels_last():
    model = timm.create_model(SMALL, num_classes=3).eval()
    images = make_images()
    expected = model(images)
    output = model.to(memory_format=torch.channels_last)(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(output, expected)


# --- timm's own tests ---


@pytest.mark.parametrize('name', WIDTHS)
@pytest.mark.parametrize('pool', ['avg', 'max'])
@pytest.mark.filterwarnings('ignore:`torch.jit.script` is deprecated:FutureWarning')
def test_the_model_can_be_scripted(name, pool):
    model = timm.create_model(name, num_classes=5, global_pool=pool, drop_rate=0.1, scriptable=True).eval()
    scripted = torch.jit.script(model)
    images = make_images()
    torch.testing.assert_close(scripted(images), model(images))
    assert scripted.train()(images).shape == (2, 5)


@pytest.mark.filterwarnings('ignore:`torch.jit.script` is deprecated:FutureWarning')
def test_features_traced_by_fx_can_be_scripted():
    model = timm.create_model(SMALL, features_only=True, feature_cls='fx', scriptable=True).eval()
    images = make_images()
    maps = torch.jit.script(model)(images)
    assert [m.shape[1] for m in maps] == model.feature_info.channels()
    assert all(map(torch.equal, maps, model(images)))


@pytest.mark.parametrize('kwargs', [{'head': 'x'}, {'drop_path_rate': 0.1}, {'features_only': True, 'widths': 2}])
def test_unknown_arguments_are_refused(kwargs):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{list(kwargs)[-1]}'"):
        timm.create_model(SMALL, **kwargs)


@pytest.mark.slow
@pytest.mark.skipif('TIMM_SCRIPTS' not in os.environ, reason='TIMM_SCRIPTS names no clone of pytorch-image-models')
def test_timms_own_tests_pass(run):
    done = run(
        sys.executable, '-m', 'pytest', '-q', '-p', 'timm_splicemix', '-p', 'no:cacheprovider', '--noconftest',
        'test_models.py', '-k', 'shufflenetv2 and not pretrained', cwd=Path(os.environ['TIMM_SCRIPTS']) / 'tests')
    assert done.returncode == 0 and ' passed' in done.stdout, done.stdout
