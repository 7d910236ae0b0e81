""" Write an HTML report of one run, or of several side by side: a single file that needs no network

    python -m timm_splicemix.report runs/splicemix
    python -m timm_splicemix.report runs/plain runs/splicemix results/plain results/splicemix output/analysis
    python -m timm_splicemix.report runs/*/ --output report.html --title 'All runs'

The report shows what it finds in the folders, and in their sub-folders that are not runs themselves: metrics and AP of
each class (validate.py), curves, mixed batches and settings (train.py), and tables and figures of analyses. Results of
a checkpoint in one of the runs are shown with that run. Nothing is evaluated again; a run without results of
validate.py shows the metrics of its best epoch. By default report.html is written to the folder, or to the common
parent of several folders.

Results of validate.py are also shown as pictures: the most confident false positives and false negatives of each class,
which are often wrong labels, and a random sample. They can be filtered by class, kind and text in the page. If the
images were moved since the evaluation, give their folder by --images.
"""
import argparse
import math
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional, Sequence

from .analysis.mistakes import Evaluated, Limits, collect_mistakes
from .analysis.page import Chart, Line, Picture, Table, render_page
from .args import CommandParser, command
from .args.types import at_least
from .errors import UsageError
from .files import printable, read_rows, read_yaml, short_names, write_text
from .results import CLASSES, RESULTS, Result, read_result
from .run.tracking import read_summary

MAX_DEPTH = 4  # of sub-folders
MAX_PICTURES, MAX_ROWS, MAX_COLUMNS = 40, 100, 40  # pictures of a folder's analyses, size of their tables
PICTURES = ('.png', '.jpg', '.jpeg', '.gif', '.webp')
SHOWN = ('curves.png', 'per_class_ap.png', CLASSES, 'results.csv', 'summary.csv')  # the report has its own version
BATCH = re.compile(r'train-batch-(\d+)-(\d+)\.jpg')
FACTS = {
    'model': 'model', 'dataset': 'data set', 'split': 'split', 'num_images': 'images', 'input_size': 'input size',
    'epoch': 'epoch', 'use_ema': 'EMA weights', 'tta': 'TTA by flips'}  # of results.json
CHARTS = {
    'training loss': ('train_loss',), 'validation loss': ('eval_loss', 'eval_ema_loss'),
    'mAP': ('eval_mAP', 'eval_ema_mAP'), 'top-1 accuracy': ('eval_top1', 'eval_ema_top1'), 'learning rate': ('lr',)}
MAIN_SETTINGS = (
    'model', 'pretrained', 'dataset', 'data_dir', 'img_size', 'gp', 'epochs', 'batch_size', 'opt', 'lr', 'weight_decay',
    'sched', 'loss', 'splicemix_grids', 'splicemix_ratio', 'splicemix_drop_prob', 'splicemix_weight', 'splicemix_cl',
    'mixup', 'cutmix', 'model_ema', 'amp', 'seed')

MISTAKES_HINT = (
    'Mistakes with their pictures need an evaluation: run timm-splicemix validate --output DIR, and give DIR to the '
    'report beside the run.')

