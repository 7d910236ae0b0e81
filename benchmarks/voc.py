""" Does SpliceMix help on real photos? Trains arms x seeds on VOC 2007 by train.py, and compares them

Trains on split train and scores on split val, by one recipe for all arms (voc_arms.py), the first seed of every arm
before any second. Can be stopped at any time, by Ctrl-C, SIGTERM, --time-limit or worse: the same command goes on where
it was, and what is finished is not repeated. Every run keeps its folder in that of --output.

    python benchmarks/voc.py --data-dir voc --weights tf_efficientnet_lite0-imagenet.pth
    python benchmarks/voc.py --data-dir voc --arms baseline splicemix --seeds 1 --size 128 --subset 800 --time-limit 60
    python benchmarks/voc.py --table
    python benchmarks/voc.py --data-dir voc --low-resolution
    python benchmarks/voc.py --keep
    python benchmarks/voc.py --write-docs

The environment variable TSM_VOC_TAR may name an archive of VOCdevkit/VOC2007 instead of --data-dir; it is unpacked into
--cache. The headline is the mAP after the last epoch, as the best epoch would be chosen on the split that is reported.
"""
import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence

from voc_arms import (
    ARMS,
    BACKBONE_LR_SCALE,
    BATCH_SIZE,
    EPOCHS,
    FREEZE,
    LR,
    MODEL,
    SIZE,
    WARMUP_EPOCHS,
    WEIGHT_DECAY,
    Arm,
    Recipe,
    run_order,
    seed_flags,
)
from voc_data import TAR_VARIABLE, find_data, make_subset
from voc_document import write_document, write_section
from voc_jobs import ENVIRONMENT, Job, run_jobs
from voc_pictures import PICTURES
from voc_records import EVALUATION, Run, all_runs, keep_runs, read_record, run_name, write_record
from voc_results import NUM_SAMPLES, Report
from voc_time import TIMES, format_times, measure, read_times

from timm_splicemix.args import CommandParser, command
from timm_splicemix.files import write_json
from timm_splicemix.run.tracking import read_summary

REPOSITORY = Path(__file__).resolve().parent.parent
RECORDS = REPOSITORY / 'benchmarks' / 'voc_runs'
DOCUMENT = REPOSITORY / 'benchmarks' / 'RESULTS.md'
README, HEADLINE = REPOSITORY / 'README.md', 'voc-224'  # whose main arms the README shows
TRAIN = (sys.executable, str(REPOSITORY / 'train.py'))
VALIDATE = (sys.executable, str(REPOSITORY / 'validate.py'))
PARTS = (1, 2, 4, 7)  # of the size, in the low-resolution study of the paper


