""" validate.py from its flags to its files """
import csv
import json
import logging
import math
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, precision_recall_fscore_support

import timm_splicemix as tsm
from tests.helpers import raises_error
from timm_splicemix import draw
from timm_splicemix.metrics import AveragingMeter
from timm_splicemix.results import Scores
from timm_splicemix.run.checkpoint import CheckpointInfo, RunSaver
from timm_splicemix.run.load import load_model
from timm_splicemix.run.predictor import ChosenOutputs, FlipAverage, match_classes
from timm_splicemix.validate import is_out_of_memory, main

CLASSES = ('bird', 'cat', 'dog')
DATA_CONFIG = {
    'input_size': (3, 32, 32), 'interpolation': 'bilinear', 'mean': (0.5, 0.5, 0.5), 'std': (0.5, 0.5, 0.5),
    'crop_pct': 1.0, 'crop_mode': 'squash'}


def write_checkpoint(folder, model_name='test_resnet', class_names=CLASSES, ema=False, seed=0, size=32, **kwargs):
    """A checkpoint as train.py writes it, of a model that knows nothing."""
    torch.manual_seed(seed)
    kwargs = {'in_chans': 3, 'num_classes': len(class_names), 'global_pool': 'max', **kwargs}
    model = tsm.create_model(model_name, **kwargs)
    task = tsm.SpliceMixTask(model, torch.nn.BCEWithLogitsLoss(), None, verbose=False)
    if ema:
        task.setup_ema(decay=0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    info = CheckpointInfo(model_name, kwargs, {**DATA_CONFIG, 'input_size': (3, size, size)}, tuple(class_names))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder.mkdir(parents=True, exist_ok=True)
    RunSaver(task, optimizer, folder, info, {}).save_checkpoint(3, 50.)
    return folder / 'model_best.pth.tar'


def write_data(root, number=11, classes=CLASSES, splits=('val', 'test'), seed=0):
    """Images of noise with labels, in a CSV file."""
    generator = np.random.default_rng(seed)
    root.mkdir(parents=True, exist_ok=True)
    lines = [f'image,split,{",".join(classes)}']
    for split in splits:
        labels = generator.integers(0, 2, (number, len(classes)))
        labels[0], labels[1] = 1, 0
        for index in range(number):
            name = f'{split}_{index:02d}.png'
            pixels = generator.integers(0, 256, (4, 5, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((40, 36), Image.Resampling.BILINEAR).save(root / name)
            lines.append(f'{name},{split},{",".join(map(str, labels[index]))}')
    (root / 'labels.csv').write_text('\n'.join(lines) + '\n')
    return root


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A run and a data set that the tests only read."""
    folder = tmp_path_factory.mktemp('validate')
    write_checkpoint(folder / 'run', ema=True)
    write_data(folder / 'data')
    return folder


@pytest.fixture
def plots():
    """Asks for plots, which most tests do without to be quick."""


@pytest.fixture(autouse=True)
def quiet(request, monkeypatch):
    """Each run of the command adds a handler to the log; without this, all of them would write for all later tests."""
    if 'plots' not in request.fixturenames:
        monkeypatch.setattr(draw, 'load_pyplot', lambda: None)
    handlers = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers[:] = handlers


def arguments(place, *more):
    checkpoint = place / 'run' / 'model_best.pth.tar'
    return [
        '--dataset', 'csv', '--data-dir', str(place / 'data'), '--checkpoint', str(checkpoint), '-j', '0', '-b', '4',
        *map(str, more)]


def validate(place, output, *more):
    main([*arguments(place, *more), '--output', str(output)])
    return json.loads((output / 'results.json').read_text())


def refusal(capsys, argv):
    """What a user is told: one line, and exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main([str(part) for part in argv])
    assert caught.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert 'error: ' in line, line
    return line


def logits_of(place, use_ema=False, split='val', size=32, flip=False):
    """Logits by plain PIL and torch, an image at a time."""
    model, _ = tsm.load_checkpoint(place / 'run' / 'model_best.pth.tar', use_ema=use_ema)
    rows = []
    for path in sorted((place / 'data').glob(f'{split}_*.png')):
        image = Image.open(path).convert('RGB').resize((size, size), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255).sub(0.5).div(0.5)
        with torch.inference_mode():
            rows.append(model((pixels.flip(-1) if flip else pixels)[None])[0])
    return torch.stack(rows)


def labels_of(place, split='val'):
    with open(place / 'data' / 'labels.csv') as file:
        rows = [row for row in csv.DictReader(file) if row['split'] == split]
    return np.array([[int(row[name]) for name in CLASSES] for row in rows])


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


def test_the_moving_average_is_taken_when_asked_for(place, tmp_path):
    validate(place, tmp_path, '--use-ema')
    scores = Scores.load(tmp_path / 'scores.npz').scores
    torch.testing.assert_close(scores, logits_of(place, use_ema=True), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(scores, logits_of(place), atol=1e-2)


def test_a_flipped_image_counts_half_as_a_probability(place, tmp_path):
    validate(place, tmp_path, '--tta', 'flip')
    mean = (logits_of(place).sigmoid() + logits_of(place, flip=True).sigmoid()) / 2
    torch.testing.assert_close(Scores.load(tmp_path / 'scores.npz').scores.sigmoid(), mean, rtol=1e-3, atol=1e-4)


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


def test_thresholds_are_tuned_on_a_split_of_their_own_and_used_again(place, tmp_path, caplog):
    write_checkpoint(tmp_path / 'run')
    own = tmp_path / 'run' / 'model_best.pth.tar'
    tuned = validate(place, tmp_path / 'tuned', '--checkpoint', own, '--thresholds', 'tune', '--tune-split', 'test')
    content = json.loads((tmp_path / 'run' / 'thresholds.json').read_text())
    assert (content['dataset'], content['split'], content['num_images']) == ('csv', 'test', 11)
    assert tuned['threshold'] == [entry['threshold'] for entry in content['classes']]
    assert tuned['thresholds_tuned_on'] == 'csv test'
    assert 'are overfitting' in caplog.text and 'fewer than 10 positives' in caplog.text
    file = tmp_path / 'run' / 'thresholds.json'
    again = validate(place, tmp_path / 'again', '--checkpoint', own, '--thresholds', file)
    assert again['metrics'] == tuned['metrics']
    caplog.clear()
    validate(place, tmp_path / 'same', '--checkpoint', own, '--thresholds', file, '--split', 'test')
    assert 'look better than they are' in caplog.text


def test_one_threshold_holds_for_all_classes(place, tmp_path):
    result = validate(place, tmp_path, '--thresholds', 0)
    assert result['threshold'] == 0 and result['metrics']['OR'] == 100


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
        place / 'run' / 'model_best.pth.tar', global_pool='avg', image_size=(48, 48), data_options={'mean': [0.4]})
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


def test_classes_in_another_order_are_put_in_order(place, tmp_path):
    (tmp_path / 'classes.txt').write_text('dog\nbird\ncat\n')
    first = validate(place, tmp_path / 'first')
    other = validate(place, tmp_path / 'other', '--class-map', tmp_path / 'classes.txt')
    assert other['metrics'] == pytest.approx(first['metrics'])
    a, b = (Scores.load(tmp_path / name / 'scores.npz') for name in ('first', 'other'))
    assert b.class_names == ('dog', 'bird', 'cat')
    torch.testing.assert_close(b.scores, a.scores[:, [2, 0, 1]])


def test_a_split_that_lacks_a_class_has_the_classes_of_the_checkpoint(place, tmp_path, caplog):
    data = write_data(tmp_path / 'data')
    (data / 'labels.csv').write_text('image,labels,split\nval_00.png,dog,val\nval_01.png,bird,val\n')
    result = validate(place, tmp_path / 'out', '--data-dir', data)
    assert result['num_classes'] == 3 and result['classes_without_positives'] == ['cat']
    assert 'cat' in caplog.text


def test_outputs_can_be_chosen_by_a_file(place, tmp_path):
    (tmp_path / 'valid.txt').write_text('2\n0\n')
    data = write_data(tmp_path / 'data', classes=('dog', 'bird'))
    validate(place, tmp_path / 'out', '--data-dir', data, '--valid-labels', tmp_path / 'valid.txt')
    scores = Scores.load(tmp_path / 'out' / 'scores.npz')
    (tmp_path / 'run').symlink_to(place / 'run')
    torch.testing.assert_close(scores.scores, logits_of(tmp_path)[:, [2, 0]], rtol=1e-3, atol=1e-4)
    assert scores.class_names == ('dog', 'bird')


def test_a_checkpoint_of_timm_needs_a_name_alone(place, tmp_path, capsys):
    torch.manual_seed(0)
    model = timm.create_model('test_resnet', num_classes=3)
    torch.save({'arch': 'test_resnet', 'state_dict': model.state_dict()}, tmp_path / 'timm.pth')
    torch.save(model.state_dict(), tmp_path / 'bare.pth')
    for name in ('timm', 'bare'):
        flags = ['--checkpoint', tmp_path / f'{name}.pth', '--img-size', 32]
        if name == 'bare':
            assert '--model' in refusal(capsys, arguments(place, *flags))
            flags += ['--model', 'test_resnet']
        validate(place, tmp_path / name, *flags)
    a, b = (Scores.load(tmp_path / name / 'scores.npz').scores for name in ('timm', 'bare'))
    assert torch.equal(a, b)


def test_smaller_batches_are_tried_when_memory_runs_out(place, tmp_path, monkeypatch, capsys):
    sizes = []

    def forward(self, x):
        sizes.append(len(x))
        if len(x) > 2:
            raise torch.OutOfMemoryError('CUDA out of memory')
        return self.model(x)[:, self.outputs]

    monkeypatch.setattr(ChosenOutputs, 'forward', forward)
    (tmp_path / 'classes.txt').write_text('dog\nbird\ncat\n')
    flags = ['--class-map', tmp_path / 'classes.txt']
    assert '--retry' in refusal(capsys, [*arguments(place, *flags), '--output', tmp_path])
    result = validate(place, tmp_path, *flags, '--retry')
    assert result['batch_size'] == 2 and result['num_images'] == 11 and sizes[-6:] == [2, 2, 2, 2, 2, 1]
    assert not is_out_of_memory(RuntimeError('shape mismatch'))


def test_one_label_per_image_is_scored_by_accuracy(tmp_path):
    for name in CLASSES:
        for index in range(3):
            (tmp_path / 'data' / name).mkdir(parents=True, exist_ok=True)
            Image.new('RGB', (32, 32), (40 * index, 80, 100)).save(tmp_path / 'data' / name / f'{index}.png')
    write_checkpoint(tmp_path / 'run')
    main([
        str(tmp_path / 'data'), '--checkpoint', str(tmp_path / 'run' / 'last.pth.tar'), '-j', '0',
        '--metrics-avg', 'macro', '--output', str(tmp_path / 'out'), '--split', ''])
    result = json.loads((tmp_path / 'out' / 'results.json').read_text())
    assert set(result['metrics']) == {'loss', 'top1', 'top5', 'precision_macro', 'recall_macro', 'f1_macro'}
    assert result['metrics']['top5'] == 100 and result['num_images'] == 9 and result['preset'] is None


@pytest.mark.parametrize('average', ['micro', 'macro', 'weighted'])
def test_averages_of_single_labels_are_those_of_scikit_learn(average):
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(50, 7, generator=generator), torch.randint(5, (50,), generator=generator)
    meter = AveragingMeter(torch.device('cpu'), 7, average)
    for part in range(0, 50, 20):
        meter.update(logits[part:part + 20], targets[part:part + 20])
    expected = precision_recall_fscore_support(targets, logits.argmax(dim=1), average=average, zero_division=0)
    names = [f'{name}_{average}' for name in ('precision', 'recall', 'f1')]
    assert [meter.compute()[name] for name in names] == pytest.approx([100 * value for value in expected[:3]])


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
    (['--mean', '0.1', '0.2'], '--mean with 1 number or 3'),
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
    (['--checkpoint', 'nowhere.pth'], 'which is no file'),
    (['--data-dir', 'nowhere'], 'which does not exist'),
])
@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_bad_flags_are_one_line(place, capsys, tmp_path, flags, message):
    line = refusal(capsys, [*arguments(place, *flags), '--output', tmp_path / 'out'])
    assert message in line
    assert not (tmp_path / 'out').exists()


def test_nothing_to_do_is_said(capsys, place):
    assert '--export or --compare' in refusal(capsys, ['--checkpoint', place / 'run' / 'last.pth.tar'])
    assert '--checkpoint, or --model' in refusal(capsys, ['--dataset', 'csv', '--data-dir', place / 'data'])
    write = ['--dataset', 'csv', '--data-dir', place / 'data', '--checkpoint', place / 'data' / 'labels.csv']
    assert 'not one or is not whole' in refusal(capsys, write)


def test_a_moving_average_that_is_not_there_is_refused(tmp_path):
    write_checkpoint(tmp_path)
    with raises_error('but got none in'):
        load_model(tmp_path / 'last.pth.tar', use_ema=True)


def test_another_number_of_classes_says_which_file_knows_better(place, capsys, tmp_path):
    data = write_data(tmp_path / 'data', classes=('ant', 'bee', 'cow', 'yak'))
    (tmp_path / 'classes.txt').write_text('ant\nbee\ncow\nyak\n')
    line = refusal(capsys, arguments(place, '--data-dir', data, '--class-map', tmp_path / 'classes.txt'))
    assert '3 in model_best.pth.tar and 4 in csv' in line and 'model_best.pth.tar lists its classes' in line
    unnamed = CheckpointInfo('resnet18')
    with raises_error('the data set lists its classes and knows better'):
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
