import doctest
import math

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import raises_error, rng
from timm_splicemix.loss import ConsistencyLoss, consistency, consistency_loss


def make_logits(num_cells=12, classes=5, dtype=torch.float64, seed=0, scale=3.):
    generator = rng(seed)
    return [
        (scale * torch.randn(num_cells, classes, dtype=torch.float64, generator=generator)).to(dtype).requires_grad_()
        for _ in range(2)
    ]


def plain_loops(cell_logits, image_logits, dropped, mean='visible'):
    """The mean of equation 3.5, one cell and one class at a time."""
    total, terms = 0., 0
    for cell, (student, teacher) in enumerate(zip(cell_logits.tolist(), image_logits.tolist())):
        if dropped[cell]:
            terms += len(student) if mean == 'all' else 0
            continue
        for x, z in zip(student, teacher):
            p, q = 1 / (1 + math.exp(-x)), 1 / (1 + math.exp(-z))
            total += -q * math.log(p) - (1 - q) * math.log(1 - p)
            terms += 1
    return total / terms


@pytest.mark.parametrize('num_dropped', [0, 1, 5, 11])
@pytest.mark.parametrize('classes', [1, 5])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_loss_equals_the_plain_loops(num_dropped, classes, dtype, tolerance):
    cell_logits, image_logits = make_logits(classes=classes, dtype=dtype)
    dropped = torch.zeros(12, dtype=torch.bool)
    dropped[torch.randperm(12, generator=rng())[:num_dropped]] = True
    expected = plain_loops(cell_logits, image_logits, dropped.tolist())
    for mask in (dropped, dropped.view(3, 4), dropped.view(2, 6)):
        loss = consistency_loss(cell_logits, image_logits, mask)
        assert loss.shape == () and loss.dtype == dtype
        assert loss.item() == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize('num_dropped', [0, 1, 5, 11])
def test_the_mean_over_all_cells_is_that_of_the_reference_code(num_dropped):
    cell_logits, image_logits = make_logits()
    dropped = torch.arange(12) < num_dropped
    loss = consistency_loss(cell_logits, image_logits, dropped, mean='all')
    assert loss.item() == pytest.approx(plain_loops(cell_logits, image_logits, dropped.tolist(), 'all'), rel=1e-12)
    # It replaces the logits of dropped cells, so that they add nothing to the sum but count in the mean.
    replaced = [logits.detach().masked_fill(dropped.view(-1, 1), -1e3) for logits in (cell_logits, image_logits)]
    expected = F.binary_cross_entropy_with_logits(replaced[0], replaced[1].sigmoid())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    module = ConsistencyLoss(mean='all')
    assert module(cell_logits, image_logits, dropped) == loss and "mean='all'" in repr(module)
    visible = consistency_loss(cell_logits, image_logits, dropped)
    assert loss.item() == pytest.approx(visible.item() * (12 - num_dropped) / 12)


def test_no_cell_has_a_loss_of_0():
    nothing = torch.zeros(0, 5)
    for mean in ('visible', 'all'):
        assert consistency_loss(nothing, nothing, mean=mean) == 0


def test_an_unknown_mean_is_refused():
    for make in (lambda: ConsistencyLoss(mean='none'), lambda: consistency_loss(*make_logits(), mean='none')):
        with raises_error("Expected mean to be one of visible, all, but got 'none'"):
            make()


def test_a_case_by_hand():
    # Logit log(3) is a probability of 3/4. Cell 0: -3/4 log 1/2 - 1/4 log 1/2 = log 2, and -1/2 log 3/4 - 1/2 log 1/4.
    cell_logits = torch.tensor([[0., math.log(3)], [7., -7.]], dtype=torch.float64)
    image_logits = torch.tensor([[math.log(3), 0.], [-7., 7.]], dtype=torch.float64)
    of_cell_0 = (math.log(2) + (math.log(4 / 3) + math.log(4)) / 2) / 2
    of_cell_1 = math.log1p(math.exp(7)) - 7 / (1 + math.exp(7))
    assert consistency_loss(cell_logits, image_logits).item() == pytest.approx((of_cell_0 + of_cell_1) / 2)
    dropped = torch.tensor([False, True])
    assert consistency_loss(cell_logits, image_logits, dropped).item() == pytest.approx(of_cell_0)


