import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import timm_splicemix as tsm
from tests import reference
from tests.helpers import make_batch, raises_error, rng, visible_sources

# --- splice ---


@pytest.mark.parametrize('size', [(12, 12), (13, 11), (5, 9), (7, 6)])
@pytest.mark.parametrize('grid', tsm.parse_grids('1x1,1x2,2x1,2x2,2x3,3x2,3x3,1x4'))
@pytest.mark.parametrize('channels', [1, 3, 4])
def test_splice_equals_the_plain_loops(size, grid, channels):
    images, targets = make_batch(channels=channels, height=size[0], width=size[1])
    targets[0, :3], targets[1, 2], targets[2, 4] = -1, 0.3, 0.7
    record = tsm.sample_record(len(images), grid, 3, num_dropped=grid.cells // 2, generator=rng())
    expected_images, expected_targets = reference.splice(images, targets, record, fill=0.5)
    mixed_images, mixed_targets = tsm.splice(images, targets, record, fill=0.5)
    torch.testing.assert_close(mixed_images.double(), expected_images, atol=1e-5, rtol=0)
    assert torch.equal(mixed_targets, expected_targets)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize('channels', [1, 2, 3, 4, 7])
def test_cells_are_bit_equal_to_interpolate(dtype, memory_format, channels):
    for grid in tsm.parse_grids('1x1,1x2,2x1,2x2,2x3,3x2'):
        for height, width in ((48, 36), (12, 96)):
            images, targets = make_batch(6, channels, height, width, dtype=dtype)
            images = images.contiguous(memory_format=memory_format)
            record = tsm.sample_record(6, grid, 2, generator=rng())
            mixed, _ = tsm.splice(images, targets, record)
            h, w = height // grid.rows, width // grid.cols
            for m in range(2):
                for cell, source in enumerate(record.sources[m].tolist()):
                    i, j = divmod(cell, grid.cols)
                    expected = F.interpolate(
                        images[source:source + 1], size=(h, w), mode='bilinear', align_corners=True)[0]
                    assert torch.equal(mixed[m, :, i * h:(i + 1) * h, j * w:(j + 1) * w], expected)


@pytest.mark.parametrize('dtype', [torch.float32, torch.uint8])
def test_a_mixed_image_of_one_cell_is_the_image(dtype):
    images, targets = make_batch(dtype=dtype)
    record = tsm.sample_record(8, tsm.Grid(1, 1), 8, generator=rng())
    mixed_images, mixed_targets = tsm.splice(images, targets, record)
    assert torch.equal(mixed_images, images[record.sources[:, 0]])
    assert torch.equal(mixed_targets, targets[record.sources[:, 0]])


@pytest.mark.parametrize('dtype', [torch.float32, torch.uint8])
@pytest.mark.parametrize('channels', [1, 3])
def test_an_image_with_one_pixel_for_each_cell_can_be_mixed(dtype, channels):
    images, targets = make_batch(4, channels, 2, 2, dtype=dtype)
    record = tsm.sample_record(4, tsm.Grid(2, 2), 1, generator=rng())
    mixed, _ = tsm.splice(images, targets, record)
    assert torch.equal(mixed[0].flatten(1), images[record.sources[0], :, 0, 0].T)


def test_constant_images_can_be_read_off_the_mixed_one():
    images = torch.arange(6.).view(6, 1, 1, 1).expand(6, 3, 7, 10)
    targets = torch.eye(6)
    record = tsm.SpliceRecord(
        tsm.Grid(2, 3), torch.tensor([[4, 2, 0, 5, 1, 3]]), torch.tensor([[False, False, True, False, False, True]]))
    mixed_images, mixed_targets = tsm.splice(images, targets, record, fill=9.)
    assert mixed_images[0, 0, 0].tolist() == [4, 4, 4, 2, 2, 2, 9, 9, 9, 9]
    assert mixed_images[0, 2, -1].tolist() == [5, 5, 5, 1, 1, 1, 9, 9, 9, 9]
    assert mixed_images[0, 0, :, 0].tolist() == [4, 4, 4, 5, 5, 5, 5]
    assert mixed_targets.tolist() == [[0, 1, 1, 0, 1, 1]]


@pytest.mark.parametrize('cells, expected', [
    ([0, 0], 0), ([0, 1], 1), ([-1, 0], -1), ([0, -1], -1), ([-1, 1], 1), ([-1, -1], -1), ([0.2, 0.7], 0.7),
    ([0, 0.4], 0.4), ([1, 0.4], 1)])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
def test_the_union_of_labels(cells, expected, dtype):
    images = torch.zeros(2, 3, 4, 4)
    record = tsm.SpliceRecord(tsm.Grid(1, 2), torch.tensor([[0, 1]]), torch.zeros(1, 2, dtype=torch.bool))
    targets = torch.tensor(cells, dtype=dtype).view(2, 1)
    mixed = tsm.splice(images, targets, record)[1]
    assert mixed.dtype == dtype
    assert mixed.item() == torch.tensor(expected, dtype=dtype).item()


@pytest.mark.parametrize('dtype', [torch.bool, torch.uint8, torch.int64])
def test_multi_hot_targets_may_be_integers_or_booleans(dtype):
    images = torch.zeros(2, 3, 4, 4)
    targets = torch.tensor([[1, 0, 0], [0, 0, 1]], dtype=dtype)
    record = tsm.SpliceRecord(tsm.Grid(1, 2), torch.tensor([[0, 1]]), torch.zeros(1, 2, dtype=torch.bool))
    assert tsm.splice(images, targets, record)[1].tolist() == [[1, 0, 1]]


def test_a_dropped_cell_gives_no_label_even_if_unknown():
    images, targets = torch.zeros(2, 3, 4, 4), torch.tensor([[1., 0., 0.], [-1., -1., 1.]])
    record = tsm.SpliceRecord(tsm.Grid(1, 2), torch.tensor([[0, 1]]), torch.tensor([[False, True]]))
    assert tsm.splice(images, targets, record)[1].tolist() == [[1, 0, 0]]


def test_fill_may_differ_by_channel_and_is_rounded_for_uint8():
    images, targets = make_batch(4, dtype=torch.uint8)
    record = tsm.sample_record(4, tsm.Grid(2, 2), 2, num_dropped=3, generator=rng())
    mixed, _ = tsm.splice(images, targets, record, fill=(123.7, 116.3, 103.5))
    for m in range(2):
        for cell in record.dropped[m].nonzero().flatten().tolist():
            i, j = divmod(cell, 2)
            area = mixed[m, :, i * 6:(i + 1) * 6, j * 6:(j + 1) * 6].flatten(1)
            assert area.unique(dim=1).flatten().tolist() == [124, 116, 104]


def test_splice_writes_to_a_given_tensor():
    images, targets = make_batch()
    record = tsm.sample_record(8, tsm.Grid(2, 2), 2, generator=rng())
    out = torch.full((2, 3, 12, 12), float('nan'))
    mixed, _ = tsm.splice(images, targets, record, out=out)
    assert mixed is out
    assert torch.equal(out, tsm.splice(images, targets, record)[0])


def test_gradients_reach_the_sources():
    images, targets = make_batch()
    images.requires_grad_()
    mixer = tsm.SpliceMix('2x2-1')
    plan = mixer.plan(8)
    mixer.apply(images, targets, plan)[0][8:].sum().backward()
    seen = images.grad.flatten(1).abs().sum(dim=1) > 0
    assert set(seen.nonzero().flatten().tolist()) == set(visible_sources(plan.records[0]))


# --- split_cells ---


def test_split_cells_undoes_the_grid_in_the_order_of_the_sources():
    images = torch.arange(8.).view(8, 1, 1, 1).expand(8, 2, 12, 12)
    for grid in tsm.parse_grids('1x2,2x2,2x3,3x1'):
        record = tsm.sample_record(8, grid, 3, generator=rng())
        mixed, _ = tsm.splice(images, torch.zeros(8, 1), record)
        cells = tsm.split_cells(mixed, grid)
        assert cells.shape == (3 * grid.cells, 2, 12 // grid.rows, 12 // grid.cols)
        expected = record.sources.flatten().float().view(-1, 1, 1, 1)
        torch.testing.assert_close(cells, expected.expand_as(cells))


@pytest.mark.parametrize('size, grid, resized', [
    ((7, 7), '2x2', (6, 6)), ((7, 7), '2x3', (6, 6)), ((14, 14), '2x3', (14, 12)), ((1, 2), '2x3', (2, 3)),
    ((4, 4), '3x3', (3, 3)), ((2, 2), '3x2', (3, 2))])
def test_maps_that_do_not_divide_are_resized_first(size, grid, resized):
    grid, = tsm.parse_grids(grid)
    maps = torch.randn(2, 5, *size, generator=rng())
    expected = F.interpolate(maps, size=resized, mode='bilinear', align_corners=True)
    h, w = resized[0] // grid.rows, resized[1] // grid.cols
    cells = tsm.split_cells(maps, grid)
    assert cells.shape == (2 * grid.cells, 5, h, w)
    for m in range(2):
        for cell in range(grid.cells):
            i, j = divmod(cell, grid.cols)
            assert torch.equal(
                cells[m * grid.cells + cell], expected[m, :, i * h:(i + 1) * h, j * w:(j + 1) * w])


def test_split_cells_of_channels_last_maps_are_the_same():
    maps = torch.randn(2, 8, 6, 6, generator=rng())
    last = maps.contiguous(memory_format=torch.channels_last)
    assert torch.equal(tsm.split_cells(maps, tsm.Grid(2, 3)), tsm.split_cells(last, tsm.Grid(2, 3)))


def test_split_cells_refuses_other_shapes():
    with raises_error('Expected maps'):
        tsm.split_cells(torch.zeros(2, 49, 8), tsm.Grid(2, 2))


# --- SpliceMix ---


def test_calling_the_mixer_is_planning_and_applying():
    images, targets = make_batch(16)
    for mode in tsm.SpliceMix.MODES:
        for batch in tsm.SpliceMix.BATCHES:
            called = tsm.SpliceMix(mode=mode, batch=batch, seed=3)
            planned = tsm.SpliceMix(mode=mode, batch=batch, seed=3)
            for _ in range(5):
                expected = planned.apply(images, targets, planned.plan(16))
                for left, right in zip(called(images, targets), expected):
                    assert torch.equal(left, right)


@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize('mode', tsm.SpliceMix.MODES)
def test_mixed_images_follow_the_regular_ones_in_the_same_type_and_memory_format(memory_format, dtype, mode):
    images, targets = make_batch(16, height=14, width=10, dtype=dtype)
    images = images.contiguous(memory_format=memory_format)
    mixer = tsm.SpliceMix(mode=mode, ratio=0.5)
    for _ in range(6):
        plan = mixer.plan(16)
        mixed, mixed_targets = mixer.apply(images, targets, plan)
        assert mixed.dtype == dtype and mixed.is_contiguous(memory_format=memory_format)
        spliced = [tsm.splice(images, targets, record) for record in plan.records]
        assert torch.equal(mixed, torch.cat([images, *(part for part, _ in spliced)]))
        assert torch.equal(mixed_targets, torch.cat([targets, *(part for _, part in spliced)]))


def test_images_that_are_a_view_of_others_are_mixed_alike():
    images, targets = make_batch(8, height=20, width=20)
    view = images[:, :, 2:14, 4:16]
    mixer = tsm.SpliceMix('2x2')
    plan = mixer.plan(8)
    assert torch.equal(mixer.apply(view, targets, plan)[0], mixer.apply(view.contiguous(), targets, plan)[0])


@pytest.mark.parametrize('mode', tsm.SpliceMix.MODES)
def test_the_defaults_are_those_of_the_paper(mode):
    mixer = tsm.SpliceMix(mode=mode)
    assert mixer.grids == (tsm.Grid(1, 2), tsm.Grid(2, 2), tsm.Grid(2, 3))
    shapes, drops = Counter(), Counter()
    steps = 6000 if mode == 'batch' else 1500  # each draws once, or for each of 4 mixed images
    for _ in range(steps):
        plan = mixer.plan(16)
        assert plan.num_mixed == 4
        if mode == 'batch':
            assert len({count for record in plan.records for count in record.dropped.sum(dim=1).tolist()}) == 1
        for record in plan.records:
            weight = 1 if mode == 'batch' else record.num_mixed
            shapes[record.grid.rows, record.grid.cols] += weight
            for count in record.dropped.sum(dim=1).tolist()[:weight]:
                drops[record.grid.cells, count] += 1
    assert sum(shapes.values()) == 6000 and len(shapes) == 5
    for shape, part in {(1, 2): 1 / 6, (2, 1): 1 / 6, (2, 2): 1 / 3, (2, 3): 1 / 6, (3, 2): 1 / 6}.items():
        assert abs(shapes[shape] / 6000 - part) < 0.025
    for cells in (2, 4, 6):
        of_grid = sum(count for (c, _), count in drops.items() if c == cells)
        assert abs(drops[cells, 0] / of_grid - 0.7) < 0.04
        for dropped in range(1, cells):
            assert abs(drops[cells, dropped] / of_grid - 0.3 / (cells - 1)) < 0.04


def test_grids_are_drawn_by_their_weights_for_each_mixed_image():
    mixer = tsm.SpliceMix('2x2@3,3x3', mode='elem', ratio=1., drop_prob=0)
    counts, per_batch = Counter(), Counter()
    for _ in range(60):
        records = mixer.plan(32).records
        per_batch[len(records)] += 1
        for record in records:
            counts[record.grid.rows] += record.num_mixed
    assert abs(counts[2] / sum(counts.values()) - 0.75) < 0.04
    assert per_batch[2] == 60  # both grids in every batch


def test_elem_mode_draws_flips_and_drops_for_each_mixed_image():
    mixer = tsm.SpliceMix('2x3', mode='elem', ratio=1., drop_prob=0.5)
    records = mixer.plan(64).records
    assert {(record.grid.rows, record.grid.cols) for record in records} == {(2, 3), (3, 2)}
    assert sum(record.num_mixed for record in records) == 64
    assert len({count for record in records for count in record.dropped.sum(dim=1).tolist()}) > 2
    uses = Counter(source for record in records for source in visible_sources(record))
    assert max(uses.values()) - min(uses[image] for image in range(64)) <= 1  # across all records


def test_a_fixed_number_of_dropped_cells_is_kept():
    for mode in tsm.SpliceMix.MODES:
        mixer = tsm.SpliceMix('2x3-2,2x2-0', mode=mode, drop_prob=1., ratio=0.5)
        for _ in range(20):
            for record in mixer.plan(16).records:
                expected = {6: 2, 4: 0}[record.grid.cells]
                assert record.dropped.sum(dim=1).unique().tolist() == [expected]


@pytest.mark.parametrize('grid, batch_size, expected', [
    ('2x2', 16, 4), ('2x2-1', 16, 5), ('2x2-3', 16, 16), ('1x2', 16, 8), ('2x3', 16, 2), ('3x3', 16, 1), ('3x3', 8, 0),
    ('2x3-2', 32, 8), ('2x2', 1, 0), ('1x2-1', 1, 1)])
def test_the_reference_number_of_mixed_images(grid, batch_size, expected):
    for mode in tsm.SpliceMix.MODES:
        plan = tsm.SpliceMix(grid, ratio='ref', mode=mode, drop_prob=0).plan(batch_size)
        assert plan.num_mixed == expected
        sources = [source for record in plan.records for source in visible_sources(record)]
        assert len(set(sources)) == len(sources)


@pytest.mark.parametrize('ratio, batch_size, expected', [
    (0.25, 16, 4), (0.25, 15, 3), (0.25, 3, 0), (0.29, 100, 29), (1., 7, 7), (1.5, 4, 6), (0, 16, 0), (0.1, 30, 3)])
def test_the_number_of_mixed_images_is_the_floor(ratio, batch_size, expected):
    for mode in tsm.SpliceMix.MODES:
        assert tsm.SpliceMix('2x2', ratio=ratio, mode=mode).plan(batch_size).num_mixed == expected


@pytest.mark.parametrize('mode', tsm.SpliceMix.MODES)
def test_fixed_keeps_the_size_of_the_batch(mode):
    images, targets = make_batch(16)
    mixer = tsm.SpliceMix(batch='fixed', mode=mode, drop_prob=0, ratio=0.5)
    seen = set()
    for _ in range(10):
        plan = mixer.plan(16)
        mixed_images, mixed_targets = mixer.apply(images, targets, plan)
        assert len(mixed_images) == len(mixed_targets) == 16
        assert plan.kept.tolist() == list(range(8, 16))
        assert torch.equal(mixed_images[:8], images[8:]) and torch.equal(mixed_targets[:8], targets[8:])
        seen |= {source for record in plan.records for source in visible_sources(record)}
    assert seen == set(range(16))  # also of the images that left
    assert len(tsm.SpliceMix(batch='fixed', ratio=3.).plan(4).kept) == 0
    assert tsm.SpliceMix(batch='fixed', ratio=3.).plan(4).num_mixed == 4


@pytest.mark.parametrize('mode', tsm.SpliceMix.MODES)
def test_exclusive_shows_no_image_twice(mode):
    images, targets = make_batch(24)
    mixer = tsm.SpliceMix(batch='exclusive', mode=mode, ratio=0.25, drop_prob=0.3)
    for _ in range(20):
        plan = mixer.plan(24)
        sources = [source for record in plan.records for source in visible_sources(record)]
        assert sorted(sources + plan.kept.tolist()) == list(range(24))
        assert len(mixer.apply(images, targets, plan)[0]) == len(plan.kept) + plan.num_mixed
        assert plan.num_mixed <= 6


@pytest.mark.parametrize('batch, loaded, ratio, regular, mixed', [
    ('append', 32, 0.25, 32, 8),
    ('exclusive', 64, 0.125, 32, 8),
    ('exclusive', 100, 0.2, 20, 20),
    ('exclusive', 160, 0.25, 0, 40),
    ('only', 160, 0.25, 0, 40),
])
def test_the_counts_of_the_papers_ways_of_batch_splice(batch, loaded, ratio, regular, mixed):
    plan = tsm.SpliceMix('2x2', ratio=ratio, drop_prob=0, batch=batch).plan(loaded)
    assert (len(plan.kept), plan.num_mixed) == (regular, mixed)


@pytest.mark.parametrize('batch', tsm.SpliceMix.BATCHES)
@pytest.mark.parametrize('mode', tsm.SpliceMix.MODES)
@pytest.mark.parametrize('ratio', [0.25, 1., 'ref'])
def test_any_batch_size_works(batch, mode, ratio):
    for size in (1, 2, 3, 5, 7):
        images, targets = make_batch(size)
        mixer = tsm.SpliceMix(batch=batch, mode=mode, ratio=ratio)
        for _ in range(8):
            plan = mixer.plan(size)
            mixed_images, mixed_targets = mixer.apply(images, targets, plan)
            assert len(mixed_images) == len(mixed_targets) == len(plan.kept) + plan.num_mixed > 0
            assert mixed_images.isfinite().all()


@pytest.mark.parametrize('mixer', [tsm.SpliceMix(ratio=0.), tsm.SpliceMix('3x3', ratio='ref', drop_prob=0)])
def test_a_batch_without_mixed_images_passes_through(mixer):
    images, targets = make_batch(8)
    plan = mixer.plan(8)
    assert plan.records == () and plan.kept.tolist() == list(range(8))
    assert mixer.apply(images, targets, plan)[0] is images


def test_batches_are_mixed_with_the_given_probability():
    mixer = tsm.SpliceMix('2x2', prob=0.3)
    mixed = sum(bool(mixer.plan(8).records) for _ in range(2000))
    assert abs(mixed / 2000 - 0.3) < 0.04


def test_the_mixer_counts_the_steps_from_set_step_on():
    def values(plan):
        return plan.kept.tolist(), [(str(r.grid), r.sources.tolist(), r.dropped.tolist()) for r in plan.records]

    first, second, resumed = (tsm.SpliceMix(seed=1, rank=0) for _ in range(3))
    second.plan(5)
    first.set_step(3, 7), second.set_step(3, 7)
    assert values(first.plan(32)) == values(second.plan(32))
    assert first.state_dict() == {'epoch': 3, 'step': 8}
    resumed.load_state_dict(first.state_dict())
    assert values(resumed.plan(32)) == values(first.plan(32))


@pytest.mark.parametrize('kwargs', [{'ratio': 'ref'}, {'batch': 'exclusive', 'ratio': 1.}])
def test_elem_mode_fills_up_with_the_grids_that_fit(kwargs):
    mixer = tsm.SpliceMix('1x2,3x3', mode='elem', drop_prob=0, **kwargs)
    for size in (8, 16, 17):
        for _ in range(20):
            plan = mixer.plan(size)
            sources = [source for record in plan.records for source in visible_sources(record)]
            assert len(set(sources)) == len(sources) >= size - 1  # all but one that no grid of two can hold


def test_the_classes_of_mixed_images_are_the_union_of_integer_classes():
    classes = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6])
    mixer = tsm.SpliceMix('2x2', num_classes=7, drop_prob=0)
    plan = mixer.plan(8)
    _, targets = mixer.apply(make_batch(8)[0], classes, plan)
    assert torch.equal(targets[:8], F.one_hot(classes, 7).float())
    for row, sources in zip(targets[8:], plan.records[0].sources):
        assert set(row.nonzero().flatten().tolist()) == set(classes[sources].tolist())


