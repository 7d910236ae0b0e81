""" ResizeMix and RecursiveMix, which show a whole image in a box """
import io

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import make_batch, raises_error
from timm_splicemix.mix import RecursiveMix, ResizeMix


def box_of(plan, images):
    top, bottom, left, right = plan.pixel_boxes(*images.shape[2:])[0].tolist()
    return (..., slice(top, bottom), slice(left, right)), (bottom - top, right - left)


# --- ResizeMix ---


def test_the_whole_partner_is_in_the_box_and_the_image_around_it():
    images, targets = make_batch(6, height=20, width=30)
    for seed in range(20):
        mixer = ResizeMix(seed=seed)
        plan = mixer.plan(6)
        mixed, labels = mixer.apply(images, targets, plan)
        place, size = box_of(plan, images)
        small = F.interpolate(images[plan.partners], size=size, mode='bilinear', align_corners=True)
        torch.testing.assert_close(mixed[place], small, atol=1e-6, rtol=0)
        around = torch.ones(20, 30, dtype=torch.bool)
        around[place[1:]] = False
        assert torch.equal(mixed[..., around], images[..., around])
        weight = around.double().mean().item()
        torch.testing.assert_close(labels, weight * targets + (1 - weight) * targets[plan.partners])


def test_no_image_is_its_own_partner_and_each_is_one():
    for batch_size in (2, 3, 8, 9):
        for seed in range(10):
            partners = ResizeMix(seed=seed).plan(batch_size).partners
            assert sorted(partners.tolist()) == list(range(batch_size))
            assert not (partners == torch.arange(batch_size)).any()


def test_sides_are_uniform_between_the_papers_bounds():
    sides = torch.stack([ResizeMix(seed=seed).plan(2).boxes[0, :2] for seed in range(1500)])
    assert torch.equal(sides[:, 0], sides[:, 1])
    assert 0.1 <= sides.min() < 0.11 and 0.79 < sides.max() <= 0.8
    assert sides.mean() == pytest.approx(0.45, abs=0.02) and sides.std() == pytest.approx(0.7 / 12 ** 0.5, abs=0.01)
    narrow = torch.stack([ResizeMix(8., seed=seed).plan(2).boxes[0, 0] for seed in range(500)])
    assert narrow.mean() == pytest.approx(0.45, abs=0.02) and narrow.std() < 0.1


def test_borders_cut_the_box_but_not_the_partner():
    sizes = {box_of(ResizeMix(scale=(0.6, 0.6), seed=seed).plan(2), torch.zeros(2, 1, 10, 10))[1] for seed in range(99)}
    assert max(sizes) == (6, 6) and min(min(size) for size in sizes) < 6


def test_a_box_without_a_pixel_changes_nothing():
    images, targets = make_batch(4, height=5, width=5)
    mixed_images, mixed_targets = ResizeMix(scale=(0.1, 0.19))(images, targets)
    assert torch.equal(mixed_images, images) and torch.equal(mixed_targets, targets)


# --- RecursiveMix ---


def steps(mixer, batches):
    """Mix and remember batches one after the other; the logits are the targets + 1."""
    outputs = []
    for images, targets in batches:
        plan = mixer.plan(len(images))
        mixed = mixer.apply(images, targets, plan)
        mixer.remember(*mixed, mixed[1] + 1)
        outputs.append((plan, *mixed))
    return outputs


def some_batches(*sizes):
    return [make_batch(size, height=16, width=12, seed=seed) for seed, size in enumerate(sizes)]


def test_the_first_batch_of_an_epoch_stays_and_the_next_show_the_one_before():
    batches = some_batches(4, 4, 4)
    mixer = RecursiveMix()
    for epoch in range(2):
        mixer.set_step(epoch, 0)
        outputs = steps(mixer, batches)
        assert outputs[0][0].previous is None and outputs[0][1] is batches[0][0]
        for (_, before, before_targets), (plan, mixed, labels), (images, targets) in zip(
                outputs, outputs[1:], batches[1:]):
            place, size = box_of(plan, images)
            small = F.interpolate(before, size=size, mode='bilinear', align_corners=True)
            torch.testing.assert_close(mixed[place], small, atol=1e-6, rtol=0)
            weight = plan.weights(16, 12)[0].item()
            assert weight == pytest.approx(1 - size[0] * size[1] / (16 * 12))
            torch.testing.assert_close(labels, weight * targets + (1 - weight) * before_targets)


def test_the_previous_batch_is_discarded_in_another_epoch_and_when_steps_are_repeated():
    kept, forgotten = ((0, 3), (0, 4)), ((0, 2), (0, 0), (1, 0), (1, 3))
    for epoch, step in kept + forgotten:
        mixer = RecursiveMix()
        steps(mixer, some_batches(4, 4, 4))
        mixer.set_step(epoch, step)
        assert (mixer.plan(4).previous is not None) == ((epoch, step) in kept)


def test_setting_the_step_before_each_batch_changes_nothing():
    batches = some_batches(4, 4, 4)
    expected = steps(RecursiveMix(), batches)
    mixer = RecursiveMix()
    for step, batch in enumerate(batches):
        mixer.set_step(0, step)
        (_, images, targets), = steps(mixer, [batch])
        assert torch.equal(images, expected[step][1]) and torch.equal(targets, expected[step][2])


