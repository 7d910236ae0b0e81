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


@pytest.mark.parametrize('case', CASES, ids=[case['id'] for case in CASES])
def test_outputs_and_gradients_are_those_of_the_published_code(case):
    settings = case['settings']
    head = create_head(
        'q2l', settings['channels'], settings['num_classes'], dim=settings['hidden_dim'],
        project=settings['keep_input_proj'], heads=settings['nheads'], encoder_layers=settings['enc_layers'],
        decoder_layers=settings['dec_layers'], ffn=settings['dim_feedforward']).eval()
    names = golden.names_of('q2l', case)
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


def attend(layer, query, key, value):
    query, key, value = (x @ weight.T + bias for x, weight, bias in zip(
        (query, key, value), layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)))
    parts = []
    for part in torch.arange(query.shape[1]).chunk(layer.heads):
        scores = query[:, part] @ key[:, part].T / math.sqrt(len(part))
        parts.append(scores.softmax(dim=1) @ value[:, part])
    return layer.out_proj(torch.cat(parts, dim=1))


def feed_forward(layer, x):
    return layer.ffn.linear2(layer.ffn.linear1(x).relu())


def plain_logits(head, image, kept):
    """The logits of one image (C, h, w), layer by layer."""
    memory = head.project(image[None])[0].flatten(1).T
    position = sine_position(memory.shape[1], *image.shape[1:], memory)
    for layer in head.encoder:
        placed = memory + position
        memory = layer.norm1(memory + attend(layer.attn, placed, placed, memory))
        memory = layer.norm2(memory + feed_forward(layer, memory))
    hidden = torch.zeros_like(head.queries)
    for layer, keep in zip(head.decoder, kept):
        assert (layer.self_attn is not None) == (layer.norm1 is not None) == bool(keep)
        if keep:
            placed = hidden + head.queries
            hidden = layer.norm1(hidden + attend(layer.self_attn, placed, placed, hidden))
        hidden = layer.norm2(hidden + attend(layer.cross_attn, hidden + head.queries, memory + position, memory))
        hidden = layer.norm3(hidden + feed_forward(layer, hidden))
    hidden = head.norm(hidden)
    return torch.stack([row @ weight for row, weight in zip(hidden, head.classifier.weight)]) + head.classifier.bias


@pytest.mark.parametrize('self_attention, kept', [
    ('none', [0, 0, 0]), ('first', [1, 0, 0]), ('other', [0, 1, 1]), ('all', [1, 1, 1])])
@pytest.mark.parametrize('channels, encoder_layers', [(8, 0), (6, 2)])
@torch.no_grad()
def test_logits_are_those_of_the_layers_one_by_one(self_attention, kept, channels, encoder_layers):
    torch.manual_seed(0)
    head = create_head(
        'q2l', channels, 4, dim=8, heads=2, ffn=12, encoder_layers=encoder_layers, decoder_layers=3,
        self_attention=self_attention).double().eval()
    for parameter in head.parameters():
        parameter.normal_(std=0.5)
    images = torch.randn(2, channels, 3, 5, dtype=torch.float64)
    expected = torch.stack([plain_logits(head, image, kept) for image in images])
    torch.testing.assert_close(head(images), expected, rtol=1e-9, atol=1e-9)


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
            {'self_attention': ['all']}, {'encoder_layers': -1}, {'decoder_layers': 0}):
        with raises_error(f"for option '{next(iter(options))}' of head 'q2l', but got"):
            create_head('q2l', 8, 4, **options)
    with raises_error("Expected True or False, and True for a 'dim' other than 8 for option 'project'"):
        create_head('q2l', 8, 4, dim=16, project=False)
    with raises_error("set option 'dim' to project the feature map to other channels"):
        create_head('q2l', 9, 4)
