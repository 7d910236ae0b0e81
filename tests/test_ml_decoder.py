""" ML-Decoder """
import math

import pytest
import torch

from timm_splicemix.heads import create_head

from . import golden
from .helpers import raises_error

CASES = golden.read_cases('mldecoder')


@pytest.mark.parametrize('case', CASES, ids=[case['id'] for case in CASES])
def test_outputs_and_gradients_are_those_of_the_published_code(case):
    settings = case['settings']
    groups = {} if settings['num_of_groups'] < 0 else {'groups': settings['num_of_groups']}
    head = create_head(
        'ml-decoder', settings['initial_num_features'], settings['num_classes'], dim=settings['decoder_embedding'],
        heads=settings['heads'], ffn=settings['ffn'], **groups).eval()
    assert head.group_weight.shape[::2] == (settings['queries'], settings['group_factor'])
    names = golden.names_of('ml-decoder', case)
    golden.fill(head, case, names)
    x = golden.inputs_of(case)['x'].requires_grad_()
    logits = head(x)
    golden.same_values(logits, case['outputs']['logits'])
    golden.same_gradients(head, case, 'logits', logits, names, {'x': x})


@pytest.mark.parametrize('num_classes, groups, queries, group_size', [
    (1, 100, 1, 1), (80, 100, 80, 1), (101, 100, 100, 2), (1000, 100, 100, 10), (20, 3, 3, 7), (2001, 2000, 2000, 2)])
def test_queries_share_the_classes(num_classes, groups, queries, group_size):
    head = create_head('ml-decoder', 8, num_classes, dim=16, ffn=32, groups=groups)
    assert head.queries.shape == (queries, 16) and head.group_weight.shape == (queries, 16, group_size)
    assert head(torch.randn(2, 8, 3, 5)).shape == (2, num_classes)


def test_first_values():
    torch.manual_seed(0)
    head = create_head('ml-decoder', 32, 200)
    assert head.attn.in_proj_weight.shape == (3 * 768, 768) and head.ffn.linear1.weight.shape == (2048, 768)
    assert math.isclose(head.queries.std().item(), 1, rel_tol=0.02) and 'queries' in dict(head.named_buffers())
    std = math.sqrt(2 / (768 * 2 + 100 * 2))
    assert math.isclose(head.group_weight.std().item(), std, rel_tol=0.02)
    assert not head.bias.any()


def test_tokens_are_accepted_in_place_of_a_map():
    torch.manual_seed(0)
    head, x = create_head('ml-decoder', 8, 4, dim=16).eval(), torch.randn(2, 8, 3, 5)
    assert torch.equal(head(x), head(x.flatten(2).transpose(1, 2)))


def test_dropout_changes_queries_in_training():
    torch.manual_seed(0)
    head, x = create_head('ml-decoder', 8, 4, dim=16), torch.randn(2, 8, 3, 5)
    assert not torch.equal(head.train()(x), head(x)) and torch.equal(head.eval()(x), head(x))
    off = create_head('ml-decoder', 8, 4, dim=16, dropout=0.).train()
    assert torch.equal(off(x), off(x))


def test_wrong_options_get_a_sentence():
    for options in ({'groups': 0}, {'dim': 0}, {'heads': 7}, {'ffn': 'x'}, {'dropout': 1.5}):
        with raises_error(f"for option '{next(iter(options))}' of head 'ml-decoder', but got"):
            create_head('ml-decoder', 8, 4, **options)
