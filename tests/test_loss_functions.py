""" The values and gradients of losses """
import doctest
import math

import pytest
import torch
import torch.nn.functional as F
from timm.loss import AsymmetricLossMultiLabel
from timm.loss import BinaryCrossEntropy as TimmBinaryCrossEntropy

from tests.helpers import raises_error, rng
from timm_splicemix.loss import (
    LOSSES,
    REDUCTIONS,
    asymmetric_loss,
    binary_cross_entropy,
    create_loss,
    focal_loss,
    functional,
    loss_parameters,
    multilabel,
    partial_asymmetric_loss,
    splc_loss,
)

NAMES = list(LOSSES)
MASKING = ['bce', 'bce-ls', 'focal', 'asl', 'hill', 'splc']
WEIGHING = ['bce', 'bce-ls', 'focal', 'asl', 'an', 'p-asl']
TARGETS = ['hard', 'soft', 'unknown', 'all unknown']


def make_batch(kind='hard', images=6, classes=5, dtype=torch.float64, seed=0, scale=3.):
    logits = (scale * torch.randn(images, classes, dtype=torch.float64, generator=rng(seed))).to(dtype)
    targets = (torch.rand(images, classes, generator=rng(seed + 1)) < 0.4).to(dtype)
    if kind == 'soft':
        targets = (0.8 * targets + 0.2 * torch.rand(images, classes, generator=rng(seed + 2))).to(dtype)
    elif kind == 'unknown':
        targets[torch.rand(images, classes, generator=rng(seed + 3)) < 0.5] = -1
        targets[0] = -1
    elif kind == 'all unknown':
        targets[:] = -1
    return logits.requires_grad_(), targets


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def focal_pair(x, gamma_pos, gamma_neg, clip=0.):
    """Losses of a positive and of a negative of this logit."""
    p = sigmoid(x)
    q = max(p - clip, 0.)
    return -(1 - p) ** gamma_pos * math.log(p), -q ** gamma_neg * math.log(1 - q)


def entry(name, x, y, classes, weight=1.):
    """Loss of one entry, with the default parameters but the weight of positives, and whether it counts."""
    p = sigmoid(x)
    if name in ('an', 'wan'):
        y = max(y, 0.)
    if y < 0 and name != 'p-asl':
        return 0., False
    if name == 'bce-ls':
        y = {0.: 0.1, 1.: 0.9}.get(y, 0.1 + 0.8 * y)
    if name in ('bce', 'bce-ls', 'an', 'wan'):
        positive, negative = -math.log(p), -math.log(1 - p)
        if name == 'wan':
            negative /= classes - 1
    elif name == 'focal':
        positive, negative = focal_pair(x, 2, 2)
    elif name == 'asl':
        positive, negative = focal_pair(x, 1, 4, 0.05)
    elif name == 'hill':
        positive, negative = focal_pair(x - 1, 2, 2)[0], (1.5 - p) * p * p
    elif name == 'splc':
        positive, negative = focal_pair(x - 1, 2, 2)[0], focal_pair(x, 2, 2)[1]
    elif name == 'p-asl':
        if y < 0:
            return focal_pair(x, 0, 4)[1], True
        positive, negative = focal_pair(x, 0, 1)
    return y * weight * positive + (1 - y) * negative, True


def plain_loops(name, logits, targets, reduction, ignored=frozenset(), weights=(1.,) * 5):
    total, terms, images = 0., 0, set()
    for i, (xs, ys) in enumerate(zip(logits.tolist(), targets.tolist())):
        for j, (x, y) in enumerate(zip(xs, ys)):
            value, counts = entry(name, x, y, len(xs), weights[j])
            if counts and (i, j) not in ignored:
                total, terms = total + value, terms + 1
                images.add(i)
    return total / max({'mean': terms, 'sum': 1, 'batchmean': len(images)}[reduction], 1)


def most_likely(logits, targets, number):
    unknown = [(i, j) for i, row in enumerate(targets.tolist()) for j, y in enumerate(row) if y == -1]
    return set(sorted(unknown, key=lambda place: -logits[place].item())[:number])


# --- values ---


