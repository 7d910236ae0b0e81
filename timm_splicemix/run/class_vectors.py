""" Word vectors of classes: read from a file, or made by the package wordllama """
import json
import logging
import re
from codecs import BOM_UTF8
from pathlib import Path
from typing import Optional, Sequence

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ..errors import UsageError
from ..files import open_regular, read_text

_logger = logging.getLogger(__name__)
_FORMATS = '.npy, .npz, .safetensors, .txt or .vec'
_NAMES, _VECTORS = 'names', 'vectors'  # of the arrays in .npz and .safetensors files
_LISTED = 10  # words in a message
Vectors = dict[str, np.ndarray]


def read_class_vectors(path: str, class_names: Sequence[str]) -> torch.Tensor:
    """ Read a vector for each class.

    The vector of a name with several words is that of the whole name if the file has it, otherwise the mean of the
    vectors of its words. Files without names contain one row for each class, in the order of the classes.

    Args:
        path: GloVe or fastText vectors as text (.txt, .vec); .npz with the arrays 'names' and 'vectors';
            .safetensors with the tensor 'vectors' and a JSON list of names as metadata 'names'; .npz or .safetensors
            with an array for each word; .npz, .safetensors or .npy with one array, for which a text file beside the
            .npy may list the names.
        class_names: Names of the classes.

    Returns:
        (classes, dimensions) float32.
    """
    file = Path(path)
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise UsageError(f'Expected a {_FORMATS} file for --class-vectors, but got {path}.')
    if not file.is_file():
        raise UsageError(f'Expected a file for --class-vectors, but got {path}, which does not exist.')
    wanted = {word for name in class_names for words in (_whole(name), _words(name)) for word in words}
    try:
        names, vectors = reader(file, wanted)
        vectors = np.asarray(vectors, dtype=np.float32)
    except (EOFError, OSError, SafetensorError, ValueError) as error:  # UsageError is a ValueError
        if isinstance(error, UsageError):
            raise
        raise UsageError(f'Cannot read --class-vectors {path}: {error}') from error
    if names is None:
        if len(vectors) != len(class_names):
            raise UsageError(
                f'Expected a row for each of {len(class_names)} classes in --class-vectors {path}, which has no names, '
                f'but got {len(vectors)} rows.')
        found = vectors
        _logger.info(f'{path} has no names of classes: its rows are used in the order of the classes.')
    else:
        found = _match(dict(zip(names, vectors)), class_names, path)
    found = torch.from_numpy(np.array(found))
    if found.ndim != 2 or not found.shape[1] or not found.isfinite().all():
        raise UsageError(f'Expected vectors of finite numbers in --class-vectors {path}.')
    return found


def embed_class_names(class_names: Sequence[str]) -> Optional[torch.Tensor]:
    """Vectors of the package wordllama, (classes, 256); None if it is not installed."""
    try:
        import wordllama
    except ImportError:
        return None
    try:
        # Its weights and tokenizer are in its own folder, where it looks for one of them only in the cache.
        model = wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)
    except FileNotFoundError as error:
        raise UsageError(
            f'Cannot load the weights of the package wordllama: {error} Set --class-vectors instead.') from error
    return torch.from_numpy(np.array(model.embed([' '.join(_words(name)) for name in class_names]), dtype=np.float32))


def _words(name: str) -> list[str]:
    return [word for word in re.split(r'[\s_\-/,()]+', name.strip()) if word]


def _whole(name: str) -> list[str]:
    """Spellings of a whole name."""
    return list(dict.fromkeys([name, *(separator.join(_words(name)) for separator in (' ', '_', '-', ''))]))


def _find(vectors: Vectors, spellings: Sequence[str]) -> Optional[np.ndarray]:
    spellings = (*spellings, *(word.lower() for word in spellings))
    return next((vectors[word] for word in spellings if word in vectors), None)


def _match(vectors: Vectors, class_names: Sequence[str], path: str) -> list[np.ndarray]:
    lower = {word.lower(): vector for word, vector in reversed(vectors.items())}
    vectors = {**lower, **vectors}
    rows, missing, unknown = [], [], []
    for name in class_names:
        found = _find(vectors, _whole(name))
        if found is None:
            words = {word: _find(vectors, [word]) for word in _words(name)}
            known = [vector for vector in words.values() if vector is not None]
            missing += [word for word, vector in words.items() if vector is None]
            unknown += [] if known else [name]
            found = np.mean(known, axis=0) if known else None
        rows.append(found)
    if unknown:
        raise UsageError(
            f'Expected vectors of all classes in --class-vectors {path}, but got none of {_list(unknown)}. Add them to '
            'the file, or rename the classes with --class-map.')
    if missing:
        _logger.warning(f'{path} has no vectors of these words of class names, which are left out: {_list(missing)}.')
    return rows


