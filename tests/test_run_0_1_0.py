""" A run that version 0.1.0 saved in the middle of an epoch

data/run-0.1.0 is the folder of a run on `make_images(num_train=24)` after batch 3 of its second epoch; expected.json
holds what 0.1.0 itself arrived at: rows of the summary, sum and norm of each weight, norms of the optimizer's state.
"""
import json
import shutil
from pathlib import Path

import pytest
import torch

import timm_splicemix as tsm
from timm_splicemix.run.read import read_checkpoint
from timm_splicemix.train import main

from .runs import make_images, summary

FOLDER = Path(__file__).parent / 'data' / 'run-0.1.0'
CHECKPOINT = FOLDER / 'recovery-1-3.pth.tar'


def test_it_resumes_and_arrives_at_the_same_weights_and_metrics(tmp_path, caplog):
    data = make_images(tmp_path / 'images', num_train=24)
    folder = tmp_path / 'run'
    shutil.copytree(FOLDER, folder)
    caplog.set_level('INFO')
    main(['--resume', str(folder), '--data-dir', str(data)])
    assert f'Resuming {folder / CHECKPOINT.name} at epoch 1, batch 3.' in caplog.text
    expected = json.loads((FOLDER / 'expected.json').read_text())
    rows = summary(folder)
    assert [row['epoch'] for row in rows] == ['0', '1', '2']
    for row, other in zip(rows[1:], expected['summary'], strict=True):
        for name, value in other.items():
            tolerance = {'abs': 5} if name.endswith('mAP') else {'rel': 1e-3}  # 9 images: mAP changes in steps
            assert float(row[name]) == pytest.approx(value, **tolerance), name
    state = read_checkpoint(folder / 'last.pth.tar')
    for key in ('state_dict', 'state_dict_ema'):
        found = {name: [value.sum().item(), value.norm().item()] for name, value in state[key].items()}
        assert found.keys() == expected[key].keys()
        for name, values in found.items():
            assert values == pytest.approx(expected[key][name], rel=1e-3, abs=1e-3), (key, name)
    moments = [part['exp_avg'].norm().item() for part in state['optimizer']['state'].values()]
    assert moments == pytest.approx(expected['exp_avg'], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize('use_ema, key', [(True, 'state_dict_ema'), (False, 'state_dict')])
def test_its_checkpoint_loads(use_ema, key):
    model, info = tsm.load_checkpoint(CHECKPOINT, use_ema=use_ema)
    saved = torch.load(CHECKPOINT, weights_only=True)[key]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert (info.model_name, info.epoch, info.class_names) == ('test_vit', 0, ('red', 'green', 'blue'))
    assert info.data_config['input_size'] == (3, 64, 64)
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
