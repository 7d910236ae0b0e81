""" Compare SpliceMix with plain training on a small generated data set, in about five minutes on two CPU cores

    timm-splicemix quickstart
    timm-splicemix quickstart --seed 1
    timm-splicemix quickstart --images 2000 --epochs 10

This command generates the shapes data set, draws a mixed batch, and trains the same small model plain, with SpliceMix
and with SpliceMix-CL: the same images, number of steps and first weights, one process of one thread each. All models
are evaluated on the same images; a table shows their mAP, and an HTML report shows everything else. SpliceMix is for
the case that is the default here: training images are few, and the plain model overfits. Where it does not, SpliceMix
may cost accuracy (docs/when.md); 2,000 images and 10 epochs are as many steps.

Ctrl-C saves all runs and stops them; the same command resumes them and does not repeat what is finished.
"""
import argparse
import signal
import subprocess
import sys
from pathlib import Path
from typing import Optional, Sequence

from .args import CommandParser, command
from .args.types import at_least
from .data.shapes import generate_shapes
from .errors import UsageError
from .files import format_table, write_csv
from .results import RESULTS, read_results
from .run.checkpoint import has_checkpoints
from .run.compare import compare_results
from .run.jobs import Job, run_jobs, start_commands
from .run.lock import FolderInUse, FolderLock
from .run.tracking import read_summary

GRIDS = ('--splicemix-grids', '1x2,2x2')
ARMS = {  # flags of train.py that each run adds to the recipe; differences are to the first
    'plain': (),
    'splicemix': GRIDS,
    'splicemix-cl': (*GRIDS, '--splicemix-cl'),
}
RECIPE = (
    '--model', 'test_resnet', '--model-kwargs', 'output_stride=8', 'stem_width=8', 'channels=(16, 32, 32, 64)',
    '--gp', 'max', '--img-size', '96', '--scale', '0.6', '1', '--color-jitter', '0',
    '--train-interpolation', 'bilinear', '--opt', 'adamw', '--lr', '4e-3', '--weight-decay', '0.02', '--cache', 'ram',
    '--checkpoint-hist', '1', '--log-interval', '1000')
INPUT = ('--batch-size', '32', '--workers', '0', '--decoder', 'torchvision', '--channels-last')
PREVIEW = (
    '--batch-size', '8', '--img-size', '112', '--columns', '8', '--splicemix-ratio', '0.5', '--splicemix-mode', 'elem',
    '--seed', '7')
HALF_SIZE = 48
SPLITS = {'val': ('--eval-sizes', str(HALF_SIZE)), 'val_unbiased': ()}  # with flags of validate.py
COLUMNS = {'val': 'val', 'val_unbiased': 'val_unbiased', f'val/size-{HALF_SIZE}': f'val at {HALF_SIZE} px'}


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = CommandParser(prog='timm_splicemix.quickstart', description=__doc__)
    add = parser.add_argument
    add('--output', default='output/quickstart', metavar='DIR', help='folder of data, runs and report')
    add('--seed', type=at_least(0), default=0, metavar='N',
        help='seed of the training images, the first weights and the order of batches')
    add('--images', type=at_least(32), default=200, metavar='N', help='number of training images')
    add('--epochs', type=at_least(1), default=100, metavar='N', help='number of epochs of each run')
    add('--jobs', type=at_least(1), default=len(ARMS), metavar='N',
        help='number of runs at the same time (default: all, which takes least time on any number of cores)')
    return parser.parse_args(argv)


def make_data(args: argparse.Namespace) -> tuple[Path, Path]:
    """Generate the shapes data set, which all runs are evaluated on, and the training images of the seed."""
    root = Path(args.output).absolute()
    shapes = generate_shapes(root / 'shapes')
    return shapes, generate_shapes(root / f'train-{args.images}-seed{args.seed}', args.seed, {'train': args.images})