def _list(words: Sequence[str]) -> str:
    words = list(dict.fromkeys(words))
    more = f' and {len(words) - _LISTED} more' if len(words) > _LISTED else ''
    return f'{", ".join(words[:_LISTED])}{more}'


# Readers return the names, None if the file has none, and their vectors.

def _read_text(path: Path, wanted: set[str]) -> tuple[list[str], list[np.ndarray]]:
    wanted_bytes = {word.lower().encode() for word in wanted}
    found = {}
    dimensions = None
    with open_regular(path) as file:
        for number, line in enumerate(file):
            if dimensions is None:
                line = line.removeprefix(BOM_UTF8)
                fields = line.split()
                is_header = number == 0 and len(fields) == 2 and all(field.isdigit() for field in fields)
                if is_header or not fields:  # fastText: numbers of words and dimensions
                    continue
                dimensions = len(fields) - 1
            word, *values = line.split(None, 1) or [b'']
            if word.lower() not in wanted_bytes:
                continue
            values = values[0].split() if values else []
            if len(values) == dimensions:  # some words of GloVe contain spaces
                found[word.decode('utf-8', errors='replace')] = np.array(values, dtype=np.float32)
    if not dimensions:
        raise UsageError(f"Expected lines 'word number number ...' in --class-vectors {path}, but got none.")
    return list(found), list(found.values())


def _read_npy(path: Path, wanted: set[str]) -> tuple[Optional[list[str]], np.ndarray]:
    vectors = np.load(path, allow_pickle=False)
    if vectors.ndim != 2:
        raise UsageError(
            f'Expected an array of shape (classes, dimensions) in --class-vectors {path}, but got {vectors.shape}.')
    beside = path.with_suffix('.txt')
    if not beside.is_file():
        return None, vectors
    names = read_text(beside).splitlines()
    _check_length(beside, names, vectors)
    return names, vectors


def _read_npz(path: Path, wanted: set[str]) -> tuple[Optional[list[str]], Sequence[np.ndarray]]:
    with np.load(path, allow_pickle=False) as arrays:
        names = arrays.get(_NAMES)
        return _choose(path, dict(arrays), None if names is None else names.astype(str))  # bytes, too


def _read_safetensors(path: Path, wanted: set[str]) -> tuple[Optional[list[str]], Sequence[np.ndarray]]:
    with safe_open(str(path), 'pt') as file:
        arrays = {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118
        names = (file.metadata() or {}).get(_NAMES)
    return _choose(path, arrays, None if names is None else json.loads(names))


def _choose(
        path: Path,
        arrays: Vectors,
        names: Optional[Sequence[str]],
) -> tuple[Optional[list[str]], Sequence[np.ndarray]]:
    if names is not None and _VECTORS in arrays:
        _check_length(path, names, arrays[_VECTORS])
        return [str(name) for name in names], arrays[_VECTORS]
    if arrays and all(array.ndim == 1 for array in arrays.values()):
        return list(arrays), _same_length(path, list(arrays.values()))
    if len(arrays) == 1:
        return None, next(iter(arrays.values()))
    raise UsageError(
        f"Expected '{_NAMES}' (metadata in .safetensors) and '{_VECTORS}', one array for each word, or a single array "
        f'in --class-vectors {path}, but got {_list(list(arrays)) or "none"}.')


def _check_length(path: Path, names: Sequence[str], vectors: np.ndarray) -> None:
    if len(names) != len(vectors):
        raise UsageError(f'Expected a name for each of {len(vectors)} vectors in {path}, but got {len(names)}.')


def _same_length(path: Path, vectors: list[np.ndarray]) -> list[np.ndarray]:
    lengths = {len(vector) for vector in vectors}
    if len(lengths) > 1:
        raise UsageError(f'Expected vectors of one length in --class-vectors {path}, but got {sorted(lengths)}.')
    return vectors


_READERS = {
    '.npy': _read_npy, '.npz': _read_npz, '.safetensors': _read_safetensors, '.txt': _read_text, '.vec': _read_text}
