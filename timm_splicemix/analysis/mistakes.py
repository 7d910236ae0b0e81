""" Mistakes of evaluated models with pictures: the most confident false positives and false negatives of each class """
import base64
import contextlib
import io
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Optional, Sequence

import torch
from PIL import Image, ImageOps
from tqdm import tqdm

from ..data import decode_image
from ..errors import UsageError
from ..files import open_regular, os_error_reason
from ..metrics import PRESETS
from ..results import RESULTS, Result, Scores

FALSE_POSITIVE, FALSE_NEGATIVE, RANDOM = range(3)  # kinds of cards, in the order of `KINDS`
KINDS = ('fp', 'fn', 'random')  # as in the address of the page
MAX_LABELS = 12  # of an image that are right or missed, and of those that are wrong or unknown
_SEED = 0  # of the random sample
_CLASSES_AT_ONCE = 64
_TRIED = 20  # files by which the folder of the images is found


@dataclass(frozen=True)
class Limits:
    """ How many mistakes and pictures a page has.

    Args:
        per_class: False positives, and false negatives, of each class and result.
        sample: Random images of each result.
        pictures: Different images of the whole page.
        size: Largest width and height of a thumbnail in pixels.
    """
    per_class: int = 6
    sample: int = 24
    pictures: int = 1000
    size: int = 160


@dataclass(frozen=True)
class Mistakes:
    """A block of the page: notes, sentences about missing pictures, and the data that its script shows."""
    notes: list[str]
    problems: list[str]
    data: dict[str, Any]


class Candidate(NamedTuple):
    """An image to show: number of its result, its row in the scores, and the mistake unless it is a random image."""
    result: int
    row: int
    kind: int
    index: int = -1  # of the class
    probability: Optional[float] = None
    confidence: float = -math.inf  # mistakes are sorted by it


class Evaluated:
    """ Predictions of a result at its own thresholds.

    Args:
        result: An evaluation with scores.
        folders: Folders that may contain its images.
    """

    def __init__(self, result: Result, folders: Sequence[Path] = ()):
        scores: Scores = result.scores
        content = result.content
        self.name = result.name
        self.folders = folders
        self.class_names = scores.class_names
        self.files = scores.filenames or tuple(f'image {index}' for index in range(len(scores.targets)))
        self.has_files = bool(scores.filenames) and content.get('image_folder', '') is not None
        self.tuned_on = content.get('thresholds_tuned_on')
        self.thresholds = _read_thresholds(result, len(self.class_names))
        self.strict = content.get('preset') in PRESETS and PRESETS[content['preset']].strict
        self.targets = scores.targets
        self.scores = scores.scores
        limits = self.thresholds.logit().to(scores.scores.dtype)  # compared as the metrics do
        self.predicted = scores.scores > limits if self.strict else scores.scores >= limits

    def wrong(self, kind: int) -> torch.Tensor:
        """(N, classes) whether a prediction is a mistake of a kind; an unknown label (-1) never is."""
        if kind == FALSE_POSITIVE:
            return self.predicted & (self.targets == 0)
        return ~self.predicted & (self.targets == 1)

    def confidence(self, kind: int, classes: slice) -> torch.Tensor:
        """(N, some classes) distance of the probability from the threshold, 1 at a probability of 1 or 0."""
        thresholds = self.thresholds[classes]
        distance = self.scores[:, classes].double().sigmoid() - thresholds
        if kind == FALSE_POSITIVE:
            return distance / (1 - thresholds).clamp(min=1e-9)
        return -distance / thresholds.clamp(min=1e-9)

    def probability(self, row: int, index: int) -> float:
        return round(float(self.scores[row, index].double().sigmoid()), 4)

    def labels(self, row: int) -> list[Any]:
        """Return a list of [class, probability, label, predicted], the most probable first, and how many are left out.

        Classes are shown that are labelled or predicted, at most `MAX_LABELS` of each.
        """
        order = self.scores[row].argsort(descending=True, stable=True).tolist()
        labels, predicted = self.targets[row].tolist(), self.predicted[row].tolist()
        labelled = [index for index in order if labels[index] == 1]
        others = [index for index in order if predicted[index] and labels[index] != 1]
        kept = {*labelled[:MAX_LABELS], *others[:MAX_LABELS]}
        entries = [
            [index, self.probability(row, index), labels[index], int(predicted[index])]
            for index in order if index in kept]
        return [entries, len(labelled) + len(others) - len(kept)]

    def rule(self) -> str:
        """Say from which probability a class counts as predicted."""
        more = 'above' if self.strict else 'of at least'
        if len(set(self.thresholds.tolist())) == 1:
            return f'a probability {more} {self.thresholds[0]:g}'
        origin = f', tuned on {self.tuned_on}' if self.tuned_on else ''
        return f'a probability {more} the threshold of its class{origin}'