def test_the_repr_lists_the_settings():
    assert repr(tsm.SpliceMix('2x3-2', ratio='ref')) == (
        "SpliceMix('2x3-2', ratio='ref', drop_prob=0.3, prob=1.0, mode='batch', batch='append', num_classes=None, "
        'fill=0.0, seed=0, rank=None)')


# --- bad input ---


@pytest.mark.parametrize('name, values, message', [
    ('grids', ['2x'], 'Expected grids'),
    ('grids', [[2], []], 'Expected at least one grid'),
    ('ratio', [-0.1, math.nan, math.inf, '0.5', None], 'Expected ratio'),
    ('prob', [1.1, -0.1, math.nan, None], 'Expected prob '),
    ('drop_prob', [1.1, -0.1], 'Expected drop_prob'),
    ('fill', ['abc', math.nan], 'Expected fill'),
    ('num_classes', [0], 'Expected num_classes'),
    ('mode', ['pair'], 'Expected mode'),
    ('batch', ['replace'], 'Expected batch'),
])
def test_invalid_settings_are_refused(name, values, message):
    for value in values:
        with raises_error(message):
            tsm.SpliceMix(**{name: value})


IMAGES, TARGETS = make_batch(4)


@pytest.mark.parametrize('images, targets, message', [
    (IMAGES[0], TARGETS, r'Expected images of shape \(B, C, H, W\)'),
    (IMAGES[None], TARGETS[:1], r'Expected images of shape \(B, C, H, W\)'),
    (IMAGES.int(), TARGETS, 'floating point type or uint8'),
    (IMAGES, TARGETS[:3], '3 targets for 4 images'),
    (IMAGES, TARGETS.to('meta'), 'on one device'),
    (IMAGES, torch.tensor([0, 1, 2, 0]), 'num_classes'),
    (IMAGES, torch.tensor([0., 1., 0., 1.]), r'Expected targets of shape \(B, classes\)'),
    (IMAGES, TARGETS * 2 + 1, r'Expected targets in \[0, 1\]'),
    (IMAGES, TARGETS - 0.5, 'but got -0.5'),
    (IMAGES, TARGETS / 0, 'but got (nan|inf)'),
    (IMAGES[:, :, :1], TARGETS, 'a pixel for each cell'),
])
@pytest.mark.parametrize('entry', ['mixer', 'splice'])
def test_bad_batches_are_refused(images, targets, message, entry):
    if entry == 'splice' and message == 'num_classes':
        message = r'\(B, classes\)'  # only the mixer takes integer classes
    record = tsm.sample_record(4, tsm.Grid(2, 2), 1, generator=rng())
    with raises_error(message):
        if entry == 'mixer':
            tsm.SpliceMix('2x2').apply(images, targets, tsm.MixPlan(torch.arange(4), (record,)))
        else:
            tsm.splice(images, targets, record)


