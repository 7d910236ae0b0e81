""" One checkpoint with EMA weights: every reader takes the same ones and says which """
import json
import re

import pytest
import timm
import torch
from PIL import Image

import timm_splicemix as tsm
from timm_splicemix.analysis.cam import main as cam
from timm_splicemix.data import create_transform
from timm_splicemix.export import main as export
from timm_splicemix.files import read_csv
from timm_splicemix.predict import main as predict
from timm_splicemix.results import read_result
from timm_splicemix.run.read import read_checkpoint
from timm_splicemix.validate import main as validate

from .evaluations import plots, quiet  # noqa: F401
from .runs import summary, train

KEYS = {'ema': 'state_dict_ema', 'plain': 'state_dict'}
BOTH = pytest.mark.parametrize('flags, kind', [((), 'ema'), (('--use-ema',), 'ema'), (('--no-ema',), 'plain')])


@pytest.fixture(scope='module')
def run(data, tmp_path_factory):
    """A run with EMA, and its log."""
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr('timm_splicemix.run.trainer._logger.info', lines.append)
        folder = train(
            data, tmp_path_factory.mktemp('ema'), '--epochs', '2', '--model-ema', '--model-ema-decay', '0.7')
    return folder, lines


@pytest.fixture(scope='module')
def folder(run):
    return run[0]


def assert_weights(state_dict, folder, kind):
    expected = read_checkpoint(folder / 'model_best.pth.tar')[KEYS[kind]]
    assert state_dict.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state_dict.items())


def logits_of(folder, kind, data):
    """Logits of the first image."""
    model, info = tsm.load_checkpoint(folder, use_ema=kind == 'ema')
    config = info.data_config
    transform = create_transform(config['input_size'], **{
        name: config[name] for name in ('mean', 'std', 'interpolation', 'crop_pct', 'crop_mode')})
    with torch.inference_mode():
        return model(transform(Image.open(data / '0.png').convert('RGB'))[None])[0]


def test_the_two_kinds_of_weights_differ(folder, data):
    assert not torch.allclose(logits_of(folder, 'ema', data), logits_of(folder, 'plain', data), atol=0.01)


def test_training_says_which_metric_it_shows(run):
    folder, lines = run
    rows = summary(folder)
    for row in rows:
        shown = f'{float(row["eval_ema_mAP"]):.3f}'
        assert any(line.startswith(f'Epoch {row["epoch"]}: EMA mAP {shown}, ') for line in lines)
    best = next(row for row in rows if f'\nBest epoch {row["epoch"]}, by EMA mAP:' in lines)
    table = lines[lines.index(f'\nBest epoch {best["epoch"]}, by EMA mAP:') + 1]
    for title, column in (('plain', 'eval_mAP'), ('EMA', 'eval_ema_mAP')):
        assert re.search(rf'^{title} mAP {float(best[column]):.2f}, ', table, re.MULTILINE)
    assert float(best['eval_ema_mAP']) == max(float(row['eval_ema_mAP']) for row in rows)


@pytest.mark.parametrize('use_ema, kind', [(None, 'ema'), (True, 'ema'), (False, 'plain')])
def test_load_checkpoint(folder, use_ema, kind):
    model, info = tsm.load_checkpoint(folder, use_ema=use_ema)
    assert info.weights == kind
    assert_weights(model.state_dict(), folder, kind)


def test_timm_loads_the_same_weights(folder):
    model = timm.create_model('test_resnet', num_classes=3)
    timm.models.load_checkpoint(model, str(folder / 'model_best.pth.tar'))
    assert_weights(model.state_dict(), folder, 'ema')


@BOTH
def test_validate(data, folder, tmp_path, flags, kind, caplog):
    validate([
        '--dataset', 'csv', '--data-dir', str(data), '--checkpoint', str(folder), '-j', '0', '-b', '4', '--output',
        str(tmp_path), *flags])
    result = read_result(tmp_path).content
    assert result['weights'] == kind and result['use_ema'] == (kind == 'ema')
    best = summary(folder)[read_checkpoint(folder / 'model_best.pth.tar')['epoch']]
    column = 'eval_ema_mAP' if kind == 'ema' else 'eval_mAP'
    assert result['metrics']['mAP'] == pytest.approx(float(best[column]), abs=1e-3)
    assert f'test_resnet ({kind} weights)' in caplog.text
    assert kind in (tmp_path / 'results.csv').read_text()


@BOTH
def test_predict(data, folder, tmp_path, flags, kind, caplog):
    predict(['--checkpoint', str(folder), str(data / '0.png'), '--output', str(tmp_path / 'out.json'), *flags])
    assert f'test_resnet ({kind} weights)' in caplog.text
    (row,) = json.loads((tmp_path / 'out.json').read_text())
    expected = logits_of(folder, kind, data).sigmoid().tolist()
    assert list(row['probabilities'].values()) == pytest.approx(expected, abs=1e-4)


@BOTH
@pytest.mark.usefixtures('plots')
def test_analyses(data, folder, tmp_path, flags, kind, capsys):
    cam(['--images', str(data / '0.png'), '--classes', 'red', '--output', str(tmp_path), *flags, '--', str(folder)])
    assert f'run: {kind} weights of {folder / "model_best.pth.tar"}' in capsys.readouterr().out
    (row,) = read_csv(tmp_path / 'cam.csv')
    assert float(row['logit']) == pytest.approx(float(logits_of(folder, kind, data)[0]), abs=1e-3)


@BOTH
@pytest.mark.parametrize('format', ['safetensors', 'torchscript'])
def test_export(folder, tmp_path, flags, kind, format, caplog):
    export([str(folder), '--format', format, '--output', str(tmp_path), *flags])
    (description,) = tmp_path.glob('*.json')
    assert json.loads(description.read_text())['weights'] == kind
    assert f'({kind} weights; ' in caplog.text
    if format == 'safetensors':
        model, info = tsm.load_checkpoint(description.with_suffix(''))
        assert info.weights == kind
        assert_weights(model.state_dict(), folder, kind)
