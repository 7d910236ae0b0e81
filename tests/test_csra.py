""" CSRA """
import re

import pytest
import torch

from timm_splicemix.heads import create_head

from . import golden
from .helpers import raises_error

CASES = golden.read_cases('csra')


@pytest.mark.parametrize('case', CASES, ids=[case['id'] for case in CASES])
def test_outputs_and_gradients_are_those_of_the_published_code(case):
    settings = case['settings']
    head = create_head(
        'csra', settings['input_dim'], settings['num_classes'], heads=settings['num_heads'], lam=settings['lam'])
    names = golden.names_of('csra', case)
    golden.fill(head, case, names)
    x = golden.inputs_of(case)['x'].requires_grad_()
    logits = head(x)
    golden.same_values(logits, case['outputs']['logits'])
    golden.same_gradients(head, case, 'logits', logits, names, {'x': x})


@pytest.mark.parametrize('heads, temperatures', [
    (1, (1,)), (2, (1, 99)), (4, (1, 2, 4, 99)), (6, (1, 2, 3, 4, 5, 99)), (8, (1, 2, 3, 4, 5, 6, 7, 99))])
def test_each_number_of_heads_has_its_temperatures(heads, temperatures):
    head = create_head('csra', 3, 2, heads=heads, lam=0.4).double()
    x = torch.randn(2, 3, 2, 3, dtype=torch.float64)
    expected = torch.zeros(2, 2, dtype=torch.float64)
    for layer, temperature in zip(head.classifiers, temperatures):
        for image in range(2):
            for label in range(2):
                w = layer.weight[label, :, 0, 0]
                s = [float(w @ x[image, :, i, j] / w.norm()) for i in range(2) for j in range(3)]
                attention = torch.tensor(s, dtype=torch.float64).mul(temperature).softmax(0).tolist()
                attended = max(s) if temperature == 99 else sum(a * b for a, b in zip(attention, s))
                expected[image, label] += sum(s) / 6 + 0.4 * attended
    torch.testing.assert_close(head(x), expected)


def test_wrong_options_get_a_sentence():
    for heads in (0, 3, '4', True, 4., [4]):
        found = re.escape(repr(heads))
        with raises_error(f"Expected 1, 2, 4, 6 or 8 for option 'heads' of head 'csra', but got {found}"):
            create_head('csra', 8, 5, heads=heads)
    for lam in (-1, 'x', float('nan')):
        with raises_error("Expected a number of at least 0 for option 'lam' of head 'csra'"):
            create_head('csra', 8, 5, lam=lam)
