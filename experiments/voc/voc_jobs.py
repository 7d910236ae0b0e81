""" Runs commands in order, several at once, and asks them to save and stop """
import contextlib
import fcntl
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

POLL_SECONDS = 1.
SECONDS_TO_SAVE = 300  # before a command that was asked to stop is killed
# One thread per command. With these settings glibc's malloc reuses freed memory instead of requesting it from the
# system for each large tensor, which took 8 of 44 ms of training on an image and 6 of 23 ms of evaluating one.
ENVIRONMENT = {
    'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1', 'MALLOC_MMAP_MAX_': '0', 'MALLOC_TRIM_THRESHOLD_': str(1 << 40)}


@dataclass
class Job:
    """ A command with its folder.

    Args:
        name: Name for messages.
        folder: Output folder; log.txt in it gets the output of the command.
        command: Returns the command when the job starts.
        begin: Called before the start; returns False if there is nothing left to do.
        progress: Called regularly, and once at the end.
        end: Called at the end, with whether the command succeeded and its seconds.
    """
    name: str
    folder: Path
    command: Callable[[], list[str]]
    begin: Callable[[], bool] = lambda: True
    progress: Callable[[], None] = lambda: None
    end: Callable[[bool, float], None] = lambda finished, seconds: None
    process: Optional[subprocess.Popen] = field(default=None, init=False)
    started: float = field(default=0., init=False)
    lock: int = field(default=-1, init=False)

    def start(self) -> str:
        """Start the command; returns running, finished (nothing to do) or elsewhere (another process runs it)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.folder / 'lock', os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.lock)
            return 'elsewhere'
        if not self.begin():
            os.close(self.lock)
            return 'finished'
        self.started = time.monotonic()
        with open(self.folder / 'log.txt', 'ab') as log:
            # The command inherits the lock and holds it even if this process is killed. Its own session keeps Ctrl-C
            # from reaching it: a second signal would end it before it has saved.
            self.process = subprocess.Popen(
                self.command(), env={**os.environ, **ENVIRONMENT}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, pass_fds=[self.lock], start_new_session=True)
        return 'running'

    def leave(self) -> None:
        self.progress()
        self.end(self.process.returncode == 0, time.monotonic() - self.started)
        os.close(self.lock)


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Collect the first SIGINT or SIGTERM in a list; a second one has its usual effect."""
    received: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(number: int, _: Any) -> None:
        received.append(number)
        restore()

    for number in previous:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()


def run_jobs(jobs: Sequence[Job], at_once: int, seconds: Optional[float] = None) -> dict[str, str]:
    """ Run jobs in order until all are done, the time is up or a signal arrives.

    Returns:
        State of each job: finished, failed, stopped, waiting (not started) or elsewhere (run by another process).
    """
    states = {job.name: 'waiting' for job in jobs}
    waiting, running = list(jobs), []
    deadline = None if seconds is None else time.monotonic() + seconds
    asked: Optional[float] = None
    with noted_signals() as received:
        try:
            while running or (waiting and asked is None):
                if asked is None and (received or (deadline is not None and time.monotonic() >= deadline)):
                    asked = time.monotonic()
                    reason = 'Signal received' if received else 'Time limit reached'
                    print(f'{reason}, stopping {len(running)} jobs.', flush=True)
                    for job in running:
                        job.process.terminate()
                while asked is None and waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    states[job.name] = job.start()
                    if states[job.name] == 'running':
                        running.append(job)
                for job in list(running):
                    if job.process.poll() is None:
                        job.progress()
                        if asked is not None and time.monotonic() - asked > SECONDS_TO_SAVE:
                            job.process.kill()
                        continue
                    running.remove(job)
                    job.leave()
                    code = job.process.returncode
                    states[job.name] = 'finished' if code == 0 else 'failed' if asked is None else 'stopped'
                    if states[job.name] == 'failed':
                        print(f'{job.name} failed with exit code {code}. Last lines of {job.folder / "log.txt"}:\n'
                              f'{tail(job.folder)}', flush=True)
                if running:
                    time.sleep(POLL_SECONDS)
        finally:
            if asked is None:
                for job in running:  # an error occurred here
                    job.process.terminate()
    return states


def tail(folder: Path, lines: int = 3) -> str:
    return '\n'.join((folder / 'log.txt').read_text(encoding='utf-8', errors='replace').splitlines()[-lines:])
