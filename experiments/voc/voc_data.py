""" Data of the VOC study: the folder, an archive to unpack, or a subset """
import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Callable, Optional

import torch

from timm_splicemix.data.readers.voc import VOC_CLASSES, ReaderVoc
from timm_splicemix.errors import UsageError

TAR_VARIABLE = 'TSM_VOC_TAR'


def find_data(data_dir: Optional[str], cache: Path) -> Path:
    """Folder of VOC 2007: data_dir, or else the archive named by TSM_VOC_TAR, unpacked into the cache."""
    if data_dir:
        return Path(data_dir).resolve()
    if not os.environ.get(TAR_VARIABLE):
        raise UsageError(
            f'VOC 2007 is missing: set --data-dir, or {TAR_VARIABLE} to a tar archive of VOCdevkit/VOC2007.')
    archive = Path(os.environ[TAR_VARIABLE])
    if not archive.is_file():
        raise UsageError(f'{TAR_VARIABLE}: file not found: {archive}')
    folder = cache / archive.name.split('.')[0]

    def unpack(temporary: Path) -> None:
        try:
            with tarfile.open(archive) as file:
                file.extractall(temporary, filter='data')
        except tarfile.TarError as error:
            raise UsageError(f'{TAR_VARIABLE}: {archive} is not a tar archive: {error}') from error

    make_folder(folder, unpack)
    return folder


def make_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Create and fill a folder atomically, unless it exists."""
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
            if not folder.is_dir():  # created by another process meanwhile
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_subset(data: Path, number: int, cache: Path) -> Path:
    """Folder with a split train<number> of random images, always the same ones, and the whole of val."""
    train, val = (ReaderVoc(data, '2007', split) for split in ('train', 'val'))
    if not 0 < number <= len(train):
        raise UsageError(f'Expected --subset between 1 and {len(train)}, the images of split train, but got {number}.')
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:number].sort().values.tolist()
    images = Path(train.root).resolve()
    key = hashlib.sha256('\n'.join([str(images), *(train.image_ids[row] for row in chosen)]).encode()).hexdigest()[:12]
    folder = cache / f'subset-{number}-{key}'

    def fill(temporary: Path) -> None:
        main = temporary / 'VOCdevkit' / 'VOC2007' / 'ImageSets' / 'Main'
        main.mkdir(parents=True)
        (main.parent.parent / 'JPEGImages').symlink_to(images, target_is_directory=True)
        for split, reader, rows in ((f'train{number}', train, chosen), ('val', val, range(len(val)))):
            labels = (2 * reader.targets - 1).masked_fill(reader.difficult, 0).tolist()  # the values of VOC's files
            (main / f'{split}.txt').write_text(''.join(f'{reader.image_ids[row]}\n' for row in rows))
            for column, name in enumerate(VOC_CLASSES):
                lines = [f'{reader.image_ids[row]} {labels[row][column]:2d}\n' for row in rows]
                (main / f'{name}_{split}.txt').write_text(''.join(lines))

    make_folder(folder, fill)
    return folder