Blocks = list[tuple[str, Any]]


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = CommandParser(prog='timm_splicemix.report', description=__doc__)
    parser.add_argument('paths', nargs='+', metavar='RUN', help='folders of train.py, validate.py and analyses')
    parser.add_argument(
        '--batches', type=at_least(0), default=2, metavar='N',
        help='pictures of mixed batches of each run, see train.py --save-images (default: %(default)s)')
    group = parser.add_argument_group('Mistakes')
    group.add_argument(
        '--mistakes', type=at_least(0), default=6, metavar='N',
        help='false positives, and false negatives, of each class and result (default: %(default)s)')
    group.add_argument(
        '--sample', type=at_least(0), default=24, metavar='N',
        help='random images of each result (default: %(default)s)')
    group.add_argument(
        '--max-pictures', type=at_least(0), default=1000, metavar='N',
        help='different images in the page, about 8 KB each (default: %(default)s)')
    group.add_argument(
        '--thumbnail-size', type=at_least(16), default=160, metavar='PIXELS',
        help='largest width and height of these pictures (default: %(default)s)')
    group.add_argument(
        '--images', metavar='DIR',
        help='folder of the images or of their data set (default: the one that validate.py read)')
    parser.add_argument('--title', default='Report', help='title of the page (default: %(default)s)')
    parser.add_argument('--output', metavar='FILE', help='file to write (default: report.html in the folder)')
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Folder:
    """What a folder contains; parts that it does not have are empty."""
    name: str
    path: Path
    settings: dict[str, Any]  # args.yaml
    environment: dict[str, Any]  # environment.yaml
    epochs: list[dict[str, str]]  # summary.csv
    results: list[Result]  # of validate.py
    batches: list[Path]  # pictures of mixed batches
    analyses: list[Path]  # other pictures and CSV files

    @property
    def is_run(self) -> bool:
        return bool(self.settings or self.epochs)


def list_files(folder: Path, others: Sequence[Path], depth: int = MAX_DEPTH) -> list[Path]:
    """List the files of a folder and of its sub-folders, except for `others`, runs, and sizes of --eval-sizes."""
    try:
        paths = [path for path in sorted(folder.iterdir()) if not path.name.startswith('.')]
    except OSError as error:
        raise UsageError(f'Cannot read {folder}: {error.strerror}.') from error
    files = [path for path in paths if path.is_file()]
    for path in paths if depth else ():
        is_other = path.is_symlink() or path.resolve() in others or (path / 'args.yaml').exists()
        if path.is_dir() and not is_other and not re.fullmatch(r'size-\d+', path.name):
            files += list_files(path, others, depth - 1)
    return files


def read_folder(path: Path, name: str, others: Sequence[Path] = ()) -> Folder:
    """Read what train.py, validate.py and analyses wrote, except for `others`, which the report shows separately."""
    files = list_files(path, others)
    results = []
    found = [file for file in files if file.name == RESULTS]
    for file in found:
        inner = file.parent.relative_to(path).as_posix()
        results.append(read_result(file, f'{name}/{inner}' if len(found) > 1 and inner != '.' else name))
    batches = [file for file in files if BATCH.fullmatch(file.name)]
    analyses = [
        file for file in files
        if file.suffix.lower() in (*PICTURES, '.csv') and file.name not in SHOWN and file not in batches]
    settings, environment = (
        read_yaml(path / file) if (path / file).is_file() else {} for file in ('args.yaml', 'environment.yaml'))
    folder = Folder(
        name, path, settings, environment, read_summary(path / 'summary.csv'), results,
        sorted(batches, key=lambda file: tuple(map(int, BATCH.fullmatch(file.name).groups()))), analyses)
    if not (folder.is_run or results or batches or analyses):
        raise UsageError(
            f'Expected a folder that train.py, validate.py or an analysis wrote, but got {path}, which has no '
            'args.yaml, summary.csv, results.json, CSV file or picture.')
    return folder


def join_results(folders: Sequence[Folder]) -> list[Folder]:
    """Move the results of a checkpoint in one of the runs to that run."""
    runs = {folder.path.resolve(): folder for folder in folders if folder.is_run}
    joined = []
    for folder in folders:
        checkpoints = {result.content.get('checkpoint') for result in folder.results}
        homes = {Path(checkpoint).resolve().parent for checkpoint in checkpoints if checkpoint}
        home = homes.pop() if len(homes) == len(checkpoints) == 1 else None
        if folder.is_run or home not in runs:
            joined.append(folder)
            continue
        run = runs[home]
        results = [replace(result, name=f'{run.name}: {result.name}') for result in folder.results]
        runs[home] = replace(run, results=[*run.results, *results], analyses=[*run.analyses, *folder.analyses])
    return [runs[folder.path.resolve()] if folder.is_run else folder for folder in joined]


