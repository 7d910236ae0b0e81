""" Files and tables of an evaluation, and the comparison of several """
import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence, Union

import numpy as np
import torch
from tqdm import tqdm

from .metrics import average_precision
from .report import load_pyplot, save_figure, written_whole

RESULTS, SCORES, CLASSES = 'results.json', 'scores.npz', 'per_class_ap.csv'
_SAMPLES_AT_ONCE = 128


@dataclass(frozen=True)
class Scores:
    """ What a model says of each image, to compute anything from.

    Args:
        scores: (N, classes) float32 logits.
        targets: (N, classes) int8, 1, 0, or -1 for unknown.
        class_names: Names of the classes.
        indices: (N,) places in the data set, None if it is streamed without.
        filenames: File of each image, () if unknown.
    """
    scores: torch.Tensor
    targets: torch.Tensor
    class_names: tuple[str, ...]
    indices: Optional[torch.Tensor] = None
    filenames: tuple[str, ...] = ()

    def save(self, path: Union[str, Path]) -> None:
        """Write arrays scores, targets, class_names, and indices and filenames where they are known."""
        arrays = {
            'scores': self.scores.numpy(), 'targets': self.targets.numpy(), 'class_names': np.array(self.class_names)}
        if self.indices is not None:
            arrays['indices'] = self.indices.numpy()
        if self.filenames:
            arrays['filenames'] = np.array(self.filenames)
        with written_whole(path) as temporary, open(temporary, 'wb') as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Union[str, Path]) -> 'Scores':
        """Read what `save` wrote."""
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
            return cls(
                torch.from_numpy(arrays['scores']), torch.from_numpy(arrays['targets']),
                tuple(arrays['class_names'].tolist()),
                torch.from_numpy(arrays['indices']) if 'indices' in arrays else None,
                tuple(arrays['filenames'].tolist()) if 'filenames' in arrays else ())
        except (OSError, KeyError, ValueError, EOFError) as error:
            raise ValueError(f'Expected scores that validate.py wrote, but got {path}: {error!r}') from error


def class_rows(scores: Scores, average_precisions: torch.Tensor) -> list[dict[str, Any]]:
    """ Rows of the table of classes, the best first, those without positives last.

    Args:
        scores: Targets are counted.
        average_precisions: (classes,) in percent, NaN for a class without positives.
    """
    positives, unknown = ((scores.targets == value).sum(dim=0).tolist() for value in (1, -1))
    rows = [
        {'class': name, 'AP': ap, 'positives': number, 'unknown': missing}
        for name, ap, number, missing in zip(scores.class_names, average_precisions.tolist(), positives, unknown)]
    return sorted(rows, key=lambda row: -row['AP'] if row['positives'] else 1.)


def format_classes(rows: Sequence[dict[str, Any]]) -> str:
    """The table of classes as text."""
    width = max(5, *(len(row['class']) for row in rows))
    lines = [f'{"class":<{width}} {"AP":>7} {"positives":>10} {"unknown":>8}']
    for row in rows:
        ap = f'{row["AP"]:.2f}' if row['positives'] else '-'
        lines.append(f'{row["class"]:<{width}} {ap:>7} {row["positives"]:>10,} {row["unknown"]:>8,}')
    return '\n'.join(lines)


def format_result(metrics: dict[str, float]) -> str:
    """ Metrics as text: the multi-label ones overall and for the top 3 side by side.

    Args:
        metrics: With the names of a meter.
    """
    if 'mAP' not in metrics:
        return ', '.join(f'{name} {value:.4g}' for name, value in metrics.items())
    names = ('CP', 'CR', 'CF1', 'OP', 'OR', 'OF1')
    return '\n'.join([
        f'mAP {metrics["mAP"]:.2f}, loss {metrics["loss"]:.4f}',
        '        ' + ''.join(f'{name:>8}' for name in names),
        '  all   ' + ''.join(f'{metrics[name]:8.2f}' for name in names),
        '  top 3 ' + ''.join(f'{metrics[f"{name}_3"]:8.2f}' for name in names)])


