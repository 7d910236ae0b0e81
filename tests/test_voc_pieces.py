import json
from types import SimpleNamespace

import pytest
import torch
import voc_pieces as pieces
from torch import nn

import timm_splicemix as tsm
from tests.helpers import make_batch


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = tsm.create_model('test_efficientnet', num_classes=5, global_pool='max').eval()
    nn.init.normal_(model.get_classifier().weight, std=100.)  # an untrained one predicts the same for all images
    return model.requires_grad_(False)


def compare(model):
    images, targets = make_batch(8, height=48, width=48)
    return {**pieces.compare_mixing(images, targets), **pieces.compare_consistency(model, images[:6], targets[:6])}


def test_all_parts_equal_plain_loops(model):
    found = compare(model)
    assert set(found) == {
        'regular images', 'mixed images', 'labels', 'cells of feature maps', 'consistency loss, relative'}
    assert all(value < 1e-4 for value in found.values()) and found['labels'] == found['regular images'] == 0


@pytest.mark.slow
def test_a_wrong_part_is_detected(model, monkeypatch):
    apply, split_cells, loss = tsm.SpliceMix.apply, tsm.split_cells, tsm.consistency_loss
    monkeypatch.setattr(tsm.SpliceMix, 'apply', lambda *args: tuple(part.flip(0) for part in apply(*args)))
    monkeypatch.setattr(tsm, 'split_cells', lambda *args: split_cells(*args).flip(0))
    found = compare(model)
    assert min(found['mixed images'], found['regular images'], found['labels']) > 0.1
    assert found['cells of feature maps'] > 1e-3
    monkeypatch.setattr(tsm, 'split_cells', split_cells)
    monkeypatch.setattr(tsm, 'consistency_loss', lambda cells, images, dropped: loss(cells, images))
    assert compare(model)['consistency loss, relative'] > 1e-4


def test_distances_from_running_statistics():
    model = nn.Sequential(nn.BatchNorm2d(4)).eval()
    model[0].running_mean.copy_(torch.tensor([1., 1., 3., 1.]))
    model[0].running_var.copy_(torch.tensor([4., 4., 4., 1e-9]))  # the last one is dead
    norms = pieces.NormInputs(model)
    norms.parts = {'regular': slice(0, 1), 'mixed': slice(1, 2)}
    images = torch.stack([torch.full((4, 2, 2), 1.), torch.full((4, 2, 2), 7.)])
    images[1, :, 0] += 2.  # halves of 9 and 7
    model(images)
    assert norms.distances('regular') == {'0': (0., pytest.approx(0.9), 0.)}  # of 0, 0 and 1
    assert norms.distances('mixed') == {'0': (pytest.approx(3.5), pytest.approx(3.5), pytest.approx(0.25))}


def test_printed_and_written_numbers(model, monkeypatch, tmp_path, capsys):
    torch.manual_seed(1)
    batches = [make_batch(24, height=48, width=48) for _ in range(2)] + [make_batch(5, height=48, width=48)]
    info = SimpleNamespace(data_config={'input_size': (3, 48, 48)})
    monkeypatch.setattr(pieces, 'val_batches', lambda *args: iter(batches))
    monkeypatch.setattr(tsm, 'load_checkpoint', lambda path: (model, info))
    pieces.main([
        '--data-dir', 'voc', '--checkpoints', 'runs/one-seed0/last.pth.tar', 'runs/two-seed0/last.pth.tar', '--keep',
        str(tmp_path / 'pieces.json')])
    text, kept = capsys.readouterr().out, json.loads((tmp_path / 'pieces.json').read_text())
    images, targets = (torch.cat(parts) for parts in zip(*batches[:2]))  # the last one is not full
    ap = tsm.average_precision(model(images), targets)
    score, loss, number = kept['looks']['two-seed0']['regular']
    assert (score, number) == (pytest.approx(100 * float(ap.nanmean()), abs=0.01), 48)
    assert kept['looks']['one-seed0']['1x2 mixed'][2] == 24 and kept['looks']['one-seed0']['3x2 mixed'][2] == 8
    assert kept['looks']['one-seed0']['3x2 cells'][2] == 48
    assert f'| regular | 48 | {score:.2f} ({loss:.4f}) | {score:.2f} ({loss:.4f}) |' in text
    assert set(kept['norms']) == {'one-seed0', 'two-seed0'} and kept['pieces']['labels'] == 0
