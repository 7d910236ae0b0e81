""" validate.py from its flags to its files """
# ruff: noqa: F811 - fixtures that are imported are arguments too
import csv
import json
import math
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score

import timm_splicemix as tsm
from tests.evaluations import (
    CLASSES,
    arguments,
    labels_of,
    logits_of,
    place,  # noqa: F401 - used by pytest, as the other fixtures
    plots,  # noqa: F401
    quiet,  # noqa: F401
    refusal,
    validate,
    write_checkpoint,
    write_data,
)
from tests.helpers import raises_error
from timm_splicemix.results import Scores
from timm_splicemix.run.evaluation import match_classes
from timm_splicemix.run.load import load_model
from timm_splicemix.run.predictor import FlipAverage
from timm_splicemix.run.read import CheckpointInfo
from timm_splicemix.validate import main


def test_the_files_say_what_the_model_says(place, tmp_path, plots):
    result = validate(place, tmp_path / 'out')
    logits, labels = logits_of(place), labels_of(place)
    expected = [average_precision_score(labels[:, i], logits[:, i].numpy()) for i in range(3)]
    scores = Scores.load(tmp_path / 'out' / 'scores.npz')
    torch.testing.assert_close(scores.scores, logits, rtol=1e-3, atol=1e-4)
    assert scores.targets.tolist() == labels.tolist() and scores.class_names == CLASSES
    assert scores.filenames == tuple(f'val_{i:02d}.png' for i in range(11))
    assert scores.indices.tolist() == list(range(11))
    assert result['metrics']['mAP'] == pytest.approx(100 * np.mean(expected))
    assert (result['model'], result['preset'], result['input_size']) == ('test_resnet', 'paper', [3, 32, 32])
    assert (result['num_images'], result['num_classes'], result['num_labels']) == (11, 3, labels.sum())
    assert (result['epoch'], result['threshold'], result['split']) == (3, 0.5, 'validation')
    assert 'harmonic mean of CP and CR' in result['definitions']
    with open(tmp_path / 'out' / 'results.csv') as file:
        row, = csv.DictReader(file)
    assert float(row['mAP']) == result['metrics']['mAP'] and row['input_size'] == '3x32x32'
    with open(tmp_path / 'out' / 'per_class_ap.csv') as file:
        rows = list(csv.DictReader(file))
    assert {row['class']: float(row['AP']) for row in rows} == pytest.approx(
        {name: 100 * value for name, value in zip(CLASSES, expected)})
    assert [float(row['AP']) for row in rows] == sorted((float(row['AP']) for row in rows), reverse=True)
    assert {row['class']: int(row['positives']) for row in rows} == dict(zip(CLASSES, labels.sum(axis=0)))
    assert {file.name for file in (tmp_path / 'out').iterdir()} == {
        'results.json', 'results.csv', 'per_class_ap.csv', 'per_class_ap.png', 'scores.npz', 'environment.yaml'}


def test_flips_that_are_almost_sure_stay_apart():
    model = FlipAverage(torch.nn.Flatten())
    logits = model(torch.tensor([[[[40., 42.]]], [[[-60., -80.]]]]))
    high, low = -math.log((math.exp(-40) + math.exp(-42)) / 2), math.log((math.exp(-60) + math.exp(-80)) / 2)
    torch.testing.assert_close(logits, torch.tensor([[high, high], [low, low]]))
    single = FlipAverage(torch.nn.Flatten(), multi_label=False)(torch.tensor([[[[1., 3.]]]]))
    torch.testing.assert_close(single.softmax(dim=1), torch.tensor([[0.5, 0.5]]))


def test_sizes_are_fed_as_they_are(place, tmp_path, plots):
    result = validate(place, tmp_path, '--eval-sizes', 32, 24, 24, 48)
    assert [(row['size'], row['trained']) for row in result['sizes']] == [(48, False), (32, True), (24, False)]
    for size in (24, 48):
        scores = Scores.load(tmp_path / f'size-{size}' / 'scores.npz').scores
        torch.testing.assert_close(scores, logits_of(place, size=size), rtol=1e-3, atol=1e-4)
        inner = json.loads((tmp_path / f'size-{size}' / 'results.json').read_text())
        row = next(row for row in result['sizes'] if row['size'] == size)
        assert inner['input_size'] == [3, size, size] and inner['metrics']['mAP'] == row['mAP']
    with open(tmp_path / 'per_class_ap.csv') as file:
        mean = np.mean([float(row['AP']) for row in csv.DictReader(file)])
    assert mean == pytest.approx(result['metrics']['mAP'])  # of its own size, not of the last one
    assert (tmp_path / 'sizes.png').is_file() and len((tmp_path / 'sizes.csv').read_text().splitlines()) == 4