@pytest.mark.parametrize('num_classes, targets, message', [
    (80, TARGETS, 'Expected targets of 80 classes, but got 5'),
    (5, torch.tensor([0, 1, 2, 5]), 'Expected integer targets from 0 to 4, but got 0 to 5'),
    (5, torch.tensor([0, -1, 2, 3]), 'Expected integer targets from 0 to 4, but got -1 to 3')])
def test_targets_of_other_classes_are_refused(num_classes, targets, message):
    with raises_error(message):
        tsm.SpliceMix('2x2', num_classes=num_classes)(IMAGES, targets)


def test_grids_may_be_given_one_by_one():
    expected = tsm.parse_grids('1x2,2x2-1')
    for grids in (['1x2', '2x2-1'], expected, [expected[0], '2x2-1']):
        assert tsm.SpliceMix(grids).grids == expected
    assert tsm.SpliceMix(expected[0]).grids == expected[:1]


def test_a_plan_for_another_batch_is_refused():
    mixer = tsm.SpliceMix('2x2', drop_prob=0, ratio=1.)
    for size in (8, 3):
        with raises_error(f'Expected a plan for 4 images, but got one for {size}'):
            mixer.apply(IMAGES, TARGETS, mixer.plan(size))
    with raises_error('Expected sources among the 4 images'):
        tsm.splice(IMAGES, TARGETS, mixer.plan(8).records[0])
    for kept in ([0, 4], [-1, 0]):
        with raises_error('Expected a plan for 4 images, but got one that keeps'):
            mixer.apply(IMAGES, TARGETS, tsm.MixPlan(torch.tensor(kept)))