def best_epoch(run: Folder) -> list[Result]:
    """Return the metrics of the best epoch of a run, of the weights and of their EMA; [] if it was not evaluated."""
    for metric in ('eval_ema_mAP', 'eval_mAP', 'eval_ema_top1', 'eval_top1'):  # as train.py chooses the best checkpoint
        rows = [row for row in run.epochs if _finite(row.get(metric)) is not None]
        if rows:
            break
    else:
        return []
    best = max(rows, key=lambda row: _finite(row[metric]))
    results = []
    for prefix, use_ema in (('eval_', False), ('eval_ema_', True)):
        metrics = {
            name.removeprefix(prefix): _finite(value) for name, value in best.items()
            if name.startswith(prefix) and name.startswith('eval_ema_') == use_ema}
        if metrics:
            results.append(Result(f'{run.name}, in training', run.path, {
                'model': run.settings.get('model'), 'dataset': run.settings.get('dataset'),
                'epoch': int(best['epoch']), 'use_ema': use_ema, 'metrics': metrics}))
    return results


def _finite(value: Any) -> Optional[float]:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _comparable(result: Result, first: Result) -> bool:
    names = ('dataset', 'split', 'num_images', 'preset')
    return all(name in first.content and result.content.get(name) == first.content[name] for name in names)


def _metric(value: Optional[float], digits: int = 2, sign: str = '') -> str:
    return '-' if value is None else f'{value:{sign}.{digits}f}'


def _text(value: Any) -> str:
    if value is None or value == '':
        return '-'
    if isinstance(value, bool):
        return 'yes' if value else 'no'
    return ' '.join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def metric_blocks(results: Sequence[Result]) -> Blocks:
    """Show the metrics with their differences from the first result."""
    if not results:
        return []
    rows = []
    for name, title in FACTS.items():
        values = [result.content.get(name) for result in results]
        if any(value not in (None, '', False) for value in values):
            rows.append([title, *map(_text, values)])
    for name in dict.fromkeys(name for result in results for name in result.content['metrics']):
        digits = 4 if name == 'loss' else 2
        values = [_finite(result.content['metrics'].get(name)) for result in results]
        cells = [_metric(value, digits) for value in values]
        for place, (result, value) in enumerate(zip(results, values)):
            if place and None not in (value, values[0]) and _comparable(result, results[0]):
                cells[place] += f' ({value - values[0]:+.{digits}f})'
        rows.append([name, *cells])
    notes = ['Metrics in %, except for the loss; in brackets the difference from the first result on the same images.']
    notes += dict.fromkeys(filter(None, (result.content.get('definitions') for result in results)))
    table = Table(['', *(result.name for result in results)], rows)
    return [*(('note', str(note)) for note in notes), ('table', table)]


def curve_blocks(runs: Sequence[Folder]) -> Blocks:
    """Show losses, metric and learning rate over the epochs, one colour per run."""
    charts = []
    for title, columns in CHARTS.items():
        lines = []
        for number, run in enumerate(runs):
            for column in columns:
                values = [(int(row['epoch']), _finite(row.get(column))) for row in run.epochs]
                points = [(x, y) for x, y in values if y is not None]
                if points:
                    lines.append(Line(number, column.startswith('eval_ema_'), points))
        if lines:
            charts.append(Chart(title, lines))
    if not charts:
        return []
    dashed = any(line.dashed for chart in charts for line in chart.lines)
    notes = [('note', 'Dashed lines: EMA weights.')] if dashed else []
    return [('key', [run.name for run in runs]), *notes, ('charts', charts)]


