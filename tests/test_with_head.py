""" Multi-label heads on timm models: the interface of timm, the keys, consistency learning """
import copy
import io
import pickle

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from tests.head_cases import (
    FAMILIES,
    HEADS,
    ONE_MAP,
    PAIRS,
    STRIDES_16_AND_32,
    TWO_MAPS,
    make_model,
    make_side_inputs,
    model_of,
    size_of,
)
from tests.helpers import make_batch, raises_error
from timm_splicemix.mix import SpliceMix, split_cells
from timm_splicemix.models import check_consistency, classifier_parameters, create_model
from timm_splicemix.task import SpliceMixModule, SpliceMixTask

PREFIX = 'multilabel_head.'
each_family = pytest.mark.parametrize('family', FAMILIES)
each_pair = pytest.mark.parametrize('head, family', PAIRS)
each_head = pytest.mark.parametrize('head', HEADS)


def family_of(head):
    return 'resnet' if head in TWO_MAPS else 'vit'


def make_task(model, consistency_weight=1., **kwargs):
    return SpliceMixTask(
        model, nn.BCEWithLogitsLoss(), SpliceMix('1x2,2x2', ratio=0.5, drop_prob=0.), consistency_weight,
        input_size=(3, *[size_of(model.head_name)] * 2), verbose=False, **kwargs)


def images_of(number=4, height=64, width=64, head='csra'):
    if head in TWO_MAPS:
        height = width = size_of(head)
    return make_batch(number, height=height, width=width)


# --- timm's interface ---


@each_pair
def test_a_step_gives_finite_losses_and_gradients_of_all_trained_parameters(head, family):
    model = make_model(family, head)
    task = make_task(model, consistency_weight=float(head in ONE_MAP)).train()
    result = task(*images_of(head=head))
    assert all(value.isfinite().all() for value in result.values())
    assert ('consistency_loss' in result) == (head in ONE_MAP)
    result['loss'].backward()
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert [name for name, gradient in trained.items() if gradient is None] == []
    assert all(gradient.isfinite().all() for gradient in trained.values())
    assert any(name.startswith(PREFIX) for name in trained)


@each_family
def test_keys_of_the_backbone_are_those_of_timm_without_classifier(family):
    model = make_model(family)
    name, kwargs = model_of(family)
    plain = timm.create_model(name, num_classes=0, **kwargs)
    backbone = {key: value for key, value in model.state_dict().items() if not key.startswith(PREFIX)}
    assert list(backbone) == list(plain.state_dict())
    assert 0 < len(backbone) < len(model.state_dict())
    plain.load_state_dict(backbone)
    images = images_of(2)[0]
    torch.testing.assert_close(plain.eval().forward_features(images), model.eval().forward_features(images))


@each_family
def test_attributes_and_methods_are_those_of_timm(family):
    model = make_model(family).eval()
    name, kwargs = model_of(family)
    plain = timm.create_model(name, num_classes=5, **kwargs)
    assert isinstance(model, type(plain)) and type(model).__name__ == type(plain).__name__
    assert (model.num_classes, model.num_features) == (5, plain.num_features)
    assert model.pretrained_cfg == plain.pretrained_cfg
    assert model.get_classifier() is model.multilabel_head
    assert model.get_classifier(name_only=True) == 'multilabel_head'
    assert {id(part) for part in classifier_parameters(model)} == set(map(id, model.multilabel_head.parameters()))
    images = images_of(2)[0]
    features = model.forward_features(images)
    assert torch.equal(model.forward_head(features), model(images))
    assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)


@pytest.mark.parametrize('head, family', [
    (head, family) for head, family in PAIRS if head == 'csra' or family == family_of(head)])