@pytest.mark.parametrize('kind', TARGETS)
@pytest.mark.parametrize('name', NAMES)
def test_each_loss_equals_the_plain_loops(name, kind):
    logits, targets = make_batch(kind)
    kwargs = {'topk': 1} if name == 'p-asl' else {}
    ignored = most_likely(logits, targets, len(logits)) if name == 'p-asl' else frozenset()
    for reduction in REDUCTIONS:
        loss = create_loss(name, 5, reduction=reduction, **kwargs)(logits, targets)
        assert loss.shape == () and loss.dtype == torch.float64
        assert loss.item() == pytest.approx(plain_loops(name, logits, targets, reduction, ignored), rel=1e-12)


def test_cases_by_hand():
    # Logit log(3) is a probability of 3/4, logit 0 one of 1/2.
    logits, targets = torch.tensor([[math.log(3), 0.]], dtype=torch.float64), torch.tensor([[1., 0.]])
    log2, log4, of_3_4 = math.log(2), math.log(4), math.log(4 / 3)
    for name, kwargs, positive, negative in (
            ('bce', {}, of_3_4, log2),
            ('bce', {'smoothing': 0.2}, 0.9 * of_3_4 + 0.1 * log4, log2),  # 1 -> 0.8 + 0.2 / 2
            ('bce-ls', {}, 0.9 * of_3_4 + 0.1 * log4, log2),
            ('focal', {}, of_3_4 / 16, log2 / 4),
            ('focal', {'alpha': 0.25}, of_3_4 / 64, 3 * log2 / 16),
            ('asl', {}, of_3_4 / 4, -0.45 ** 4 * math.log(0.55)),
            ('hill', {'margin': math.log(3)}, log2 / 4, 1 / 4),
            ('splc', {'margin': math.log(3)}, log2 / 4, log2 / 4),
            ('an', {}, of_3_4, log2),
            ('wan', {}, of_3_4, log2),  # of two classes one negative weighs 1
            ('p-asl', {}, of_3_4, log2 / 2)):
        loss = create_loss(name, reduction='sum', **kwargs)(logits, targets)
        assert loss.item() == pytest.approx(positive + negative, rel=1e-12), name


def test_weak_negatives_of_an_image_weigh_as_much_as_its_positive():
    loss = create_loss('wan', reduction='sum')(torch.zeros(1, 9), torch.tensor([[1.] + [-1.] * 4 + [0.] * 4]))
    assert loss.item() == pytest.approx(2 * math.log(2))
    assert create_loss('wan')(torch.zeros(1, 1), torch.zeros(1, 1)).item() == pytest.approx(math.log(2))


def test_the_branches_of_a_soft_target_are_weighed_separately():
    logits, targets = torch.tensor([[0.3]], dtype=torch.float64), torch.tensor([[0.9]], dtype=torch.float64)
    positive, negative = focal_pair(0.3, 1, 4, 0.05)
    assert asymmetric_loss(logits, targets).item() == pytest.approx(0.9 * positive + 0.1 * negative, rel=1e-12)
    assert asymmetric_loss(logits, targets).item() == pytest.approx(0.2179, abs=5e-5)
    assert AsymmetricLossMultiLabel()(logits, targets).item() == pytest.approx(0.1945, abs=5e-5)


@pytest.mark.parametrize('kwargs', [
    {}, {'gamma_pos': 0, 'gamma_neg': 4}, {'gamma_pos': 0, 'gamma_neg': 2, 'clip': 0.}, {'gamma_pos': 3, 'clip': 0.3}])
@pytest.mark.parametrize('detach', [True, False])
def test_the_asymmetric_loss_of_hard_targets_is_that_of_timm(kwargs, detach):
    # timm 1.0.31 computes it in float32 and averages over images by default, 1.0.30 in the type of the logits and sums.
    logits, targets = make_batch(images=40, dtype=torch.float32)
    criterion = AsymmetricLossMultiLabel(disable_torch_grad_focal_loss=detach, **kwargs)
    expected = sum(criterion(logits[i:i + 1], targets[i:i + 1]) for i in range(40))
    loss = asymmetric_loss(logits, targets, reduction='sum', detach_focus=detach, **kwargs)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits)[0] for value in (loss, expected)))