class Progress:
    """ Tells each epoch that is done, and how long the rest will take.

    Args:
        total: Number of epochs of all runs.
        done: Number of those that were done before.
    """

    def __init__(self, total: int, done: int):
        self.total, self.done = total, done
        self.new = 0
        self.started = time.monotonic()

    def tell(self, name: str, row: dict[str, str], epochs: int) -> None:
        """ Tell an epoch.

        Args:
            name: Name of the run.
            row: Its row of the summary.
            epochs: Number of epochs of the run.
        """
        self.done, self.new = self.done + 1, self.new + 1
        hours = (time.monotonic() - self.started) / self.new * (self.total - self.done) / 3600
        score = f', mAP {float(row["eval_mAP"]):.2f}' if row.get('eval_mAP') else ''
        print(f'{name}: epoch {int(row["epoch"]) + 1} of {epochs}{score}; {self.done} of {self.total} epochs of all, '
              f'about {hours:.1f} h to go', flush=True)


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has saved anything to go on from."""
    return any(folder.glob('[!.]*.pth.tar'))


@dataclass(frozen=True)
class Setting:
    """ What runs are made of.

    Args:
        output: Folder of all runs.
        records: Folder of what was kept of finished ones.
        recipe: What all arms share.
        machine_flags: Flags of train.py that don't change the result, or say where things are.
        weights: Name of the weights to start from.
    """
    output: Path
    records: Path
    recipe: Recipe
    machine_flags: tuple[str, ...]
    weights: str

    def record(self, arm: Arm, seed: int) -> dict[str, Any]:
        """What a run is, apart from what became of it."""
        return {
            'arm': arm.name, 'seed': seed, 'epochs': self.recipe.epochs, 'recipe': self.recipe.flags(),
            'flags': [*arm.flags, *seed_flags(arm, seed)], 'weights': self.weights}

    def check(self, runs: Sequence[Run]) -> None:
        """ Refuse a folder with runs of another recipe, which can't be compared.

        Args:
            runs: Runs that are there or were kept; those that saved nothing may begin anew.
        """
        for run in runs:
            if not run.is_finished and not has_checkpoint(run.folder):
                continue
            wanted = self.record(run.arm, run.seed)
            other = next((name for name, value in wanted.items() if run.record[name] != value), None)
            if other is not None:
                raise ValueError(
                    f'Expected runs of the same recipe in {run.folder.parent}, but got {run.folder.name} with '
                    f'{other} {run.record[other]} instead of {wanted[other]}: choose another --output.')

    def command(self, arm: Arm, seed: int) -> list[str]:
        """The command that begins a run, or goes on with it."""
        name = run_name(arm, seed)
        folder = self.output / name
        resume = ['--resume', str(folder)] if has_checkpoint(folder) else []
        return [
            *TRAIN, *self.recipe.flags(), *arm.flags, *seed_flags(arm, seed), *self.machine_flags,
            '--output', str(self.output), '--experiment', name, *resume]


def train_job(setting: Setting, arm: Arm, seed: int, progress: Progress) -> Job:
    """ The job of a run.

    Args:
        setting: What runs are made of.
        arm: The arm.
        seed: The seed.
        progress: Is told each epoch.
    """
    folder = setting.output / run_name(arm, seed)
    record = {**setting.record(arm, seed), 'finished': False, 'seconds': 0.}
    told: set[str] = set()

    def begin() -> bool:
        before = read_record(folder) or {}  # anew, as another process may have had it until now
        record.update({name: before[name] for name in ('finished', 'seconds') if name in before})
        write_record(folder, record)
        told.update(row['epoch'] for row in read_summary(folder / 'summary.csv'))
        return not record['finished']

    def look() -> None:
        for row in read_summary(folder / 'summary.csv'):
            if row['epoch'] not in told:
                told.add(row['epoch'])
                progress.tell(folder.name, row, setting.recipe.epochs)

    def end(finished: bool, seconds: float) -> None:
        record.update(finished=finished, seconds=record['seconds'] + seconds)
        write_record(folder, record)

    return Job(folder.name, folder, lambda: setting.command(arm, seed), begin, look, end)


def train(setting: Setting, order: Sequence[tuple[Arm, int]], jobs: int, seconds: Optional[float]) -> dict[str, str]:
    """ Train what is not finished yet; returns how each run ended.

    Args:
        setting: What runs are made of.
        order: Arms and seeds.
        jobs: Number of runs at once.
        seconds: Time after which to stop, None for no limit.
    """
    runs = {run.name: run for run in all_runs(setting.output, setting.records)}
    setting.check(list(runs.values()))
    names = [run_name(arm, seed) for arm, seed in order]
    finished = [name for name in names if name in runs and runs[name].is_finished]
    progress = Progress(
        setting.recipe.epochs * len(order), sum(len(runs[name].rows) for name in names if name in runs))
    print(f'{len(order)} runs of {setting.recipe.epochs} epochs, {len(finished)} of them finished, in {setting.output}',
          flush=True)
    todo = [train_job(setting, arm, seed, progress) for (arm, seed), name in zip(order, names) if name not in finished]
    return run_jobs(todo, jobs, seconds)


def evaluate(
        runs: Sequence[Run],
        data: Path,
        jobs: int,
        seconds: Optional[float],
        workers: int = 0,
) -> dict[str, str]:
    """ Score finished runs by validate.py at full, half, a quarter and a seventh of the size, if that was not done yet.

    Args:
        runs: All runs.
        data: Folder of VOC 2007.
        jobs: Number of processes at once.
        seconds: Time after which to stop, None for no limit.
        workers: Processes that read images, for each.
    """
    def job(run: Run) -> Job:
        sizes = [str(round(run.size / part)) for part in PARTS]
        line = [
            *VALIDATE, '--dataset', 'voc/2007', '--data-dir', str(data), '--split', 'val', '--decoder', 'torchvision',
            '--checkpoint', str(run.folder / 'last.pth.tar'), '--eval-sizes', *sizes, '--batch-size', '32',
            '--channels-last', '--workers', str(workers), '--output', str(run.folder / EVALUATION)]

        def end(finished: bool, seconds: float) -> None:
            print(f'{run.name}: {"evaluated" if finished else "not evaluated"} in {seconds:.0f} s', flush=True)

        return Job(run.name, run.folder / EVALUATION, lambda: line, lambda: run.evaluation() is None, end=end)

    todo = [job(run) for run in runs if run.is_finished and run.evaluation() is None]
    print(f'{len(todo)} finished runs to evaluate', flush=True)
    return run_jobs(todo, jobs, seconds)


def build_parser() -> CommandParser:
    parser = CommandParser(prog='voc.py', description=__doc__)
    group = parser.add_argument_group('What to do', 'trains and prints the table unless one of these is given')
    actions = group.add_mutually_exclusive_group()
    actions.add_argument('--table', action='store_true', help='print the table of what is there, and draw the curves')
    actions.add_argument(
        '--low-resolution', action='store_true',
        help='score finished runs at full, half, a quarter and a seventh of the size; gives intervals of gains too')
    actions.add_argument(
        '--time', nargs='?', const=8, type=int, metavar='ROUNDS',
        help='time training of the arms in turn, in one process; the machine should do nothing else (default: 8)')
    actions.add_argument(
        '--keep', action='store_true', help='copy results of finished and scored runs, without weights, to --records')
    actions.add_argument(
        '--write-docs', nargs='?', const=DOCUMENT, type=Path, metavar='FILE',
        help='write the results between the marks of a document (default: benchmarks/RESULTS.md, and the README)')
    actions.add_argument('--dry-run', action='store_true', help='print the commands in their order')

    group = parser.add_argument_group('Where')
    group.add_argument('--data-dir', metavar='DIR', help=f'folder of VOC 2007 (default: the archive of {TAR_VARIABLE})')
    group.add_argument(
        '--cache', type=Path, default=Path.home() / '.cache' / 'timm_splicemix' / 'voc', metavar='DIR',
        help='folder to unpack into (default: %(default)s)')
    group.add_argument('--weights', metavar='FILE', help='ImageNet weights (default: those that timm offers)')
    group.add_argument(
        '--output', type=Path, metavar='DIR', help='folder of all runs (default: output/voc-SIZE, with the subset)')
    group.add_argument(
        '--records', type=Path, metavar='DIR',
        help='folder of what is kept of finished runs, which are not trained again (default: benchmarks/voc_runs/NAME, '
             'by the name of --output)')

    group = parser.add_argument_group('What is trained')
    group.add_argument(
        '--arms', nargs='+', default=(), metavar='ARM',
        help=f'of {", ".join(ARMS)} (default: all but {", ".join(arm.name for arm in ARMS.values() if not arm.seeds)})')
    group.add_argument(
        '--seeds', type=int, metavar='N', help='seeds of each arm (default: 3 of the first four, else 1)')
    group.add_argument('--size', type=int, default=SIZE, help='size of images (default: %(default)s)')
    group.add_argument(
        '--subset', type=int, default=0, metavar='N', help='train on so many random images (default: on all)')

    group = parser.add_argument_group('Recipe', 'of all arms')
    group.add_argument('--model', default=MODEL, help='model of timm (default: %(default)s)')
    group.add_argument('--freeze', nargs='*', default=FREEZE, metavar='NAME', help=f'default: {" ".join(FREEZE)}')
    group.add_argument('--epochs', type=int, default=EPOCHS, help='default: %(default)s')
    group.add_argument('--warmup-epochs', type=int, default=WARMUP_EPOCHS, help='default: %(default)s')
    group.add_argument('--lr', type=float, default=LR, help='default: %(default)s')
    group.add_argument('--backbone-lr-scale', type=float, default=BACKBONE_LR_SCALE, help='default: %(default)s')
    group.add_argument('--batch-size', type=int, default=BATCH_SIZE, help='default: %(default)s')
    group.add_argument('--weight-decay', type=float, default=WEIGHT_DECAY, help='default: %(default)s')
    group.add_argument(
        '--head-init-scale', type=float, metavar='FACTOR',
        help="start with the model's own classifier, scaled by this (default: small weights, right on average)")

    group = parser.add_argument_group('How')
    group.add_argument('--jobs', type=int, default=1, metavar='N', help='runs at once, of one thread each (default: 1)')
    group.add_argument('--workers', type=int, default=0, help='processes that read images, for each run (default: 0)')
    group.add_argument(
        '--val-interval', type=int, default=1, metavar='N',
        help='epochs between evaluations, which take a third of the time; the last one always is (default: 1)')
    group.add_argument('--time-limit', type=float, metavar='MINUTES', help='save and leave then (default: none)')
    group.add_argument(
        '--bootstrap', type=int, default=NUM_SAMPLES, metavar='N',
        help='samples of images behind the intervals (default: %(default)s)')
    return parser


def make_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe that the flags describe."""
    for name in ('epochs', 'jobs', 'batch_size', 'size', 'bootstrap', 'val_interval'):
        if getattr(args, name) < 1:
            raise ValueError(f'Expected --{name.replace("_", "-")} of at least 1, but got {getattr(args, name)}.')
    if args.seeds is not None and args.seeds < 1:
        raise ValueError(f'Expected --seeds of at least 1, but got {args.seeds}.')
    if args.time is not None and args.time < 2:
        raise ValueError(f'Expected --time of at least 2 rounds, but got {args.time}.')
    names = (
        'model', 'size', 'epochs', 'warmup_epochs', 'lr', 'backbone_lr_scale', 'batch_size', 'weight_decay',
        'head_init_scale', 'subset')
    return Recipe(**{name: getattr(args, name) for name in names}, freeze=tuple(args.freeze))