@pytest.mark.parametrize('kept', [[1, 2], [3, 2, 1, 0], []])
@pytest.mark.parametrize('mixed', [0, 1])
def test_the_images_that_a_plan_keeps_are_kept_in_its_order(kept, mixed):
    records = (tsm.sample_record(4, tsm.Grid(2, 2), 1),) * mixed
    plan = tsm.MixPlan(torch.tensor(kept, dtype=torch.int64), records)
    images, targets = tsm.SpliceMix('2x2').apply(IMAGES, TARGETS, plan)
    assert len(images) == len(targets) == len(kept) + mixed
    assert torch.equal(images[:len(kept)], IMAGES[kept]) and torch.equal(targets[:len(kept)], TARGETS[kept])


@pytest.mark.parametrize('out', [torch.empty(2, 3, 12, 12), torch.empty(1, 3, 12, 12, dtype=torch.float64)])
def test_an_output_that_does_not_fit_is_refused(out):
    record = tsm.sample_record(4, tsm.Grid(2, 2), 1)
    with raises_error('Expected out of shape'):
        tsm.splice(IMAGES, TARGETS, record, out=out)


@pytest.mark.parametrize('fill, dtype', [((1., 2.), torch.float32), (256, torch.uint8), ((0, 0, -1), torch.uint8)])
def test_a_fill_that_does_not_fit_is_refused(fill, dtype):
    images, targets = make_batch(4, dtype=dtype)
    with raises_error('Expected fill'):
        tsm.SpliceMix('2x2-1', fill=fill, ratio=1.)(images, targets)
