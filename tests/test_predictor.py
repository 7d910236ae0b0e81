""" `Predictor` and the commands on the folder of a run, its thresholds, and checkpoints of timm """
import argparse
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.utils import CheckpointSaver

import timm_splicemix as tsm
from timm_splicemix.compare import main as compare
from timm_splicemix.export import main as export
from timm_splicemix.metrics import Thresholds, save_thresholds
from timm_splicemix.predict import main as predict
from timm_splicemix.run.export import export_model
from timm_splicemix.validate import main as validate

from .evaluations import (  # noqa: F401
    CLASSES,
    arguments,
    logits_of,
    quiet,
    refusal,
    write_checkpoint,
    write_data,
)
from .helpers import raises_error
from .runs import train


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A run with EMA weights and tuned thresholds, and images."""
    folder = tmp_path_factory.mktemp('predictor')
    write_checkpoint(folder / 'run', ema=True)
    save_thresholds(
        Thresholds((0.9, 0.2, 0.), CLASSES[::-1], 'csv', 'val', 11, weights='ema', epoch=3),
        folder / 'run' / 'thresholds.json')
    write_data(folder / 'data', number=4)
    return folder


@pytest.fixture
def files(place):
    return sorted((place / 'data').glob('val_*.png'))


def probabilities(predictions):
    return torch.tensor([list(one.probabilities.values()) for one in predictions])


def test_all_kinds_of_images_have_the_same_predictions(place, files):
    predictor = tsm.Predictor(place / 'run', batch_size=3)
    images = [Image.open(file).convert('RGB') for file in files]
    pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
    normalised = torch.stack([
        torch.from_numpy(np.array(image.resize((32, 32), Image.Resampling.BILINEAR))).permute(2, 0, 1) / 127.5 - 1
        for image in images])
    expected = logits_of(place).sigmoid()  # of the EMA weights
    for sources in (files, list(map(str, files)), images, pixels, normalised, list(normalised)):
        found = predictor.predict(sources)
        torch.testing.assert_close(probabilities(found), expected, rtol=1e-3, atol=1e-3)
        assert [one.file for one in found] == (files if sources in (files, list(map(str, files))) else [None] * 4)
    for one in (files[1], images[1], pixels[1], normalised[1]):
        prediction, = predictor.predict(one)
        assert list(prediction.probabilities.values()) == pytest.approx(expected[1].tolist(), abs=1e-3)
    assert len(predictor.predict([place / 'data', images[0]])) == 9 and predictor.predict([]) == []
    assert predictor.info.weights == 'ema' and predictor.class_names == CLASSES


def test_thresholds_of_the_run_are_inside(place, files):
    predictor = tsm.Predictor(place / 'run')
    assert predictor.thresholds == {'bird': 0., 'cat': 0.2, 'dog': 0.9}
    for one in predictor.predict(files):
        expected = {name for name, value in one.probabilities.items() if value >= predictor.thresholds[name]}
        assert set(one.labels) == expected and 'bird' in one.labels
        assert list(one.labels.values()) == sorted(one.labels.values(), reverse=True)
    assert tsm.Predictor(place / 'run', thresholds=0.3).thresholds == dict.fromkeys(CLASSES, 0.3)
    assert list(tsm.Predictor(place / 'run', top=1).predict(files)[0].labels)


def test_thresholds_of_other_weights_or_epochs_are_not_used(place, tmp_path, caplog):
    assert set(tsm.Predictor(place / 'run', use_ema=False).thresholds.values()) == {0.5}
    assert 'Ignoring the thresholds of' in caplog.text and 'for the ema weights' in caplog.text
    write_checkpoint(tmp_path)
    for thresholds, reason in (
            (Thresholds((0.1,) * 3, CLASSES, epoch=2), 'the checkpoint of epoch 2'),
            (Thresholds((0.1,) * 3, ('a', 'b', 'c')), 'other classes')):
        save_thresholds(thresholds, tmp_path / 'thresholds.json')
        caplog.clear()
        assert set(tsm.Predictor(tmp_path).thresholds.values()) == {0.5}
        assert f'which are for {reason}' in caplog.text


def test_bad_images_and_types_are_errors(place, tmp_path):
    predictor = tsm.Predictor(place / 'run')
    (tmp_path / 'bad.png').write_bytes(b'nothing')
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / 'half.jpg')
    (tmp_path / 'half.jpg').write_bytes((tmp_path / 'half.jpg').read_bytes()[:1500])
    for source, message in (
            ([noise[..., 0].copy()], r'but got ndarray. Convert arrays by PIL.Image.fromarray\(\)'),
            (noise, 'but got ndarray'), (None, 'but got NoneType'),
            ([Image.new('RGB', (9, 9)), Image.open(tmp_path / 'half.jpg')], 'Cannot read image number 1: .*truncated'),
            (tmp_path / 'bad.png', 'Cannot read image .*bad.png'), (tmp_path / 'none.png', 'does not exist'),
            ([3], 'Expected files, PIL images or tensors to predict, but got int'),
            (torch.zeros(3, 9, 9), r'normalised float tensors \(3, 32, 32\), but got torch.float32 \(3, 9, 9\)')):
        with raises_error(message):
            predictor.predict(source)


def test_an_onnx_file_predicts_as_its_checkpoint(place, files, tmp_path, caplog):
    pytest.importorskip('onnxruntime')
    export([str(place / 'run'), '--format', 'onnx', '--output', str(tmp_path)])
    caplog.set_level(logging.INFO)
    exported, own = tsm.Predictor(tmp_path / 'test_resnet.onnx'), tsm.Predictor(place / 'run')
    assert exported.thresholds == own.thresholds and exported.info.weights == 'ema'
    for one, other in zip(exported.predict(files), own.predict(files)):
        assert list(one.labels) == list(other.labels)
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-4)
    checkpoint = ['--checkpoint', str(tmp_path / 'test_resnet.onnx')]
    predict([*checkpoint, str(files[0]), '--tta', 'flip', '--output', str(tmp_path / 'out.json')])
    row, = json.loads((tmp_path / 'out.json').read_text())
    assert row['weights'] == 'ema' and set(row['probabilities']) == set(CLASSES)
    validate([*arguments(place), *checkpoint, '--output', str(tmp_path / 'results')])
    assert 'test_resnet (ema weights), 3 classes' in caplog.text  # an ONNX file does not count its parameters
    validate([*arguments(place), '--output', str(tmp_path / 'own')])
    values = [json.loads((tmp_path / name / 'results.json').read_text())['metrics'] for name in ('results', 'own')]
    assert values[0] == pytest.approx(values[1], abs=1e-3)
    with raises_error('Expected no img_size .* an exported model cannot be changed'):
        tsm.Predictor(tmp_path / 'test_resnet.onnx', img_size=64)
    (tmp_path / 'test_resnet.onnx.json').unlink()
    with raises_error('test_resnet.onnx.json does not exist'):
        tsm.Predictor(tmp_path / 'test_resnet.onnx')


def test_the_program_of_the_tutorial_predicts_as_this_package(place, tmp_path):
    pytest.importorskip('onnxruntime')
    model, info = tsm.load_checkpoint(place / 'run')
    with torch.no_grad():
        model.fc.weight.mul_(20)
    info.data_config.update(crop_mode='center', crop_pct=0.9)
    export_model(model, info, tmp_path / 'deployed' / 'test_resnet', 'onnx')
    (tmp_path / 'photos').mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera turned
    Image.fromarray(pixels).resize((93, 70)).save(tmp_path / 'photos' / '0.jpg', exif=exif)
    tutorial = Path(__file__).parents[1] / 'docs' / 'tutorial.md'
    program = re.findall(r'^```python\n(.*?)^```', tutorial.read_text(), flags=re.MULTILINE | re.DOTALL)[-1]
    printed = subprocess.run(
        [sys.executable, '-c', program], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    predictor = tsm.Predictor(tmp_path / 'deployed' / 'test_resnet.onnx')
    prediction, = predictor.predict(tmp_path / 'photos' / '0.jpg')
    found = {name: float(value) for name, value in (line.split(': ') for line in printed.splitlines())}
    assert found == pytest.approx(prediction.probabilities, abs=0.006)


def test_validate_and_predict_use_the_tuned_thresholds_and_say_so(place, files, tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO)
    run = tmp_path / 'run'
    write_checkpoint(run, ema=True)
    flags = [*arguments(place), '--checkpoint', str(run)]
    assert 'Expected --tune-split with --thresholds tune' in refusal(capsys, [*flags, '--thresholds', 'tune'])
    validate([*flags, '--split', 'test', '--thresholds', 'tune', '--output', str(tmp_path / 'tuned')])
    assert "Tuning the thresholds on 'validation', the validation split of the run" in caplog.text
    content = json.loads((run / 'thresholds.json').read_text())
    assert (content['weights'], content['epoch'], content['split']) == ('ema', 3, 'validation')
    values = {entry['name']: entry['threshold'] for entry in content['classes']}

    said = f'Using the thresholds of {run / "thresholds.json"} (tuned on csv validation, for the ema weights).'
    for override, expected in ([], [values[name] for name in CLASSES]), (['--thresholds', '0.5'], 0.5):
        caplog.clear()
        output = tmp_path / f'validate{len(override)}'
        validate([*flags, '--split', 'test', *override, '--output', str(output)])
        assert json.loads((output / 'results.json').read_text())['threshold'] == expected
        assert (f'{said} --thresholds 0.5 overrides them.' in caplog.text) == (not override)

        caplog.clear()
        predict(['--checkpoint', str(run), str(files[0]), *override, '--output', str(tmp_path / 'out.json')])
        row, = json.loads((tmp_path / 'out.json').read_text())
        assert (said in caplog.text) == (not override) and row['weights'] == 'ema'
        limits = dict.fromkeys(CLASSES, 0.5) if override else values
        assert set(row['labels']) == {name for name, value in row['probabilities'].items() if value >= limits[name]}


def test_a_checkpoint_that_timm_saved_predicts_one_class_by_softmax(tmp_path, files):
    torch.manual_seed(0)
    model = timm.create_model('test_resnet', num_classes=5, global_pool='max').eval()
    args = argparse.Namespace(
        model='test_resnet', num_classes=5, gp='max', in_chans=None, img_size=64, input_size=None, mean=None, std=None,
        crop_pct=None, interpolation='', model_kwargs={}, lr=0.1, opt_betas=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    CheckpointSaver(
        model, optimizer, args, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path)).save_checkpoint(2, metric=9.)
    loaded, info = tsm.load_checkpoint(tmp_path)
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(loaded(images), model(images))
    assert (info.multi_label, info.epoch, info.metric) == (False, 2, 9.) and info.args['lr'] == 0.1
    for one in tsm.Predictor(tmp_path).predict(files):
        assert sum(one.probabilities.values()) == pytest.approx(1) and len(one.labels) == 1
        assert max(one.probabilities, key=one.probabilities.get) in one.labels
    with raises_error('Expected a multi-label model for thresholds'):
        tsm.Predictor(tmp_path, thresholds=0.3)


def write_rgba(root, source):
    """Copy a data set as PNG files of four channels."""
    root.mkdir()
    (root / 'labels.csv').write_text((source / 'labels.csv').read_text())
    for index, file in enumerate(sorted(source.glob('*.png'))):
        image = Image.open(file).convert('RGBA')
        image.putalpha(20 * (index % 10) + 30)
        image.save(root / file.name)
    return root


def test_a_model_of_four_channels_predicts_such_files(data, tmp_path, capsys):
    root = write_rgba(tmp_path / 'data', data)
    run = train(root, tmp_path, '--in-chans', 4, '--input-img-mode', 'RGBA', '--epochs', 1)
    file = root / '0.png'
    predictor = tsm.Predictor(run)
    assert predictor.info.image_mode == 'RGBA'
    from_file, from_image = predictor.predict([file, Image.open(file)])
    assert from_file.probabilities == from_image.probabilities
    opaque = predictor.predict(Image.open(file).convert('RGB'))[0]
    assert opaque.probabilities != from_file.probabilities  # the fourth channel counts
    predict(['--checkpoint', str(run), str(file), '--output', str(tmp_path / 'out.json')])
    row, = json.loads((tmp_path / 'out.json').read_text())
    assert row['probabilities'] == pytest.approx(from_file.probabilities, abs=1e-6)
    validate(['--dataset', 'csv', '--data-dir', str(root), '--checkpoint', str(run), '-j', '0', '--output',
              str(tmp_path / 'results')])  # without --input-img-mode
    assert json.loads((tmp_path / 'results' / 'results.json').read_text())['input_size'] == [4, 64, 64]


@pytest.mark.parametrize('flag', ['--initial-checkpoint', '--pretrained-path'])
def test_training_starts_from_the_folder_of_a_run(data, tmp_path, flag):
    folder = tmp_path / 'first'
    write_checkpoint(folder, class_names=('red', 'green', 'blue'), size=64, ema=True)
    run = train(data, tmp_path, flag, folder, '--epochs', 1, '--lr', 0, '--gp', 'max')
    weights = [
        torch.load(file, weights_only=True) for file in (folder / 'model_best.pth.tar', run / 'last.pth.tar')]
    name = 'layer1.0.conv1.weight'
    assert torch.equal(weights[1]['state_dict'][name], weights[0]['state_dict_ema'][name])


def test_runs_with_an_evaluation_inside_are_compared(place, tmp_path, capsys):
    for seed, name in enumerate('ab'):
        write_checkpoint(tmp_path / name, seed=seed)
        (tmp_path / name / 'args.yaml').write_text('seed: 0\n')
        flags = ['--checkpoint', str(tmp_path / name), '--output', str(tmp_path / name / 'val')]
        if name == 'b':
            with pytest.raises(SystemExit):
                compare([str(tmp_path / 'a'), str(tmp_path / 'b')])
            assert f'evaluate it first, with validate.py --checkpoint {tmp_path / "b"}' in capsys.readouterr().err
        validate([*arguments(place), *flags])
    compare([str(tmp_path / 'a'), str(tmp_path / 'b'), '--bootstrap', '20'])
    assert 'b/val against a/val' in capsys.readouterr().out
