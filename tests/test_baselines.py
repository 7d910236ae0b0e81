""" What all mixers have in common, and the pair mixers against plain loops """
from functools import partial

import pytest
import torch

from tests import reference
from tests.helpers import make_batch, raises_error
from timm_splicemix.mix import (
    Mixer,
    Mixup,
    PairPlan,
    RecursiveMix,
    ResizeMix,
    SpliceMix,
    SpliceWith,
)
from timm_splicemix.mix.pairs import mix_pairs, soft_targets

MAKERS = {
    'mixup': lambda **kwargs: Mixup(0.8, **kwargs),
    'mixup pair': lambda **kwargs: Mixup(0.8, mode='pair', **kwargs),
    'mixup elem': lambda **kwargs: Mixup(0.8, mode='elem', **kwargs),
    'cutmix': lambda **kwargs: Mixup(0., 1., **kwargs),
    'cutmix pair': lambda **kwargs: Mixup(0., 1., mode='pair', **kwargs),
    'cutmix elem': lambda **kwargs: Mixup(0., 1., mode='elem', **kwargs),
    'minmax': lambda **kwargs: Mixup(0., 0., (0.2, 0.8), **kwargs),
    'minmax elem': lambda **kwargs: Mixup(0., 0., (0.2, 0.8), mode='elem', **kwargs),
    'both': lambda **kwargs: Mixup(0.8, 1., **kwargs),
    'both elem': lambda **kwargs: Mixup(0.8, 1., mode='elem', **kwargs),
    'resizemix': ResizeMix,
    'recursivemix': RecursiveMix,
    'splice with mixup': lambda **kwargs: SpliceWith('mixup', **kwargs),
    'splice with cutmix': lambda **kwargs: SpliceWith('cutmix', 1., mode='elem', **kwargs),
}
SPLICEMIX = {f'splicemix {batch}': partial(SpliceMix, ratio=0.5, mode='elem', batch=batch, fill=3.)
             for batch in SpliceMix.BATCHES}
pair_mixers = pytest.mark.parametrize('make', MAKERS.values(), ids=MAKERS)
all_mixers = pytest.mark.parametrize('make', [*MAKERS.values(), *SPLICEMIX.values()], ids=[*MAKERS, *SPLICEMIX])


def make_ready(make, dtype=torch.float32, **kwargs):
    """A mixer after a step, so that RecursiveMix has a previous batch."""
    mixer = make(**kwargs)
    images, targets = make_batch(7, height=9, width=14, dtype=dtype, seed=9)
    mixer.plan(7)
    mixer.remember(images, targets, targets)
    return mixer


def plain_box(box, height, width, inside):
    """Top, bottom, left and right of a box, as in CutMix."""
    edges = []
    for side, place, length in zip(box[:2], box[2:], (height, width)):
        cut = int(side * length)
        if inside:
            start, end = int(place * (length - cut + 1)), int(place * (length - cut + 1)) + cut
        else:
            start, end = int(place * length) - cut // 2, int(place * length) + (cut + 1) // 2
        edges += [min(max(start, 0), length), min(max(end, 0), length)]
    return edges


