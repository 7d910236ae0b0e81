""" Label files in the folder of a data set """
from pathlib import Path
from typing import Sequence, Union

from ...errors import UsageError
from ..splits import TRAIN, VALIDATION, is_training_split, split_names

# Names of files in the folder of the images that they list: those of Roboflow and of Hugging Face's image folders
_BESIDE_IMAGES = ('_annotations.coco.json', '_classes.csv', 'metadata.csv', 'metadata.jsonl')

WORKBOOKS = ('.xlsx', '.xls', '.xlsm', '.ods')
SAVE_AS_CSV = "Save it as a CSV file; Excel calls that 'CSV UTF-8'."


def find_beside_images(root: Path, split: str, suffixes: Sequence[str]) -> list[Path]:
    """Label files beside the images of a split, such as train/_classes.csv."""
    files = [root / name / file for name in split_names(split) for file in _BESIDE_IMAGES if file.endswith(suffixes)]
    return [file for file in files if file.is_file()]


def image_folder(root: Union[str, Path], file: Union[str, Path]) -> Path:
    """Folder that the images in a label file are relative to: that of the file if its name says so, or else root."""
    return Path(file).parent if Path(file).name in _BESIDE_IMAGES else Path(root)


def find_label_file(root: Union[str, Path], split: str, suffixes: tuple[str, ...]) -> tuple[Path, bool]:
    """ Find the file of a split.

    It is the split's own (train.csv), or the one beside its images (train/_classes.csv), or the one of all splits: the
    only file in root, or labels.csv, or annotations.csv.

    Args:
        root: Folder of the data set; the folder annotations in it is searched too.
        split: Name of the split, or one of its synonyms.
        suffixes: Suffixes of the files in the order of preference.

    Returns:
        The file, and whether it is the one of all splits.
    """
    root = Path(root)
    if not root.is_dir():
        raise UsageError(f'The folder of the data set (--data-dir) does not exist: {root.absolute()}.')
    there = [path for folder in (root, root / 'annotations') if folder.is_dir() for path in sorted(folder.iterdir())]
    files: dict[str, Path] = {}
    for file in there:
        if file.suffix.lower() in suffixes and not file.name.startswith('.'):
            files.setdefault(file.name.lower(), file)
    own = [f'{name}{suffix}' for name in split_names(split.lower()) for suffix in suffixes]
    found = [files[name] for name in own if name in files] + find_beside_images(root, split, suffixes)
    if found:
        return found[0], False
    shared = [files[name] for stem in ('labels', 'annotations') for suffix in suffixes
              if (name := f'{stem}{suffix}') in files]
    if len(files) == 1:
        shared = [file for file in files.values() if file.stem.lower() not in (*TRAIN, *VALIDATION, 'test')]
    if not shared:
        listed = ', '.join(file.name for file in files.values()) or f"no {' or '.join(suffixes)} file"
        way_out = 'Set --train-ann and --val-ann to the files of labels.'
        book = next((file.name for file in there if file.suffix.lower() in WORKBOOKS), None)
        if '.csv' in suffixes and not files and book is not None:
            listed, way_out = f'the workbook {book}', SAVE_AS_CSV
        elif not is_training_split(split):
            way_out = (
                'Set --val-ann to the file of its labels, or let --val-fraction 0.2 validate on a part of the training '
                'images.')
        wanted = f'{split}{suffixes[0]} or one file of all splits in {root.absolute()}'
        raise UsageError(f'Expected {wanted}, but got {listed}. {way_out}')
    return shared[0], True
