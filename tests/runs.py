""" Tiny data sets and runs that tests of the commands share """
import csv
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from timm_splicemix.run.read import read_checkpoint
from timm_splicemix.run.trainer import Trainer
from timm_splicemix.train import main

from .conftest import REPOSITORY

CLASSES = ('red', 'green', 'blue')
# One process on the CPU, 0.1 million weights, a few seconds per epoch
TINY = (
    '--dataset', 'csv', '--model', 'test_resnet', '--img-size', '64', '-b', '4', '-j', '0', '--epochs', '2',
    '--warmup-epochs', '0', '--lr', '0.05', '--log-interval', '2', '--train-interpolation', 'bilinear',
    '--color-jitter', '0')


def make_images(folder: Path, num_train: int = 16, num_val: int = 9, size: int = 72) -> Path:
    """Write noise images with a stripe in the colour of each of their labels, and labels.csv."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(num_train + num_val):
        labels = (torch.rand(len(CLASSES), generator=generator) < 0.5).int()
        labels[index % len(CLASSES)] = 1
        pixels = torch.randint(0, 120, (size, size, 3), generator=generator)
        for color in labels.nonzero().flatten().tolist():
            top = int(torch.randint(size - 8, (), generator=generator))
            pixels[top:top + 8, :, color] = 255
        name = f'{index}.png'
        Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / name)
        rows.append({'image': name, 'split': 'train' if index < num_train else 'val',
                     **dict(zip(CLASSES, labels.tolist()))})
    with open(folder / 'labels.csv', 'w', newline='') as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return folder


def flags_of(data: Path, output: Path, *flags: object, name: str = 'run') -> list[str]:
    return [*TINY, *map(str, ('--data-dir', data, '--output', output, '--experiment', name, *flags))]


def train(data: Path, output: Path, *flags: object, name: str = 'run') -> Path:
    """Train in this process; returns the output folder."""
    main(flags_of(data, output, *flags, name=name))
    return output / name


def train_until(epoch: int, batch: int, data: Path, output: Path, *flags: object, name: str = 'run') -> Path:
    """Train until SIGTERM arrives in a batch of an epoch; returns the output folder."""
    before_batch = Trainer.before_batch

    def before_batch_and_signal(self: Trainer, index: int, *args: torch.Tensor) -> None:
        before_batch(self, index, *args)
        if (self.epoch, index) == (epoch, batch):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(Trainer, 'before_batch', before_batch_and_signal)
        train(data, output, *flags, name=name)
    assert stopped.value.code == 128 + signal.SIGTERM
    return output / name


def train_command(data: Path, output: Path, *flags: object, name: str = 'run') -> list[str]:
    """The command line of a training run in another process."""
    return [sys.executable, str(REPOSITORY / 'train.py'), *flags_of(data, output, *flags, name=name)]


def weights(checkpoint: Path, key: str = 'state_dict') -> dict[str, torch.Tensor]:
    return read_checkpoint(checkpoint)[key]


def assert_same_weights(left: Path, right: Path, key: str = 'state_dict') -> None:
    left, right = weights(left, key), weights(right, key)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def summary(folder: Path) -> list[dict[str, str]]:
    with open(folder / 'summary.csv', newline='') as file:
        return list(csv.DictReader(file))