def test_the_example_of_the_docstring():
    result = doctest.testmod(consistency)
    assert result.attempted and not result.failed


def test_the_module_is_the_function():
    cell_logits, image_logits = make_logits()
    dropped = torch.arange(12) % 5 == 0
    for detach in (True, False):
        module = ConsistencyLoss(detach=detach)
        assert torch.equal(
            module(cell_logits, image_logits, dropped),
            consistency_loss(cell_logits, image_logits, dropped, detach=detach))
        assert module(cell_logits, image_logits, dropped).requires_grad
        assert repr(module) == f"ConsistencyLoss(detach={detach}, mean='visible')"
        assert not list(module.parameters()) and not module.state_dict()


# --- gradients ---


@pytest.mark.parametrize('drop', [False, True])
def test_gradients_are_those_of_finite_differences(drop):
    cell_logits, image_logits = make_logits(6, 3)
    dropped = torch.tensor([[False, True, False], [True, False, False]]) if drop else None
    assert torch.autograd.gradcheck(
        lambda student, teacher: consistency_loss(student, teacher, dropped, detach=False),
        (cell_logits, image_logits))
    assert torch.autograd.gradcheck(
        lambda student: consistency_loss(student, image_logits, dropped), (cell_logits,))


def test_the_regular_image_gets_gradients_only_if_not_detached():
    cell_logits, image_logits = make_logits()
    consistency_loss(cell_logits, image_logits).backward()
    assert image_logits.grad is None
    torch.testing.assert_close(cell_logits.grad, (cell_logits.sigmoid() - image_logits.sigmoid()).detach() / 60)
    student_grad, cell_logits.grad = cell_logits.grad, None
    consistency_loss(cell_logits, image_logits, detach=False).backward()
    torch.testing.assert_close(cell_logits.grad, student_grad)
    p = image_logits.detach().sigmoid()
    torch.testing.assert_close(image_logits.grad, -cell_logits.detach() * p * (1 - p) / 60)


def test_the_loss_is_smallest_where_the_cell_predicts_what_its_image_does():
    _, image_logits = make_logits()
    cell_logits = image_logits.detach().clone().requires_grad_()
    loss = consistency_loss(cell_logits, image_logits)
    loss.backward()
    torch.testing.assert_close(cell_logits.grad, torch.zeros_like(cell_logits), atol=1e-15, rtol=0)
    for seed in range(5):
        moved = cell_logits.detach() + 0.1 * torch.randn(cell_logits.shape, generator=rng(seed))
        assert consistency_loss(moved, image_logits) > loss


# --- dropped cells ---


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf'), 1e30])
def test_whatever_a_dropped_cell_predicts_it_adds_no_loss_and_gets_no_gradient(value):
    cell_logits, image_logits = make_logits()
    dropped = torch.arange(12).view(3, 4) % 3 == 1
    expected = consistency_loss(cell_logits, image_logits, dropped)
    with torch.no_grad():
        cell_logits[dropped.flatten()] = value
        image_logits[dropped.flatten()] = value
    loss = consistency_loss(cell_logits, image_logits, dropped, detach=False)
    assert torch.equal(loss, expected)
    loss.backward()
    for logits in (cell_logits, image_logits):
        assert logits.grad.isfinite().all()
        assert not logits.grad[dropped.flatten()].any()
        assert logits.grad[~dropped.flatten()].all()


@pytest.mark.parametrize('detach', [True, False])
@pytest.mark.parametrize('num_cells, dropped', [
    (4, torch.ones(4, dtype=torch.bool)), (4, torch.ones(2, 2, dtype=torch.bool)),
    (0, None), (0, torch.zeros(0, dtype=torch.bool)), (0, torch.zeros(0, 4, dtype=torch.bool))])
def test_without_a_cell_the_loss_is_0_and_backpropagates(num_cells, dropped, detach):
    features = torch.randn(num_cells, 3)
    classifier = torch.nn.Linear(3, 2)
    loss = consistency_loss(classifier(features), classifier(features), dropped, detach=detach)
    assert loss.item() == 0
    loss.backward()
    assert torch.equal(classifier.weight.grad, torch.zeros(2, 3))
    assert torch.equal(classifier.bias.grad, torch.zeros(2))


# --- number types and devices ---


