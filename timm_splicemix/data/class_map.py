""" Names of classes from a file (--class-map) """
import os
from pathlib import Path
from typing import Iterable, Optional, Sequence, Union

from timm.data.readers.class_map import load_class_map

from ..errors import UsageError
from ..files import read_text


class ClassNames(list):
    """ Names of classes that know where they come from.

    Args:
        names: The names.
        file: The file, None if the names come from elsewhere.
        source: What set them, for errors.
    """

    def __init__(self, names: Iterable[str], file: Optional[Path] = None, source: str = '--class-map'):
        super().__init__(names)
        self.file = file
        self.source = source if file is None else f'{source} {file}'


def source_of(class_names: Sequence[str]) -> str:
    """What set classes, such as a flag and its file, for errors."""
    return getattr(class_names, 'source', '--class-map')


def read_class_map(class_map: Union[str, dict[str, int]], root: Union[str, Path, None] = None) -> ClassNames:
    """ Read the names of classes.

    Args:
        class_map: A file with one class per line, or one that timm reads; or a dict of the index of each class.
        root: Folder of the data set. A relative path is searched there first, then in the current folder.
    """
    file = None if isinstance(class_map, dict) else _find(class_map, root)
    source = 'the class map' if file is None else f'{file} (--class-map)'
    if file is not None:
        try:
            class_map = _read_lines(file, source) if file.suffix.lower() == '.txt' else load_class_map(str(file))
        except Exception as error:  # a damaged .pkl can raise anything; timm's unpickler runs no code
            reason = str(error).rstrip('.') or type(error).__name__
            raise UsageError(f'Cannot read the classes from {source}: {reason}.') from error
    if not all(isinstance(name, str) and name and type(index) is int for name, index in class_map.items()):
        raise UsageError(f'Expected a class in each line of {source}, or a dict of classes and indices.')
    names = sorted(class_map, key=class_map.get)
    if not names or [class_map[name] for name in names] != list(range(len(names))):
        got = 'others' if names else 'nothing'
        raise UsageError(f'Expected classes with the indices 0, 1, 2, ... in {source}, but got {got}.')
    return ClassNames(names, file)


def _find(class_map: Union[str, Path], root: Union[str, Path, None]) -> Path:
    folders = [Path.cwd()] if root is None else [Path(root).absolute(), Path.cwd()]
    places = list(dict.fromkeys(folder / class_map for folder in folders))
    file = next((place for place in places if os.path.isfile(place)), None)  # no pipes
    if file is None:
        where = '' if os.path.isabs(class_map) else f" in {' or '.join(str(place.parent) for place in places)}"
        raise UsageError(f'Cannot read the classes from {class_map} (--class-map): there is no such file{where}.')
    return file


def _read_lines(file: Path, source: str) -> dict[str, int]:
    names = [line.strip() for line in read_text(file).rstrip().splitlines()]
    double = next((name for name in names if name and names.count(name) > 1), None)
    if double is not None:
        raise UsageError(f"class '{double}' is listed more than once")
    return {name: index for index, name in enumerate(names)}
