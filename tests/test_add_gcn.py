""" ADD-GCN """
import math

import pytest
import torch

from timm_splicemix.heads import create_head

from . import golden
from .helpers import raises_error

CASES = golden.read_cases('addgcn')


def make_head(case):
    settings = case['settings']
    head = create_head('add-gcn', settings['channels'], settings['num_classes'], node_dim=settings['node_dim'])
    golden.fill(head, case, golden.names_of('add-gcn', case))
    return head


@pytest.mark.parametrize('case', CASES, ids=[case['id'] for case in CASES])
def test_outputs_and_gradients_are_those_of_the_published_code(case, monkeypatch):
    head = make_head(case).eval()
    matrices = []
    adjacency = head.dynamic_adjacency
    monkeypatch.setattr(head, 'dynamic_adjacency', lambda *args: matrices.append(adjacency(*args)) or matrices[-1])
    x = golden.inputs_of(case)['x'].requires_grad_()
    logits, (scores, graph) = head(x), head.branches(x)
    golden.same_values(matrices[0].transpose(1, 2), case['outputs']['dynamic_adj'])  # they multiply from the right
    for name, value in (('logits', logits), ('s_m', scores), ('s_r', graph)):
        golden.same_values(value, case['outputs'][name])
        golden.same_gradients(head, case, name, value, golden.names_of('add-gcn', case), {'x': x})


@pytest.mark.parametrize('case', CASES, ids=[case['id'] for case in CASES])
def test_training_uses_and_updates_the_statistics_of_images_alone(case):
    head, x, expected = make_head(case).train(), golden.inputs_of(case)['x'], case['train_mode']
    (scores, graph), (logits, aux) = make_head(case).train().branches(x), head.forward_train(x)
    golden.same_values(scores, expected['s_m'])
    golden.same_values(graph, expected['s_r'])
    torch.testing.assert_close(logits, (scores + graph) / 2)
    assert aux == {}
    head.forward_cells(x[:, :, :2])
    golden.same_values(head.global_norm.running_mean, expected['bn_running_mean_after'])
    golden.same_values(head.global_norm.running_var, expected['bn_running_var_after'])


def test_the_classifier_computes_one_logit_per_class():
    """The published code applies C classifiers to C features and keeps the diagonal."""
    torch.manual_seed(0)
    head = create_head('add-gcn', 8, 5, node_dim=6)
    features = torch.randn(2, 5, 6)
    everything = torch.nn.functional.linear(features, head.classifier.weight, head.classifier.bias)
    torch.testing.assert_close(head.classifier(features), everything.diagonal(dim1=1, dim2=2))


def test_first_values_and_options():
    torch.manual_seed(0)
    head = create_head('add-gcn', 16, 25)
    assert head.transform.weight.shape == (1024, 16, 1, 1)
    bounds = {head.static_matrix: 1 / 5, head.classifier.weight: 1 / 32, head.score_map.weight: 1 / 4}
    for weight, bound in bounds.items():
        assert weight.abs().max() <= bound and math.isclose(weight.std().item(), bound / math.sqrt(3), rel_tol=0.1)
    with raises_error("Expected a whole number of at least 1 for option 'node_dim' of head 'add-gcn', but got 0"):
        create_head('add-gcn', 16, 5, node_dim=0)