@pytest.mark.parametrize('kind', ['hard', 'soft'])
@pytest.mark.parametrize('kwargs', [
    {}, {'sum_classes': True}, {'target_threshold': 0.15}, {'pos_weight': 3.}, {'reduction': 'sum'},
    {'pos_weight': torch.tensor([1., 2., 3., 4., 5.]).double(), 'sum_classes': True}])
def test_binary_cross_entropy_is_that_of_timm(kwargs, kind):
    logits, targets = make_batch(kind)
    expected = TimmBinaryCrossEntropy(smoothing=0., **kwargs)(logits, targets)
    torch.testing.assert_close(create_loss('bce', 5, **kwargs)(logits, targets), expected)


@pytest.mark.parametrize('kwargs', [{}, {'smoothing': 0.3}, {'smoothing': 0.3, 'target_threshold': 0.1}])
def test_binary_cross_entropy_of_class_indices_is_that_of_timm(kwargs):
    logits, _ = make_batch()
    classes = torch.tensor([0, 4, 2, 2, 1, 3])
    expected = TimmBinaryCrossEntropy(**{'smoothing': 0., **kwargs})(logits, classes)
    torch.testing.assert_close(binary_cross_entropy(logits, classes, **kwargs), expected)
    one_hot = F.one_hot(classes, 5)
    for targets in (one_hot, one_hot.bool(), one_hot.half()):
        torch.testing.assert_close(binary_cross_entropy(logits, targets, **kwargs), expected)


def test_special_cases_of_losses_equal_each_other():
    logits, targets = make_batch('soft')
    bce = F.binary_cross_entropy_with_logits(logits, targets)
    torch.testing.assert_close(binary_cross_entropy(logits, targets), bce)
    torch.testing.assert_close(asymmetric_loss(logits, targets, gamma_neg=0, gamma_pos=0, clip=0.), bce)
    torch.testing.assert_close(focal_loss(logits, targets, gamma=0), bce)
    focal = focal_loss(logits, targets)
    torch.testing.assert_close(asymmetric_loss(logits, targets, gamma_neg=2, gamma_pos=2, clip=0.), focal)
    torch.testing.assert_close(splc_loss(logits, targets, margin=0.), focal)
    torch.testing.assert_close(create_loss('an', eps=0.1)(logits, targets), create_loss('bce-ls')(logits, targets))
    torch.testing.assert_close(focal_loss(logits, targets, alpha=0.5), focal / 2)


def test_the_examples_of_docstrings():
    for module in (functional, multilabel):
        result = doctest.testmod(module)
        assert result.attempted and not result.failed


# --- unknown targets ---


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -1e30])
@pytest.mark.parametrize('name', [*MASKING, 'p-asl'])
def test_whatever_the_logit_of_an_unknown_target_it_adds_nothing(name, value):
    logits, targets = make_batch('unknown')
    loss = create_loss(name, **({'partial': 'ignore'} if name == 'p-asl' else {}))
    expected = loss(logits, targets)
    with torch.no_grad():
        logits[targets == -1] = value
    result = loss(logits, targets)
    assert torch.equal(result, expected)
    result.backward()
    assert logits.grad.isfinite().all() and not logits.grad[targets == -1].any()
    assert logits.grad[targets == 1].all()


@pytest.mark.parametrize('reduction', REDUCTIONS)
@pytest.mark.parametrize('images', [0, 3])
@pytest.mark.parametrize('name', [*MASKING, 'p-asl'])
def test_without_a_known_target_the_loss_is_0_and_backpropagates(name, images, reduction):
    classifier = torch.nn.Linear(4, 2)
    loss = create_loss(name, reduction=reduction, **({'partial': 'ignore'} if name == 'p-asl' else {}))
    result = loss(classifier(torch.randn(images, 4)), -torch.ones(images, 2))
    assert result.item() == 0
    result.backward()
    assert torch.equal(classifier.weight.grad, torch.zeros(2, 4))


# --- partial labels ---


