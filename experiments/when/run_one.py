""" Train one run of the study, or resume it, and score it

    python experiments/when/run_one.py shapes-12x12-400-plain-seed0-lr0.004 --data DIR --output DIR [--weights DIR]

The folder of the run gets result.json when everything is done: losses and mAP of the last epoch, the learning curve,
and the mAP of bootstrap samples of the validation images, from which report.py makes intervals.
"""
import argparse
import csv
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np
import timm
import torch
from lists import make_lists
from plan import Run, find_run

import timm_splicemix
from timm_splicemix import average_precision
from timm_splicemix.train import main as train
from timm_splicemix.validate import main as validate

RESULT = 'result.json'
SECONDS = 'seconds.txt'  # core time of each start of the run
NUM_SAMPLES = 300
SMOKE_FLAGS = ('--train-batches-per-epoch', '2', '--epochs', '2', '--val-interval', '2')


def train_run(run: Run, lists: dict[str, Path], args: argparse.Namespace) -> None:
    """ Train a run to its end.

    Args:
        run: The run.
        lists: Lists of its images.
        args: Flags of this script.
    """
    folder = args.output / run.name
    rows = read_summary(folder)
    if rows and int(rows[-1]['epoch']) == run.setting.epochs - 1:
        return
    flags = [
        *run.flags(), '--dataset', 'csv', '--data-dir', args.data, '--train-ann', lists['train'],
        '--val-ann', lists['val'], '--output', args.output, '--experiment', run.name, '--checkpoint-hist', 1,
        '--workers', 0, '--log-interval', 1000]
    if run.setting.recipe.weights:
        flags += ['--pretrained', '--pretrained-path', args.weights / run.setting.recipe.weights]
    if any(folder.glob('*.pth.tar')):
        flags += ['--resume', folder]
    train([str(flag) for flag in (*flags, *(SMOKE_FLAGS if args.smoke else ()))])


def read_summary(folder: Path) -> list[dict[str, str]]:
    """Rows of summary.csv, one for each finished epoch."""
    file = folder / 'summary.csv'
    if not file.is_file():
        return []
    with open(file, newline='', encoding='utf-8') as stream:
        return list(csv.DictReader(stream))


def score_run(run: Run, lists: dict[str, Path], args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """ Score the last checkpoint of a run by validate.py, at full and at half size.

    Args:
        run: The run.
        lists: Lists of its images.
        args: Flags of this script.

    Returns:
        mAP and loss on each list, and the mAP of bootstrap samples.
    """
    folder = args.output / run.name
    half = run.setting.size // 2
    metrics, samples = {}, {}
    for name, file in lists.items():
        output = folder / 'scores' / name
        sizes = [] if name == 'train' else ['--eval-sizes', half]
        validate([str(flag) for flag in (
            '--dataset', 'csv', '--data-dir', args.data, '--val-ann', file, '--split', 'val',
            '--checkpoint', folder / 'last.pth.tar', '--decoder', 'torchvision', '--channels-last',
            '--batch-size', 32, '--workers', 0, '--output', output, *sizes)])
        places = {name: output} if name == 'train' else {name: output, f'{name}_half': output / f'size-{half}'}
        for place, path in places.items():
            found = json.loads((path / 'results.json').read_text(encoding='utf-8'))['metrics']
            metrics[place] = {'mAP': round(found['mAP'], 4), 'loss': round(found['loss'], 6)}
            if name != 'train' and not run.is_search:
                samples[place] = bootstrap(path / 'scores.npz')
    return metrics, samples


def bootstrap(file: Path) -> list[int]:
    """ mAP of samples of the images, drawn with replacement, in hundredths of a percent.

    Samples are the same for all runs that are scored on as many images.

    Args:
        file: Scores that validate.py wrote.
    """
    with np.load(file, allow_pickle=False) as arrays:
        scores, targets = (torch.from_numpy(arrays[name]) for name in ('scores', 'targets'))
        if 'indices' in arrays:
            order = torch.from_numpy(arrays['indices']).argsort()
            scores, targets = scores[order], targets[order]
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(NUM_SAMPLES):
        rows = torch.randint(len(scores), (len(scores),), generator=generator)
        values.append(round(10000 * float(average_precision(scores[rows], targets[rows]).nanmean())))
    return values


def curve(rows: Sequence[dict[str, str]]) -> dict[str, list[Optional[float]]]:
    """ The learning curve of a run.

    Args:
        rows: Rows of summary.csv.

    Returns:
        Values after each epoch; those of the validation are None in epochs without one.
    """
    names = {
        'train_loss': 'train_task_loss', 'consistency_loss': 'train_consistency_loss', 'val_loss': 'eval_loss',
        'val_mAP': 'eval_mAP'}
    return {
        name: [round(float(row[column]), 5) if row[column] else None for row in rows]
        for name, column in names.items() if column in rows[0]}


def code_version() -> str:
    """Commit of the code under study, with a mark if files are changed; its version number outside of a repository."""
    folder = Path(timm_splicemix.__file__).parent
    result = subprocess.run(
        ['git', '-C', str(folder), 'describe', '--always', '--dirty', '--abbrev=12'], capture_output=True, text=True)
    return result.stdout.strip() or timm_splicemix.__version__


def write_result(run: Run, args: argparse.Namespace) -> None:
    """ Train and score a run, and write result.json.

    Args:
        run: The run.
        args: Flags of this script.
    """
    folder = args.output / run.name
    lists, notes = make_lists(run, args.data)
    train_run(run, lists, args)
    metrics, samples = score_run(run, lists, args)
    seconds = [float(line) for line in (folder / SECONDS).read_text().split()] if (folder / SECONDS).is_file() else []
    result = {
        'name': run.name, 'setting': run.setting.name, 'images': run.images, 'arm': run.arm, 'seed': run.seed,
        'lr': run.lr, 'metrics': metrics, 'curve': curve(read_summary(folder)),
        'core_seconds': round(sum(seconds) + time.process_time()), 'lists': notes, 'flags': ' '.join(run.flags()),
        'weights': run.setting.recipe.weights, 'code': code_version(), 'torch': torch.__version__,
        'timm': timm.__version__, 'samples': samples}
    temporary = folder / f'.{RESULT}'
    temporary.write_text(json.dumps(result) + '\n', encoding='utf-8')
    os.replace(temporary, folder / RESULT)


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('name', help='name of the run')
    parser.add_argument('--data', type=Path, required=True, metavar='DIR', help='folder of the data, see lists.py')
    parser.add_argument('--output', type=Path, required=True, metavar='DIR', help='folder of all runs')
    parser.add_argument('--weights', type=Path, default=Path(), metavar='DIR', help='folder of the pretrained weights')
    parser.add_argument('--smoke', action='store_true', help='two epochs of two batches, to check that everything runs')
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    run = find_run(args.name)
    folder = args.output / run.name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_result(run, args)
    finally:
        with open(folder / SECONDS, 'a', encoding='utf-8') as file:
            file.write(f'{time.process_time():.1f}\n')


if __name__ == '__main__':
    main()