def class_blocks(results: Sequence[Result]) -> Blocks:
    """Show the AP of each class with its differences from the first result."""
    results = [result for result in results if result.classes]
    if not results:
        return []
    first = results[0]
    differs = [result is not first and _comparable(result, first) for result in results]
    header = ['class', 'positives']
    for result, differ in zip(results, differs):
        header += [result.name, 'difference'] if differ else [result.name]
    rows, bars = [], []
    for name in dict.fromkeys(name for result in results for name in result.classes):
        values = [_finite(result.classes.get(name, (None, 0))[0]) for result in results]
        cells, widths = [name, _text(first.classes.get(name, (None, None))[1])], [None]
        for value, differ in zip(values, differs):
            cells.append(_metric(value))
            widths.append(None if value is None else min(100., max(0., value)))
            if differ:
                cells.append(_metric(None if None in (value, values[0]) else value - values[0], sign='+'))
                widths.append(None)
        rows.append(cells)
        bars.append(widths)
    return [('table', Table(header, rows, bars=bars))]


def batch_blocks(folders: Sequence[Folder], number: int) -> Blocks:
    """Show the first `number` pictures of mixed batches of each run."""
    pictures = []
    for folder in folders:
        for path in folder.batches[:number]:
            epoch, batch = BATCH.fullmatch(path.name).groups()
            pictures.append(Picture.read(path, f'{folder.name}: epoch {epoch}, batch {batch}'))
    return [('pictures', pictures)] if pictures else []


def analysis_blocks(folder: Folder) -> Blocks:
    """Show the pictures and tables of analyses, each picture above the table of the same name."""
    groups: dict[Path, list[Path]] = {}
    for path in folder.analyses:
        groups.setdefault(path.with_suffix(''), []).append(path)
    blocks, num_pictures = [], 0
    for stem, paths in groups.items():
        inside = stem.is_relative_to(folder.path)
        caption = stem.relative_to(folder.path).as_posix() if inside else f'{stem.parent.name}/{stem.name}'
        for path in sorted(paths, key=lambda path: path.suffix.lower() == '.csv'):
            if path.suffix.lower() == '.csv':
                blocks += csv_blocks(path, caption)
            else:
                num_pictures += 1
                if num_pictures <= MAX_PICTURES:
                    blocks.append(('picture', Picture.read(path, caption)))
    if num_pictures > MAX_PICTURES:
        blocks.append(('note', f'The first {MAX_PICTURES} of {num_pictures} pictures.'))
    return [('heading', folder.name), *blocks] if blocks else []


def csv_blocks(path: Path, caption: str) -> Blocks:
    """Show a CSV file as a table that opens at a click."""
    rows = read_rows(path)
    if not rows:
        return []
    width = max(map(len, rows))
    header, *body = [[*row, *[''] * (width - len(row))][:MAX_COLUMNS] for row in rows]
    limits = ((len(body), MAX_ROWS, 'rows'), (width, MAX_COLUMNS, 'columns'))
    notes = [f'first {most} of {number:,} {what}' for number, most, what in limits if number > most]
    title = f'{caption}: table' + (f' ({", ".join(notes)})' if notes else '')
    shown = [[_short(cell) for cell in row] for row in body[:MAX_ROWS]]
    return [('table', Table(header, shown, summary=title))]


def _short(cell: str) -> str:
    """Round a decimal number for display."""
    number = _finite(cell) if '.' in cell else None
    if number is None:
        return cell
    return f'{number:.2f}' if abs(number) >= 1 else f'{number:.3g}'


def mistake_blocks(folders: Sequence[Folder], limits: Limits, images: Optional[Path] = None) -> Blocks:
    """Show the mistakes of results with scores, with pictures from `images` or from where they were evaluated."""
    if not limits.per_class and not limits.sample:
        return []
    evaluated = []
    for folder in folders:
        for result in folder.results:
            if result.scores is not None:
                places = [images] if images else image_folders(result, folder.settings)
                evaluated.append(Evaluated(result, places))
    if not evaluated:
        unseen = any(not folder.results and 'eval_mAP' in row for folder in folders for row in folder.epochs[:1])
        return [('note', MISTAKES_HINT)] if unseen else []
    mistakes = collect_mistakes(evaluated, limits)
    for problem in mistakes.problems:
        print(printable(problem), file=sys.stderr)
    return [*(('note', note) for note in (*mistakes.notes, *mistakes.problems)), ('mistakes', mistakes.data)]


