""" What the analyses share: how they are called, what they read, the tables they print, where they write """
import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence, Union

import yaml

from ..args import CommandParser
from ..errors import UsageError
from ..results import CLASSES, Scores, read_results
from ..run.tracking import read_summary

COLORS = ('#1a73e8', '#d93025', '#188038', '#f9ab00', '#9334e6', '#12b5cb', '#e8710a', '#5f6368')


def create_parser(name: str, description: str, metavar: str, what: str, named: bool = True) -> CommandParser:
    """ A parser with the flags that all analyses have.

    Args:
        name: Name of the analysis.
        description: What --help says first.
        metavar: What is read, as one word.
        what: What is read, as a sentence.
        named: Whether each of them is shown by a name.
    """
    parser = CommandParser(prog=f'timm_splicemix.analysis.{name}', description=description)
    parser.add_argument('paths', nargs='+', metavar=metavar, help=what)
    if named:
        parser.add_argument(
            '--names', nargs='+', metavar='NAME', help='what to call them, in their order (default: by their folders)')
    parser.add_argument(
        '--output', metavar='DIR',
        help=f'folder for {name}.csv and {name}.png (default: a new one in output/analysis)')
    return parser


def output_folder(given: Optional[str], name: str) -> Path:
    """ The folder that is given, or one that is not there yet.

    Args:
        given: What --output says.
        name: Name of the analysis.
    """
    if given:
        return Path(given)
    number, folder = 1, Path('output/analysis') / name
    while folder.exists():
        number += 1
        folder = folder.with_name(f'{name}-{number}')
    return folder


@dataclass(frozen=True)
class Evaluation:
    """ What validate.py wrote.

    Args:
        name: What to call it.
        folder: Where it is.
        content: Content of results.json.
        scores: Scores of all images, None if they are not there.
    """
    name: str
    folder: Path
    content: dict[str, Any]
    scores: Optional[Scores]

    def class_ap(self) -> dict[str, float]:
        """AP of each class in percent, NaN for one without positives."""
        path = self.folder / CLASSES
        try:
            with open(path, newline='', encoding='utf-8') as file:
                values = {row['class']: float(row['AP']) for row in csv.DictReader(file)}
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f'Expected the AP of classes that validate.py wrote, but got {path}: {error!r}') from error
        if not values:
            raise UsageError(f'Expected the AP of classes that validate.py wrote, but got {path}, which has none.')
        return values

    def need_scores(self) -> Scores:
        """The scores, or an error that says what to do."""
        if self.scores is None:
            raise UsageError(
                f'Expected scores.npz beside results.json, but got none in {self.folder}: evaluate a multi-label data '
                'set with validate.py.')
        return self.scores


def read_evaluations(paths: Sequence[Union[str, Path]], names: Optional[Sequence[str]] = None) -> list[Evaluation]:
    """ Read results of validate.py, and refuse those of different images.

    Args:
        paths: results.json files, or their folders.
        names: What to call them, by their folders if None.
    """
    results = read_results(paths)
    names = _check_names(names, [result.name for result in results])
    folders = [Path(path) if Path(path).is_dir() else Path(path).parent for path in paths]
    return [
        Evaluation(name, folder, result.content, result.scores)
        for name, folder, result in zip(names, folders, results)]


@dataclass(frozen=True)
class Run:
    """ What train.py wrote.

    Args:
        name: What to call it.
        folder: Where it is.
        rows: Rows of summary.csv.
    """
    name: str
    folder: Path
    rows: list[dict[str, str]]

    def column(self, name: str) -> dict[int, float]:
        """ Values of a column by epoch, without the epochs that have none.

        Args:
            name: Column of summary.csv.
        """
        if name not in self.rows[0]:
            there = ', '.join(other for other in self.rows[0] if other and other not in ('epoch', 'lr'))
            raise UsageError(
                f"Expected a column '{name}' in {self.folder / 'summary.csv'}, but got {there or 'none'}.")
        try:
            values = {int(row['epoch']): float(row[name]) for row in self.rows if row[name]}
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"Expected numbers by epoch in {self.folder / 'summary.csv'}, but got {error!r}.") from error
        values = {epoch: value for epoch, value in values.items() if math.isfinite(value)}
        if not values:
            raise UsageError(
                f"Expected an epoch with a number in column '{name}', but got none in {self.folder / 'summary.csv'}.")
        return values

    def settings(self) -> dict[str, Any]:
        """The flags of the run."""
        path = self.folder / 'args.yaml'
        try:
            settings = yaml.safe_load(path.read_text(encoding='utf-8'))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UsageError(f'Expected args.yaml of a run of train.py, but got {path}: {error}') from error
        if not isinstance(settings, dict):
            raise UsageError(f"Expected lines 'flag: value' in {path}, but got {type(settings).__name__}.")
        return settings


def read_runs(paths: Sequence[Union[str, Path]], names: Optional[Sequence[str]] = None) -> list[Run]:
    """ Read runs of train.py.

    Args:
        paths: Folders of runs, or their summary.csv.
        names: What to call them, by their folders if None.
    """
    folders = [Path(path).parent if Path(path).name == 'summary.csv' else Path(path) for path in paths]
    names = _check_names(names, _short_names(folders))
    runs = []
    for name, folder in zip(names, folders):
        try:
            rows = read_summary(folder / 'summary.csv')
        except (csv.Error, UnicodeDecodeError) as error:
            raise UsageError(f'Expected a summary of train.py, but got {folder / "summary.csv"}: {error}') from error
        if not rows:
            what = 'which has no epoch' if folder.is_dir() else 'which does not exist'
            raise UsageError(f'Expected the folder of a run of train.py, with summary.csv, but got {folder}, {what}.')
        runs.append(Run(name, folder, rows))
    return runs


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the folders' paths that differ."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ['/'.join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise UsageError('Expected different runs, but got one twice.')


def _check_names(names: Optional[Sequence[str]], own: Sequence[str]) -> Sequence[str]:
    if names is None:
        return own
    if len(names) != len(own) or len(set(names)) != len(names):
        raise UsageError(f'Expected {len(own)} different --names, one for each, but got {" ".join(names)}.')
    return names


def format_table(rows: Sequence[dict[str, Any]], signed: Sequence[str] = (), precise: Sequence[str] = ()) -> str:
    """ Rows as text: words to the left, numbers to the right, - for what is not there.

    Args:
        rows: Rows with the same names.
        signed: Names of columns whose numbers get a sign.
        precise: Names of columns whose numbers get four digits instead of two.
    """
    columns = []
    for name in rows[0]:
        spec = f'{"+" * (name in signed)}.{4 if name in precise else 2}f'
        cells = [_format_cell(row[name], spec) for row in rows]
        width = max(map(len, (name, *cells)))
        side = '<' if all(isinstance(row[name], str) for row in rows) else '>'
        columns.append([f'{cell:{side}{width}}' for cell in (name, *cells)])
    return '\n'.join('  '.join(line).rstrip() for line in zip(*columns))


def _format_cell(value: Any, spec: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return '-'
    return format(value, spec) if isinstance(value, float) else f'{value:,}' if isinstance(value, int) else str(value)


def mean(values: Sequence[float]) -> float:
    """The mean of the values that are numbers, NaN if there are none."""
    values = [value for value in values if not math.isnan(value)]
    return sum(values) / len(values) if values else math.nan
