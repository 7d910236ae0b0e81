""" Make one page of a run, or of several side by side: report.html, which needs no network and no other file

    python -m timm_splicemix.analysis.html runs/splicemix
    python -m timm_splicemix.analysis.html runs/plain runs/splicemix results/plain results/splicemix output/analysis
    python -m timm_splicemix.analysis.html runs/*/ --output report.html --title 'All runs'

It shows what it finds in the folders, and in their sub-folders that are no runs themselves: metrics and AP of each
class (validate.py), curves, mixed batches and settings (train.py), and the tables and pictures of analyses. Results of
a checkpoint in one of the runs belong to that run. Nothing is computed again; a run that validate.py has not seen shows
the metrics of its best epoch. One folder gets report.html inside, several get it in the folder that holds them all.
"""
import argparse
import csv
import json
import math
import os
import re
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, Optional, Sequence

import yaml

from .analysis.checkpoints import short_names
from .analysis.page import (
    render_curves,
    render_key,
    render_page,
    render_picture,
    render_table,
)
from .args import CommandParser, command
from .errors import UsageError
from .files import atomic_write
from .results import CLASSES, RESULTS
from .run.tracking import read_summary

DEPTH = 4  # folders below the given one
MOST_PICTURES, MOST_ROWS, MOST_COLUMNS = 40, 100, 40  # of the analyses of a folder, and of each table
PICTURES = ('.png', '.jpg', '.jpeg', '.gif', '.webp')
# What has a place of its own in the page, or repeats what is there
KNOWN = ('curves.png', 'per_class_ap.png', CLASSES, 'results.csv', 'summary.csv')
BATCH = re.compile(r'train-batch-(\d+)-(\d+)\.jpg')
MAIN_SETTINGS = (
    'model', 'pretrained', 'dataset', 'data_dir', 'img_size', 'gp', 'epochs', 'batch_size', 'opt', 'lr', 'weight_decay',
    'sched', 'loss', 'splicemix_grids', 'splicemix_ratio', 'splicemix_drop_prob', 'splicemix_cl', 'mixup', 'cutmix',
    'model_ema', 'amp', 'seed')


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = CommandParser(prog='timm_splicemix.analysis.html', description=__doc__)
    parser.add_argument(
        'paths', nargs='+', metavar='RUN', help='folders of train.py, of validate.py and of analyses')
    parser.add_argument(
        '--batches', type=int, default=2, metavar='N',
        help='pictures of mixed batches to show of each run (train.py --save-images) (default: %(default)s)')
    parser.add_argument('--title', default='Report', help='headline of the page (default: %(default)s)')
    parser.add_argument('--output', metavar='FILE', help='page to write (default: report.html in the folder)')
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Evaluation:
    """ Metrics of a model.

    Args:
        name: What to call it.
        content: Content of results.json, or as much of it as training knows.
        classes: AP in percent, None without positives, and number of positives of each class.
    """
    name: str
    content: dict[str, Any]
    classes: dict[str, tuple[Optional[float], str]] = field(default_factory=dict)

    def comparable(self, other: 'Evaluation') -> bool:
        """Whether a difference of metrics means something."""
        names = ('dataset', 'split', 'num_images', 'preset')
        return all(name in self.content and self.content[name] == other.content.get(name) for name in names)


@dataclass(frozen=True)
class Folder:
    """ What a folder has to show.

    Args:
        name: What to call it.
        path: The folder.
        settings: Of args.yaml, empty if it is no run.
        environment: Of environment.yaml.
        epochs: Rows of summary.csv.
        evaluations: What validate.py wrote.
        batches: Pictures of mixed batches.
        analyses: Other pictures and tables.
    """
    name: str
    path: Path
    settings: dict[str, Any]
    environment: dict[str, Any]
    epochs: list[dict[str, str]]
    evaluations: list[Evaluation]
    batches: list[Path]
    analyses: list[Path]

    @property
    def is_run(self) -> bool:
        return bool(self.settings or self.epochs)


