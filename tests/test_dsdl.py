""" DSDL """
import pytest
import torch
import torch.nn.functional as F

from timm_splicemix.heads import create_head

from . import golden
from .helpers import raises_error

CASES = golden.read_cases('dsdl')


@pytest.mark.parametrize('case', CASES, ids=[case['id'] for case in CASES])
def test_outputs_and_gradients_are_those_of_the_published_code(case):
    settings, inputs = case['settings'], golden.inputs_of(case)
    head = create_head(
        'dsdl', settings['channels'], settings['num_classes'], side_inputs={'class_vectors': inputs['words']},
        hidden=settings['hidden'], alpha=settings['alpha'], beta=settings['loss_beta'], lam=settings['loss_lambd'])
    names = golden.names_of('dsdl', case)
    golden.fill(head, case, names)
    x, words = (inputs[name].requires_grad_() for name in ('x', 'words'))
    assert not head.class_vectors.requires_grad
    head.class_vectors = words  # the published code computes their gradient, but does not train them
    weights = head.class_weights()
    logits, aux = head.forward_train(x, weights)
    golden.same_values(head(x), case['outputs']['logits'])
    golden.same_values(logits, case['outputs']['logits'])
    golden.same_values(weights[1], case['outputs']['dictionary'])
    golden.same_gradients(head, case, 'logits', logits, names, {'x': x, 'words': words})

    target = torch.tensor(case['target'], dtype=torch.float64)

    def criterion(values):
        return F.binary_cross_entropy_with_logits(values, target)

    task_loss = criterion(logits)
    loss, terms = head.losses(task_loss, aux, criterion)
    golden.same_values(loss, case['outputs']['loss'])
    assert set(terms) == {'reconstruction', 'code_norm', 'dissimilarity'}
    torch.testing.assert_close(loss, task_loss + sum(terms.values()))
    golden.same_gradients(head, case, 'loss', loss, names, {'x': x, 'words': words})


def test_the_loss_is_never_divided_by_zero_or_a_negative_number():
    head = create_head('dsdl', 8, 3, side_inputs={'class_vectors': torch.randn(3, 4)})
    aux = {name: torch.tensor(1.) for name in ('reconstruction', 'code_norm')}
    for similarity in (-1., 0.):
        loss, _ = head.losses(torch.tensor(1.), {**aux, 'similarity': torch.tensor(similarity)}, None)
        assert loss.item() == pytest.approx((1 + 0.01 * 1.01) / 0.01)


def test_the_similarity_is_high_at_the_start_with_real_sizes():
    torch.manual_seed(0)
    head = create_head('dsdl', 2048, 80, side_inputs={'class_vectors': torch.randn(80, 300)})
    assert head.weight1.abs().max() <= 1 / 32 and head.weight2.abs().max() <= 2048 ** -0.5
    _, aux = head.forward_train(torch.randn(2, 2048, 2, 2))
    assert aux['similarity'] > 0.5


def test_wrong_options_get_a_sentence():
    for options in ({'hidden': 0}, {'alpha': 0.}, {'beta': -1.}, {'lam': None}):
        with raises_error(f"for option '{next(iter(options))}' of head 'dsdl', but got"):
            create_head('dsdl', 8, 3, side_inputs={'class_vectors': torch.randn(3, 4)}, **options)
