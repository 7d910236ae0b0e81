import numpy as np
import pytest
import timm.data.mixup
import torch

from tests.helpers import make_batch, raises_error
from timm_splicemix.mix import Mixup, SpliceWith


class TimmMixup(timm.data.mixup.Mixup):
    """timm's Mixup with the weights and boxes of a plan."""

    def __init__(self, plan, size, monkeypatch, **kwargs):
        super().__init__(label_smoothing=0., num_classes=5, **kwargs)
        is_box = plan.boxes[:, 0] > 0
        self.use_cutmix = is_box.numpy()
        self.lam = torch.where(is_box, 0.5, plan.blend).numpy()  # any below 1 makes timm ask for a box
        boxes = iter(plan.pixel_boxes(*size)[is_box].tolist())
        monkeypatch.setattr(timm.data.mixup, 'rand_bbox', lambda *_, **__: next(boxes))
        monkeypatch.setattr(timm.data.mixup, 'rand_bbox_minmax', lambda *_, **__: next(boxes))

    def _params_per_batch(self):
        return float(self.lam[0]), bool(self.use_cutmix[0])

    def _params_per_elem(self, count):
        return self.lam[:count].copy(), self.use_cutmix[:count]


@pytest.mark.parametrize('mode', Mixup.MODES)
@pytest.mark.parametrize('kwargs', [
    {'mixup_alpha': 0.4}, {'mixup_alpha': 0., 'cutmix_alpha': 1.}, {'mixup_alpha': 0.8, 'cutmix_alpha': 1.},
    {'mixup_alpha': 0., 'cutmix_minmax': (0.2, 0.8)}, {'mixup_alpha': 0.8, 'cutmix_alpha': 1., 'prob': 0.5}])