def plain_mix(images, targets, plan, others=None):
    """Apply a plan one pixel and one label at a time, in double precision."""
    other_images, other_targets = others or (images, targets)
    height, width = images.shape[2:]
    out_images = [images[i].double() for i in plan.kept]
    out_targets = [targets[i].double() for i in plan.kept]
    for own, partner, blend, box in zip(*(v.tolist() for v in (plan.images, plan.partners, plan.blend, plan.boxes))):
        top, bottom, left, right = plain_box(box, height, width, plan.inside)
        image, other = images[own].double(), other_images[partner].double()
        small = reference.resize_bilinear(other, bottom - top, right - left) if plan.resized else None
        mixed = image.clone()
        own_pixels = 0
        for y in range(height):
            for x in range(width):
                if top <= y < bottom and left <= x < right:
                    mixed[:, y, x] = small[:, y - top, x - left] if plan.resized else other[:, y, x]
                else:
                    mixed[:, y, x] = blend * image[:, y, x] + ((1 - blend) * other[:, y, x] if blend < 1 else 0)
                    own_pixels += 1
        weight = blend * own_pixels / (height * width)
        labels = []
        for a, b in zip(targets[own].tolist(), other_targets[partner].tolist()):
            unknown = (a == -1 and weight > 0) or (b == -1 and weight < 1)
            labels.append(-1. if unknown else weight * a + (1 - weight) * b)
        out_images.append(mixed)
        out_targets.append(torch.tensor(labels, dtype=torch.float64))
    return torch.stack(out_images), torch.stack(out_targets)


@pair_mixers
@pytest.mark.parametrize('batch_size, channels, dtype', [
    (8, 3, torch.float32), (5, 1, torch.float32), (2, 4, torch.uint8), (7, 3, torch.uint8), (1, 3, torch.float32)])
def test_every_pair_mixer_equals_the_plain_loops(make, batch_size, channels, dtype):
    for seed in range(3):
        mixer = make(seed=seed)
        before = make_batch(4, channels, 11, 6, dtype=dtype, seed=1)
        if isinstance(mixer, RecursiveMix):
            mixer.plan(4)
            mixer.remember(*before, before[1])
        images, targets = make_batch(batch_size, channels, 9, 14, dtype=dtype)
        targets[0, :2], targets[-1, 1:3] = torch.tensor([-1., 0.3]), torch.tensor([0.6, -1.])
        plan = mixer.plan(batch_size)
        mixed_images, mixed_targets = mixer.apply(images, targets, plan)
        others = before if isinstance(mixer, RecursiveMix) else None
        expected_images, expected_targets = plain_mix(images, targets, plan, others)
        assert mixed_images.dtype == dtype and mixed_targets.dtype == torch.float32
        tolerance = 1e-5
        if dtype == torch.uint8:  # torch rounds after resizing along each axis
            tolerance = 1.01 if plan.resized else 0.51
        torch.testing.assert_close(mixed_images.double(), expected_images, atol=tolerance, rtol=0)
        torch.testing.assert_close(mixed_targets.double(), expected_targets, atol=1e-6, rtol=0)
        assert mixed_targets.eq(-1).equal(expected_targets.eq(-1))


@all_mixers
def test_every_mixer_mixes(make):
    images, targets = make_batch(6)
    mixed_images, mixed_targets = make_ready(make)(images, targets)
    number = min(6, len(mixed_images))
    assert isinstance(make(), Mixer)
    assert not torch.equal(mixed_images[-number:], images[-number:])
    assert not torch.equal(mixed_targets[-number:], targets[-number:])


@all_mixers
@pytest.mark.parametrize('off', ['prob', 'enabled'])
def test_an_unmixed_batch_is_the_batch_itself(make, off):
    mixer = make_ready(make, **({'prob': 0.} if off == 'prob' else {}))
    mixer.mixup_enabled = off == 'prob'
    images, targets = make_batch(6)
    for _ in range(5):
        mixed_images, mixed_targets = mixer(images, targets)
        assert mixed_images is images and mixed_targets is targets
    assert mixer.plan(6).kept.tolist() == list(range(6)) and mixer.plan(6).num_mixed == 0


@all_mixers
def test_the_draws_depend_on_seed_rank_epoch_and_step_alone(make):
    images, targets = make_batch(6)

    def mixed(epoch=0, step=3, **kwargs):
        mixer = make_ready(make, **kwargs)
        mixer.set_step(epoch, step)
        mixer.remember(images + 1, targets, targets)
        return mixer(images, targets)[0]

    torch.manual_seed(1)
    first = mixed()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(mixed(), first)
    assert torch.equal(torch.get_rng_state(), state)
    for other in ({'seed': 1}, {'rank': 1}, {'epoch': 1}, {'step': 4}):
        assert not torch.equal(mixed(**other), first)