def test_partial_labels_are_ignored_or_negative():
    logits, targets = make_batch('unknown')
    known = targets >= 0
    kwargs = {'gamma_neg': 3., 'gamma_pos': 1., 'clip': 0.05}
    ignored = partial_asymmetric_loss(logits, targets, partial='ignore', **kwargs)
    torch.testing.assert_close(ignored, asymmetric_loss(logits, targets, **kwargs))
    # With the same exponent an unknown label is as good as a negative, and with another it isn't.
    as_negative = asymmetric_loss(logits, targets.clamp(min=0), **kwargs)
    same = partial_asymmetric_loss(logits, targets, partial='negative', gamma_unknown=3., **kwargs)
    torch.testing.assert_close(same, as_negative)
    other = partial_asymmetric_loss(logits, targets, partial='negative', gamma_unknown=4., **kwargs)
    unknown_losses = [focal_pair(x, 0, 4, 0.05)[1] for x in logits[~known].tolist()]
    assert other.item() == pytest.approx((ignored.item() * known.sum().item() + sum(unknown_losses)) / known.numel())


@pytest.mark.parametrize('topk', [0, 1, 2, 100])
@pytest.mark.parametrize('with_prior', [False, True])
def test_selection_ignores_likely_positives_and_frequent_classes(topk, with_prior):
    logits, targets = make_batch('unknown')
    prior = torch.tensor([0.5, 0.01, 0.04, 0.06, 0.05]) if with_prior else None
    ignored = most_likely(logits, targets, topk * len(logits))
    if with_prior:
        ignored |= {(i, j) for i in range(6) for j in (0, 3) if targets[i, j] == -1}
    loss = create_loss('p-asl', 5, topk=topk, prior=prior)
    expected = plain_loops('p-asl', logits, targets, 'mean', ignored)
    result = loss(logits, targets)
    assert result.item() == pytest.approx(expected, rel=1e-12)
    result.backward()
    has_gradient = torch.tensor([[(i, j) not in ignored for j in range(5)] for i in range(6)])
    assert torch.equal(logits.grad != 0, has_gradient)


def test_selection_ranks_logits_whose_probabilities_are_all_1():
    logits = torch.tensor([[50., 60.]], requires_grad=True)
    partial_asymmetric_loss(logits, -torch.ones(1, 2), topk=1).backward()
    assert (logits.grad != 0).tolist() == [[True, False]]


# --- the epoch ---


def test_negatives_are_corrected_from_the_start_epoch_on():
    logits = torch.tensor([[1., 0.3, -2., 1., -1.]], dtype=torch.float64)  # probabilities .73, .57, .12, .73, .27
    targets = torch.tensor([[0., 0., 0., 1., -1.]])
    loss = create_loss('splc', reduction='sum')
    shared = focal_pair(0.3, 2, 2)[1] + focal_pair(-2., 2, 2)[1] + focal_pair(0., 2, 2)[0]
    as_negative, as_positive = shared + focal_pair(1., 2, 2)[1], shared + focal_pair(1., 2, 2)[0]
    for epoch, expected in ((None, as_negative), (0, as_negative), (1, as_positive), (7, as_positive)):
        if epoch is not None:
            loss.set_epoch(epoch)
        assert loss(logits, targets).item() == pytest.approx(expected, rel=1e-12)
    assert targets.tolist() == [[0., 0., 0., 1., -1.]]
    loss.set_epoch(0)
    assert loss(logits, targets).item() == pytest.approx(as_negative, rel=1e-12)
    late = create_loss('splc', start_epoch=3, tau=0.9)
    late.set_epoch(2)
    assert late(logits, targets) == splc_loss(logits, targets)
    late.set_epoch(3)
    assert late(logits, targets) == splc_loss(logits, targets)  # no probability is above .9
    assert splc_loss(logits, targets, epoch=1, tau=0.5, reduction='sum').item() == pytest.approx(
        as_positive - focal_pair(0.3, 2, 2)[1] + focal_pair(0.3, 2, 2)[0])


def test_only_splc_has_an_epoch():
    for name in NAMES:
        loss = create_loss(name)
        loss.set_epoch(7)
        assert loss.settings.get('epoch') == (7 if name == 'splc' else None)
        assert 'epoch' not in loss_parameters(name)


