""" --splicemix-batch alternate: mixed images as a separate batch """
import pytest
import torch
import torch.nn.functional as F

import timm_splicemix as tsm
from tests.helpers import make_batch, raises_error, visible_sources


def plan_of(mixer, batch_size):
    """The plan that the mixer will draw next."""
    other = tsm.SpliceMix(mixer.grids, mixer.ratio, mixer.drop_prob, mixer.prob, mixer.mode, mixer.batch)
    other.load_state_dict(mixer.state_dict())
    return other.plan(batch_size)


@pytest.mark.parametrize('mode', tsm.SpliceMix.MODES)
def test_the_regular_batch_comes_first_and_then_the_mixed_one(mode):
    images, targets = make_batch(8)
    mixer = tsm.SpliceMix(batch='alternate', ratio=0.5, mode=mode)
    appended = tsm.SpliceMix(batch='append', ratio=0.5, mode=mode)
    for _ in range(4):
        (regular, regular_targets), (mixed, mixed_targets) = mixer.batches(images, targets)
        expected_images, expected_targets = appended(images, targets)  # draws the same
        assert regular is images and regular_targets is targets
        assert torch.equal(mixed, expected_images[8:]) and torch.equal(mixed_targets, expected_targets[8:])


@pytest.mark.parametrize('dtype', [torch.float32, torch.uint8])
@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
def test_a_single_cell_in_sight_gives_half_size_images(dtype, memory_format):
    images, targets = make_batch(8, height=16, width=12, dtype=dtype)
    images = images.contiguous(memory_format=memory_format)
    mixer = tsm.SpliceMix('2x2-3', ratio='ref', batch='alternate')
    sources = visible_sources(plan_of(mixer, 8).records[0])
    (regular, _), (small, small_targets) = mixer.batches(images, targets)
    assert regular is images
    assert sorted(sources) == list(range(8))
    assert torch.equal(small, F.interpolate(images[sources], size=(8, 6), mode='bilinear', align_corners=True))
    assert torch.equal(small_targets, targets[sources])


def test_single_cells_of_several_sizes_are_batches_of_their_own():
    images, targets = make_batch(12)
    mixer = tsm.SpliceMix('1x2-1,2x2-3', ratio=1., batch='alternate', mode='elem')
    records = plan_of(mixer, 12).records
    batches = mixer.batches(images, targets)
    assert len(batches) == 1 + len(records) > 3
    for (small, labels), record in zip(batches[1:], records):
        assert small.shape == (record.num_mixed, 3, 12 // record.grid.rows, 12 // record.grid.cols)
        assert torch.equal(labels, targets[visible_sources(record)])
    assert sum(len(labels) for _, labels in batches[1:]) == 12


def test_grids_that_drop_by_chance_give_whole_images():
    images, targets = make_batch(8)
    mixer = tsm.SpliceMix('1x2', drop_prob=1., batch='alternate')
    assert mixer.batches(images, targets)[1][0].shape == (2, 3, 12, 12)


def test_an_unmixed_batch_is_one_batch():
    images, targets = make_batch(8)
    (regular, labels), = tsm.SpliceMix(batch='alternate', prob=0.).batches(images, targets)
    assert regular is images and labels is targets
    mixer = tsm.SpliceMix(batch='alternate')
    mixer.mixup_enabled = False
    assert len(mixer.batches(images, targets)) == 1


@pytest.mark.parametrize('batch', ['append', 'fixed', 'exclusive', 'only'])
def test_other_modes_give_one_batch(batch):
    images, targets = make_batch(8)
    (mixed, labels), = tsm.SpliceMix(batch=batch).batches(images, targets)
    expected_images, expected_targets = tsm.SpliceMix(batch=batch)(images, targets)
    assert torch.equal(mixed, expected_images) and torch.equal(labels, expected_targets)


def test_integer_classes_become_one_hot_in_all_batches():
    images, _ = make_batch(8)
    classes = torch.arange(8) % 5
    for grids in ('2x2', '2x2-3'):
        batches = tsm.SpliceMix(grids, batch='alternate', num_classes=5).batches(images, classes)
        assert torch.equal(batches[0][1], torch.eye(5)[classes])
        assert batches[1][1].shape == (2, 5) and batches[1][1].dtype == torch.float32


def test_images_smaller_than_the_grid_are_refused():
    with raises_error('Expected images with a pixel for each cell of a 2x2 grid'):
        tsm.SpliceMix('2x2-3', batch='alternate').batches(*make_batch(8, height=1))


def test_no_value_on_a_device_is_read():
    images, targets = (tensor.to('meta') for tensor in make_batch(8))
    for grids in ('2x2', '2x2-3'):
        assert len(tsm.SpliceMix(grids, batch='alternate').batches(images, targets)) == 2
