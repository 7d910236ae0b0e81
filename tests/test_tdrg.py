""" TDRG """
import math

import pytest
import torch

from timm_splicemix.heads import create_head

from . import golden
from .helpers import raises_error

CASES = golden.read_cases('tdrg')


def make_case(case):
    settings, inputs = case['settings'], golden.inputs_of(case)
    head = create_head(
        'tdrg', (inputs['x3'].shape[1], inputs['x4'].shape[1]), settings['num_classes'],
        dim=settings['transformer_dim'], graph_dim=settings['gcn_dim'], heads=settings['n_head'],
        layers=settings['encoder_layers'], ffn=settings['ffn'], top=settings['topk_fraction'])
    names = golden.names_of('tdrg', case)
    golden.fill(head, case, names)
    return head, names, {name: x.requires_grad_() for name, x in inputs.items()}


def outputs(head, inputs):
    logits, aux = head.forward_train((inputs['x3'], inputs['x4']))
    return {'logits': logits, 'out_trans': aux['transformer'], 'out_gcn': aux['graph'], 'out_sac': aux['score_map']}


@pytest.mark.parametrize('case', CASES, ids=[case['id'] for case in CASES])
def test_outputs_and_gradients_are_those_of_the_published_code_with_attention_over_positions(case):
    head, names, inputs = make_case(case)
    found = outputs(head.eval(), inputs)
    golden.same_values(head((inputs['x3'], inputs['x4'])), case['outputs']['logits'])
    for name, value in found.items():
        golden.same_values(value, case['outputs'][name])
    for name in case['grads']:
        golden.same_gradients(head, case, name, found[name], names, inputs)


@pytest.mark.parametrize('case', CASES, ids=[case['id'] for case in CASES])
def test_all_else_is_as_published_if_attention_is_over_the_images_of_the_batch(case, monkeypatch):
    """Shows all gradients, and training mode, for which no numbers with attention over positions exist."""
    head, names, inputs = make_case(case)
    for layer in head.encoder:
        attend = layer.attn.forward
        monkeypatch.setattr(layer.attn, 'forward', lambda *sequences, attend=attend: attend(
            *(x.transpose(0, 1) for x in sequences)).transpose(0, 1))
    official = {**case, 'grads': case['official_grads']}
    for name, value in outputs(head.eval(), inputs).items():
        golden.same_values(value, case['official_outputs'][name])
        golden.same_gradients(head, official, name, value, names, inputs)
    expected = case['train_mode']
    for name, value in outputs(head.train(), inputs).items():
        if name != 'logits':
            golden.same_values(value, expected[name])
    golden.same_values(head.guidance_norm.running_mean, expected['bn_running_mean_after'])
    golden.same_values(head.guidance_norm.running_var, expected['bn_running_var_after'])


def test_four_losses_are_added_and_named():
    torch.manual_seed(0)
    for options, weight in (({}, 1.), ({'aux_weight': 0.5}, 0.5)):
        head = create_head('tdrg', (6, 8), 4, dim=8, graph_dim=8, **options)
        logits, aux = head.forward_train((torch.randn(2, 6, 6, 6), torch.randn(2, 8, 3, 3)))
        loss, terms = head.losses(logits.square().mean(), aux, lambda values: values.square().mean())
        assert set(terms) == {'transformer', 'graph', 'score_map'}
        for name, term in terms.items():
            torch.testing.assert_close(term, weight * aux[name].square().mean())
        torch.testing.assert_close(loss, logits.square().mean() + sum(terms.values()))
        torch.testing.assert_close(logits, 0.7 * aux['transformer'] + 0.3 * aux['graph'])


@pytest.mark.parametrize('size, top, positions', [
    ((3, 3), 0.05, 1), ((3, 5), 0.05, 1), ((5, 6), 0.05, 2), ((14, 14), 0.05, 10), ((3, 5), 0.2, 3), ((3, 5), 1., 15)])
def test_the_largest_scores_are_those_of_at_least_one_position(size, top, positions):
    torch.manual_seed(0)
    head = create_head('tdrg', (6, 8), 4, dim=8, graph_dim=8, top=top)
    last = torch.randn(2, 8, *size)
    _, aux = head.forward_train((torch.randn(2, 6, 2 * size[0], 2 * size[1]), last))
    expected = head.score_map(last).flatten(2).sort(dim=2, descending=True).values[:, :, :positions].mean(dim=2)
    torch.testing.assert_close(aux['score_map'], expected)


def test_small_maps_cells_and_wrong_options_get_a_sentence():
    head = create_head('tdrg', (6, 8), 4, dim=8, graph_dim=8)
    with raises_error("Expected a last feature map of at least 3 x 3 positions for head 'tdrg', but got 2 x 5"):
        head((torch.randn(2, 6, 4, 10), torch.randn(2, 8, 2, 5)))
    with raises_error('TDRG cannot predict cells: it predicts from the feature maps of two strides'):
        head.forward_cells((torch.randn(2, 6, 6, 6), torch.randn(2, 8, 3, 3)))
    for options in (
            {'dim': 0}, {'heads': 3}, {'layers': 0}, {'top': 2}, {'aux_weight': -1}, {'ffn': 0}, {'graph_dim': 0}):
        with raises_error(f"for option '{next(iter(options))}' of head 'tdrg', but got"):
            create_head('tdrg', (6, 8), 4, **options)


def test_sizes_and_first_values():
    torch.manual_seed(0)
    head = create_head('tdrg', (6, 8), 4)
    assert len(head.encoder) == 3 and head.encoder[0].attn.heads == 4
    assert head.encoder[0].ffn.linear1.weight.shape == (2048, 512) and head.graph_classifier.weight.shape == (4, 1024)
    weight, bound = head.encoder[0].ffn.linear1.weight, math.sqrt(6 / (512 + 2048))
    assert bound * 0.99 < weight.abs().max() <= bound