def test_the_negative_part_of_a_soft_target_is_corrected():
    logits, targets = torch.tensor([[2.]], dtype=torch.float64), torch.tensor([[0.25]], dtype=torch.float64)
    expected = 0.25 * focal_pair(1., 2, 2)[0] + 0.75 * focal_pair(2., 2, 2)[0]
    assert splc_loss(logits, targets, epoch=1).item() == pytest.approx(expected, rel=1e-12)


# --- gradients ---


@pytest.mark.parametrize('kind', ['hard', 'soft', 'unknown'])
@pytest.mark.parametrize('name, kwargs', [
    ('bce', {'pos_weight': 2.}), ('bce-ls', {}), ('focal', {'alpha': 0.25}), ('focal', {'gamma': 0.5}), ('asl', {}),
    ('asl', {'gamma_neg': 0.5, 'gamma_pos': 0.5}), ('asl', {'gamma_neg': 0., 'clip': 0.2}), ('hill', {}), ('splc', {}),
    ('splc', {'start_epoch': 0}), ('an', {}), ('wan', {}), ('p-asl', {'detach_focus': False, 'topk': 1})])
def test_gradients_are_those_of_finite_differences(name, kwargs, kind):
    logits, targets = make_batch(kind)
    assert torch.autograd.gradcheck(lambda x: create_loss(name, **kwargs)(x, targets), (logits,))


@pytest.mark.parametrize('name', ['asl', 'p-asl'])
def test_no_gradient_goes_through_detached_focusing_weights(name):
    logits, targets = make_batch()
    loss = create_loss(name, gamma_neg=3., gamma_pos=2., clip=0., detach_focus=True, reduction='sum')
    loss(logits, targets).backward()
    p = logits.detach().sigmoid()
    expected = torch.where(targets == 1, -(1 - p) ** 2 * (1 - p), p ** 3 * p)
    torch.testing.assert_close(logits.grad, expected)
    attached = create_loss(name, gamma_neg=3., gamma_pos=2., clip=0., detach_focus=False, reduction='sum')
    assert torch.equal(attached(logits, targets), loss(logits, targets))
    assert not torch.allclose(torch.autograd.grad(attached(logits, targets), logits)[0], expected)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize('name, kwargs', [
    *((name, {}) for name in NAMES), ('asl', {'clip': 0.}), ('asl', {'gamma_neg': 0.5, 'gamma_pos': 0.5}),
    ('asl', {'gamma_neg': 0.5, 'gamma_pos': 0.5, 'clip': 0.}), ('asl', {'clip': 1e-12, 'gamma_neg': 0.}),
    ('focal', {'gamma': 0.1}), ('focal', {'gamma': 50.}), ('splc', {'start_epoch': 0}), ('p-asl', {'topk': 0})])
def test_extreme_logits_stay_finite(name, kwargs, dtype):
    values = torch.tensor([-60000., -100., -20., 0., 20., 100., 60000.], dtype=dtype)
    logits = values.repeat(4).view(1, -1).requires_grad_()
    targets = torch.tensor([0., 1., 0.3, -1.]).repeat_interleave(7).view(1, -1)
    for reduction, autocast, images in (('mean', False, 1), ('batchmean', True, 1), ('sum', False, 64)):
        loss = create_loss(name, reduction=reduction, **kwargs)
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=autocast):
            result = loss(logits.expand(images, -1), targets.expand(images, -1))
        assert result.dtype == torch.float32
        assert result.isfinite() and result > 0
        gradient, = torch.autograd.grad(result, logits)
        assert gradient.isfinite().all() and gradient.any()


@pytest.mark.parametrize('clip', [0., 0.05])
def test_sure_mistakes_keep_their_gradient(clip):
    logits = torch.tensor([[-30., 30.]], requires_grad=True)
    asymmetric_loss(logits, torch.tensor([[1., 0.]]), clip=clip, reduction='sum').backward()
    assert logits.grad[0, 0].item() == pytest.approx(-1)
    assert logits.grad[0, 1].item() == pytest.approx(1 if clip == 0 else 0, abs=1e-6)  # the clipped one is flat there


