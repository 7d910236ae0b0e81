""" Checkpoints, images and runs of validate.py that several test files share """
import csv
import json
import logging

import numpy as np
import pytest
import torch
from PIL import Image

import timm_splicemix as tsm
from timm_splicemix import draw
from timm_splicemix.results import Scores
from timm_splicemix.run import evaluation
from timm_splicemix.run.checkpoint import RunSaver
from timm_splicemix.run.read import CheckpointInfo
from timm_splicemix.validate import main

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
    channels = kwargs['in_chans']
    config = {**DATA_CONFIG, 'input_size': (channels, size, size), **dict.fromkeys(('mean', 'std'), (0.5,) * channels)}
    info = CheckpointInfo(model_name, kwargs, config, tuple(class_names))
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


def logits_of(place, use_ema=None, split='val', size=32, flip=False):
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


@pytest.fixture
def score(place, tmp_path):
    """Validate with some flags, and read the scores."""
    numbers = iter(range(100))

    def scores_of(*flags):
        folder = tmp_path / f'score{next(numbers)}'
        validate(place, folder, *flags)
        return Scores.load(folder / 'scores.npz')

    return scores_of


def close(scores, expected):
    return torch.allclose(scores, expected, rtol=1e-3, atol=1e-3)


def write_folders(root):
    """A folder for each class; returns it and the class of each image."""
    generator = np.random.default_rng(0)
    classes = []
    for index, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for number in range(3):
            pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f'{number}.png')
            classes.append(index)
    return root, classes


class Seen:
    """What was evaluated last: the model, its images and its step."""

    def __init__(self, model, loader, meter, step, *_):
        self.model, self.loader, self.meter, self.step = model, loader, meter, step

    @property
    def images(self):
        return torch.cat([images for images, _ in self.loader])

    def output(self):
        with torch.inference_mode(), self.step.autocast():
            images, _ = self.step.to_device(*next(iter(self.loader)))
            return self.model(images)


@pytest.fixture
def look(place, tmp_path, monkeypatch):
    """Validate with some flags, and see what was evaluated."""
    seen, evaluate = [], evaluation.evaluate

    def evaluate_and_keep(*args):
        seen.append(Seen(*args))
        return evaluate(*args)

    def look_at(*flags):
        validate(place, tmp_path / f'look{len(seen)}', *flags)
        return seen[-1]

    monkeypatch.setattr(evaluation, 'evaluate', evaluate_and_keep)
    return look_at
