import math

import pytest
import timm
import torch
from torch import nn

from tests.helpers import raises_error
from timm_splicemix.models import (
    classifier_parameters,
    freeze_batch_norm,
    init_classifier,
    mean_prior_bias,
    prior_bias,
)

CLASSES = 7
# Arguments of the model, and the names of the layers that return logits
MODELS = {
    'test_resnet': ({}, ['fc']),
    'test_vit': ({}, ['head']),
    'test_convnext': ({}, ['head.fc']),
    'test_vit2': ({}, ['head']),
    'caformer_s18': ({}, ['head.fc.fc2']),  # an MLP
    'dpn48b': ({}, ['classifier']),  # a convolution
    'deit_tiny_distilled_patch16_224': ({'img_size': 32, 'depth': 2}, ['head', 'head_dist']),
    'levit_128s': ({}, ['head.linear', 'head_dist.linear']),  # after a BatchNorm
    'crossvit_tiny_240': ({}, ['head.0', 'head.1']),
    'repvit_m0_9': ({}, ['head.head.l', 'head.head_dist.l']),
}


def make_model(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=CLASSES, **MODELS[name][0], **kwargs)


@pytest.mark.parametrize('name', MODELS)
def test_only_the_layers_that_return_logits_are_initialised(name):
    model = make_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    init_classifier(model, std=0.01, bias=torch.arange(CLASSES) - 2.)
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {f'{layer}.{part}' for layer in MODELS[name][1] for part in ('weight', 'bias')}
    for layer in map(model.get_submodule, MODELS[name][1]):
        assert layer.weight.std().item() == pytest.approx(0.01, rel=0.15)
        assert abs(layer.weight.mean().item()) < 0.002
        assert layer.bias.tolist() == [-2, -1, 0, 1, 2, 3, 4]


@pytest.mark.parametrize('name', MODELS)
def test_the_parameters_of_the_classifier_are_those_after_the_backbone(name):
    model = make_model(name)
    parameters = classifier_parameters(model)
    ids = {id(parameter) for parameter in parameters}
    assert len(ids) == len(parameters)
    for layer in map(model.get_submodule, MODELS[name][1]):
        assert {id(layer.weight), id(layer.bias)} <= ids
    backbone = {key for key, parameter in model.named_parameters() if id(parameter) not in ids}
    model.reset_classifier(0)
    assert backbone >= {key for key, _ in model.named_parameters() if 'head' not in key}


def test_a_small_deviation_gives_small_logits():
    model = make_model('test_resnet').eval()
    images = torch.randn(4, 3, 64, 64)
    init_classifier(model, std=0.01, bias=-2.5)
    assert (model(images) + 2.5).abs().max() < 0.5


def test_a_scale_multiplies_weights_and_biases():
    model = make_model('test_resnet').eval()
    nn.init.normal_(model.fc.bias)
    images = torch.randn(2, 3, 64, 64)
    expected = model(images) * 0.25
    init_classifier(model, scale=0.25)
    torch.testing.assert_close(model(images), expected)


def test_without_arguments_nothing_changes():
    model = make_model('test_resnet')
    before = {key: value.clone() for key, value in model.state_dict().items()}
    init_classifier(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    init_classifier(model, bias=1.)
    assert torch.equal(model.fc.weight, before['fc.weight']) and (model.fc.bias == 1).all()
    assert model.fc.weight.requires_grad and model.fc.weight.grad_fn is None


def test_a_bias_for_a_classifier_without_bias_is_an_error():
    model = make_model('test_resnet')
    model.fc = nn.Linear(model.fc.in_features, CLASSES, bias=False)
    init_classifier(model, std=0.01, scale=2.)
    with raises_error('Cannot set the bias of a classifier that has none'):
        init_classifier(model, bias=0.)


def test_a_model_without_a_classifier_is_an_error():
    model = timm.create_model('test_resnet', num_classes=0)
    with raises_error('Expected a model with a classifier, but ResNet has none'):
        classifier_parameters(model)


def test_the_prior_bias_predicts_the_frequency_of_each_class():
    targets = torch.tensor([[1, 0, 1, -1], [1, 0, 0, -1], [1, 0, -1, 1], [1, 0, 0, 0]])
    expected = [math.log(4.5 / 0.5), math.log(0.5 / 4.5), math.log(1.5 / 2.5), math.log(1.5 / 1.5)]
    for dtype in (torch.int8, torch.float32):
        bias = prior_bias(targets.to(dtype))
        assert bias.dtype == torch.float32
        assert bias.tolist() == pytest.approx(expected)
    many = (torch.rand(20000, 3, generator=torch.Generator().manual_seed(0)) < torch.tensor([0.1, 0.5, 0.01])).float()
    torch.testing.assert_close(prior_bias(many).sigmoid(), many.mean(dim=0), rtol=0, atol=1e-4)


def test_the_mean_prior_bias_predicts_the_average_number_of_labels():
    targets = torch.tensor([[1, 0, 0, -1], [1, 1, 0, 0]])
    assert mean_prior_bias(targets) == pytest.approx(math.log(3.5 / 4.5))
    assert mean_prior_bias(torch.zeros(5, 2)) == pytest.approx(math.log(0.5 / 10.5))


def test_frozen_batch_norm_keeps_its_statistics_and_trains_scale_and_shift():
    model = make_model('test_resnet').train()
    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [layer.running_mean.clone() for layer in layers]
    assert freeze_batch_norm(model) == len(layers) > 0
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert all(torch.equal(layer.running_mean, mean) for layer, mean in zip(layers, before))
    assert all(layer.weight.grad is not None and layer.bias.grad is not None for layer in layers)
    assert model.training and model.fc.training
    assert freeze_batch_norm(nn.Linear(2, 2)) == 0
