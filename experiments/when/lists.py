""" Which images a run is trained and scored on, as CSV files with a column for each class (1, 0, or -1 for unknown)

shapes: the training images are the first N of the 2,000 that the generator draws with the run's seed. All runs are
scored on val and val_unbiased of generator seed 0. The search has training and validation images of its own seed.

VOC 2007: the training images are the first N of a permutation of split train, drawn with the run's seed. All runs are
scored on split val. The search trains on the first 600 images of its own permutation and is scored on the next 1,000.
"""
import csv
import hashlib
import os
from pathlib import Path
from typing import Any, Optional, Sequence

import torch
from plan import SEARCH_SEED, Run

from timm_splicemix import create_dataset

SEARCH_VAL_IMAGES = 1000  # of VOC


def make_lists(run: Run, root: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """ Write the lists of images of a run.

    Args:
        run: The run.
        root: Folder of the data: shapes is generated here, and VOC 2007 must be in `voc`, with `VOCdevkit` in it.

    Returns:
        File of each list (train, val, and val_unbiased of shapes), and the number of images and the hash of each.
    """
    make = _shapes_lists if run.setting.recipe.data == 'shapes' else _voc_lists
    files = make(run, root)
    return files, {name: _describe(file) for name, file in files.items()}


def _shapes_lists(run: Run, root: Path) -> dict[str, Path]:
    val_seed = SEARCH_SEED if run.is_search else 0
    train = {'name': 'shapes', 'root': root / f'shapes-{run.seed}', 'seed': run.seed, 'split': 'train'}
    val = {'name': 'shapes', 'root': root / f'shapes-{val_seed}', 'seed': val_seed}
    return {
        'train': _write(root, f'shapes-train-{run.images}-seed{run.seed}', range(run.images), **train),
        'val': _write(root, f'shapes-val-seed{val_seed}', split='val', **val),
        'val_unbiased': _write(root, f'shapes-val_unbiased-seed{val_seed}', split='val_unbiased', **val),
    }


def _voc_lists(run: Run, root: Path) -> dict[str, Path]:
    voc = {'name': 'voc/2007', 'root': root / 'voc'}
    number = len(create_dataset(**voc, split='train-only'))
    order = torch.randperm(number, generator=torch.Generator().manual_seed(run.seed)).tolist()
    train = _write(root, f'voc-train-{run.images}-seed{run.seed}', order[:run.images], split='train-only', **voc)
    if run.is_search:
        rows = order[run.images:run.images + SEARCH_VAL_IMAGES]
        return {'train': train, 'val': _write(
            root, f'voc-val-seed{SEARCH_SEED}', rows, split='train-only', is_training=False, **voc)}
    return {'train': train, 'val': _write(root, 'voc-val', split='val', **voc)}


def _write(data: Path, stem: str, rows: Optional[Sequence[int]] = None, **kwargs: Any) -> Path:
    """ Write some images of a data set to a CSV file, unless the file is there.

    Args:
        data: Folder of all data, which the names of images are relative to.
        stem: Name of the file without its extension.
        rows: Indices of the images, None for all.
        **kwargs: Arguments of `create_dataset`.
    """
    file = data / 'lists' / f'{stem}.csv'
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    reader = create_dataset(**kwargs).reader
    temporary = file.with_name(f'.{file.name}.{os.getpid()}')
    with open(temporary, 'w', newline='', encoding='utf-8') as stream:
        writer = csv.writer(stream)
        writer.writerow(['image', *reader.class_names])
        for row in range(len(reader)) if rows is None else rows:
            writer.writerow([os.path.relpath(reader.paths[row], data), *reader.targets[row].tolist()])
    os.replace(temporary, file)
    return file


def _describe(file: Path) -> str:
    content = file.read_bytes()
    return f'{len(content.splitlines()) - 1} images, sha256 {hashlib.sha256(content).hexdigest()[:12]}'
