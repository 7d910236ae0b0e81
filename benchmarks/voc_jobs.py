""" Commands that benchmarks/voc.py runs side by side, in an order, and asks to stop """
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
SECONDS_TO_SAVE = 300  # that a command has to save its state after it was asked to stop
# One thread, and glibc's malloc keeps what was freed: asking the system anew for the memory of each large tensor took
# 8 of 44 ms of training on an image, and 6 of 23 ms of scoring one.
ENVIRONMENT = {
    'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1', 'MALLOC_MMAP_MAX_': '0', 'MALLOC_TRIM_THRESHOLD_': str(1 << 40)}


@dataclass
class Job:
    """ A command to run, and where it writes.

    Args:
        name: What to call it.
        folder: Its folder; its output goes to log.txt there.
        command: Makes the command when its time has come.
        begin: Called before it starts; returns whether there is still anything to do.
        progress: Called now and then, and when it has ended.
        end: Called when it has ended, with whether it came to its end and the seconds that it took.
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
        """Start it; returns running, finished if it is, or elsewhere if another process has it in hand."""
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
            # It holds the lock as long as it lives, also if this process is killed. In a session of its own, it gets
            # no Ctrl-C of the terminal: a second signal would end it before it has saved.
            self.process = subprocess.Popen(
                self.command(), env={**os.environ, **ENVIRONMENT}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, pass_fds=[self.lock], start_new_session=True)
        return 'running'

    def leave(self) -> None:
        """Note how it ended."""
        self.progress()
        self.end(self.process.returncode == 0, time.monotonic() - self.started)
        os.close(self.lock)


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Note the first SIGINT or SIGTERM in a list; a second one ends the program at once, as usual."""
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
    """ Run jobs in their order, some at once, until all are done, time is up, or a signal comes.

    Args:
        jobs: What to run.
        at_once: Number of processes.
        seconds: Time after which running ones are asked to save and leave, None for no limit.

    Returns:
        How each job ended: finished, failed, stopped, waiting (not begun), or elsewhere (another process has it).
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
                    reason = 'Asked to stop' if received else 'Time is up'
                    print(f'{reason}: {len(running)} save and leave.', flush=True)
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
                        print(f'{job.name} failed with code {code}, {job.folder / "log.txt"} ends with\n'
                              f'{tail(job.folder)}', flush=True)
                if running:
                    time.sleep(POLL_SECONDS)
        finally:
            if asked is None:
                for job in running:  # after an error of this program
                    job.process.terminate()
    return states


def tail(folder: Path, lines: int = 3) -> str:
    """The last lines of a log."""
    return '\n'.join((folder / 'log.txt').read_text(encoding='utf-8', errors='replace').splitlines()[-lines:])