def make_setting(args: argparse.Namespace, recipe: Recipe, output: Path, records: Path) -> Setting:
    """ Find data and weights.

    Args:
        args: Flags.
        recipe: What all arms share.
        output: Folder of all runs.
        records: Folder of what was kept of finished ones.
    """
    if args.weights and not Path(args.weights).is_file():
        raise ValueError(f'Expected a file for --weights, but got {args.weights}, which is none.')
    data = find_data(args.data_dir, args.cache.resolve())
    if recipe.subset:
        data = make_subset(data, recipe.subset, args.cache.resolve())
    weights = ('--pretrained-path', str(Path(args.weights).resolve())) if args.weights else ('--pretrained',)
    machine_flags = (
        '--data-dir', str(data), *weights, '--workers', str(args.workers), '--checkpoint-hist', '1',
        '--val-interval', str(args.val_interval))
    return Setting(output, records, recipe, machine_flags, Path(args.weights).name if args.weights else "timm's")


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = build_parser().parse_args(argv)
    recipe = make_recipe(args)
    order = run_order(args.arms, args.seeds)
    name = f'voc-{recipe.size}' + (f'-{recipe.subset}' if recipe.subset else '')
    output = (args.output or REPOSITORY / 'output' / name).resolve()
    records = (args.records or RECORDS / output.name).resolve()
    states: dict[str, str] = {}
    seconds = None if args.time_limit is None else 60 * args.time_limit
    if args.low_resolution:
        data = find_data(args.data_dir, args.cache.resolve())
        states = evaluate(all_runs(output, records), data, args.jobs, seconds, args.workers)
    elif args.keep:
        print(f'Kept in {records}: {", ".join(keep_runs(all_runs(output, records), records)) or "nothing new"}')
    elif args.dry_run or args.time or not (args.table or args.write_docs):
        setting = make_setting(args, recipe, output, records)
        if args.dry_run:
            print('\n'.join(shlex.join(setting.command(arm, seed)) for arm, seed in order))
            return
        if args.time and any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
            line = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv)]
            sys.exit(subprocess.call(line, env={**os.environ, **ENVIRONMENT}))  # malloc reads them when it starts
        if args.time:
            arms = list(dict.fromkeys(arm for arm, _ in order))
            write_json(measure(arms, recipe, setting.machine_flags, args.time), records / TIMES)
            print(format_times(read_times(records)))
            return
        states = train(setting, order, args.jobs, seconds)

    report = Report(all_runs(output, records), args.bootstrap)
    print('\n' + report.text())
    for name, (_, draw) in PICTURES.items():
        if draw(report, output / f'{name}.png'):
            print(f'Drawn to {output / f"{name}.png"}')
    if args.write_docs:
        write_document(args.write_docs, output.name, report, read_times(records))
        print(f'Written to {args.write_docs}')
        if args.write_docs == DOCUMENT and output.name == HEADLINE:
            write_section(README, HEADLINE, report.headline())
            print(f'The headline is written to {README}')
    for state in ('elsewhere', 'stopped', 'waiting'):
        names = [job for job, value in states.items() if value == state]
        if names:
            print(f'{state}: {", ".join(names)}')
    failed = [job for job, value in states.items() if value == 'failed']
    if failed:
        sys.exit(f'Failed: {", ".join(failed)}; the same command tries again, from where they were.')


if __name__ == '__main__':
    main()