def list_files(folder: Path, others: Sequence[Path], depth: int = DEPTH) -> list[Path]:
    """ Files of a folder and its sub-folders, without those that are runs, or the sizes of a low-resolution study.

    Args:
        folder: The folder.
        others: Folders that are shown themselves.
        depth: Number of levels to go down.
    """
    files, folders = [], []
    for path in sorted(folder.iterdir()):
        if path.name.startswith('.'):
            continue
        (folders if path.is_dir() else files).append(path)
    for path in folders if depth else ():
        is_other = path.resolve() in others or (path / 'args.yaml').exists()
        if not is_other and not path.is_symlink() and not re.fullmatch(r'size-\d+', path.name):
            files += list_files(path, others, depth - 1)
    return files


def read_folder(path: Path, name: str, others: Sequence[Path] = ()) -> Folder:
    """ Read what train.py, validate.py and analyses wrote.

    Args:
        path: The folder.
        name: What to call it.
        others: Folders that are shown themselves.
    """
    files = list_files(path, others)
    results = [file for file in files if file.name == RESULTS]
    evaluations = [read_evaluation(file, _below(name, path, file, len(results) > 1)) for file in results]
    batches = [file for file in files if BATCH.fullmatch(file.name)]
    analyses = [
        file for file in files
        if file.suffix.lower() in (*PICTURES, '.csv') and file.name not in KNOWN and file not in batches]
    folder = Folder(
        name, path, _read_yaml(path / 'args.yaml'), _read_yaml(path / 'environment.yaml'), _read_epochs(path),
        evaluations, sorted(batches, key=lambda file: tuple(map(int, BATCH.fullmatch(file.name).groups()))), analyses)
    if not (folder.is_run or evaluations or batches or analyses):
        raise UsageError(
            f'Expected a folder that train.py, validate.py or an analysis wrote, but got {path}, which has no '
            'args.yaml, summary.csv, results.json, table or picture.')
    return folder


def _below(name: str, folder: Path, file: Path, is_one_of_many: bool) -> str:
    inner = file.parent.relative_to(folder).as_posix()
    return f'{name}/{inner}' if is_one_of_many and inner != '.' else name


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding='utf-8'))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f'Expected settings in {path}, but got: {error}') from error
    if not isinstance(content, dict):
        raise UsageError(f"Expected lines 'name: value' in {path}, but got {type(content).__name__}.")
    return {str(name): value for name, value in content.items()}


def _read_epochs(folder: Path) -> list[dict[str, str]]:
    path = folder / 'summary.csv'
    try:
        rows = read_summary(path)
        for row in rows:
            int(row['epoch'])
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise UsageError(f'Expected a summary of train.py, but got {path}: {error!r}') from error
    return rows


def read_evaluation(path: Path, name: str) -> Evaluation:
    """ Read what validate.py wrote.

    Args:
        path: results.json; the table of classes is beside it, if there is one.
        name: What to call it.
    """
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
        content['metrics'].items()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"Expected a results.json of validate.py, but got {path}, which isn't: {error!r}") from error
    table, classes = path.with_name(CLASSES), {}
    if table.is_file():
        try:
            with open(table, newline='', encoding='utf-8') as file:
                for row in csv.DictReader(file):
                    value = float(row['AP'])
                    classes[row['class']] = (None if math.isnan(value) else value, row['positives'])
        except (csv.Error, KeyError, TypeError, ValueError) as error:
            raise UsageError(f'Expected the classes of an evaluation, but got {table}: {error!r}') from error
    return Evaluation(name, content, classes)


