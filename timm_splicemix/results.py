""" Files and tables of an evaluation: results.json, results.csv, scores.npz, per_class_ap.csv """
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence, Union

import numpy as np
import torch

from .errors import UsageError
from .files import (
    atomic_write,
    format_table,
    read_csv,
    read_json,
    short_names,
    write_csv,
    write_json,
)

RESULTS, SCORES, CLASSES = 'results.json', 'scores.npz', 'per_class_ap.csv'
_NEEDED = {'metrics', 'preset', 'dataset', 'split', 'num_images', 'num_classes', 'model'}  # in results.json


@dataclass(frozen=True)
class Scores:
    """ Logits and targets of all images of an evaluation.

    Args:
        scores: (N, classes) float32 logits.
        targets: (N, classes) int8, 1, 0, or -1 for unknown.
        class_names: Names of the classes.
        indices: (N,) indices in the data set, None if it has none.
        filenames: File of each image, () if unknown.
    """
    scores: torch.Tensor
    targets: torch.Tensor
    class_names: tuple[str, ...]
    indices: Optional[torch.Tensor] = None
    filenames: tuple[str, ...] = ()

    def save(self, path: Union[str, Path]) -> None:
        """Write the arrays scores, targets, class_names and, if known, indices and filenames."""
        arrays = {
            'scores': self.scores.numpy(), 'targets': self.targets.numpy(), 'class_names': np.array(self.class_names)}
        if self.indices is not None:
            arrays['indices'] = self.indices.numpy()
        if self.filenames:
            arrays['filenames'] = np.array(self.filenames)
        with atomic_write(path) as temporary, open(temporary, 'wb') as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Union[str, Path]) -> 'Scores':
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
            return cls(
                torch.from_numpy(arrays['scores']), torch.from_numpy(arrays['targets']),
                tuple(arrays['class_names'].tolist()),
                torch.from_numpy(arrays['indices']) if 'indices' in arrays else None,
                tuple(arrays['filenames'].tolist()) if 'filenames' in arrays else ())
        except (OSError, KeyError, ValueError, EOFError) as error:
            raise UsageError(f'Expected scores that validate.py wrote, but got {path}: {error!r}') from error


def class_rows(scores: Scores, average_precisions: torch.Tensor) -> list[dict[str, Any]]:
    """ Create the rows of per_class_ap.csv, sorted by AP, with classes without positives last.

    Args:
        scores: Scores with the targets to count.
        average_precisions: (classes,) in percent, NaN for a class without positives.
    """
    positives, unknown = ((scores.targets == value).sum(dim=0).tolist() for value in (1, -1))
    rows = [
        {'class': name, 'AP': ap, 'positives': number, 'unknown': missing}
        for name, ap, number, missing in zip(scores.class_names, average_precisions.tolist(), positives, unknown)]
    return sorted(rows, key=lambda row: -row['AP'] if row['positives'] else 1.)


def format_classes(rows: Sequence[dict[str, Any]]) -> str:
    return format_table([{**row, 'AP': row['AP'] if row['positives'] else None} for row in rows])


def format_metrics(metrics: dict[str, float], title: str = '') -> str:
    """ Format metrics as text, multi-label ones as a table of all predictions and the top 3.

    Args:
        metrics: Metrics of a meter and the loss.
        title: Text before the first metric.
    """
    if 'mAP' not in metrics:
        return title + ', '.join(f'{name} {value:.4g}' for name, value in metrics.items())
    names = ('CP', 'CR', 'CF1', 'OP', 'OR', 'OF1')
    rows = [
        {'': title, **{name: metrics[name + suffix] for name in names}}
        for title, suffix in (('  all', ''), ('  top 3', '_3'))]
    return f'{title}mAP {metrics["mAP"]:.2f}, loss {metrics["loss"]:.4f}\n{format_table(rows)}'


def format_epoch(row: dict[str, str]) -> str:
    """Format the metrics of an epoch, a row of summary.csv, of the plain and of the EMA weights."""
    lines = []
    has_ema = any(name.startswith('eval_ema_') and value for name, value in row.items())
    for prefix, title in (('eval_', 'plain ' if has_ema else ''), ('eval_ema_', 'EMA ')):
        metrics = {
            name.removeprefix(prefix): float(value) for name, value in row.items()
            if name.startswith(prefix) and value and not (prefix == 'eval_' and name.startswith('eval_ema_'))}
        if metrics:
            lines.append(format_metrics(metrics, title))
    return '\n'.join(lines)


def flat_row(result: dict[str, Any]) -> dict[str, Any]:
    """Flatten the content of results.json to one row of a CSV file."""
    row = {}
    for name, value in result.items():
        if isinstance(value, (list, tuple)) and all(isinstance(part, (int, float)) for part in value):
            row[name] = 'x'.join(map(str, value)) if name == 'input_size' else ' '.join(map(str, value))
        elif not isinstance(value, (dict, list, tuple)):
            row[name] = value
    return {**row, **result['metrics']}