def test_even_batches_of_integer_classes_are_mixed_as_by_timm(mode, kwargs, monkeypatch):
    images, _ = make_batch(8, height=10, width=13)
    classes = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    for seed in range(6):
        mixer = Mixup(mode=mode, num_classes=5, seed=seed, **kwargs)
        plan = mixer.plan(8)
        mixed_images, mixed_targets = mixer.apply(images, classes, plan)
        if not plan.num_mixed:
            assert mixed_images is images
            continue
        other = TimmMixup(plan, (10, 13), monkeypatch, mode=mode, **kwargs)
        expected_images, expected_targets = other(images.clone(), classes)
        torch.testing.assert_close(mixed_images, expected_images, atol=1e-6, rtol=0)
        torch.testing.assert_close(mixed_targets, expected_targets.float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize('height, width', [(10, 13), (7, 7), (224, 192)])
@pytest.mark.parametrize('minmax', [None, (0.2, 0.8)])
def test_boxes_are_those_of_timm_for_the_same_draws(height, width, minmax, monkeypatch):
    for seed in range(30):
        plan = Mixup(0., 1., minmax, seed=seed).plan(2)
        side_y, side_x, y, x = plan.boxes[0].tolist()
        places = iter([y, x] if minmax is None else [None, None, y, x])
        sides = iter([int(side_y * height), int(side_x * width)])

        def draw(low, high, size=None, places=places, sides=sides):
            place = next(places)
            return next(sides) if place is None else low + int(place * (high - low))

        with monkeypatch.context() as patch:
            patch.setattr(np.random, 'randint', draw)
            box, weight = timm.data.mixup.cutmix_bbox_and_lam((3, height, width), 1 - side_y ** 2, minmax)
        assert plan.pixel_boxes(height, width)[0].tolist() == list(box)
        assert plan.weights(height, width)[0].item() == pytest.approx(weight)


def test_the_weight_of_a_cutmix_label_is_the_area_that_is_seen():
    images = torch.arange(6.).view(6, 1, 1, 1).expand(6, 3, 11, 17)
    for mode in Mixup.MODES:
        for seed in range(10):
            mixed_images, mixed_targets = Mixup(0., 1., mode=mode, seed=seed)(images, torch.eye(6))
            for image, target in zip(mixed_images, mixed_targets):
                seen = torch.stack([(image[0] == value).double().mean() for value in range(6)])
                torch.testing.assert_close(target.double(), seen, atol=1e-6, rtol=0)


def test_the_weight_of_a_mixup_label_is_that_of_the_image():
    images = torch.eye(5).view(5, 5, 1, 1).expand(5, 5, 4, 6)
    for mode in Mixup.MODES:
        mixed_images, mixed_targets = Mixup(1., mode=mode)(images, torch.eye(5))
        torch.testing.assert_close(mixed_images[:, :, 0, 0], mixed_targets)


def test_an_image_is_mixed_with_the_one_opposite():
    assert Mixup().plan(6).partners.tolist() == [5, 4, 3, 2, 1, 0]
    assert Mixup().plan(5).partners.tolist() == [4, 3, 0, 1, 0]
    assert Mixup(mode='elem').plan(3).partners.tolist() == [2, 0, 0]
    plan = Mixup(mode='pair').plan(5)
    assert plan.partners.tolist() == [4, 3, 2, 1, 0]
    assert plan.blend[2] == 1 and plan.blend[0] == plan.blend[4] < 1 and plan.blend[1] == plan.blend[3] < 1


def test_the_mode_draws_once_per_batch_pair_or_image():
    for kwargs in ({}, {'mixup_alpha': 0., 'cutmix_alpha': 1.}):
        counts = {}
        for mode in Mixup.MODES:
            plan = Mixup(mode=mode, **kwargs).plan(8)
            counts[mode] = len(set(plan.weights(1000, 1000).tolist()))
        assert counts == {'batch': 1, 'pair': 4, 'elem': 8}


def test_a_batch_of_one_passes_through():
    images, targets = make_batch(1)
    for mode in Mixup.MODES:
        assert Mixup(mode=mode)(images, targets)[0] is images


def test_probabilities_are_kept():
    mixed = [Mixup(0.5, 1., prob=0.25, seed=seed).plan(2).num_mixed > 0 for seed in range(800)]
    assert 0.2 < np.mean(mixed) < 0.3
    boxed = [bool(Mixup(0.5, 1., switch_prob=0.75, seed=seed).plan(2).boxes.any()) for seed in range(800)]
    assert 0.7 < np.mean(boxed) < 0.8
    plan = Mixup(0.5, 1., prob=0.25, switch_prob=0.75, mode='elem').plan(4000)
    is_boxed, is_blended = plan.boxes[:, 0] > 0, plan.blend < 1
    assert not (is_boxed & is_blended).any()
    assert 0.22 < (is_boxed | is_blended).double().mean() < 0.28
    assert 0.7 < is_boxed.sum() / (is_boxed | is_blended).sum() < 0.8


@pytest.mark.parametrize('alpha', [0.2, 1., 5.])
def test_weights_and_areas_have_the_mean_and_variance_of_beta(alpha):
    variance = 1 / (4 * (2 * alpha + 1))
    plan = Mixup(alpha, mode='elem').plan(4000)
    assert plan.blend.mean() == pytest.approx(0.5, abs=0.03) and plan.blend.var() == pytest.approx(variance, abs=0.02)
    sides = Mixup(0., alpha, mode='elem').plan(4000).boxes[:, :2]
    assert torch.equal(sides[:, 0], sides[:, 1])
    assert (sides[:, 0] ** 2).mean() == pytest.approx(0.5, abs=0.03)
    assert (sides[:, 0] ** 2).var() == pytest.approx(variance, abs=0.02)


def test_boxes_between_two_sizes_lie_inside():
    plan = Mixup(0., 0., (0.2, 0.5), mode='elem').plan(500)
    top, bottom, left, right = plan.pixel_boxes(100, 200).T
    assert (bottom - top).min() >= 20 and (bottom - top).max() < 50
    assert (right - left).min() >= 40 and (right - left).max() < 100
    assert top.min() >= 0 and bottom.max() <= 100 and left.min() >= 0 and right.max() <= 200
    assert (bottom - top != (right - left) // 2).any()


@pytest.mark.parametrize('ratio, batch_size, expected', [(0.25, 32, 8), (1., 20, 20), (0.29, 100, 29), (0.25, 3, 0),
                                                         (1.5, 4, 6)])
@pytest.mark.parametrize('kind', SpliceWith.KINDS)
def test_mixed_images_are_appended_in_the_papers_numbers(ratio, batch_size, expected, kind):
    images, targets = make_batch(batch_size)
    mixer = SpliceWith(kind, ratio)
    plan = mixer.plan(batch_size)
    mixed_images, mixed_targets = mixer.apply(images, targets, plan)
    assert len(mixed_images) == len(mixed_targets) == batch_size + expected
    assert plan.num_mixed == expected and plan.kept.tolist() == list(range(batch_size))
    assert torch.equal(mixed_images[:batch_size], images) and torch.equal(mixed_targets[:batch_size], targets)
    assert not (plan.images == plan.partners).any()
    if expected and kind == 'mixup':
        assert (plan.blend < 1).all() and not plan.boxes.any()
    elif expected:
        assert (plan.boxes[:, 0] > 0).all() and (plan.blend == 1).all()


def test_each_image_is_mixed_once_before_any_is_mixed_twice():
    for count in (1, 4, 9, 14):
        plan = SpliceWith('mixup', count / 9).plan(9)
        first = plan.images[:9].tolist()
        assert len(set(first)) == len(first) == min(9, count)
        assert len(set(plan.partners[:9].tolist())) == len(first)
    plan = SpliceWith('cutmix', 0.5).plan(8)
    assert sorted(plan.images.tolist() + plan.partners.tolist()) == list(range(8))


def test_mixed_images_draw_once_or_for_each():
    assert len(set(SpliceWith('mixup', 1.).plan(8).blend.tolist())) == 1
    assert len(set(SpliceWith('mixup', 1., mode='elem').plan(8).blend.tolist())) == 8


@pytest.mark.parametrize('make, message', [
    (lambda: Mixup(0.), 'Expected mixup_alpha or cutmix_alpha above 0, or cutmix_minmax, but got none of them'),
    (lambda: Mixup(-1.), 'Expected mixup_alpha to be a number of at least 0, but got -1'),
    (lambda: Mixup(1., float('nan')), 'Expected cutmix_alpha to be a number of at least 0, but got nan'),
    (lambda: Mixup(cutmix_minmax=(0.8, 0.2)), r'Expected cutmix_minmax to be .*, but got \(0.8, 0.2\)'),
    (lambda: Mixup(cutmix_minmax=[0.8]), r'Expected cutmix_minmax to be .*, but got \[0.8\]'),
    (lambda: Mixup(prob=2.), 'Expected prob to be a probability from 0 to 1, but got 2'),
    (lambda: Mixup(switch_prob=-1), 'Expected switch_prob to be a probability'),
    (lambda: Mixup(mode='image'), "Expected mode to be one of batch, pair, elem, but got 'image'"),
    (lambda: Mixup(num_classes=0), 'Expected num_classes of at least 1, but got 0'),
    (lambda: SpliceWith('resizemix'), "Expected kind to be one of mixup, cutmix, but got 'resizemix'"),
    (lambda: SpliceWith('mixup', ratio=0), 'Expected ratio to be a number above 0, but got 0'),
    (lambda: SpliceWith('mixup', alpha=0), 'Expected alpha to be a number above 0, but got 0'),
    (lambda: SpliceWith('mixup', mode='pair'), "Expected mode to be one of batch, elem, but got 'pair'"),
    (lambda: SpliceWith('mixup', cutmix_minmax=(0.1, 0.5)), "Expected cutmix_minmax with kind 'cutmix' only"),
])
def test_invalid_settings_are_refused(make, message):
    with raises_error(message):
        make()