def join_results(folders: Sequence[Folder]) -> list[Folder]:
    """ Give results of a checkpoint in one of the runs to that run.

    Args:
        folders: What `read_folder` returned.
    """
    runs = {folder.path.resolve(): folder for folder in folders if folder.is_run}
    joined = []
    for folder in folders:
        checkpoints = {evaluation.content.get('checkpoint') for evaluation in folder.evaluations}
        homes = {Path(checkpoint).resolve().parent for checkpoint in checkpoints if checkpoint}
        home = homes.pop() if len(homes) == len(checkpoints) == 1 else None
        if folder.is_run or home not in runs:
            joined.append(folder)
            continue
        run = runs[home]
        evaluations = [replace(each, name=f'{run.name}: {each.name}') for each in folder.evaluations]
        runs[home] = replace(
            run, evaluations=[*run.evaluations, *evaluations], analyses=[*run.analyses, *folder.analyses])
    return [runs[folder.path.resolve()] if folder.is_run else folder for folder in joined]


def best_epoch(folder: Folder) -> list[Evaluation]:
    """ The metrics that training saw in its best epoch, of the weights and of their moving average.

    Args:
        folder: A run; one that was never evaluated has none.
    """
    for metric in ('eval_ema_mAP', 'eval_mAP', 'eval_ema_top1', 'eval_top1'):  # the average chooses, if there is one
        rows = [row for row in folder.epochs if _number(row.get(metric)) is not None]
        if rows:
            break
    else:
        return []
    best = max(rows, key=lambda row: _number(row[metric]))
    settings, evaluations = folder.settings, []
    for prefix, use_ema in (('eval_', False), ('eval_ema_', True)):
        metrics = {
            name.removeprefix(prefix): _number(value) for name, value in best.items()
            if name and name.startswith(prefix) and name.startswith('eval_ema_') == use_ema}
        if metrics:
            evaluations.append(Evaluation(f'{folder.name}, in training', {
                'model': settings.get('model'), 'dataset': settings.get('dataset'), 'epoch': int(best['epoch']),
                'use_ema': use_ema, 'metrics': metrics}))
    return evaluations


