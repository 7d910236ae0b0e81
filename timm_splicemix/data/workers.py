""" Data-loading workers that outlive the signals that stop a run

A queue, `timeout` or Ctrl-C signals every process of a run. The main process needs its workers until it has saved its
state, so they ignore SIGINT, and SIGTERM unless it comes from the main process itself. If the main process dies, torch
ends them.
"""
import contextlib
import multiprocessing
import os
import signal
import threading
from typing import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block SIGINT and SIGTERM in this thread and in workers that it starts, until they run `ignore_signals`."""
    if not hasattr(signal, 'pthread_sigmask'):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals(worker: int) -> None:
    """A `worker_init_fn`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(signal, 'sigwaitinfo'):  # macOS, Windows
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process().pid
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
