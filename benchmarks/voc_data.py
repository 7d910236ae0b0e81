""" Where benchmarks/voc.py finds VOC 2007, or makes a part of it """
import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Callable, Optional

import torch

from timm_splicemix.data.readers.voc import VOC_CLASSES, ReaderVoc

TAR_VARIABLE = 'TSM_VOC_TAR'


def find_data(data_dir: Optional[str], cache: Path) -> Path:
    """ Folder of VOC 2007: the one given, or the archive of TSM_VOC_TAR unpacked.

    Args:
        data_dir: The folder, None for the archive.
        cache: Folder to unpack into.
    """
    if data_dir:
        return Path(data_dir).resolve()
    if not os.environ.get(TAR_VARIABLE):
        raise ValueError(
            f'Expected VOC 2007, but got neither --data-dir nor an archive of VOCdevkit/VOC2007 by {TAR_VARIABLE}.')
    archive = Path(os.environ[TAR_VARIABLE])
    if not archive.is_file():
        raise ValueError(f'Expected an archive by {TAR_VARIABLE}, but got {archive}, which is no file.')
    folder = cache / archive.name.split('.')[0]

    def unpack(temporary: Path) -> None:
        try:
            with tarfile.open(archive) as file:
                file.extractall(temporary, filter='data')
        except tarfile.TarError as error:
            raise ValueError(f'Expected a tar archive by {TAR_VARIABLE}, but got {archive}: {error}.') from error

    make_folder(folder, unpack)
    return folder


def make_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """ Make a folder whole or not at all, if it is not there yet.

    Args:
        folder: The folder.
        fill: Fills the folder that it is given.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f'.{folder.name}.'))
    try:
        temporary.chmod(0o755)
        fill(temporary)
        try:
            os.replace(temporary, folder)
        except OSError:
            if not folder.is_dir():  # another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_subset(data: Path, number: int, cache: Path) -> Path:
    """ A view of VOC 2007 with a split train<number> of random images, always the same ones, and all of val.

    Args:
        data: Folder of VOC 2007.
        number: Number of images.
        cache: Folder to put the view into.
    """
    train, val = (ReaderVoc(data, '2007', split) for split in ('train', 'val'))
    if not 0 < number <= len(train):
        raise ValueError(f'Expected --subset of 1 to {len(train)} images, as split train has, but got {number}.')
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:number].sort().values.tolist()
    images = Path(train.root).resolve()
    key = hashlib.sha256('\n'.join([str(images), *(train.image_ids[row] for row in chosen)]).encode()).hexdigest()[:12]
    folder = cache / f'subset-{number}-{key}'

    def fill(temporary: Path) -> None:
        main = temporary / 'VOCdevkit' / 'VOC2007' / 'ImageSets' / 'Main'
        main.mkdir(parents=True)
        (main.parent.parent / 'JPEGImages').symlink_to(images, target_is_directory=True)
        for split, reader, rows in ((f'train{number}', train, chosen), ('val', val, range(len(val)))):
            labels = (2 * reader.targets - 1).masked_fill(reader.difficult, 0).tolist()  # as VOC has them
            (main / f'{split}.txt').write_text(''.join(f'{reader.image_ids[row]}\n' for row in rows))
            for column, name in enumerate(VOC_CLASSES):
                lines = [f'{reader.image_ids[row]} {labels[row][column]:2d}\n' for row in rows]
                (main / f'{name}_{split}.txt').write_text(''.join(lines))

    make_folder(folder, fill)
    return folder
