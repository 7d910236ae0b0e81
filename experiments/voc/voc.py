""" The VOC study: train arms x seeds on PASCAL VOC 2007 with train.py and compare them

All arms share one recipe (voc_arms.py), train on split train and are scored on split val. The first seed of every arm
comes before any second one. The study can be stopped at any time (Ctrl-C, SIGTERM, --time-limit); the same command
resumes it, and finished runs are not repeated.

    python experiments/voc/voc.py --data-dir voc --weights tf_efficientnet_lite0-imagenet.pth
    python experiments/voc/voc.py --data-dir voc --arms baseline splicemix --seeds 1 --size 128 --time-limit 60
    python experiments/voc/voc.py --table
    python experiments/voc/voc.py --data-dir voc --low-resolution
    python experiments/voc/voc.py --keep
    python experiments/voc/voc.py --write-docs

Instead of --data-dir, the environment variable TSM_VOC_TAR may name a tar archive of VOCdevkit/VOC2007, which is
unpacked into --cache. The reported mAP is that of the last epoch: the best epoch would be selected on the same split.
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

from voc_arms import ARMS, FREEZE, MODEL, SIZE, Arm, Recipe, run_order, seed_flags
from voc_data import TAR_VARIABLE, find_data, make_subset
from voc_jobs import ENVIRONMENT, Job, run_jobs
from voc_pictures import PICTURES
from voc_records import EVALUATION, Run, all_runs, keep_runs, read_evaluation, read_record, run_name, write_record
from voc_results import NUM_SAMPLES, Report, describe_runs, write_section
from voc_time import TIMES, format_times, measure, read_times

from timm_splicemix.args import CommandParser, command
from timm_splicemix.errors import UsageError
from timm_splicemix.files import write_json
from timm_splicemix.run.tracking import read_summary

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
RECORDS, DOCUMENT = HERE / 'records', HERE / 'RESULTS.md'
README, HEADLINE = REPOSITORY / 'README.md', 'voc-224'  # the README shows the main arms of this setting
TRAIN = (sys.executable, str(REPOSITORY / 'train.py'))
VALIDATE = (sys.executable, str(REPOSITORY / 'validate.py'))
PARTS = (1, 2, 4, 7)  # fractions of the image size in the paper's low-resolution study


class Progress:
    """Prints each finished epoch, and an estimate of the remaining time of all runs."""

    def __init__(self, total: int, done: int):
        self.total, self.done = total, done
        self.new = 0
        self.started = time.monotonic()

    def log(self, name: str, row: dict[str, str], epochs: int) -> None:
        self.done, self.new = self.done + 1, self.new + 1
        hours = (time.monotonic() - self.started) / self.new * (self.total - self.done) / 3600
        score = f', mAP {float(row["eval_mAP"]):.2f}' if row.get('eval_mAP') else ''
        print(f'{name}: epoch {int(row["epoch"]) + 1} of {epochs}{score}; {self.done} of {self.total} epochs in total, '
              f'about {hours:.1f} h left', flush=True)


def has_checkpoint(folder: Path) -> bool:
    return any(folder.glob('[!.]*.pth.tar'))


@dataclass(frozen=True)
class Setting:
    """ Everything that the commands of runs are built from.

    Args:
        output: Folder of all runs.
        records: Folder of the records of finished runs.
        recipe: Settings that all arms share.
        machine_flags: Flags of train.py that name paths or do not change the result.
        weights: Name of the initial weights.
    """
    output: Path
    records: Path
    recipe: Recipe
    machine_flags: tuple[str, ...]
    weights: str

    def record(self, arm: Arm, seed: int) -> dict[str, Any]:
        return {
            'arm': arm.name, 'seed': seed, 'epochs': self.recipe.epochs, 'recipe': self.recipe.flags(),
            'flags': [*arm.flags, *seed_flags(arm, seed)], 'weights': self.weights}

    def check(self, runs: Sequence[Run]) -> None:
        """Raise an error if the folders hold runs of another recipe, which cannot be compared."""
        for run in runs:
            if not run.is_finished and not has_checkpoint(run.folder):
                continue
            wanted = self.record(run.arm, run.seed)
            other = next((name for name, value in wanted.items() if run.record[name] != value), None)
            if other is not None:
                raise UsageError(
                    f'Expected runs of the same recipe in {run.folder}, but {run.name} has {other} {run.record[other]} '
                    f'instead of {wanted[other]}: choose another --output.')

    def command(self, arm: Arm, seed: int) -> list[str]:
        """The command that starts or resumes a run."""
        name = run_name(arm, seed)
        folder = self.output / name
        resume = ['--resume', str(folder)] if has_checkpoint(folder) else []
        return [
            *TRAIN, *self.recipe.flags(), *arm.flags, *seed_flags(arm, seed), *self.machine_flags,
            '--output', str(self.output), '--experiment', name, *resume]


def train_job(setting: Setting, arm: Arm, seed: int, progress: Progress) -> Job:
    folder = setting.output / run_name(arm, seed)
    record = {**setting.record(arm, seed), 'finished': False, 'seconds': 0.}
    logged: set[str] = set()

    def begin() -> bool:
        before = read_record(folder) or {}  # another process may have written it meanwhile
        record.update({name: before[name] for name in ('finished', 'seconds') if name in before})
        write_record(folder, record)
        logged.update(row['epoch'] for row in read_summary(folder / 'summary.csv'))
        return not record['finished']

    def look() -> None:
        for row in read_summary(folder / 'summary.csv'):
            if row['epoch'] not in logged:
                logged.add(row['epoch'])
                progress.log(folder.name, row, setting.recipe.epochs)

    def end(finished: bool, seconds: float) -> None:
        record.update(finished=finished, seconds=record['seconds'] + seconds)
        write_record(folder, record)

    return Job(folder.name, folder, lambda: setting.command(arm, seed), begin, look, end)


def train(setting: Setting, order: Sequence[tuple[Arm, int]], jobs: int, seconds: Optional[float]) -> dict[str, str]:
    """Train all unfinished runs, at most `seconds` long; returns the state of each."""
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
    """Evaluate finished runs with validate.py at all sizes of the low-resolution study, unless done already."""
    def job(run: Run) -> Job:
        sizes = [str(round(run.size / part)) for part in PARTS]
        line = [
            *VALIDATE, '--dataset', 'voc/2007', '--data-dir', str(data), '--split', 'val', '--decoder', 'torchvision',
            '--checkpoint', str(run.folder / 'last.pth.tar'), '--eval-sizes', *sizes, '--batch-size', '32',
            '--channels-last', '--workers', str(workers), '--output', str(run.folder / EVALUATION)]

        def end(finished: bool, seconds: float) -> None:
            print(f'{run.name}: {"evaluated" if finished else "not evaluated"} in {seconds:.0f} s', flush=True)

        return Job(
            run.name, run.folder / EVALUATION, lambda: line,
            lambda: read_evaluation(run.folder, run.epochs) is None, end=end)

    todo = [job(run) for run in runs if run.is_finished and run.evaluation is None]
    print(f'{len(todo)} finished runs to evaluate', flush=True)
    return run_jobs(todo, jobs, seconds)


def build_parser() -> CommandParser:
    parser = CommandParser(prog='voc.py', description=__doc__)
    group = parser.add_argument_group('Actions', 'default: train, then print the table')
    actions = group.add_mutually_exclusive_group()
    actions.add_argument('--table', action='store_true', help='print the table of all runs and draw the curves')
    actions.add_argument(
        '--low-resolution', action='store_true',
        help='evaluate finished runs at 1, 1/2, 1/4 and 1/7 of the image size; needed for the intervals of gains')
    actions.add_argument(
        '--time', nargs='?', const=8, type=int, metavar='ROUNDS',
        help='measure the training time of the arms on an idle machine (default: 8 rounds)')
    actions.add_argument(
        '--keep', action='store_true', help='add finished and evaluated runs, without weights, to --records')
    actions.add_argument(
        '--write-docs', nargs='?', const=DOCUMENT, type=Path, metavar='FILE',
        help='write the results into a document (default: RESULTS.md and the README)')
    actions.add_argument('--dry-run', action='store_true', help='print all training commands')

    group = parser.add_argument_group('Paths')
    group.add_argument('--data-dir', metavar='DIR', help=f'folder of VOCdevkit (default: archive in {TAR_VARIABLE})')
    group.add_argument(
        '--cache', type=Path, default=Path.home() / '.cache' / 'timm_splicemix' / 'voc', metavar='DIR',
        help='folder for the unpacked archive (default: %(default)s)')
    group.add_argument('--weights', metavar='FILE', help="ImageNet weights (default: timm's)")
    group.add_argument(
        '--output', type=Path, metavar='DIR', help='folder of all runs (default: output/voc-SIZE[-SUBSET])')
    group.add_argument(
        '--records', type=Path, metavar='DIR',
        help='records of finished runs, which are not trained again (default: records/NAME, the name of --output)')

    group = parser.add_argument_group('Runs')
    group.add_argument(
        '--arms', nargs='+', default=(), metavar='ARM',
        help=f'one or more of {", ".join(ARMS)} (default: all but '
             f'{", ".join(arm.name for arm in ARMS.values() if not arm.seeds)})')
    group.add_argument(
        '--seeds', type=int, metavar='N', help='seeds per arm (default: 3 for the four main arms, 1 for the others)')
    group.add_argument('--size', type=int, default=SIZE, help='image size (default: %(default)s)')
    group.add_argument(
        '--subset', type=int, default=0, metavar='N', help='train on N random images (default: all)')

    group = parser.add_argument_group('Recipe')
    group.add_argument('--model', default=MODEL, help='default: %(default)s')
    group.add_argument('--freeze', nargs='*', default=FREEZE, metavar='NAME', help=f'default: {" ".join(FREEZE)}')
    for name in ('epochs', 'warmup_epochs', 'lr', 'backbone_lr_scale', 'batch_size', 'weight_decay'):
        value = getattr(Recipe, name)
        group.add_argument(
            f'--{name.replace("_", "-")}', type=type(value), default=value, metavar='N', help='default: %(default)s')
    group.add_argument(
        '--head-init-scale', type=float, metavar='FACTOR',
        help="keep timm's initial classifier and scale it (default: small weights, bias from the label frequency)")

    group = parser.add_argument_group('Processes')
    group.add_argument('--jobs', type=int, default=1, metavar='N', help='concurrent runs, one thread each (default: 1)')
    group.add_argument('--workers', type=int, default=0, help='loader processes per run (default: 0)')
    group.add_argument(
        '--val-interval', type=int, default=1, metavar='N',
        help='evaluate every N epochs and after the last one (default: 1)')
    group.add_argument('--time-limit', type=float, metavar='MINUTES', help='save and stop after this time')
    group.add_argument(
        '--bootstrap', type=int, default=NUM_SAMPLES, metavar='N',
        help='bootstrap samples for the intervals (default: %(default)s)')
    return parser


def make_recipe(args: argparse.Namespace) -> Recipe:
    for name in ('epochs', 'jobs', 'batch_size', 'size', 'bootstrap', 'val_interval'):
        if getattr(args, name) < 1:
            raise UsageError(f'Expected --{name.replace("_", "-")} of at least 1, but got {getattr(args, name)}.')
    if args.seeds is not None and args.seeds < 1:
        raise UsageError(f'Expected --seeds of at least 1, but got {args.seeds}.')
    if args.time is not None and args.time < 2:
        raise UsageError(f'Expected --time of at least 2 rounds, but got {args.time}.')
    names = (
        'model', 'size', 'epochs', 'warmup_epochs', 'lr', 'backbone_lr_scale', 'batch_size', 'weight_decay',
        'head_init_scale', 'subset')
    return Recipe(**{name: getattr(args, name) for name in names}, freeze=tuple(args.freeze))


def make_setting(args: argparse.Namespace, recipe: Recipe, output: Path, records: Path) -> Setting:
    if args.weights and not Path(args.weights).is_file():
        raise UsageError(f'--weights: file not found: {args.weights}')
    data = find_data(args.data_dir, args.cache.resolve())
    if recipe.subset:
        data = make_subset(data, recipe.subset, args.cache.resolve())
    weights = ('--pretrained-path', str(Path(args.weights).resolve())) if args.weights else ('--pretrained',)
    machine_flags = (
        '--data-dir', str(data), *weights, '--workers', str(args.workers), '--checkpoint-hist', '1',
        '--val-interval', str(args.val_interval))
    return Setting(output, records, recipe, machine_flags, Path(args.weights).name if args.weights else "timm's")


def show(args: argparse.Namespace, output: Path, records: Path) -> None:
    """Print the tables, draw the pictures and, with --write-docs, write the documents."""
    report = Report(all_runs(output, records), args.bootstrap)
    print('\n' + report.text())
    for name, (_, draw) in PICTURES.items():
        if draw(report, output / f'{name}.png'):
            print(f'Picture: {output / f"{name}.png"}')
    if not args.write_docs:
        return
    write_document(args.write_docs, output.name, report, read_times(records))
    print(f'Document: {args.write_docs}')
    if args.write_docs == DOCUMENT and output.name == HEADLINE:
        write_section(README, HEADLINE, report.headline())
        print(f'Document: {README}')


def write_document(path: Path, section: str, report: Report, times: Sequence[dict[str, Any]]) -> None:
    """Write tables into the section of a document, and pictures beside the document."""
    parts = [describe_runs(report.runs)] if report.runs else []
    parts.append(report.text())
    if times:
        parts.append(format_times(times))
    for name, (title, draw) in PICTURES.items():
        file = path.with_name(f'{section}-{name}.png')
        if draw(report, file):
            parts.append(f'![{title}]({file.name})')
    write_section(path, section, '\n\n'.join(parts))


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
        print(f'Added to {records}: {", ".join(keep_runs(all_runs(output, records), records)) or "nothing new"}')
    elif args.dry_run or args.time or not (args.table or args.write_docs):
        setting = make_setting(args, recipe, output, records)
        if args.dry_run:
            print('\n'.join(shlex.join(setting.command(arm, seed)) for arm, seed in order))
            return
        if args.time and any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
            line = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv)]
            sys.exit(subprocess.call(line, env={**os.environ, **ENVIRONMENT}))  # malloc reads them at start-up
        if args.time:
            arms = list(dict.fromkeys(arm for arm, _ in order))
            write_json(measure(arms, recipe, setting.machine_flags, args.time), records / TIMES)
            print(format_times(read_times(records)))
            return
        states = train(setting, order, args.jobs, seconds)

    show(args, output, records)
    for state in ('elsewhere', 'stopped', 'waiting'):
        names = [job for job, value in states.items() if value == state]
        if names:
            print(f'{state}: {", ".join(names)}')
    failed = [job for job, value in states.items() if value == 'failed']
    if failed:
        sys.exit(f'Failed: {", ".join(failed)}. Run the same command again to resume them.')


if __name__ == '__main__':
    main()
