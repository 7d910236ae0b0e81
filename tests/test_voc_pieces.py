import importlib

import pytest
import torch
from torch import nn

import timm_splicemix as tsm
from tests.conftest import REPOSITORY
from tests.helpers import make_batch


@pytest.fixture
def pieces(monkeypatch):
    """benchmarks/voc_pieces.py."""
    monkeypatch.syspath_prepend(str(REPOSITORY / 'benchmarks'))
    return importlib.import_module('voc_pieces')


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = tsm.create_model('test_efficientnet', num_classes=5, global_pool='max').eval()
    nn.init.normal_(model.get_classifier().weight, std=100.)  # one that has learnt nothing says the same of everything
    return model.requires_grad_(False)


def test_pieces_equal_plain_loops(pieces, model):
    images, targets = make_batch(6, height=64, width=64)
    found = pieces.compare_pieces(model, images, targets)
    assert set(found) == {
        'mixed images', 'labels of mixed images', 'cells of feature maps', 'consistency loss, relative'}
    assert all(value < 1e-4 for value in found.values()) and found['labels of mixed images'] == 0


def test_a_wrong_piece_is_seen(pieces, model, monkeypatch):
    images, targets = make_batch(6, height=64, width=64)
    splice, split_cells, loss = tsm.splice, tsm.split_cells, tsm.consistency_loss
    monkeypatch.setattr(tsm, 'splice', lambda *args: tuple(part.flip(0) for part in splice(*args)))
    assert pieces.compare_pieces(model, images, targets)['mixed images'] > 0.1
    monkeypatch.setattr(tsm, 'splice', splice)
    monkeypatch.setattr(tsm, 'split_cells', lambda *args: split_cells(*args).flip(0))
    assert pieces.compare_pieces(model, images, targets)['cells of feature maps'] > 1e-3
    monkeypatch.setattr(tsm, 'split_cells', split_cells)
    monkeypatch.setattr(tsm, 'consistency_loss', lambda cells, images, dropped: loss(cells, images))
    assert pieces.compare_pieces(model, images, targets)['consistency loss, relative'] > 1e-4


def test_distances_from_running_statistics_are_in_deviations_and_ratios_of_variances(pieces):
    model = nn.Sequential(nn.BatchNorm2d(2)).eval()
    model[0].running_mean.copy_(torch.tensor([1., 1.]))
    model[0].running_var.copy_(torch.tensor([4., 4.]))
    norms = pieces.NormInputs(model)
    norms.parts = {'regular': slice(0, 1), 'mixed': slice(1, 2)}
    images = torch.stack([torch.full((2, 2, 2), 1.), torch.full((2, 2, 2), 7.)])
    images[1, :, 0] += 2.  # halves of 9 and 7
    model(images)
    assert norms.distances('regular') == {'0': (0., 0.)}
    assert norms.distances('mixed') == {'0': (pytest.approx(3.5), pytest.approx(0.25))}
