""" Q2L """
import math

import pytest
import torch
from torch import nn

from timm_splicemix.heads import create_head
from timm_splicemix.heads.q2l import sine_position

from . import golden
from .helpers import raises_error

CASES = golden.read_cases('q2l')
TOP = {
    'input_proj.weight': 'project.weight', 'input_proj.bias': 'project.bias', 'query_embed.weight': 'queries',
    'fc.W': 'classifier.weight', 'fc.b': 'classifier.bias', 'transformer.decoder.norm.weight': 'norm.weight',
    'transformer.decoder.norm.bias': 'norm.bias'}


def our_name(name):
    """'transformer.decoder.layers.1.linear1.bias' is our 'decoder.1.ffn.linear1.bias', for example."""
    if name in TOP:
        return TOP[name]
    _, part, _, index, *rest = name.split('.')
    prefix = {'linear1': 'ffn.linear1', 'linear2': 'ffn.linear2', 'multihead_attn': 'cross_attn'}
    prefix['self_attn'] = 'attn' if part == 'encoder' else 'self_attn'
    return '.'.join((part, index, prefix.get(rest[0], rest[0]), *rest[1:]))


@pytest.mark.parametrize('case', CASES, ids=[case['id'] for case in CASES])
def test_outputs_and_gradients_are_those_of_the_published_code(case):
    settings = case['settings']
    head = create_head(
        'q2l', settings['channels'], settings['num_classes'], dim=settings['hidden_dim'],
        project=settings['keep_input_proj'], heads=settings['nheads'], encoder_layers=settings['enc_layers'],
        decoder_layers=settings['dec_layers'], ffn=settings['dim_feedforward']).eval()
    names = {name: our_name(name) for name in case['params']}
    golden.fill(head, case, names)
    x = golden.inputs_of(case)['x'].requires_grad_()
    logits = head(x)
    golden.same_values(logits, case['outputs']['logits'])
    golden.same_gradients(head, case, 'logits', logits, names, {'x': x})


@pytest.mark.parametrize('case', CASES, ids=[case['id'] for case in CASES])
def test_positions_are_those_of_the_published_code(case):
    expected = case['position_encoding']
    dim, height, width = expected['shape']
    found = sine_position(dim, height, width, torch.zeros((), dtype=torch.float64)).T.reshape(dim, height, width)
    golden.same_values(found[:, 0, 0], expected['at_y0_x0'])
    golden.same_values(found[:, -1, 1], expected['at_ylast_x1'])
    golden.same_number(found.sum(), expected['sum'])
    probe = golden.formula(f'{case["salt"]}/gradprobe.pos', expected['shape'])
    golden.same_number((found * probe).sum(), expected['dot_probe'])


def test_rows_come_before_columns_on_maps_that_are_not_square():
    found = sine_position(8, 2, 3, torch.zeros(())).view(2, 3, 8)
    assert torch.equal(found[0, 0, :4], found[0, 2, :4]) and torch.equal(found[0, 1, 4:], found[1, 1, 4:])
    assert found[0, 1, 4].item() == pytest.approx(math.sin(2 / 3 * 2 * math.pi), abs=1e-5)


@pytest.mark.parametrize('self_attention, kept', [
    ('none', [0, 0, 0]), ('first', [1, 0, 0]), ('other', [0, 1, 1]), ('all', [1, 1, 1])])
@torch.no_grad()
def test_decoder_layers_with_self_attention_are_those_of_torch(self_attention, kept):
    torch.manual_seed(0)
    head = create_head(
        'q2l', 8, 4, heads=2, ffn=16, encoder_layers=0, decoder_layers=3, self_attention=self_attention).eval()
    queries, memory = torch.randn(1, 4, 8), torch.randn(1, 6, 8)
    for layer, keep in zip(head.decoder, kept):
        assert (layer.self_attn is not None) == (layer.norm1 is not None) == bool(keep)
        hidden = torch.randn(1, 4, 8)
        expected = hidden
        if keep:
            placed = hidden + queries
            expected = layer.norm1(hidden + torch_attention(layer.self_attn)(placed, placed, hidden)[0])
        attended = torch_attention(layer.cross_attn)(expected + queries, memory + 1, memory)[0]
        expected = layer.norm2(expected + attended)
        expected = layer.norm3(expected + layer.ffn.linear2(layer.ffn.linear1(expected).relu()))
        torch.testing.assert_close(layer(hidden, queries, memory + 1, memory), expected)


def torch_attention(layer):
    copy = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    copy.load_state_dict(layer.state_dict())
    return copy


def test_sizes_and_first_values():
    torch.manual_seed(0)
    head = create_head('q2l', 32, 50)
    assert isinstance(head.project, nn.Identity) and head.encoder[0].ffn.linear1.weight.shape == (128, 32)
    assert create_head('q2l', 32, 5, project=True).project.weight.shape == (32, 32, 1, 1)
    assert create_head('q2l', 32, 5, dim=64).project.weight.shape == (64, 32, 1, 1)
    assert math.isclose(head.queries.std().item(), 1, rel_tol=0.1)
    for weight, (inputs, outputs) in (
            (head.encoder[0].ffn.linear1.weight, (32, 128)), (head.decoder[1].cross_attn.in_proj_weight, (32, 96)),
            (head.decoder[0].cross_attn.out_proj.weight, (32, 32))):
        bound = math.sqrt(6 / (inputs + outputs))
        assert bound * 0.9 < weight.abs().max() <= bound
    assert head.classifier.weight.abs().max() <= 32 ** -0.5


def test_wrong_options_get_a_sentence():
    for options in (
            {'dim': 0}, {'heads': 3}, {'project': 'x'}, {'self_attention': 'second'}, {'ffn': 0}, {'dropout': -1},
            {'encoder_layers': -1}, {'decoder_layers': 0}):
        with raises_error(f"for option '{next(iter(options))}' of head 'q2l', but got"):
            create_head('q2l', 8, 4, **options)
    with raises_error("Expected True or False, and True for a 'dim' other than 8 for option 'project'"):
        create_head('q2l', 8, 4, dim=16, project=False)
    with raises_error("set option 'dim' to project the feature map to other channels"):
        create_head('q2l', 9, 4)