def _read_thresholds(result: Result, num_classes: int) -> torch.Tensor:
    threshold = result.content.get('threshold', 0.5)
    values = threshold if isinstance(threshold, list) else [threshold] * num_classes
    if len(values) != num_classes or not all(isinstance(value, (int, float)) and 0 <= value <= 1 for value in values):
        raise UsageError(
            f"Expected 'threshold' in {result.folder / RESULTS} to be a probability, or one for each of the "
            f'{num_classes} classes, but got {threshold!r:.100}.')
    return torch.tensor(values, dtype=torch.float64)


def find_candidates(evaluated: Sequence[Evaluated], limits: Limits) -> Iterator[Candidate]:
    """Yield random images, then mistakes: the most confident one of every class first, then the second of each, ..."""
    for number, one in enumerate(evaluated):
        generator = torch.Generator().manual_seed(_SEED)  # results of the same images get the same sample
        rows = torch.randperm(len(one.targets), generator=generator)[:limits.sample]
        yield from (Candidate(number, row, RANDOM) for row in sorted(rows.tolist()))
    ranks: list[list[Candidate]] = [[] for _ in range(limits.per_class)]
    for number, one in enumerate(evaluated):
        for kind in (FALSE_POSITIVE, FALSE_NEGATIVE):
            wrong = one.wrong(kind)
            for start in range(0, wrong.shape[1], _CLASSES_AT_ONCE):
                part = slice(start, start + _CLASSES_AT_ONCE)
                values = one.confidence(kind, part).masked_fill(~wrong[:, part], -math.inf)
                best = values.topk(min(limits.per_class, len(values)), dim=0)
                for rank, (confidences, rows) in enumerate(zip(best.values.tolist(), best.indices.tolist())):
                    ranks[rank] += [
                        Candidate(number, row, kind, index, one.probability(row, index), value)
                        for index, (value, row) in enumerate(zip(confidences, rows), start) if value > -math.inf]
    for rank in ranks:
        yield from sorted(rank, key=lambda candidate: -candidate.confidence)


def find_folder(folders: Sequence[Path], files: Sequence[str]) -> Optional[Path]:
    """Return the folder, among `folders` and their sub-folders, that has most of the first files; None if none has."""
    tried = files[:_TRIED]
    best, most = None, 0
    for folder in folders:
        for place in (folder, *_sub_folders(folder)):
            number = sum((place / file).is_file() for file in tried)
            if number > most:
                best, most = place, number
        if most:  # earlier folders are preferred
            break
    return best


def _sub_folders(folder: Path, depth: int = 2) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        inner = sorted(Path(entry.path) for entry in entries if entry.is_dir())
        return inner + [place for path in inner if depth > 1 for place in _sub_folders(path, depth - 1)]
    return []


def make_thumbnail(path: Path, size: int) -> bytes:
    """Read an image as the model gets it (EXIF rotation, 8 bits, RGB), as a small JPEG; raises OSError."""
    with open_regular(path) as file:
        content = file.read()
    image = None
    # PIL raises many types for damaged files, of which decode_image gives the reason.
    with contextlib.suppress(Exception), Image.open(io.BytesIO(content)) as opened:
        if opened.format == 'JPEG' and opened.mode in ('RGB', 'L'):
            opened.draft('RGB', (2 * size, 2 * size))  # decodes large photos at a fraction of their size
            image = ImageOps.exif_transpose(opened).convert('RGB')
    try:
        image = image or decode_image(content, 'pil', 'RGB')
    except ValueError as error:
        raise OSError(str(error)) from error
    image.thumbnail((size, size), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, 'JPEG', quality=80, optimize=True)
    return buffer.getvalue()