def test_a_transformer_is_evaluated_at_other_sizes_too(place, tmp_path):
    write_checkpoint(tmp_path / 'vit', 'test_vit', img_size=32)
    main([
        '--dataset', 'csv', '--data-dir', str(place / 'data'), '--checkpoint', str(tmp_path / 'vit' / 'last.pth.tar'),
        '-j', '0', '--eval-sizes', '64', '--output', str(tmp_path / 'out')])
    model, _ = tsm.load_checkpoint(tmp_path / 'vit' / 'last.pth.tar')
    model.set_input_size(img_size=(64, 64))
    image = Image.open(place / 'data' / 'val_00.png').resize((64, 64), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255).sub(0.5).div(0.5)
    scores = Scores.load(tmp_path / 'out' / 'size-64' / 'scores.npz').scores
    with torch.inference_mode():
        torch.testing.assert_close(scores[:1], model(pixels[None]), rtol=1e-3, atol=1e-3)


def test_flags_win_over_the_checkpoint(place, tmp_path):
    result = validate(
        place, tmp_path, '--img-size', 48, '--crop-pct', 0.9, '--crop-mode', 'center', '--interpolation', 'bicubic',
        '--mean', 0.4, '--std', 0.2, '--gp', 'avg', '--metrics', 'asl', '--decoder', 'torchvision',
        '--no-prefetcher', '--results-file', tmp_path / 'more.json', '--results-format', 'json', '--channels-last',
        '--crop-border-pixels', 2)
    assert (result['input_size'], result['crop_pct'], result['crop_mode']) == ([3, 48, 48], 0.9, 'center')
    assert (result['interpolation'], result['threshold']) == ('bicubic', 0.8)
    assert json.loads((tmp_path / 'more.json').read_text()) == result
    model, info = load_model(
        place / 'run' / 'model_best.pth.tar', global_pool='avg', img_size=48, data_config={'mean': [0.4]})
    assert info.data_config['mean'] == (0.4, 0.4, 0.4) and not tsm.models.is_max_pooled(model)


def test_other_precisions_and_compilers_give_nearly_the_same(place, tmp_path):
    expected = logits_of(place)
    for number, flags in enumerate((['--amp'], ['--model-dtype', 'bfloat16'], ['--torchscript'], ['--reparam'])):
        validate(place, tmp_path / str(number), *flags)
        scores = Scores.load(tmp_path / str(number) / 'scores.npz').scores
        torch.testing.assert_close(scores, expected, rtol=0.1, atol=0.15)


@pytest.mark.slow
@pytest.mark.parametrize('flags', [['--torchcompile', 'eager'], ['--aot-autograd']])
def test_a_compiled_model_gives_the_same(place, tmp_path, flags):
    validate(place, tmp_path, *flags)
    torch.testing.assert_close(
        Scores.load(tmp_path / 'scores.npz').scores, logits_of(place), rtol=1e-3, atol=1e-3)


def test_without_a_folder_nothing_is_written_over(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        main(arguments(place))
    folders = {path.name for path in (tmp_path / 'output' / 'validate').iterdir()}
    assert folders == {'run-model_best-validation', 'run-model_best-validation-2'}


def test_a_split_that_lacks_a_class_has_the_classes_of_the_checkpoint(place, tmp_path, caplog):
    data = write_data(tmp_path / 'data')
    (data / 'labels.csv').write_text('image,labels,split\nval_00.png,dog,val\nval_01.png,bird,val\n')
    result = validate(place, tmp_path / 'out', '--data-dir', data)
    assert result['num_classes'] == 3 and result['classes_without_positives'] == ['cat']
    assert 'cat' in caplog.text


@pytest.mark.slow
def test_two_processes_give_the_digits_of_one(run, place, tmp_path, plots):
    flags = ['--eval-sizes', '24', '--thresholds', 'tune', '--tune-split', 'test', '--tta', 'flip']
    write_checkpoint(tmp_path / 'run')
    flags += ['--checkpoint', str(tmp_path / 'run' / 'last.pth.tar')]
    one = validate(place, tmp_path / 'one', *flags)
    done = run(
        sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', '--standalone', 'validate.py',
        *arguments(place, *flags), '--output', tmp_path / 'two')
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / 'two' / 'results.json').read_text())
    assert two['num_images'] == 11  # which two do not divide
    for name, value in one['metrics'].items():
        assert two['metrics'][name] == pytest.approx(value, rel=1e-5 if name == 'loss' else 1e-12)
    a, b = (Scores.load(tmp_path / name / 'scores.npz') for name in ('one', 'two'))
    torch.testing.assert_close(a.scores, b.scores)
    assert a.filenames == b.filenames and torch.equal(a.targets, b.targets)
    assert sorted(path.name for path in (tmp_path / 'one').iterdir()) == sorted(
        path.name for path in (tmp_path / 'two').iterdir())
    assert (done.stdout + done.stderr).count('Results   ') == 1  # only one process speaks