def _number(value: Any) -> Optional[float]:
    """A finite number, or None."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def render_metrics(evaluations: Sequence[Evaluation]) -> str:
    """ What was evaluated, and the metrics with their differences from the first.

    Args:
        evaluations: The columns.
    """
    if not evaluations:
        return ''
    first = evaluations[0]
    rows = []
    for name, title in (
            ('model', 'model'), ('dataset', 'data set'), ('split', 'split'), ('num_images', 'images'),
            ('input_size', 'input size'), ('epoch', 'epoch'), ('use_ema', 'moving average'), ('tta', 'mirror images')):
        values = [evaluation.content.get(name) for evaluation in evaluations]
        if any(value not in (None, '', False) for value in values):
            rows.append([title, *map(_show, values)])
    names = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.content['metrics']))
    for name in names:
        values = [_number(evaluation.content['metrics'].get(name)) for evaluation in evaluations]
        cells = [_metric(name, value) for value in values]
        for place, (evaluation, value) in enumerate(zip(evaluations, values)):
            if place and None not in (value, values[0]) and evaluation.comparable(first):
                digits = 4 if name == 'loss' else 2
                cells[place] += f' ({value - values[0]:+.{digits}f})'
        rows.append([name, *cells])
    notes = ['In %, but the loss; in brackets the difference from the first, on the same images.']
    notes += dict.fromkeys(filter(None, (evaluation.content.get('definitions') for evaluation in evaluations)))
    table = render_table(['', *(evaluation.name for evaluation in evaluations)], rows)
    return ''.join(f'<p class="pale">{escape(str(note))}</p>' for note in notes) + table


def _metric(name: str, value: Optional[float]) -> str:
    return '-' if value is None else f'{value:.{4 if name == "loss" else 2}f}'


def _show(value: Any) -> str:
    if value is None or value == '':
        return '-'
    if isinstance(value, bool):
        return 'yes' if value else 'no'
    if isinstance(value, (list, tuple)):
        return ' '.join(map(str, value))
    return str(value)


def render_epochs(runs: Sequence[Folder]) -> str:
    """ Losses, metric and learning rate over the epochs, a colour for each run.

    Args:
        runs: Folders with epochs.
    """
    panels = {
        'loss in training': ('train_loss',),
        'loss in validation': ('eval_loss', 'eval_ema_loss'),
        'mAP': ('eval_mAP', 'eval_ema_mAP'),
        'top 1 accuracy': ('eval_top1', 'eval_ema_top1'),
        'learning rate': ('lr',),
    }
    drawn, dashes = [], False
    for title, columns in panels.items():
        curves = []
        for number, run in enumerate(runs):
            for column in columns:
                values = [(int(row['epoch']), _number(row.get(column))) for row in run.epochs]
                points = [(x, y) for x, y in values if y is not None]
                if points:
                    curves.append((number, column.startswith('eval_ema_'), points))
                    dashes = dashes or column.startswith('eval_ema_')
        drawn.append(render_curves(title, curves))
    if not any(drawn):
        return ''
    note = '<p class="pale">Dashed: the moving average of the weights.</p>' if dashes else ''
    return f'{render_key([run.name for run in runs])}{note}<div class="panels">{"".join(filter(None, drawn))}</div>'


def render_classes(evaluations: Sequence[Evaluation]) -> str:
    """ AP of each class, and its difference from the first.

    Args:
        evaluations: The columns.
    """
    evaluations = [evaluation for evaluation in evaluations if evaluation.classes]
    if not evaluations:
        return ''
    first, *others = evaluations
    header = ['class', 'positives', first.name]
    for other in others:
        header += [other.name, 'difference'] if other.comparable(first) else [other.name]
    rows, bars = [], []
    for name in dict.fromkeys(name for evaluation in evaluations for name in evaluation.classes):
        own, positives = first.classes.get(name, (None, '-'))
        row, parts = [name, positives, _metric('AP', own)], [None, None if own is None else own / 100]
        for other in others:
            value, _ = other.classes.get(name, (None, '-'))
            row.append(_metric('AP', value))
            parts.append(None if value is None else value / 100)
            if other.comparable(first):
                row.append('-' if None in (value, own) else f'{value - own:+.2f}')
                parts.append(None)
        rows.append(row)
        bars.append(parts)
    return render_table(header, rows, bars=bars)


def render_batches(runs: Sequence[Folder], number: int) -> str:
    """ The first pictures of mixed batches of each run.

    Args:
        runs: Folders with pictures.
        number: How many of each.
    """
    figures = []
    for run in runs:
        for path in run.batches[:number]:
            epoch, batch = BATCH.fullmatch(path.name).groups()
            figures.append(render_picture(path, f'{run.name}: epoch {epoch}, batch {batch}'))
    return f'<div class="pictures">{"".join(figures)}</div>' if figures else ''


def render_analyses(folder: Folder) -> str:
    """ The pictures and tables that were found, each picture above its table.

    Args:
        folder: The folder.
    """
    groups: dict[Path, list[Path]] = {}
    for path in folder.analyses:
        groups.setdefault(path.with_suffix(''), []).append(path)
    parts, left = [], MOST_PICTURES
    for stem, paths in groups.items():
        inside = stem.is_relative_to(folder.path)
        caption = stem.relative_to(folder.path).as_posix() if inside else f'{stem.parent.name}/{stem.name}'
        for path in sorted(paths, key=lambda path: path.suffix == '.csv'):
            if path.suffix.lower() == '.csv':
                parts.append(render_csv(path, caption))
            elif left:
                left -= 1
                parts.append(render_picture(path, caption))
    number = sum(path.suffix.lower() != '.csv' for path in folder.analyses)
    if number > MOST_PICTURES:
        parts.append(f'<p class="pale">The first {MOST_PICTURES} of {number} pictures.</p>')
    return ''.join(parts)


def render_csv(path: Path, caption: str) -> str:
    """ A table of an analysis, which opens at a click.

    Args:
        path: The file.
        caption: What to call it.
    """
    try:
        with open(path, newline='', encoding='utf-8') as file:
            rows = [row for row in csv.reader(file) if row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise UsageError(f'Expected a table, but got {path}: {error}') from error
    if not rows:
        return ''
    width = max(map(len, rows))
    header, *body = [[*row, *[''] * (width - len(row))][:MOST_COLUMNS] for row in rows]
    shown = [[_short(cell) for cell in row] for row in body[:MOST_ROWS]]
    notes = [f'first {MOST_ROWS} of {len(body):,} rows'] if len(body) > MOST_ROWS else []
    notes += [f'first {MOST_COLUMNS} of {width:,} columns'] if width > MOST_COLUMNS else []
    title = escape(f'{caption}: table' + (f' ({", ".join(notes)})' if notes else ''))
    return f'<details><summary>{title}</summary>{render_table(header, shown)}</details>'


def _short(cell: str) -> str:
    """A number with a few digits, other text as it is."""
    number = _number(cell) if '.' in cell else None
    if number is None:
        return cell
    return f'{number:.2f}' if abs(number) >= 1 else f'{number:.3g}'


def render_settings(runs: Sequence[Folder]) -> str:
    """ The main settings and those that differ, then all of them at a click.

    Args:
        runs: Folders with settings.
    """
    if not runs:
        return ''
    header = ['', *(run.name for run in runs)]
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    values = {name: [_show(run.settings.get(name)) for run in runs] for name in names}
    main = [name for name in MAIN_SETTINGS if name in values]
    differing = [name for name in names if len(set(values[name])) > 1 and name not in main]
    parts = [render_table(header, [[name, *values[name]] for name in (*main, *differing)], words=True)]
    rows = [[name, *values[name]] for name in sorted(names)]
    parts.append(f'<details><summary>All settings</summary>{render_table(header, rows, words=True)}</details>')
    names = list(dict.fromkeys(name for run in runs for name in run.environment))
    if names:
        rows = [[name, *(_show(run.environment.get(name)) for run in runs)] for name in names]
        table = render_table(header, rows, words=True)
        parts.append(f'<details><summary>Command and versions</summary>{table}</details>')
    return ''.join(parts)


def build_report(folders: Sequence[Folder], title: str = 'Report', batches: int = 2) -> str:
    """ The page.

    Args:
        folders: What there is to show.
        title: Headline.
        batches: Pictures of mixed batches of each run.
    """
    runs = [folder for folder in folders if folder.is_run]
    evaluations = [each for folder in folders for each in folder.evaluations or best_epoch(folder)]
    analyses = {folder.name: render_analyses(folder) for folder in folders}
    analyses = {name: html for name, html in analyses.items() if html}
    return render_page(title, [' · '.join(folder.name for folder in folders)], {
        'Metrics': render_metrics(evaluations),
        'Curves': render_epochs([run for run in runs if run.epochs]),
        'AP of each class': render_classes(evaluations),
        'Mixed batches': render_batches(folders, batches),
        'Analyses': ''.join(f'<h3>{escape(name)}</h3>{html}' for name, html in analyses.items()),
        'Settings': render_settings([run for run in runs if run.settings]),
    })


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    if args.batches < 0:
        raise UsageError(f'Expected --batches of at least 0, but got {args.batches}.')
    paths = [Path(path) for path in args.paths]
    for path in paths:
        if not path.is_dir():
            raise UsageError(f'Expected folders of runs, but got {path}, which is none.')
    resolved = [path.resolve() for path in paths]
    folders = [read_folder(path, name, resolved) for path, name in zip(paths, short_names(paths))]
    page = build_report(join_results(folders), args.title, args.batches)
    output = Path(args.output) if args.output else Path(os.path.commonpath(resolved)) / 'report.html'
    if output.is_dir():
        raise UsageError(f'Expected a file name for --output, such as report.html, but got the folder {output}.')
    with atomic_write(output) as temporary:
        temporary.write_text(page, encoding='utf-8')
    print(f'{output}: {len(page.encode()) / 1e6:.1f} MB, {len(folders)} folder(s)')


if __name__ == '__main__':
    main()