def test_gradients_are_the_same_with_gradient_checkpointing(head, family):
    gradients = []
    for checkpointing in (False, True):
        model = make_model(family, head).eval()  # without dropout
        model.set_grad_checkpointing(checkpointing)
        model(images_of(2, head=head)[0].requires_grad_()).sum().backward()
        gradients.append([part.grad for part in model.parameters() if part.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)


@each_head
def test_copies_pickles_and_the_moving_average_predict_the_same(head):
    model = make_model(family_of(head), head).eval()
    images = images_of(2, head=head)[0]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    task = make_task(model, consistency_weight=0.)
    task.setup_ema(decay=0.5)
    for other in [*others, task.get_eval_model(ema=True)]:
        assert torch.equal(other.eval()(images), model(images))
        assert other.state_dict().keys() == model.state_dict().keys()


@each_head
def test_a_new_head_of_the_same_kind_replaces_the_old_one(head):
    model = make_model(family_of(head), head).double().eval()
    needs = model.multilabel_head.side_inputs
    if needs:
        with raises_error(f"Head '{head}' needs .*side_inputs"):
            model.reset_classifier(3)
        assert model.num_classes == 5
    model.reset_classifier(3, side_inputs=make_side_inputs(3))
    logits = model(images_of(2, head=head)[0].double())
    assert logits.shape == (2, 3) and logits.dtype == torch.float64
    assert model.num_classes == 3 and not model.multilabel_head.training


@each_family
def test_the_head_can_be_removed_again(family):
    images = images_of(2)[0]
    name, kwargs = model_of(family)
    plain = timm.create_model(name, num_classes=0, **kwargs).eval()
    model = make_model(family).eval()
    plain.load_state_dict({key: value for key, value in model.state_dict().items() if not key.startswith(PREFIX)})
    model.reset_classifier(0)
    assert type(model) is type(plain) and list(model.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(model(images), plain(images))
    model = make_model(family).eval()
    model.reset_classifier(4, 'avg')
    assert model(images).shape == (2, 4) and not hasattr(model, 'multilabel_head')


def test_images_of_another_aspect_ratio_have_maps_of_their_own_shape():
    model = create_model(
        'test_vit', num_classes=5, head='csra', img_size=64, dynamic_img_size=True).eval()
    images = images_of(2, height=32, width=96)[0]
    shapes = []
    model.multilabel_head.register_forward_hook(lambda _, inputs, output: shapes.append(inputs[0].shape[2:]))
    model(images)
    assert shapes == [(2, 6)]


# --- optimizers ---


@each_pair
@pytest.mark.parametrize('layer_decay', [None, 0.7])
def test_the_head_has_the_full_learning_rate_with_layer_decay(head, family, layer_decay):
    model = make_model(family, head)
    optimizer = create_optimizer_v2(
        SpliceMixModule(model), opt='sgd', lr=0.1, weight_decay=0.05, layer_decay=layer_decay)
    scales = {
        id(parameter): group.get('lr_scale', 1.) for group in optimizer.param_groups for parameter in group['params']}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert scales.keys() == set(map(id, trained))
    assert {scales[id(parameter)] for parameter in classifier_parameters(model) if parameter.requires_grad} == {1.}
    assert (min(scales.values()) < 1.) == (layer_decay is not None)


def test_names_without_weight_decay_are_those_of_the_model_and_of_the_head(monkeypatch):
    model = make_model('vit')
    plain = timm.create_model('test_vit')
    assert model.no_weight_decay() == plain.no_weight_decay() and plain.no_weight_decay()
    monkeypatch.setattr(type(model.multilabel_head), 'no_weight_decay', lambda head: {'query'}, raising=False)
    assert model.no_weight_decay() == {*plain.no_weight_decay(), f'{PREFIX}query'}


def test_a_matcher_that_is_a_function_puts_the_head_into_the_last_group():
    kwargs = {'img_size': 64, 'depth': 2}
    model = create_model('cait_xxs24_224', num_classes=5, head='csra', **kwargs)
    groups = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    plain = timm.create_model('cait_xxs24_224', num_classes=0, **kwargs)
    plain_groups = timm.models.group_parameters(plain, plain.group_matcher(), reverse=True)
    assert {name: group for name, group in groups.items() if not name.startswith(PREFIX)} == plain_groups
    assert {group for name, group in groups.items() if name.startswith(PREFIX)} == {max(plain_groups.values()) + 1}


def test_adaptive_clipping_leaves_out_the_whole_head():
    task = make_task(make_model('resnet', heads=4), consistency_weight=0.)
    clipped = set(map(id, task.get_clip_parameters(exclude_head=True)))
    model = task.get_eval_model()
    assert clipped == set(map(id, model.parameters())) - set(map(id, model.multilabel_head.parameters()))
    assert len(list(task.get_clip_parameters())) == len(list(model.parameters()))


def test_layers_that_the_head_does_not_use_are_frozen_and_keep_their_keys():
    model = create_model('mobilenetv3_small_050', num_classes=5, head='csra')
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ['conv_head.weight', 'conv_head.bias']  # after pooling
    model.reset_classifier(0)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize('name, norm, kwargs', [
    ('test_convnext', 'head.norm', {}),
    ('beit_base_patch16_224', 'fc_norm', {'img_size': 64, 'depth': 1, 'embed_dim': 24, 'num_heads': 2})])
def test_the_norm_after_pooling_is_applied_to_each_position(name, norm, kwargs):
    model = create_model(name, num_classes=5, head='csra', **kwargs).eval()
    assert model.head_norm == norm
    features = model.forward_features(images_of(2)[0])
    maps, raw = model.head_maps(features), model.head_feature_map.split(features)[0]
    for position in ((0, 0), (1, 1)):
        row = raw[:, :, position[0], position[1]]
        layer = model.get_submodule(norm)
        expected = nn.functional.layer_norm(row, row.shape[1:], layer.weight, layer.bias, layer.eps)
        torch.testing.assert_close(maps[:, :, position[0], position[1]], expected)


# --- consistency learning ---


@pytest.mark.parametrize('family', FAMILIES)
def test_parts_are_predicted_by_the_same_head_one_by_one(family):
    model = make_model(family).double().eval()
    task = make_task(model)
    images, targets = images_of()
    task.set_step(3, 1)
    plan = task.mixer.plan(4)
    mixed, _ = task.mixer.apply(images.double(), targets, plan)
    logits, part_logits = SpliceMixModule(model)(mixed, plan)
    torch.testing.assert_close(logits, model(mixed))
    maps = model.head_maps(model.forward_features(mixed), (64, 64))
    record, = plan.records
    cells = split_cells(maps[4:], record.grid)
    expected = torch.cat([model.multilabel_head(cell[None]) for cell in cells])
    torch.testing.assert_close(part_logits, expected)


@pytest.mark.parametrize('head', ONE_MAP)
def test_class_weights_are_computed_once_per_step_and_batch_norm_ignores_cells(head, monkeypatch):
    model = make_model('resnet', head)
    calls = []
    compute = type(model.multilabel_head).compute_class_weights

    def count(self):
        calls.append(self)
        return compute(self)

    monkeypatch.setattr(type(model.multilabel_head), 'compute_class_weights', count)
    images, targets = images_of()
    statistics = []
    for weight in (0., 1.):
        copied = copy.deepcopy(model)
        task = make_task(copied, consistency_weight=weight).train()
        calls.clear()
        task(images, targets)
        assert len(calls) == 1
        buffers = {name: value for name, value in copied.named_buffers() if name.startswith(PREFIX)}
        statistics.append(buffers)
    for name, value in statistics[0].items():
        torch.testing.assert_close(value, statistics[1][name])


@pytest.mark.parametrize('head', TWO_MAPS)
def test_heads_with_two_maps_refuse_consistency_learning_with_the_reason(head):
    model = make_model('resnet', head)
    with raises_error(f'Head {head} cannot be used for consistency learning: {model.multilabel_head.cells_reason}'):
        check_consistency(model, size_of(head))
    with raises_error(f'Head {head} cannot be used for consistency learning'):
        make_task(model)


@pytest.mark.parametrize('head', [
    pytest.param(head, marks=() if head == 'csra' else pytest.mark.slow) for head in HEADS])
@pytest.mark.parametrize('consistency_weight', [0., 1.])
def test_a_compiled_task_gives_the_same(head, consistency_weight):
    consistency_weight *= head in ONE_MAP
    results = []
    for compiled in (False, True):
        task = make_task(make_model(family_of(head), head).eval(), consistency_weight)
        if compiled:
            task.compile(backend='eager')
        results.append(task(*images_of(head=head)))
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name])


