""" The queue of the study: which runs are finished, and what to start next

    python experiments/when/queue_runs.py run --data DIR --output DIR --weights DIR [--jobs 2] [--pause-file FILE]
    python experiments/when/queue_runs.py state --output DIR
    python experiments/when/queue_runs.py collect --output DIR
    python experiments/when/queue_runs.py plan

run: Starts runs in the order of plan.py, with one thread each and the lowest priority. SIGTERM or Ctrl-C stops the
    queue: runs save their state and exit. The same command resumes them and does not repeat finished runs. While the
    file of --pause-file exists, running processes are suspended and none is started.
state: Prints finished, running and waiting runs.
collect: Appends finished runs to the records. Commits nothing.
plan: Prints the order and the planned cost.
"""
import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

from plan import Run, runs_in_order

HERE = Path(__file__).resolve().parent
RECORDS = HERE / 'records'
RUNS, SAMPLES = 'runs.jsonl', 'samples.jsonl'
SAMPLED = ('val', 'val_unbiased', 'val_half')  # what the bootstrap samples are kept of
RESULT = 'result.json'
POLL_SECONDS = 2.
SECONDS_TO_SAVE = 300.
MAX_STARTS = 3  # of a run that fails
# One thread; glibc's malloc keeps freed memory, which makes training on a CPU about a fifth faster.
ENVIRONMENT = {
    'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1', 'MALLOC_MMAP_MAX_': '0', 'MALLOC_TRIM_THRESHOLD_': str(1 << 40)}


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Objects of a file with one JSON object per line, [] if there is no file."""
    return [json.loads(line) for line in file.read_text(encoding='utf-8').splitlines()] if file.is_file() else []


def read_finished(output: Optional[Path], records: Path) -> dict[str, dict[str, Any]]:
    """ Results of finished runs by their names.

    Args:
        output: Folder of all runs, None for the records alone.
        records: Folder of the records.
    """
    finished = {record['name']: record for record in read_lines(records / RUNS)}
    for file in sorted(output.glob(f'*/{RESULT}')) if output else ():
        result = json.loads(file.read_text(encoding='utf-8'))
        finished.setdefault(result['name'], result)
    return finished


def scores_of(finished: dict[str, dict[str, Any]]) -> dict[str, float]:
    """mAP on val of finished runs by their names."""
    return {name: record['metrics']['val']['mAP'] for name, record in finished.items()}


def collect(output: Path, records: Path) -> list[str]:
    """ Append finished runs to the records; returns their names.

    Args:
        output: Folder of all runs.
        records: Folder of the records.
    """
    files = sorted(output.glob(f'*/{RESULT}'), key=lambda file: file.stat().st_mtime)
    return append([json.loads(file.read_text(encoding='utf-8')) for file in files], records)


def append(results: Sequence[dict[str, Any]], records: Path) -> list[str]:
    """ Append results that the records do not have; returns their names.

    Args:
        results: Results of runs.
        records: Folder of the records.
    """
    known = {record['name'] for record in read_lines(records / RUNS)}
    new = [result for result in results if result['name'] not in known]
    records.mkdir(parents=True, exist_ok=True)
    with open(records / SAMPLES, 'a', encoding='utf-8') as file:
        for result in new:
            samples = {place: values for place, values in result.pop('samples').items() if place in SAMPLED}
            if samples:
                file.write(json.dumps({'name': result['name'], **samples}, separators=(',', ':')) + '\n')
    with open(records / RUNS, 'a', encoding='utf-8') as file:
        for result in new:
            file.write(json.dumps(result) + '\n')
    return [result['name'] for result in new]


@dataclass
class Job:
    """ A run that was started.

    Args:
        run: The run.
        process: Its process.
        lock: Descriptor of its lock file, which the process holds too.
    """
    run: Run
    process: subprocess.Popen
    lock: int

    def send(self, *numbers: signal.Signals) -> None:
        """Send signals to the process."""
        for number in numbers:
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)


def lowest_priority() -> list[str]:
    """Command that starts another one so that it gets only time that nobody else wants."""
    return ['chrt', '--idle', '0'] if shutil.which('chrt') else ['nice', '-n', '19']


def start(run: Run, args: argparse.Namespace) -> Job:
    """ Start or resume a run.

    Args:
        run: The run.
        args: Flags of `run`.
    """
    folder = args.output / run.name
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / 'lock', os.O_RDWR | os.O_CREAT, 0o644)
    _end_leftover(lock)
    command = [
        *lowest_priority(), sys.executable, str(HERE / 'run_one.py'), run.name, '--data', str(args.data),
        '--output', str(args.output), '--weights', str(args.weights), *(['--smoke'] if args.smoke else [])]
    with open(folder / 'log.txt', 'ab') as log:
        process = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT}, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            pass_fds=[lock], start_new_session=True)
    with contextlib.suppress(OSError):  # Linux may share the time between sessions, whatever the priority within each
        Path(f'/proc/{process.pid}/autogroup').write_text('19', encoding='utf-8')
    os.truncate(lock, 0)
    os.pwrite(lock, str(process.pid).encode(), 0)
    return Job(run, process, lock)


def _end_leftover(lock: int) -> None:
    """Take the lock of a run; a process that a killed queue left behind is told to save and exit first."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        group = int(os.pread(lock, 20, 0) or 0)
        if group:
            for number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, number)
        fcntl.flock(lock, fcntl.LOCK_EX)


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Note SIGINT and SIGTERM in a list instead of exiting."""
    received: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def log(text: str) -> None:
    """Print a line with the time."""
    print(f'{time.strftime("%d %H:%M:%S")} {text}', flush=True)


class Queue:
    """ Runs of the plan, some at a time.

    Args:
        args: Flags of `run`.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.jobs: list[Job] = []
        self.starts: dict[str, int] = {}
        self.is_paused = False
        self.has_voc = (args.data / 'voc').is_dir()
        if not self.has_voc:
            log(f'No folder {args.data / "voc"}: runs on VOC are left out.')

    def next_run(self) -> Optional[Run]:
        """The next run to start, None if there is none now."""
        finished = read_finished(self.args.output, self.args.records)
        running = [job.run.name for job in self.jobs]
        for run in runs_in_order(scores_of(finished)):
            if run.name in finished or run.name in running or self.starts.get(run.name, 0) >= MAX_STARTS:
                continue
            if self.args.only not in run.name or (run.setting.recipe.data == 'voc' and not self.has_voc):
                continue
            return run
        return None

    def work(self) -> None:
        """Start runs until all are finished or a signal arrives."""
        with noted_signals() as received:
            while not received:
                self.reap()
                self.pause(self.args.pause_file is not None and self.args.pause_file.exists())
                if not self.is_paused and len(self.jobs) < self.args.jobs:
                    run = self.next_run()
                    if run is None and not self.jobs:
                        log('No run is left.')
                        return
                    if run is not None:
                        self.starts[run.name] = self.starts.get(run.name, 0) + 1
                        self.jobs.append(start(run, self.args))
                        log(f'Started {run.name}.')
                        continue
                time.sleep(POLL_SECONDS)
            self.stop()

    def reap(self) -> None:
        """Forget processes that have exited."""
        for job in list(self.jobs):
            code = job.process.poll()
            if code is None:
                continue
            self.jobs.remove(job)
            os.close(job.lock)
            file = self.args.output / job.run.name / RESULT
            if code == 0 and file.is_file():
                result = json.loads(file.read_text(encoding='utf-8'))
                log(f'Finished {job.run.name}: mAP {result["metrics"]["val"]["mAP"]:.2f}, '
                    f'{result["core_seconds"]} core-seconds.')
            else:
                log(f'{job.run.name} exited with code {code}, see {file.with_name("log.txt")}.')

    def pause(self, wanted: bool) -> None:
        """Suspend or continue all processes."""
        if wanted != self.is_paused:
            self.is_paused = wanted
            log('Paused.' if wanted else 'Continued.')
            for job in self.jobs:
                job.send(signal.SIGSTOP if wanted else signal.SIGCONT)

    def stop(self) -> None:
        """Tell all processes to save and exit."""
        log(f'Stopping {len(self.jobs)} runs.')
        for job in self.jobs:
            job.send(signal.SIGTERM, signal.SIGCONT)
        deadline = time.monotonic() + SECONDS_TO_SAVE
        for job in self.jobs:
            try:
                job.process.wait(max(0., deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                job.send(signal.SIGKILL)
        self.reap()


def run_queue(args: argparse.Namespace) -> None:
    """ Run the queue; a second one for the same output folder is refused.

    Args:
        args: Flags of `run`.
    """
    args.output.mkdir(parents=True, exist_ok=True)
    with open(args.output / 'queue.lock', 'a+', encoding='utf-8') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f'error: A queue is running for {args.output}.') from None
        lock.truncate(0)
        lock.write(f'{os.getpid()}\n')
        lock.flush()
        log(f'Queue with process id {os.getpid()}.')
        Queue(args).work()


def print_state(args: argparse.Namespace) -> None:
    """ Print what is finished, what runs and what is left.

    Args:
        args: Flags of `state`.
    """
    finished = read_finished(args.output, args.records)
    left = 0.
    for run in runs_in_order(scores_of(finished), assume=True):
        folder = args.output / run.name
        if run.name in finished:
            record = finished[run.name]
            mAPs = ', '.join(f'{name} {value["mAP"]:.2f}' for name, value in record['metrics'].items())
            print(f'finished  {run.name}: {mAPs}; {record["core_seconds"]} core-seconds')
            continue
        summary = folder / 'summary.csv'
        epochs = len(summary.read_text().splitlines()) - 1 if summary.is_file() else 0
        left += run.seconds * (1 - epochs / run.setting.epochs)
        if folder.is_dir():
            print(f'begun     {run.name}: {epochs} of {run.setting.epochs} epochs')
        elif args.all:
            print(f'waiting   {run.name}')
    spent = sum(record['core_seconds'] for record in finished.values())
    print(f'{len(finished)} runs finished in {spent / 3600:.1f} core-hours, about {left / 3600:.1f} core-hours left')


def print_plan(args: argparse.Namespace) -> None:
    """ Print the runs in their order and the planned core-hours.

    Args:
        args: Flags of `plan`.
    """
    total = 0.
    for run in runs_in_order(scores_of(read_finished(None, args.records)), assume=True):
        total += run.seconds
        print(f'{total / 3600:6.2f} h  {run.name}')


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument('--records', type=Path, default=RECORDS, metavar='DIR', help='folder of the records')
    output = argparse.ArgumentParser(add_help=False, parents=[common])
    output.add_argument('--output', type=Path, required=True, metavar='DIR', help='folder of all runs')
    run = commands.add_parser('run', parents=[output], help='start runs')
    run.add_argument('--data', type=Path, required=True, metavar='DIR', help='folder of the data, see lists.py')
    run.add_argument('--weights', type=Path, default=Path(), metavar='DIR', help='folder of the pretrained weights')
    run.add_argument('--jobs', type=int, default=2, metavar='N', help='runs at a time (default: %(default)s)')
    run.add_argument('--pause-file', type=Path, metavar='FILE', help='suspend all runs while this file exists')
    run.add_argument('--only', default='', metavar='TEXT', help='only runs with this text in their name')
    run.add_argument('--smoke', action='store_true', help='two epochs of two batches, to check that everything runs')
    state = commands.add_parser('state', parents=[output], help='print finished, running and waiting runs')
    state.add_argument('--all', action='store_true', help='print waiting runs too')
    commands.add_parser('collect', parents=[output], help='append finished runs to the records')
    commands.add_parser('plan', parents=[common], help='print the order and the planned cost')
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    if args.command == 'run':
        run_queue(args)
    elif args.command == 'state':
        print_state(args)
    elif args.command == 'collect':
        print('\n'.join(collect(args.output, args.records)) or 'No new runs.')
    else:
        print_plan(args)


if __name__ == '__main__':
    main()