@all_mixers
def test_a_loaded_state_continues_the_draws(make):
    images, targets = make_batch(6)
    mixer = make_ready(make)
    for _ in range(3):
        mixed_images, mixed_targets = mixer(images, targets)
        mixer.remember(mixed_images, mixed_targets, mixed_targets)
    other = make()
    other.load_state_dict(mixer.state_dict())
    for _ in range(2):
        for left, right in zip(mixer(images, targets), other(images, targets)):
            assert torch.equal(left, right)


@all_mixers
@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_no_value_on_a_device_is_read_and_type_and_format_stay(make, memory_format, dtype):
    images, targets = make_batch(7, height=9, width=14, dtype=dtype)
    images = images.contiguous(memory_format=memory_format)
    mixer = make_ready(make, dtype=dtype, num_classes=5)
    for labels in (targets, torch.arange(7) % 5):
        plan = mixer.plan(7)
        expected_images, expected_targets = mixer.apply(images, labels, plan)
        mixed_images, mixed_targets = mixer.apply(images.to('meta'), labels.to('meta'), plan)
        for image in (mixed_images, expected_images):
            assert image.dtype == dtype and image.is_contiguous(memory_format=memory_format)
        assert mixed_images.shape == expected_images.shape
        assert mixed_targets.shape == expected_targets.shape and mixed_targets.dtype == expected_targets.dtype


@all_mixers
def test_neither_images_nor_targets_are_changed(make):
    images, targets = make_batch(6)
    before = images.clone(), targets.clone()
    mixer = make_ready(make)
    for _ in range(5):
        for mixed, regular in zip(mixer(images, targets), (images, targets)):
            if mixed is not regular:  # a batch that stays unmixed is the batch itself
                mixed.zero_()
        assert torch.equal(images, before[0]) and torch.equal(targets, before[1])


@all_mixers
def test_gradients_reach_the_images(make):
    images, targets = make_batch(6)
    images.requires_grad_()
    make_ready(make, seed=1)(images, targets)[0].sum().backward()
    assert (images.grad != 0).flatten(1).any(dim=1).all()