# --- two maps ---


@pytest.mark.parametrize('family', STRIDES_16_AND_32)
@pytest.mark.parametrize('head', TWO_MAPS)
def test_the_two_maps_have_strides_16_and_32_and_the_last_one_is_that_of_other_heads(head, family):
    model, (name, kwargs) = make_model(family, head).eval(), model_of(family, head)
    other = create_model(name, num_classes=5, head='csra', **kwargs).eval()
    other.load_state_dict(
        {name: value for name, value in model.state_dict().items() if not name.startswith(PREFIX)}, strict=False)
    images = images_of(2, head=head)[0]
    first, last = model.head_maps(model.forward_features(images))
    assert first.shape[2:] == (6, 6) and last.shape[2:] == (3, 3)
    torch.testing.assert_close(last, other.head_maps(other.forward_features(images)))


@pytest.mark.parametrize('name, reason', [
    ('test_vit', 'the maps of this model have strides 16'),
    ('convmixer_768_32', 'the maps of this model have strides 7'),
    ('test_resnet', 'timm offers no intermediate feature maps')])
@pytest.mark.parametrize('head', TWO_MAPS)
def test_models_without_two_maps_are_refused_with_the_reason(monkeypatch, head, name, reason):
    if name == 'test_resnet':  # as some families of older versions of timm
        monkeypatch.delattr(timm.models.ResNet, 'forward_intermediates')
    with raises_error(f'--head {head} is not possible for {name}: it needs .* of strides 16 and 32.*{reason}'):
        create_model(name, num_classes=5, head=head)