def image_folders(result: Result, settings: dict[str, Any]) -> list[Path]:
    """Return the folder of the evaluated images or, if an old results.json lacks it, the run's folder of the data."""
    if 'image_folder' in result.content:
        folder = result.content['image_folder']
    else:
        same = settings.get('dataset') == result.content.get('dataset')
        folder = settings.get('data_dir') if same else None
    return [Path(str(folder))] if folder else []


def setting_blocks(runs: Sequence[Folder]) -> Blocks:
    """Show the main settings and those that differ, then all settings and the environment at a click."""
    if not runs:
        return []

    def table(names: Sequence[str], part: str, summary: str = '') -> tuple[str, Table]:
        rows = [[name, *(_text(getattr(run, part).get(name)) for run in runs)] for name in names]
        return 'table', Table(['', *(run.name for run in runs)], rows, words=True, summary=summary)

    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    main = [name for name in MAIN_SETTINGS if name in names]
    main += [
        name for name in names if name not in main and len({_text(run.settings.get(name)) for run in runs}) > 1]
    blocks = [table(main, 'settings'), table(sorted(names), 'settings', 'All settings')]
    names = list(dict.fromkeys(name for run in runs for name in run.environment))
    return [*blocks, table(names, 'environment', 'Command and versions')] if names else blocks


def build_report(
        folders: Sequence[Folder],
        title: str = 'Report',
        batches: int = 2,
        limits: Optional[Limits] = None,
        images: Optional[Path] = None,
) -> str:
    """ Build the HTML page.

    Args:
        folders: What to show.
        title: Title of the page.
        batches: Number of pictures of mixed batches of each run.
        limits: How many mistakes to show, None for the defaults.
        images: Folder of the evaluated images, None for where they were.
    """
    runs = [folder for folder in folders if folder.is_run]
    results = [result for folder in folders for result in folder.results or best_epoch(folder)]
    return render_page(title, [folder.name for folder in folders], {
        'Metrics': metric_blocks(results),
        'Curves': curve_blocks([run for run in runs if run.epochs]),
        'AP of each class': class_blocks(results),
        'Mistakes': mistake_blocks(folders, limits or Limits(), images),
        'Mixed batches': batch_blocks(folders, batches),
        'Analyses': [block for folder in folders for block in analysis_blocks(folder)],
        'Settings': setting_blocks([run for run in runs if run.settings]),
    })


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    paths = [Path(path) for path in args.paths]
    for path in paths:
        if not path.is_dir():
            raise UsageError(f'Expected folders of runs, but got {path}, which is not a folder.')
    resolved = [path.resolve() for path in paths]
    folders = [read_folder(path, name, resolved) for path, name in zip(paths, short_names(paths))]
    if args.images and not Path(args.images).is_dir():
        raise UsageError(f'Expected a folder of images for --images, but got {args.images}, which is not a folder.')
    if args.output and not Path(args.output).is_dir() and Path(args.output).suffix.lower() not in ('.html', '.htm'):
        raise UsageError(f"Expected --output to end in .html, but got '{args.output}'.")
    limits = Limits(args.mistakes, args.sample, args.max_pictures, args.thumbnail_size)
    page = build_report(
        join_results(folders), args.title, args.batches, limits, Path(args.images) if args.images else None)
    output = Path(args.output) if args.output else Path(os.path.commonpath(resolved)) / 'report.html'
    if output.is_dir():
        raise UsageError(f'Expected a file name for --output, such as report.html, but got the folder {output}.')
    write_text(page, output)
    print(f'{output}: {len(page.encode()) / 1e6:.1f} MB, {len(folders)} folder(s)')


if __name__ == '__main__':
    main()