def write_result(
        result: dict[str, Any],
        folder: Path,
        scores: Optional[Scores],
        rows: Sequence[dict[str, Any]],
) -> None:
    """ Write the files of an evaluation, except for plots.

    Args:
        result: Content of results.json.
        folder: Output folder.
        scores: Scores of all images, None for single-label data.
        rows: Rows that `class_rows` returned, () for single-label data.
    """
    if scores is not None:  # results.json is the last, so that a folder with it is complete
        scores.save(folder / SCORES)
        write_csv(rows, folder / CLASSES)
    write_csv([flat_row(result)], folder / 'results.csv')
    write_json(result, folder / RESULTS)


def format_sizes(sizes: Sequence[dict[str, Any]], metric: str = 'mAP') -> str:
    """ Format the metrics at several image sizes as a table.

    Args:
        sizes: Rows of sizes.csv.
        metric: Metric whose change to the training size is shown.
    """
    names = [name for name in ('mAP', 'CF1', 'OF1', 'top1', 'top5') if name in sizes[0]]
    reference = next((row for row in sizes if row['trained']), sizes[0])
    rows = [{
        'size': f'{row["size"]} *' if row['trained'] else str(row['size']),
        **{name: row[name] for name in names}, 'change': row[metric] - reference[metric],
    } for row in sizes]
    return f'{format_table(rows, {"change": "+.2f"})}\n* training size'


@dataclass(frozen=True)
class Result:
    """ An evaluation that validate.py wrote.

    Args:
        name: Name in tables and figures.
        folder: Folder of results.json.
        content: Content of results.json.
    """
    name: str
    folder: Path
    content: dict[str, Any]

    @functools.cached_property
    def scores(self) -> Optional[Scores]:
        """Scores of all images; None without scores.npz."""
        path = self.folder / SCORES
        return Scores.load(path) if path.is_file() else None

    @functools.cached_property
    def classes(self) -> dict[str, tuple[float, int]]:
        """AP in percent, NaN without positives, and number of positives of each class; {} without per_class_ap.csv."""
        path = self.folder / CLASSES
        rows = read_csv(path, ('class', 'AP', 'positives')) if path.is_file() else []
        try:
            return {row['class']: (float(row['AP']), int(row['positives'])) for row in rows}
        except ValueError as error:
            raise UsageError(f'Expected the AP of classes in {path}, but got: {error}') from error


def read_result(path: Union[str, Path], name: str = '') -> Result:
    """ Read an evaluation.

    Args:
        path: results.json, or its folder.
        name: Name in tables and figures.
    """
    path = Path(path) / RESULTS if Path(path).is_dir() else Path(path)
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get('metrics'), dict):
        raise UsageError(f"Expected a results.json of validate.py, but got {path}, without 'metrics'.")
    return Result(name, path.parent, content)


def read_results(paths: Sequence[Union[str, Path]], names: Optional[Sequence[str]] = None) -> list[Result]:
    """ Read evaluations of the same images to compare them.

    Args:
        paths: results.json files, their folders, or folders of runs that contain one evaluation.
        names: Names in tables and figures, by default the shortest ends of the paths.
    """
    files = [_find_result(Path(path)) for path in paths]
    names = short_names([file.parent if file.name == RESULTS else file for file in files], names)
    results = [read_result(file, name) for file, name in zip(files, names)]
    for result, file in zip(results, files):
        missing = sorted(_NEEDED - set(result.content))
        if missing:
            raise UsageError(f"Expected a results.json of validate.py, but got {file}, without '{missing[0]}'.")
        _check_comparable(results[0], result, files[0], file)
    return results


def _find_result(path: Path) -> Path:
    if not path.is_dir():
        return path
    inside = sorted(path.glob(f'*/{RESULTS}'))
    if (path / RESULTS).is_file() or not (path / 'args.yaml').is_file():
        return path / RESULTS
    if len(inside) == 1:
        return inside[0]
    hint = f'name one of {", ".join(str(file.parent) for file in inside)}' if inside else (
        f'evaluate it first, with validate.py --checkpoint {path} --output {path / "val"}')
    raise UsageError(f'Expected results of validate.py, but got {path}, a run with {len(inside)} evaluations: {hint}.')


def _check_comparable(first: Result, other: Result, first_file: Path, other_file: Path) -> None:
    what = None
    for name in ('num_images', 'num_classes'):
        if first.content[name] != other.content[name]:
            what = f'{first.content[name]:,} and {other.content[name]:,} {name[4:]}'
    if what is None and first.scores is not None and other.scores is not None:
        a, b = first.scores, other.scores
        if a.class_names != b.class_names:
            what = 'other classes'
        elif a.filenames and b.filenames and a.filenames != b.filenames:
            what = 'other images, such as {} and {}'.format(
                *next(pair for pair in zip(a.filenames, b.filenames) if pair[0] != pair[1]))
        elif not torch.equal(a.targets, b.targets):
            what = 'other labels'
    if what is not None:
        names = ['{dataset} {split}'.format(**result.content).strip() for result in (first, other)]
        raise UsageError(
            f'Expected results of the same data set, but got {first_file} ({names[0]}) and {other_file} ({names[1]}), '
            f'with {what}. Evaluate both on the same images.')
    if first.content['preset'] != other.content['preset']:
        raise UsageError(
            f"Expected results of the same metrics, but got --metrics {first.content['preset']} in {first_file} and "
            f"{other.content['preset']} in {other_file}. Evaluate both with the same.")