def plan_run(name: str, folder: Path, data: tuple[Path, Path], args: argparse.Namespace) -> Job:
    """ Find out what is left to do of a run.

    Args:
        name: Name of the run, a key of `ARMS`.
        folder: Folder of all runs.
        data: Folders that `make_data` returned.
        args: Flags of this command.
    """
    shapes, train = data
    run, commands, text = folder / name, [], 'evaluating'
    num_done = len(read_summary(run / 'summary.csv'))
    if num_done < args.epochs:
        words = [
            'train', '--dataset', 'coco', '--data-dir', shapes,
            '--train-ann', train / 'annotations' / 'instances_train.json', '--train-images', train / 'train',
            *RECIPE, *INPUT, *ARMS[name], '--epochs', args.epochs, '--warmup-epochs', max(1, args.epochs // 10),
            '--val-interval', max(1, args.epochs // 5), '--seed', args.seed, '--output', folder, '--experiment', name]
        text = 'training'
        if has_checkpoints(run):
            words += ['--resume', run]
            text = f'resuming, {num_done} of {args.epochs} epochs are done'
        commands.append(words)
    for split, flags in SPLITS.items():
        if num_done < args.epochs or not (run / split / RESULTS).is_file():
            commands.append([
                'validate', '--dataset', 'shapes', '--data-dir', shapes, '--split', split,
                '--checkpoint', run / 'last.pth.tar', *flags, *INPUT, '--output', run / split])
    commands = [list(map(str, words)) for words in commands]
    return Job(f'{name:<{max(map(len, ARMS))}}', run, commands, text, args.epochs, args.images)


def compare_runs(folder: Path) -> list[dict[str, str]]:
    """Return a row for each run of a folder: its mAP, with the difference to plain training and the interval of it."""
    rows = [{'mAP': name} for name in ARMS]
    for place, title in COLUMNS.items():
        compared = compare_results(read_results([folder / name / place for name in ARMS], list(ARMS)))
        for number, (row, result) in enumerate(zip(rows, compared['results'])):
            low, high = result['mAP_interval']
            gain = f' {result["difference"]["mAP"]:+.1f} [{low:+.1f}, {high:+.1f}]' if number else ''
            row[title] = f'{result["metrics"]["mAP"]:.1f}{gain}'
    return rows


def call(words: Sequence[str]) -> None:
    """Run a command of this package to its end; it prints its own errors, which end this process too."""
    code = start_commands([words], stdout=subprocess.DEVNULL).wait()
    if code:
        sys.exit(code)


def run_quickstart(args: argparse.Namespace, folder: Path) -> None:
    """ Do everything that is not done yet, then print the table and write the report.

    Args:
        args: Flags of this command.
        folder: Folder of the runs.
    """
    preview, report = folder.with_name('preview.png'), folder / 'report.html'
    print(f'Data         {args.output}\nLogs         {folder / "*.log"}', flush=True)
    data = make_data(args)
    jobs = [plan_run(name, folder, data, args) for name in ARMS]
    if not preview.is_file():  # in the process of the plain run, which ends first
        words = ['preview', '--dataset', 'shapes', '--data-dir', str(data[0]), *PREVIEW, '--output', str(preview)]
        jobs[0].commands.insert(0, words)
    if not run_jobs(jobs, args.jobs):
        sys.exit(1)
    rows = compare_runs(folder)
    write_csv(rows, folder / 'comparison' / 'mAP.csv')
    title = f'{args.images:,} training images, {args.epochs} epochs, seed {args.seed}'
    call(['report', *(str(folder / name) for name in (*ARMS, 'comparison')), '--title', title, '--output', str(report)])
    print(
        f'\n{title}:\n\n{format_table(rows)}\n\nBeside the mAP: its difference to plain, with the 95 % interval over '
        f'the evaluated images. For other training images: --seed {args.seed + 1}\n\n'
        f'Mixed batch  {preview}\nReport       {report}')


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    folder = Path(args.output) / f'images{args.images}-epochs{args.epochs}-seed{args.seed}'
    try:
        lock = FolderLock(folder)
    except FolderInUse as error:
        raise UsageError(f'Another process uses the folder {folder}. Wait until it ends, or set --output.') from error
    # SIGINT too: processes that a shell starts in the background ignore it.
    previous = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        run_quickstart(args, folder)
    except KeyboardInterrupt:
        print('Stopped. The same command resumes the runs.', file=sys.stderr)
        sys.exit(130)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        lock.release()


if __name__ == '__main__':
    main()
