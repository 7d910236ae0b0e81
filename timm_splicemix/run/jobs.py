""" Run commands of this package in processes side by side, with one line of progress per run and epoch """
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Sequence

from .progress import format_duration
from .tracking import read_summary

# One thread per process; with the other settings glibc's malloc reuses freed memory, which saves 7 % of the time.
_ENVIRONMENT = {
    'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1', 'MALLOC_MMAP_MAX_': '0', 'MALLOC_TRIM_THRESHOLD_': str(1 << 40)}
_POLL_SECONDS = 0.5
_LAST_LINES = 15  # of the log of a failed run
# One process for all commands, as each process needs seconds to import torch and timm
_SCRIPT = '''
import json, shlex, sys
from timm_splicemix.cli import main
for words in json.loads(sys.argv[1]):
    print('$ timm-splicemix', shlex.join(words), flush=True)
    main(words)
'''


def start_commands(commands: Sequence[Sequence[str]], **kwargs: Any) -> subprocess.Popen:
    """ Start a process with one thread that runs commands of this package until one fails.

    Args:
        commands: Names of the commands with their flags.
        **kwargs: Further arguments of `subprocess.Popen`.
    """
    return subprocess.Popen(
        [sys.executable, '-c', _SCRIPT, json.dumps(commands)], env={**os.environ, **_ENVIRONMENT},
        stdin=subprocess.DEVNULL, **kwargs)


@dataclass
class Job:
    """ A run: commands that follow each other in a process. Their log is beside the folder of the run.

    Args:
        title: Name of the run, as wide as that of the others.
        folder: Folder of the run.
        commands: What is left to do: commands with their flags.
        text: What is done first, in a few words.
        num_epochs: Number of epochs of the training.
        num_images: Number of images of an epoch.
    """
    title: str
    folder: Path
    commands: list[list[str]]
    text: str
    num_epochs: int
    num_images: int
    process: Optional[subprocess.Popen] = field(default=None, init=False)
    num_before: int = field(default=0, init=False)  # epochs that an earlier process did
    num_shown: int = field(default=0, init=False)  # epochs that are done and shown
    since: tuple[float, int] = field(default=(0., 0), init=False)  # a time, and the number of epochs done then

    @property
    def log(self) -> Path:
        return self.folder.with_name(f'{self.folder.name}.log')

    def start(self) -> None:
        self.num_before = self.num_shown = len(read_summary(self.folder / 'summary.csv'))
        self.since = time.monotonic(), self.num_before
        self.show(self.text)
        with open(self.log, 'a', encoding='utf-8') as log:
            # A session of its own, so that Ctrl-C reaches the main process alone, which then stops all runs.
            self.process = start_commands(self.commands, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def show(self, text: str) -> None:
        print(f'{self.title}  {text}', flush=True)

    def show_epochs(self) -> None:
        """Print a line for each new epoch in summary.csv."""
        for row in read_summary(self.folder / 'summary.csv')[self.num_shown:]:
            self.num_shown += 1
            now, (then, num_done) = time.monotonic(), self.since
            seconds = max(now - then, 1e-9) / (self.num_shown - num_done)
            if num_done == self.num_before:  # later rates leave out the start of the process
                self.since = now, self.num_shown
            number = f'{self.num_shown:>{len(str(self.num_epochs))}}/{self.num_epochs}'
            score = f'mAP {float(row["eval_mAP"]):5.2f}' if row.get('eval_mAP') else ' ' * 9
            left = format_duration(seconds * (self.num_epochs - self.num_shown))
            self.show(
                f'epoch {number}  loss {float(row["train_loss"]):.4f}  {score}  {self.num_images / seconds:6.1f} img/s'
                f'  {left} left')

    def last_lines(self) -> str:
        lines = self.log.read_text(encoding='utf-8', errors='replace').splitlines()
        return '\n'.join(lines[-_LAST_LINES:])


def run_jobs(jobs: Sequence[Job], at_once: int) -> bool:
    """ Run jobs, several at once, until all are done or one fails.

    If one fails, or an exception such as KeyboardInterrupt occurs here, the others are asked to save and stop.

    Args:
        jobs: The jobs.
        at_once: Number of processes at the same time.

    Returns:
        Whether all succeeded. The last lines of a failed one are printed.
    """
    waiting, running = list(jobs), []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                if job.commands:
                    job.start()
                    running.append(job)
                else:
                    job.show('finished before')
            time.sleep(_POLL_SECONDS if running else 0)
            for job in list(running):
                code = job.process.poll()
                job.show_epochs()
                if code is not None:
                    running.remove(job)
                if code:
                    print(
                        f'{job.title.strip()} failed with exit code {code}. Last lines of {job.log}:\n'
                        f'{job.last_lines()}', file=sys.stderr, flush=True)
                    return False
                if code == 0:
                    job.show('finished')
        return True
    finally:
        _stop(running)


def _stop(jobs: Sequence[Job]) -> None:
    """Ask runs to save their state, and wait for them; a second Ctrl-C kills them."""
    if jobs:
        print(f'Stopping {", ".join(job.title.strip() for job in jobs)} ...', file=sys.stderr, flush=True)
    try:
        for job in jobs:
            job.process.terminate()
        for job in jobs:
            job.process.wait()
    except KeyboardInterrupt:
        for job in jobs:
            job.process.kill()
        raise