class _Pictures:
    """The images of the page, each once, also if several results have it."""

    def __init__(self, limit: int):
        self.limit = limit
        self.numbers: dict[Any, int] = {}
        self.paths: list[Optional[Path]] = []
        self.names: list[str] = []

    def add(self, folder: Optional[Path], name: str, result: int) -> Optional[int]:
        """Return the number of an image, None if the page is full."""
        path = None if folder is None else folder / name
        key = (result, name) if path is None else os.path.abspath(path)
        if key not in self.numbers:
            if len(self.paths) == self.limit:
                return None
            self.numbers[key] = len(self.paths)
            self.paths.append(path)
            self.names.append(name)
        return self.numbers[key]

    def read(self, size: int) -> tuple[list[Optional[str]], list[str]]:
        """Return base64 thumbnails, None for images that cannot be read, and the reasons why not."""
        def read(path: Optional[Path]) -> tuple[Optional[str], str]:
            if path is None:
                return None, ''
            try:
                return base64.b64encode(make_thumbnail(path, size)).decode(), ''
            except OSError as error:
                return None, f'{path}: {os_error_reason(path, error)}'

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            found = list(tqdm(
                pool.map(read, self.paths), 'Thumbnails', len(self.paths), unit='image', leave=False, disable=None))
        return [thumbnail for thumbnail, _ in found], [reason for _, reason in found if reason]


def collect_mistakes(evaluated: Sequence[Evaluated], limits: Limits) -> Mistakes:
    """ Choose the mistakes and read their pictures.

    Args:
        evaluated: Results of the page, at least one.
        limits: How many mistakes and pictures to show.
    """
    folders = [find_folder(one.folders, one.files) if one.has_files else None for one in evaluated]
    pictures = _Pictures(limits.pictures)
    chosen, views, left_out = [], {}, 0
    for candidate in find_candidates(evaluated, limits):
        number, row = candidate.result, candidate.row
        picture = pictures.add(folders[number], evaluated[number].files[row], number)
        if picture is None:
            left_out += 1
        else:
            chosen.append((candidate, picture, views.setdefault((number, row), len(views))))
    chosen.sort(key=lambda card: -card[0].confidence)
    thumbnails, reasons = pictures.read(limits.size)
    notes = _notes(evaluated, limits, left_out)
    notes += [f'Pictures: {folder}' for folder in dict.fromkeys(filter(None, folders))]
    return Mistakes(notes, list(_picture_problems(evaluated, folders, reasons, len(thumbnails))), {
        'results': [{
            'name': one.name, 'classes': one.class_names, 'images': len(one.targets),
            'thresholds': [round(value, 4) for value in one.thresholds.tolist()],
            'wrong': [one.wrong(kind).sum(dim=0).tolist() for kind in (FALSE_POSITIVE, FALSE_NEGATIVE)],
        } for one in evaluated],
        'files': pictures.names, 'thumbnails': thumbnails,
        'views': [evaluated[number].labels(row) for number, row in views],
        'cards': [
            [candidate.result, picture, view, KINDS[candidate.kind], candidate.index, candidate.probability]
            for candidate, picture, view in chosen]})


def _notes(evaluated: Sequence[Evaluated], limits: Limits, left_out: int) -> list[str]:
    parts = []
    if limits.per_class:
        parts.append(
            f'For each class, the {limits.per_class} most confident false positives (predicted, but labelled as '
            'absent) and false negatives (labelled as present, but not predicted). The most confident mistakes are '
            'often wrong labels. Unknown labels are neither.')
    if limits.sample:
        most = max(len(one.targets) for one in evaluated)
        number = f'All {most:,}' if most <= limits.sample else f'{limits.sample:,} random'
        parts.append(f'{number} images show what predictions look like in general.')
    notes = [' '.join(parts)]
    rules = {one.name: one.rule() for one in evaluated}
    for rule in dict.fromkeys(rules.values()):
        names = [name for name, other in rules.items() if other == rule]
        notes.append(f'{", ".join(names)}: a class is predicted at {rule}.')
    if left_out:
        notes.append(
            f'{left_out:,} less confident mistakes are left out, because the page has at most {limits.pictures:,} '
            'different pictures (--max-pictures).')
    return notes


def _picture_problems(
        evaluated: Sequence[Evaluated],
        folders: Sequence[Optional[Path]],
        reasons: Sequence[str],
        number: int,
) -> Iterator[str]:
    """Say which of a number of pictures are missing."""
    for one, place in zip(evaluated, folders):
        if place is None and not one.has_files:
            yield f'No pictures of {one.name}: its images are not files of their own.'
        elif place is None:
            where = f', such as {one.files[0]}, in {" or ".join(map(str, one.folders))}' if one.folders else ''
            yield (
                f'No pictures of {one.name}: its images were not found as files{where}. If they were moved, give their '
                'folder by --images.')
    if reasons:
        yield f'{len(reasons):,} of {number:,} pictures cannot be read, such as {reasons[0]}.'