# --- errors and other weights ---


@pytest.mark.parametrize('name, reason', [
    ('coat_tiny', 'its head combines 3 feature maps'), ('pit_ti_224', 'its features are class tokens only')])
def test_models_without_a_map_are_refused_with_the_reason(name, reason):
    with raises_error(f'--head csra is not possible for {name}: {reason}'):
        create_model(name, num_classes=5, head='csra')


def test_bad_arguments_are_refused():
    with raises_error("Expected a head among csra.*, but got 'gap'"):
        create_model('test_resnet', num_classes=5, head='gap')
    with raises_error("Unknown option 'foo' of head 'csra'"):
        create_model('test_resnet', num_classes=5, head='csra', head_kwargs={'foo': 1})
    with raises_error("Expected a head or global_pool .*, but got head 'csra' and 'max'"):
        create_model('test_resnet', num_classes=5, head='csra', global_pool='max')
    with raises_error('Expected a head with head_kwargs and side_inputs, but got none'):
        create_model('test_resnet', num_classes=5, head_kwargs={'lam': 1})


def test_the_number_of_classes_defaults_to_that_of_the_model():
    assert create_model('test_resnet', head='csra').num_classes == 1000


def test_weights_of_another_file_are_loaded_into_backbone_and_head(tmp_path):
    path = tmp_path / 'plain.pth'
    torch.manual_seed(1)
    plain = timm.create_model('test_resnet', num_classes=7)
    torch.save(plain.state_dict(), path)
    model = create_model('test_resnet', num_classes=5, head='csra', checkpoint_path=path)
    assert torch.equal(model.conv1[0].weight, plain.conv1[0].weight)
    torch.save(model.state_dict(), path)
    other = create_model('test_resnet', num_classes=5, head='csra', checkpoint_path=path)
    images = images_of(2)[0]
    assert torch.equal(other.eval()(images), model.eval()(images))
    with raises_error('Missing key .* in checkpoint .*plain.pth: it is of another model'):
        create_model('test_vit', num_classes=5, head='csra', checkpoint_path=_saved(plain, path))


def _saved(model, path):
    torch.save(model.state_dict(), path)
    return path
