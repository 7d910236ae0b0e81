""" What the analyses share: flags, runs and checkpoints to read, files to write """
import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Union

from torch import nn

from ..args import CommandParser
from ..args.timm import add_ema_args
from ..errors import UsageError
from ..files import free_folder, read_yaml, short_names, write_csv
from ..results import CLASSES, SCORES, Result, read_results
from ..run.load import ema_flag, load_model
from ..run.read import BEST, LAST, CheckpointInfo, best_checkpoint
from ..run.tracking import read_summary


def create_parser(name: str, description: str, metavar: str, paths: str, named: bool = True) -> CommandParser:
    """ Create a parser with the flags that all analyses have.

    Args:
        name: Name of the analysis.
        description: First text of --help.
        metavar: Name of the positional arguments.
        paths: Help of the positional arguments.
        named: Add --names.
    """
    parser = CommandParser(prog=f'timm_splicemix.analysis.{name}', description=description)
    parser.add_argument('paths', nargs='+', metavar=metavar, help=paths)
    if named:
        parser.add_argument(
            '--names', nargs='+', metavar='NAME', help='names in tables and figures (default: names of the folders)')
    parser.add_argument(
        '--output', metavar='DIR', help=f'folder of {name}.csv and {name}.png (default: a new one in output/analysis)')
    return parser


def create_checkpoint_parser(name: str, description: str) -> CommandParser:
    """Create a parser for an analysis of checkpoints, see `load_checkpoints`."""
    parser = create_parser(
        name, description, 'CHECKPOINT', 'checkpoints of train.py, or folders of runs, whose best checkpoint is used')
    add_ema_args(parser)
    parser.add_argument('--model', metavar='NAME', help='timm model of checkpoints that do not name theirs')
    return parser


def write_analysis(
        output: Optional[str],
        name: str,
        tables: dict[str, Sequence[dict[str, Any]]],
        draw: Callable[[Path], Any],
) -> None:
    """ Write the files of an analysis and print their folder.

    Args:
        output: Value of --output.
        name: Name of the analysis.
        tables: Rows of each CSV file, by its name without suffix.
        draw: Function that writes the figure to a path.
    """
    folder = Path(output) if output else free_folder(Path('output/analysis') / name)
    for table, rows in tables.items():
        write_csv(rows, folder / f'{table}.csv')
    draw(folder / f'{name}.png')
    print(f'\nOutput folder: {folder}')


def read_multilabel_results(
        paths: Sequence[str],
        names: Optional[Sequence[str]] = None,
        needed: Sequence[str] = (SCORES, CLASSES),
) -> list[Result]:
    """ Read evaluations of the same images.

    Args:
        paths: results.json files, or their folders.
        names: Names in tables and figures, by default the shortest ends of the paths.
        needed: Files that must be beside results.json.
    """
    results = read_results(paths, names)
    for folder, file in ((result.folder, file) for result in results for file in needed):
        if not (folder / file).is_file():
            raise UsageError(
                f'Expected {file} beside results.json, but got none in {folder}: evaluate a multi-label data set with '
                'validate.py.')
    return results


@dataclass(frozen=True)
class Run:
    """ A run of train.py.

    Args:
        name: Name in tables and figures.
        folder: Output folder.
        rows: Rows of summary.csv.
    """
    name: str
    folder: Path
    rows: list[dict[str, str]]

    def column(self, name: str) -> dict[int, float]:
        """Return the finite values of a column of summary.csv by epoch."""
        path = self.folder / 'summary.csv'
        if name not in self.rows[0]:
            there = ', '.join(other for other in self.rows[0] if other not in ('', 'epoch', 'lr'))
            raise UsageError(f"Expected a column '{name}' in {path}, but got {there or 'none'}.")
        try:
            values = {int(row['epoch']): float(row[name]) for row in self.rows if row[name]}
        except ValueError as error:
            raise UsageError(f"Expected numbers in column '{name}' of {path}, but got: {error}") from error
        values = {epoch: value for epoch, value in values.items() if math.isfinite(value)}
        if not values:
            raise UsageError(f"Expected a number in column '{name}' of {path}, but got none.")
        return values

    def settings(self) -> dict[str, Any]:
        return read_yaml(self.folder / 'args.yaml')


def read_runs(paths: Sequence[Union[str, Path]], names: Optional[Sequence[str]] = None) -> list[Run]:
    """ Read runs of train.py.

    Args:
        paths: Folders of runs, or their summary.csv.
        names: Names in tables and figures, by default the shortest ends of the paths.
    """
    folders = [Path(path).parent if Path(path).name == 'summary.csv' else Path(path) for path in paths]
    runs = []
    for name, folder in zip(short_names(folders, names), folders):
        rows = read_summary(folder / 'summary.csv')
        if not rows:
            what = 'it has no epoch' if folder.is_dir() else 'it does not exist'
            raise UsageError(f'Expected the folder of a run of train.py, with summary.csv, but got {folder}: {what}.')
        runs.append(Run(name, folder, rows))
    return runs


@dataclass(frozen=True)
class Checkpoint:
    """ A model to compare with others.

    Args:
        name: Name in tables and figures.
        model: The model, in evaluation mode.
        info: Metadata of the checkpoint.
        class_names: Name of each output, its index if the checkpoint has no names.
    """
    name: str
    model: nn.Module
    info: CheckpointInfo
    class_names: tuple[str, ...]


def load_checkpoints(args: argparse.Namespace) -> list[Checkpoint]:
    """Load the models that the flags of `create_checkpoint_parser` name."""
    files = [best_checkpoint(path) for path in args.paths]
    for file in files:
        if file.suffix == '.onnx':
            raise UsageError(
                f'Expected checkpoints or folders of runs, but got {file}, which is an exported model, whose layers '
                'cannot be analysed.')
    is_default = {file.name for file in files} in ({BEST}, {LAST})
    names = short_names([file.parent for file in files] if is_default else files, args.names)
    checkpoints = []
    for file, name in zip(files, names):
        model, info = load_model(file, model_name=args.model, use_ema=ema_flag(args))
        print(f'{name}: {info.weights} weights of {file}')
        class_names = tuple(info.class_names or map(str, range(model.num_classes)))
        checkpoints.append(Checkpoint(name, model, info, class_names))
    return checkpoints


def mean(values: Sequence[float]) -> float:
    """Return the mean without NaN, NaN if there is no number."""
    values = [value for value in values if not math.isnan(value)]
    return sum(values) / len(values) if values else math.nan