def test_a_probability_equal_to_the_clip_has_no_loss_and_no_gradient():
    logits = torch.zeros(1, 1, requires_grad=True)
    for gamma in (0., 0.5, 1., 4.):
        loss = asymmetric_loss(logits, torch.zeros(1, 1), gamma_neg=gamma, clip=0.5)
        assert loss.item() == 0 and torch.autograd.grad(loss, logits)[0].item() == 0


# --- number types and devices ---


def test_float32_is_exact_for_sure_predictions():
    logits, targets = torch.linspace(-25., 25., 101).view(1, -1), torch.tensor([[0.], [1.]]).expand(2, 101)
    for clip in (0., 1e-6):
        for y in targets:
            losses = [
                torch.stack([asymmetric_loss(x.view(1, 1), z.view(1, 1), clip=clip) for x, z in zip(values[0], y)])
                for values in (logits, logits.double())]
            torch.testing.assert_close(losses[0], losses[1].float(), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize('name', NAMES)
def test_half_precision_logits_and_autocast_give_a_float32_loss(name):
    logits, targets = make_batch('unknown', dtype=torch.float32)
    loss = create_loss(name)
    half = logits.detach().half().requires_grad_()
    result = loss(half, targets.half())
    assert result.dtype == torch.float32
    assert torch.equal(result, loss(half.float(), targets))
    result.backward()
    assert half.grad.dtype == torch.float16
    expected = loss(logits, targets)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast('cpu', dtype=dtype):
            result = loss(logits, targets)
        assert result.dtype == torch.float32 and torch.equal(result, expected)
        assert torch.equal(*(torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (result, expected)))


@pytest.mark.parametrize('name', NAMES)
def test_no_value_on_a_device_is_read(name):
    logits = torch.empty(8, 5, device='meta', requires_grad=True)
    weights = {key: torch.ones(5) for key in ('pos_weight', 'prior') if key in loss_parameters(name)}
    for reduction in REDUCTIONS:
        loss = create_loss(name, 5, reduction=reduction, **weights)
        for targets in (torch.empty(8, 5, device='meta'), torch.empty(8, device='meta', dtype=torch.long)):
            result = loss(logits, targets)
            assert result.device.type == 'meta' and result.shape == ()
            result.backward()


# --- weights of positives and bad input ---


@pytest.mark.parametrize('kind', ['hard', 'soft', 'unknown'])
@pytest.mark.parametrize('name', WEIGHING)
def test_positives_are_weighed_by_their_class(name, kind):
    logits, targets = make_batch(kind)
    kwargs = {'topk': 0} if name == 'p-asl' else {}
    for weights in ([0., 1., 2., 3.5, 10.], [3.] * 5):
        expected = plain_loops(name, logits, targets, 'mean', weights=weights)
        loss = create_loss(name, 5, pos_weight=torch.tensor(weights), **kwargs)
        assert loss(logits, targets).item() == pytest.approx(expected, rel=1e-12)
    for weight in (3., torch.tensor(3.)):
        assert create_loss(name, pos_weight=weight, **kwargs)(logits, targets).item() == pytest.approx(expected)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('logits, targets, message', [
    (torch.zeros(4), torch.zeros(4), r'Expected logits of shape \(N, classes\) and .*, but got \(4,\) of'),
    (torch.zeros(4, 3).long(), torch.zeros(4, 3), r'Expected logits .* but got \(4, 3\) of torch.int64'),
    (torch.zeros(4, 3), torch.zeros(4, 1), r'Expected targets of shape \(4, 3\), .* but got \(4, 1\)'),
    (torch.zeros(4, 3), torch.zeros(3), r'or \(4,\) class indices, but got \(3,\) of torch.float32'),
    (torch.zeros(4, 3), torch.zeros(4), r'class indices, but got \(4,\) of torch.float32'),
    (torch.zeros(4, 3), torch.zeros(3).long(), r'class indices, but got \(3,\) of torch.int64'),
])
def test_bad_input_is_refused(name, logits, targets, message):
    with raises_error(message):
        create_loss(name)(logits, targets)