@pytest.mark.parametrize('detach', [True, False])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_logits_give_a_float32_loss(dtype, detach):
    cell_logits, image_logits = make_logits(dtype=dtype)
    loss = consistency_loss(cell_logits, image_logits, detach=detach)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, consistency_loss(cell_logits.float(), image_logits.float()))
    loss.backward()
    assert cell_logits.grad.dtype == dtype


@pytest.mark.parametrize('detach', [True, False])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_logits_stay_finite(dtype, detach):
    values = torch.tensor([-60000., -100., 0., 100., 60000.])
    cell_logits = values.repeat_interleave(5).view(1, -1).to(dtype).requires_grad_()
    image_logits = values.repeat(5).view(1, -1).to(dtype).requires_grad_()
    loss = consistency_loss(cell_logits.expand(64, -1), image_logits.expand(64, -1), detach=detach)
    assert 0 < loss.item() < 60000
    loss.backward()
    assert cell_logits.grad.isfinite().all()
    assert image_logits.grad is None if detach else image_logits.grad.isfinite().all()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):
    cell_logits, image_logits = make_logits(dtype=torch.float32)
    expected = consistency_loss(cell_logits, image_logits, detach=False)
    expected_grads = torch.autograd.grad(expected, (cell_logits, image_logits))
    with torch.autocast('cpu', dtype=dtype):
        loss = consistency_loss(cell_logits, image_logits, detach=False)
        half = consistency_loss(cell_logits.to(dtype), image_logits.to(dtype))
    assert loss.dtype == half.dtype == torch.float32
    assert torch.equal(loss, expected)
    assert half.item() == pytest.approx(expected.item(), rel=1e-2)
    for grad, expected_grad in zip(torch.autograd.grad(loss, (cell_logits, image_logits)), expected_grads):
        assert torch.equal(grad, expected_grad)


def test_logits_of_two_types_use_the_more_precise():
    cell_logits, image_logits = make_logits()
    assert consistency_loss(cell_logits.half(), image_logits).dtype == torch.float64
    assert consistency_loss(cell_logits.half(), image_logits.float()).dtype == torch.float32


@pytest.mark.parametrize('mask_device', ['meta', 'cpu'])
def test_no_value_on_a_device_is_read(mask_device):
    logits = torch.empty(8, 5, device='meta', requires_grad=True)
    for dropped in (None, torch.ones(2, 4, dtype=torch.bool, device=mask_device)):
        loss = consistency_loss(logits, logits, dropped, detach=False)
        assert loss.device.type == 'meta' and loss.shape == ()
        loss.backward()
        assert logits.grad.shape == (8, 5)


# --- bad input ---


@pytest.mark.parametrize('cell_logits, image_logits, dropped, message', [
    (torch.zeros(4), torch.zeros(4), None, r'Expected cell_logits of shape \(N, classes\), but got \(4,\)'),
    (torch.zeros(2, 2, 3), torch.zeros(2, 2, 3), None, r'Expected cell_logits of shape .* but got \(2, 2, 3\)'),
    (torch.zeros(4, 3), torch.zeros(2, 3), None, r'Expected image_logits of shape \(4, 3\), .* but got \(2, 3\): gath'),
    (torch.zeros(4, 3), torch.zeros(1, 3), None, r'Expected image_logits of shape \(4, 3\), .* but got \(1, 3\)'),
    (torch.zeros(4, 3), torch.zeros(4, 1), None, r'Expected image_logits of shape \(4, 3\), .* but got \(4, 1\)'),
    (torch.zeros(4, 3).long(), torch.zeros(4, 3), None, 'Expected cell_logits of a floating point .* torch.int64'),
    (torch.zeros(4, 3), torch.zeros(4, 3).bool(), None, 'Expected image_logits of a floating point .* torch.bool'),
    (torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(4), 'Expected dropped .* torch.bool, but got torch.float32'),
    (torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(3).bool(), r'for each of 4 cells, .* but got shape \(3,\)'),
    (torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(4, 3).bool(), r'for each of 4 cells, .* got shape \(4, 3\)'),
    (torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(2, 2, 1).bool(), r'of 4 cells, .* got shape \(2, 2, 1\)'),
])
def test_bad_input_is_refused(cell_logits, image_logits, dropped, message):
    with raises_error(message):
        consistency_loss(cell_logits, image_logits, dropped)
