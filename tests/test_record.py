""" Grids and records """
from collections import Counter

import pytest
import torch

import timm_splicemix as tsm
from tests.helpers import raises_error, rng, visible_sources


def test_grids_are_read_from_their_grammar():
    assert tsm.parse_grids('1x2,2x2@0.5,2x3-2') == (tsm.Grid(1, 2), tsm.Grid(2, 2, weight=0.5), tsm.Grid(2, 3, drop=2))
    assert tsm.parse_grids(' 2x2 , 3x3-0@2 ') == (tsm.Grid(2, 2), tsm.Grid(3, 3, drop=0, weight=2.))


@pytest.mark.parametrize('text', [
    '1x2', '2x2@0.5', '2x3-2', '3x3-0', '2x3-1@0.25', '10x1@1e-05', '2x2@123456', '2x2@.5e3',
    '2x2@0.30000000000000004'])
def test_a_grid_as_text_gives_the_grammar_back(text):
    grid, = tsm.parse_grids(text)
    assert tsm.parse_grids(str(grid)) == (grid,)
    assert grid.cells == grid.rows * grid.cols


@pytest.mark.parametrize('text', [
    '2x', '0x2', '2x0', 'axb', '2x2-4', '2x2-5', '', ',', '2x2,', '-1x2', '2x2-', '2x2@', '2x2@0', '2x2@-1', '2x2@inf',
    '2x2@nan', '2*2', '2x2x2', '2.0x2', '1x1-1'])
def test_bad_grids_are_refused(text):
    with raises_error('Expected'):
        tsm.parse_grids(text)


@pytest.mark.parametrize('grid', tsm.parse_grids('1x1,1x2,2x2,2x3,3x3'))
@pytest.mark.parametrize('batch_size', [9, 10, 16, 17])
def test_no_image_repeats_inside_a_mixed_image(grid, batch_size):
    for seed in range(20):
        record = tsm.sample_record(batch_size, grid, 3 * batch_size, min(1, grid.cells - 1), generator=rng(seed))
        assert all(len(set(row)) == grid.cells for row in record.sources.tolist())


@pytest.mark.parametrize('batch_size', [1, 2, 3, 5, 8, 32])
@pytest.mark.parametrize('grid', tsm.parse_grids('1x2,2x2,2x3'))
@pytest.mark.parametrize('num_dropped', [0, 1])
def test_images_in_sight_are_used_up_before_any_repeats(batch_size, grid, num_dropped):
    for seed in range(10):
        for num_mixed in (1, 2, 5, 13):
            record = tsm.sample_record(batch_size, grid, num_mixed, num_dropped, generator=rng(seed))
            uses = Counter(visible_sources(record))
            counts = [uses[image] for image in range(batch_size)]
            assert max(counts) - min(counts) <= 1


def test_dropped_cells_have_images_of_their_own_while_there_are_enough():
    record = tsm.sample_record(16, tsm.Grid(2, 2), 4, num_dropped=2, generator=rng())
    assert sorted(record.sources.flatten().tolist()) == list(range(16))
    assert record.dropped.sum(dim=1).tolist() == [2, 2, 2, 2]


def test_every_place_is_dropped_equally_often():
    record = tsm.sample_record(8, tsm.Grid(2, 3), 6000, num_dropped=2, generator=rng())
    assert (record.dropped.float().mean(dim=0) - 2 / 6).abs().max() < 0.03


def test_every_image_is_equally_likely_in_every_cell():
    record = tsm.sample_record(8, tsm.Grid(2, 2), 8000, generator=rng())
    for cell in range(4):
        assert (torch.bincount(record.sources[:, cell], minlength=8) / 8000 - 1 / 8).abs().max() < 0.02


@pytest.mark.parametrize('kwargs, message', [
    ({'batch_size': 0, 'num_mixed': 1}, 'at least one image'),
    ({'batch_size': 4, 'num_mixed': -1}, 'num_mixed'),
    ({'batch_size': 4, 'num_mixed': 1, 'num_dropped': 4}, 'num_dropped'),
    ({'batch_size': 4, 'num_mixed': 1, 'num_dropped': -1}, 'num_dropped'),
])
def test_invalid_records_are_refused(kwargs, message):
    with raises_error(message):
        tsm.sample_record(grid=tsm.Grid(2, 2), **kwargs)


def test_a_record_of_the_wrong_shape_is_refused():
    with raises_error('shape'):
        tsm.SpliceRecord(tsm.Grid(2, 2), torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.bool))


@pytest.mark.parametrize('sizes', [(2., 2), (2, '2'), (2, 2, 1.)])
def test_sizes_of_a_grid_must_be_integers(sizes):
    with raises_error('to be an integer'):
        tsm.Grid(*sizes)