@pytest.mark.parametrize('flags, message', [
    (['--thresholds', 'tune'], '--tune-split with --thresholds tune'),
    (['--thresholds', 'tune', '--tune-split', 'validation'], 'other images'),
    (['--thresholds', 'tune', '--tune-split', 'val'], '11 images of both'),
    (['--tune-split', 'test'], '--thresholds tune with --tune-split'),
    (['--thresholds', '1.5'], 'a probability from 0 to 1'),
    (['--thresholds', 'nowhere.json'], 'No such file'),
    (['--model', 'resnet18'], '--model test_resnet'),
    (['--num-classes', '7'], '--num-classes 3'),
    (['--pretrained'], '--checkpoint or --pretrained'),
    (['--crop-mode', 'round'], '--crop-mode'),
    (['--interpolation', 'best'], '--interpolation'),
    (['--mean', '0.1', '0.2'], '--mean with 1 or 3 values'),
    (['--std', '0'], '--std: Expected a finite number above 0'),
    (['--crop-pct', '2'], '--crop-pct'),
    (['--batch-size', '0'], '--batch-size: Expected a whole number of at least 1'),
    (['--eval-sizes', '0'], '--eval-sizes: Expected a whole number of at least 1'),
    (['--eval-sizes', '24', '--img-size', '48'], '--eval-sizes without'),
    (['--device', 'cuda'], 'a GPU'),
    (['--results-format', 'json'], '--results-file with --results-format'),
    (['--torchcompile-mode', 'default'], '--torchcompile with'),
    (['--fuser', 'te'], '--torchscript with --fuser'),
    (['--amp', '--model-dtype', 'bfloat16'], 'but got both'),
    (['--metrics-avg', 'macro'], 'CP, CR, CF1'),
    (['--test-pool'], 'average pooling'),
    (['--train-ann', 'labels.csv'], '--val-ann'),
    (['--valid-labels', 'nowhere.txt'], '--valid-labels'),
    (['--compare', 'a', 'b'], '--compare alone'),
    (['--split', 'holiday'], 'holiday'),
    (['--checkpoint', 'nowhere.pth'], 'which is not a file'),
    (['--data-dir', 'nowhere'], 'does not exist: nowhere'),
])
@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_bad_flags_are_one_line(place, capsys, tmp_path, flags, message):
    line = refusal(capsys, [*arguments(place, *flags), '--output', tmp_path / 'out'])
    assert message in line
    assert not (tmp_path / 'out').exists()


def test_nothing_to_do_is_said(capsys, place):
    assert '--export or --compare' in refusal(capsys, ['--checkpoint', place / 'run' / 'last.pth.tar'])
    assert 'a checkpoint, or --model' in refusal(capsys, ['--dataset', 'csv', '--data-dir', place / 'data'])
    write = ['--dataset', 'csv', '--data-dir', place / 'data', '--checkpoint', place / 'data' / 'labels.csv']
    assert 'is not a checkpoint' in refusal(capsys, write)


def test_another_number_of_classes_says_which_file_knows_better(place, capsys, tmp_path):
    data = write_data(tmp_path / 'data', classes=('ant', 'bee', 'cow', 'yak'))
    (tmp_path / 'classes.txt').write_text('ant\nbee\ncow\nyak\n')
    line = refusal(capsys, arguments(place, '--data-dir', data, '--class-map', tmp_path / 'classes.txt'))
    assert '3 in model_best.pth.tar and 4 in csv' in line and '--valid-labels' in line
    unnamed = CheckpointInfo('resnet18')
    with raises_error(r'3 in old.pth and 2 in csv \(old.pth without class names\)'):
        match_classes(unnamed, 3, ['a', 'b'], 2, 'old.pth', 'csv')
    with raises_error("such as 'b', but got 'c'"):
        match_classes(CheckpointInfo('resnet18', class_names=('a', 'b')), 2, ['a', 'c'], 2, 'new.pth', 'csv')
    assert match_classes(unnamed, 2, ['a', 'b'], 2, 'old.pth', 'csv') is None


def test_no_images_are_an_error(place, capsys, tmp_path):
    data = write_data(tmp_path / 'data', number=2)
    (data / 'labels.csv').write_text('image,bird,cat,dog\n')
    assert 'labels.csv' in refusal(capsys, arguments(place, '--data-dir', data))


def test_scores_that_are_no_numbers_name_the_image(place, capsys, tmp_path):
    path = write_checkpoint(tmp_path / 'run')
    state = torch.load(path, weights_only=True)
    state['state_dict']['fc.bias'][1] = math.nan
    torch.save(state, path)
    line = refusal(capsys, arguments(place, '--checkpoint', path, '--output', tmp_path / 'out'))
    assert 'NaN for val_00.png' in line


def test_an_image_that_can_not_be_read_is_named(place, capsys, tmp_path):
    data = write_data(tmp_path / 'data')
    (data / 'val_03.png').write_bytes(b'nothing')
    assert 'val_03.png' in refusal(capsys, arguments(place, '--data-dir', data, '--output', tmp_path / 'out'))