def write_rows(rows: Sequence[dict[str, Any]], path: Union[str, Path]) -> None:
    """ Write a CSV file.

    Args:
        rows: Rows with the same names.
        path: The file.
    """
    with written_whole(path) as temporary, open(temporary, 'w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_json(content: Any, path: Union[str, Path]) -> None:
    """Write a JSON file; what is not a number becomes null, as JSON has no NaN."""
    with written_whole(path) as temporary:
        text = json.dumps(_without_nan(content), indent=2, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + '\n', encoding='utf-8')


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def flat_row(result: dict[str, Any]) -> dict[str, Any]:
    """ A result as one row: what was evaluated, then the metrics.

    Args:
        result: Content of results.json.
    """
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
    """ Write all files of one evaluation.

    Args:
        result: Content of results.json.
        folder: Where to.
        scores: Scores of all images, None for single labels.
        rows: What `class_rows` returned, () for single labels.
    """
    if scores is not None:  # before the results, which speak of them
        scores.save(folder / SCORES)
        write_rows(rows, folder / CLASSES)
        draw_classes(rows, result, folder / 'per_class_ap.png')
    write_rows([flat_row(result)], folder / 'results.csv')
    write_json(result, folder / RESULTS)


def draw_classes(rows: Sequence[dict[str, Any]], result: dict[str, Any], path: Union[str, Path]) -> None:
    """ Draw the AP of each class, with the number of its positives.

    Args:
        rows: What `class_rows` returned.
        result: Content of results.json.
        path: Picture to write; none is without matplotlib.
    """
    pyplot = load_pyplot()
    rows = [row for row in rows if row['positives']]
    if pyplot is None or not rows:
        return
    figure, axes = pyplot.subplots(figsize=(7, max(3., 0.19 * len(rows) + 1.3)), layout='constrained')
    places = range(len(rows))
    axes.barh(places, [row['AP'] for row in rows], color='#1a73e8')
    for place, row in zip(places, rows):
        axes.text(row['AP'] + 1, place, f'{row["positives"]:,}', va='center', fontsize=7, color='#5f6368')
    mean = result['metrics']['mAP']
    axes.axvline(mean, color='#d93025', linewidth=1, label=f'mAP {mean:.2f}')
    axes.set(
        yticks=places, yticklabels=[row['class'] for row in rows], xlim=(0, 112), xlabel='AP in %, with positives',
        title=f'{result["model"]}, {result["dataset"]} {result["split"]}, {result["num_images"]:,} images')
    axes.tick_params(axis='y', labelsize=8 if len(rows) <= 40 else 6)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.legend(loc='lower right', fontsize='small')
    save_figure(figure, path)


def format_sizes(sizes: Sequence[dict[str, Any]], metric: str = 'mAP') -> str:
    """ The table of the low-resolution study.

    Args:
        sizes: Size and metrics, for each size.
        metric: What is compared.
    """
    names = [name for name in ('mAP', 'CF1', 'OF1', 'top1', 'top5') if name in sizes[0]]
    reference = next((row for row in sizes if row['trained']), sizes[0])
    lines = [f'{"size":<10}' + ''.join(f'{name:>9}' for name in names) + f'{"change":>9}']
    for row in sizes:
        size = f'{row["size"]} *' if row['trained'] else str(row['size'])
        values = ''.join(f'{row[name]:>9.2f}' for name in names)
        lines.append(f'{size:<10}{values}{row[metric] - reference[metric]:>+9.2f}')
    return '\n'.join([*lines, '* size of training'])


def draw_sizes(curves: dict[str, Sequence[dict[str, Any]]], path: Union[str, Path], metric: str = 'mAP') -> None:
    """ Draw a metric against the size of images, a line for each model, and the size of training.

    Args:
        curves: Size and metrics, for each size, of each model.
        path: Picture to write; none is without matplotlib.
        metric: What is drawn.
    """
    pyplot = load_pyplot()
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(figsize=(5.5, 4), layout='constrained')
    ticks = sorted({row['size'] for rows in curves.values() for row in rows})
    for name, rows in curves.items():
        rows = sorted(rows, key=lambda row: row['size'])
        axes.plot([row['size'] for row in rows], [row[metric] for row in rows], marker='o', label=name)
    for size in {row['size'] for rows in curves.values() for row in rows if row['trained']}:
        axes.axvline(size, color='#5f6368', linestyle='--', linewidth=1, label=f'trained at {size}')
    axes.set_xscale('log', base=2)
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.minorticks_off()
    axes.set(xlabel='size of images in pixels', ylabel=f'{metric} in %')
    axes.grid(alpha=0.3)
    axes.legend(fontsize='small')
    save_figure(figure, path)


@dataclass(frozen=True)
class Result:
    """ A result that was written.

    Args:
        name: What to call it.
        content: Content of results.json.
        scores: Scores of all images, None if they are not there.
    """
    name: str
    content: dict[str, Any]
    scores: Optional[Scores]


def read_results(paths: Sequence[Union[str, Path]]) -> list[Result]:
    """ Read results to compare, and refuse those that can't be.

    Args:
        paths: results.json files, or their folders.
    """
    files = [Path(path) / RESULTS if Path(path).is_dir() else Path(path) for path in paths]
    results = []
    for file, name in zip(files, _short_names(files)):
        try:
            content = json.loads(file.read_text(encoding='utf-8'))
            wanted = {'metrics', 'preset', 'dataset', 'split', 'num_images', 'num_classes', 'model'}
            missing = sorted(wanted - set(content))
            if missing:
                raise KeyError(f'no {missing[0]}')
        except OSError as error:
            raise ValueError(f'Expected a results.json of validate.py, but got {file}: {error.strerror}.') from error
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Expected a results.json of validate.py, but got {file}, which isn't: {error}") from error
        scores = file.parent / SCORES
        results.append(Result(name, content, Scores.load(scores) if scores.is_file() else None))
    for result, file in zip(results[1:], files[1:]):
        _check_comparable(results[0], result, files[0], file)
    return results


def _short_names(files: Sequence[Path]) -> list[str]:
    """The shortest ends of the folders' paths that differ."""
    parts = [file.resolve().parent.parts if file.name == RESULTS else file.resolve().parts for file in files]
    for length in range(1, max(map(len, parts)) + 1):
        names = ['/'.join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError('Expected different results to compare, but got one twice.')


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
        raise ValueError(
            f'Expected results of the same data set, but got {first_file} ({names[0]}) and {other_file} ({names[1]}), '
            f'with {what}: evaluate both on the same images.')
    if first.content['preset'] != other.content['preset']:
        raise ValueError(
            f"Expected results of the same metrics, but got --metrics {first.content['preset']} in {first_file} and "
            f"{other.content['preset']} in {other_file}: evaluate both with the same.")


def draw_samples(num_images: int, number: int, seed: int = 0) -> torch.Tensor:
    """ Bootstrap samples: how often each image is drawn when as many as there are are drawn with replacement.

    Args:
        num_images: Number of images.
        number: Number of samples.
        seed: Seed of the draw.

    Returns:
        (samples, images) uint8.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = torch.empty(number, num_images, dtype=torch.uint8)
    for row in counts:
        drawn = torch.randint(num_images, (num_images,), generator=generator)
        row.copy_(torch.bincount(drawn, minlength=num_images))
    return counts


def sampled_average_precision(
        scores: torch.Tensor,
        labels: torch.Tensor,
        samples: torch.Tensor,
        interpolated: bool = False,
) -> torch.Tensor:
    """ AP of one class on many bootstrap samples; sorting once serves all of them.

    Args:
        scores: (N,).
        labels: (N,), 1, 0, or -1 for unknown.
        samples: (samples, N), how often each image is drawn.
        interpolated: Whether to use the envelope of the precision.

    Returns:
        (samples,) float64 from 0 to 1, NaN for a sample without positives.
    """
    known = (labels >= 0).nonzero().flatten()
    ordered, order = scores[known].sort(descending=True)
    order = known[order]
    positive = labels[order] == 1
    # Where the scores equal to that of each positive end, among all and among the positives: they share one threshold.
    mine = -ordered[positive]
    ends, ends_true = (torch.searchsorted(among, mine, right=True) - 1 for among in (-ordered, mine))
    values = []
    for some in samples.split(_SAMPLES_AT_ONCE):
        weights = some[:, order]  # (some, known)
        predicted = weights.cumsum(dim=1, dtype=torch.int32)[:, ends]
        drawn = weights[:, positive]  # (some, positives)
        true = drawn.cumsum(dim=1, dtype=torch.int32)[:, ends_true]
        precision = true.double() / predicted.clamp(min=1)
        if interpolated:
            precision = precision.masked_fill(drawn == 0, 0.).flip(1).cummax(dim=1).values.flip(1)
        values.append((drawn * precision).sum(dim=1) / drawn.sum(dim=1))  # 0 / 0 is NaN
    return torch.cat(values)


def sampled_map(scores: Scores, samples: torch.Tensor, interpolated: bool = False, name: str = '') -> torch.Tensor:
    """ mAP on many bootstrap samples, in percent.

    Args:
        scores: Scores of all images.
        samples: (samples, images), how often each image is drawn.
        interpolated: Whether AP uses the envelope of the precision.
        name: What the progress bar says.

    Returns:
        (samples,) float64.
    """
    pairs = zip(scores.scores.t().contiguous(), scores.targets.t().contiguous())
    bar = tqdm(pairs, total=len(scores.class_names), desc=f'Bootstrap {name}', unit='class', leave=False, disable=None)
    values = [
        sampled_average_precision(column, labels, samples, interpolated)
        for column, labels in bar if (labels == 1).any()]
    return 100 * torch.stack(values).nanmean(dim=0)


def interval(values: torch.Tensor) -> tuple[float, float]:
    """The 2.5 % and 97.5 % quantiles."""
    low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return low, high


def compare_results(results: Sequence[Result], num_samples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """ Compare results of the same images, the others with the first.

    Intervals are of the paired bootstrap over images: both models are scored on the same samples of the images, so
    that what is hard for both cancels out. They say how much depends on which images were in the data set, not on the
    seed of training.

    Args:
        results: What `read_results` returned.
        num_samples: Number of bootstrap samples.
        seed: Seed of their draw.

    Returns:
        For each result, 'name', 'metrics', and against the first 'difference' of each metric, 'mAP_interval' of the
        difference, and 'classes', the difference of AP of each class; the last two where all have scores.
    """
    first = results[0]
    names = [name for name in first.content['metrics'] if all(name in other.content['metrics'] for other in results)]
    rows = [{
        'name': result.name,
        'model': result.content['model'],
        'metrics': {name: result.content['metrics'][name] for name in names},
        'difference': {name: _minus(result.content['metrics'][name], first.content['metrics'][name]) for name in names},
    } for result in results]
    if any(result.scores is None for result in results):
        return {'results': rows, 'num_samples': 0}
    interpolated = first.content['preset'] == 'interpolated'
    samples = draw_samples(len(first.scores.scores), num_samples, seed)
    sampled = [sampled_map(result.scores, samples, interpolated, result.name) for result in results]
    classes = [100 * average_precision(result.scores.scores, result.scores.targets, interpolated) for result in results]
    for row, values, precisions in zip(rows, sampled, classes):
        row['mAP_interval'] = interval(values - sampled[0])
        row['classes'] = dict(zip(first.scores.class_names, (precisions - classes[0]).tolist()))
    return {'results': rows, 'num_samples': num_samples}


def _minus(value: Optional[float], other: Optional[float]) -> Optional[float]:
    return None if value is None or other is None else value - other


def format_comparison(comparison: dict[str, Any], number: int = 5) -> str:
    """ A comparison as text.

    Args:
        comparison: What `compare_results` returned.
        number: Classes to list that gain or lose most.
    """
    first, *others = rows = comparison['results']
    width = max(18, *(len(row['name']) + 2 for row in rows))
    lines = [' ' * 8 + ''.join(f'{row["name"]:>{width}}' for row in rows)]
    for name in first['metrics']:
        cells = [_number(first['metrics'][name], '.2f')]
        cells += [
            f'{_number(row["metrics"][name], ".2f")} ({_number(row["difference"][name], "+.2f")})' for row in others]
        lines.append(f'{name:<8}' + ''.join(f'{cell:>{width}}' for cell in cells))
    if not comparison['num_samples']:
        lines += ['', f'No intervals, as not all results have {SCORES} beside them.']
        return '\n'.join(lines)
    for row in others:
        low, high = row['mAP_interval']
        verdict = 'higher' if low > 0 else 'lower' if high < 0 else 'not told apart'
        lines += [
            '', f'{row["name"]} against {first["name"]}: {row["difference"]["mAP"]:+.2f} mAP, '
            f'95 % interval [{low:+.2f}, {high:+.2f}] ({comparison["num_samples"]:,} bootstrap samples): {verdict}']
        changes = sorted(
            ((name, value) for name, value in row['classes'].items() if value == value), key=lambda item: item[1])
        gains, losses = [item for item in changes[::-1] if item[1] > 0], [item for item in changes if item[1] < 0]
        for title, part in (('gain', gains[:number]), ('lose', losses[:number])):
            if part:
                lines.append(f'  {title} most: ' + ', '.join(f'{name} {value:+.2f}' for name, value in part))
    return '\n'.join(lines)


def _number(value: Optional[float], spec: str) -> str:
    return '-' if value is None else format(value, spec)