@pytest.mark.parametrize('sizes', [(4, 3), (3, 7), (1, 4), (4, 1)])
def test_a_smaller_previous_batch_is_repeated(sizes):
    outputs = steps(RecursiveMix(), some_batches(*sizes))
    plan, mixed, _ = outputs[1]
    assert plan.partners.tolist() == [i % sizes[0] for i in range(sizes[1])]
    place, size = box_of(plan, mixed)
    small = F.interpolate(outputs[0][1], size=size, mode='bilinear', align_corners=True)
    for i, partner in enumerate(plan.partners.tolist()):
        torch.testing.assert_close(mixed[i][place], small[partner], atol=1e-6, rtol=0)
    assert torch.equal(plan.teachers(outputs[1][2]), (outputs[0][2] + 1)[plan.partners])


def test_the_image_size_may_change():
    mixer = RecursiveMix()
    steps(mixer, some_batches(4))
    images, targets = make_batch(4, height=24, width=20)
    (plan, mixed, _), = steps(mixer, [(images, targets)])
    assert plan.previous is not None and mixed.shape == images.shape


def test_a_plan_keeps_what_it_was_made_for():
    first, second, third = some_batches(4, 4, 4)
    mixer = RecursiveMix()
    steps(mixer, [first])
    plan = mixer.plan(4)
    expected = mixer.apply(*second, plan)
    mixer.remember(*third, third[1])
    for left, right in zip(mixer.apply(*second, plan), expected):
        assert torch.equal(left, right)


def test_the_box_is_known_as_parts_of_the_image():
    plan = steps(RecursiveMix(), some_batches(4, 4))[1][0]
    top, bottom, left, right = plan.pixel_boxes(16, 12)[0].tolist()
    assert plan.relative_box(16, 12) == (left / 12, top / 16, right / 12, bottom / 16)
    x0, y0, x1, y1 = plan.relative_box(16, 12)
    assert plan.weights(16, 12)[0].item() == pytest.approx(1 - (x1 - x0) * (y1 - y0))


def test_areas_are_uniform_up_to_alpha():
    mixer = RecursiveMix(0.4)
    mixer.remember(*some_batches(2)[0], torch.zeros(2, 5))
    areas = torch.stack([mixer.plan(2).boxes[0, :2].prod() for _ in range(1500)])
    assert 0 < areas.min() < 0.01 and 0.39 < areas.max() < 0.4
    assert areas.mean() == pytest.approx(0.2, abs=0.01)


def test_no_graph_is_remembered():
    mixer = RecursiveMix()
    mixer.plan(2)
    images, targets = make_batch(2)
    mixer.remember(images.requires_grad_(), targets, (targets * 2).requires_grad_() * 2)
    previous = mixer.plan(2).previous
    assert not any(tensor.requires_grad for tensor in (previous.images, previous.targets, previous.logits))


def test_a_run_continued_in_mid_epoch_equals_the_one_never_interrupted():
    batches = some_batches(4, 4, 4, 3, 4)
    mixer = RecursiveMix(seed=5)
    mixer.set_step(2, 0)
    expected = steps(mixer, batches)
    cut = RecursiveMix(seed=5)
    cut.set_step(2, 0)
    steps(cut, batches[:2])
    file = io.BytesIO()
    torch.save(cut.state_dict(), file)
    file.seek(0)
    resumed = RecursiveMix(seed=5)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    resumed.set_step(2, 2)
    for (_, images, targets), (_, other_images, other_targets) in zip(steps(resumed, batches[2:]), expected[2:]):
        assert torch.equal(images, other_images) and torch.equal(targets, other_targets)


def test_a_process_ignores_the_previous_batch_of_another():
    mixer = RecursiveMix(rank=0)
    steps(mixer, some_batches(4, 4))
    other = RecursiveMix(rank=1)
    other.load_state_dict(mixer.state_dict())
    assert other.state_dict() == {'epoch': 0, 'step': 2, 'previous': None, 'previous_place': (0, 2), 'rank': 1}
    assert other.plan(4).previous is None


@pytest.mark.parametrize('make, message', [
    (lambda: ResizeMix(0.), 'Expected alpha to be a number above 0, but got 0'),
    (lambda: ResizeMix(scale=(0.8, 0.1)), r'Expected scale to be .*, but got \(0.8, 0.1\)'),
    (lambda: ResizeMix(scale=(0.1,)), r'Expected scale to be .*, but got \(0.1,\)'),
    (lambda: ResizeMix(prob=-1), 'Expected prob to be a probability'),
    (lambda: RecursiveMix(0.), 'Expected alpha to be a number above 0, but got 0'),
    (lambda: RecursiveMix(1.5), 'Expected alpha to be a part of the area, at most 1, but got 1.5'),
    (lambda: RecursiveMix(prob=2), 'Expected prob to be a probability'),
    (lambda: RecursiveMix().remember(torch.zeros(3, 1, 2, 2), torch.zeros(3, 5), torch.zeros(2, 5)),
     'Expected as many targets and logits as images, but got 3 targets and 2 logits for 3 images'),
])
def test_invalid_settings_are_refused(make, message):
    with raises_error(message):
        make()