@pair_mixers
def test_the_sum_of_labels_is_that_of_the_weights(make):
    images, targets = make_batch(8, classes=6)
    targets = torch.eye(8)[:, :6] + torch.eye(8)[:, 2:]  # one or two classes for each image
    mixer = make()
    if isinstance(mixer, RecursiveMix):
        mixer.plan(8)
        mixer.remember(images, targets, targets)
    plan = mixer.plan(8)
    _, mixed = mixer.apply(images, targets, plan)
    weights = plan.weights(12, 12)
    sums = targets.double().sum(dim=1)
    expected = torch.cat([sums[plan.kept], weights * sums[plan.images] + (1 - weights) * sums[plan.partners]])
    torch.testing.assert_close(mixed.double().sum(dim=1), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize('own, other, weight, expected', [
    (1, 0, 0.25, 0.25), (0, 1, 0.25, 0.75), (1, 1, 0.25, 1), (0.5, 0.1, 0.5, 0.3), (-1, 1, 0.25, -1), (1, -1, 0.25, -1),
    (0, -1, 0.999, -1), (-1, -1, 0.5, -1), (1, -1, 1, 1), (0, -1, 1, 0), (-1, 1, 0, 1), (-1, 0, 0, 0), (-1, 0, 1, -1)])
def test_labels_are_weighted_and_unknown_if_a_part_is(own, other, weight, expected):
    mixed = soft_targets(torch.tensor([[float(own)]]), torch.tensor([[float(other)]]), torch.tensor([weight]).double())
    assert mixed.item() == pytest.approx(expected)


@pytest.mark.parametrize('dtype', [torch.int64, torch.bool, torch.uint8])
def test_multi_hot_targets_may_be_integers_or_booleans(dtype):
    images, targets = make_batch(6)
    mixer = Mixup(1.)
    plan = mixer.plan(6)
    assert torch.equal(mixer.apply(images, targets.to(dtype), plan)[1], mixer.apply(images, targets, plan)[1])
    unmixed = mixer.apply(images, targets.to(dtype), PairPlan.unmixed(6))[1]
    assert unmixed.dtype == torch.float32 and torch.equal(unmixed, targets)


@all_mixers
def test_integer_classes_become_one_hot_mixed_or_not(make):
    images, _ = make_batch(7)
    classes = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    for prob in (0., 1.):
        mixer = make_ready(make, num_classes=5, prob=prob)
        plan = mixer.plan(7)
        _, targets = mixer.apply(images, classes, plan)
        assert torch.equal(targets, mixer.apply(images, torch.eye(5)[classes], plan)[1])
    with raises_error('Expected num_classes to be given for integer targets, but got None'):
        make()(images, classes)
    with raises_error('Expected targets of 4 classes, but got 5'):
        make(num_classes=4)(images, torch.eye(5)[classes])


@all_mixers
def test_a_plan_for_another_batch_is_refused(make):
    with raises_error('Expected a plan for 6 images, but got one for 5'):
        mixer = make_ready(make)
        mixer.apply(*make_batch(6), mixer.plan(5))
    with raises_error('Expected a batch of at least one image, but got batch_size=0'):
        make().plan(0)


def test_boxes_of_several_sizes_with_resized_partners_are_refused():
    index, boxes = torch.arange(2), torch.tensor([[.5, .5, 0., 0.], [.4, .5, 0., 0.]], dtype=torch.float64)
    with raises_error('Expected one box for all images'):
        PairPlan(index[:0], index, index.flip(0), torch.ones(2).double(), boxes, resized=True)
    with raises_error('Expected partners, blend and boxes for 2 images'):
        PairPlan(index[:0], index, index, torch.ones(1).double(), boxes)


def test_an_image_may_be_blended_and_boxed():
    images, targets = make_batch(4)
    index = torch.arange(4)
    boxes = torch.tensor([[.5, .5, .3, .6]] * 4, dtype=torch.float64)
    plan = PairPlan(index[:0], index, index.flip(0), torch.tensor([.3, 1., .5, .9], dtype=torch.float64), boxes)
    mixed_images, mixed_targets = mix_pairs(images, targets, plan)
    expected_images, expected_targets = plain_mix(images, targets, plan)
    torch.testing.assert_close(mixed_images.double(), expected_images, atol=1e-6, rtol=0)
    torch.testing.assert_close(mixed_targets.double(), expected_targets, atol=1e-6, rtol=0)


def test_the_repr_lists_the_settings():
    assert repr(ResizeMix(seed=3)) == (
        'ResizeMix(num_classes=None, seed=3, rank=None, alpha=1.0, scale=(0.1, 0.8), prob=1.0)')
    assert repr(RecursiveMix()) == 'RecursiveMix(num_classes=None, seed=0, rank=None, alpha=0.5, prob=1.0)'


@pair_mixers
def test_a_plan_describes_each_row_of_the_batch(make):
    mixer = make_ready(make)
    plan = mixer.plan(7)
    captions = plan.captions()
    assert len(captions) == len(mixer.apply(*make_batch(7), plan)[0])
    is_mixed = plan.weights(9, 14) < 1
    for image, partner, mixed, caption in zip(plan.images, plan.partners, is_mixed, captions[len(plan.kept):]):
        before = 'previous ' if isinstance(mixer, RecursiveMix) else ''
        assert caption == (f'#{image} + {before}#{partner}' if mixed else f'#{image}')
    assert PairPlan.unmixed(2).captions() == ['#0', '#1'] and not plan.cells()
