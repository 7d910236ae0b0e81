import math

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import raises_error, rng
from timm_splicemix.loss import MultilabelLoss, union_cross_entropy


def make_logits(dtype=torch.float64):
    return torch.randn(6, 5, dtype=torch.float64, generator=rng()).to(dtype).requires_grad_()


def plain_loops(logits, targets, smoothing):
    losses = []
    for row, target in zip(logits.tolist(), targets.tolist()):
        log_sum = math.log(sum(math.exp(value) for value in row))
        shares = [value / sum(target) * (1 - smoothing) + smoothing / len(row) for value in target]
        losses.append(-sum(share * (value - log_sum) for share, value in zip(shares, row)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize('smoothing', [0., 0.1])
def test_class_indices_give_torch_s_cross_entropy(smoothing):
    logits, classes = make_logits(), torch.tensor([0, 4, 2, 2, 1, 3])
    expected = F.cross_entropy(logits, classes, label_smoothing=smoothing)
    for targets in (classes, classes.to(torch.uint8), F.one_hot(classes, 5), F.one_hot(classes, 5).float()):
        torch.testing.assert_close(union_cross_entropy(logits, targets, smoothing), expected)


@pytest.mark.parametrize('smoothing', [0., 0.3])
def test_the_classes_of_a_union_share_the_target(smoothing):
    logits = make_logits()
    targets = torch.tensor([
        [1., 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0.5, 0, 0.25, 0], [0, 0, 0, 0, 0.1], [0, 1, 1, 0, 1]])
    loss = union_cross_entropy(logits, targets, smoothing)
    assert loss.item() == pytest.approx(plain_loops(logits, targets, smoothing), rel=1e-6)
    assert torch.autograd.gradcheck(lambda logits: union_cross_entropy(logits, targets.double(), smoothing), (logits,))


def test_a_case_by_hand():
    logits = torch.tensor([[math.log(2), 0., 0.]])  # probabilities 1/2, 1/4, 1/4
    assert union_cross_entropy(logits, torch.tensor([[1., 1., 0.]])).item() == pytest.approx(
        (math.log(2) + math.log(4)) / 2)


def test_an_image_without_a_class_gives_no_loss_and_stays_finite():
    logits = make_logits(torch.float32)
    loss = union_cross_entropy(logits, torch.zeros(6, 5))
    loss.backward()
    assert loss == 0 and not logits.grad.any()


def test_half_precision_and_extreme_logits_stay_finite():
    for dtype in (torch.bfloat16, torch.float32):
        logits = (make_logits(dtype) * 1e4).detach().requires_grad_()
        loss = union_cross_entropy(logits, torch.ones(6, 5))
        loss.backward()
        assert loss.isfinite() and logits.grad.isfinite().all()


def test_the_module_is_the_function():
    logits, targets = make_logits(), torch.arange(5).repeat(6, 1) % 2
    targets[:, 0] = 1
    loss = MultilabelLoss(union_cross_entropy, smoothing=0.2)
    assert torch.equal(loss(logits, targets), union_cross_entropy(logits, targets, 0.2))
    assert not loss.state_dict() and repr(loss) == 'MultilabelLoss(union_cross_entropy, smoothing=0.2)'


@pytest.mark.parametrize('smoothing', [-0.1, 1., 2.])
def test_bad_smoothing_is_refused(smoothing):
    with raises_error(f'Expected smoothing from 0 to below 1, but got {smoothing}'):
        union_cross_entropy(torch.zeros(2, 3), torch.zeros(2), smoothing)
    with raises_error('Expected smoothing'):
        MultilabelLoss(union_cross_entropy, smoothing=smoothing)
