""" Stop a run at the next batch when it receives a signal """
import signal
import time
from types import FrameType
from typing import Any, Optional

import torch


class StopRequest:
    """ Catches SIGINT and SIGTERM, so that a run can save a checkpoint before it exits.

        with StopRequest() as stop:
            ...
            if stop.requested():
                save()

    If one of several processes receives a signal, all of them stop at the same batch: about once a second, they
    exchange a flag over the CPU, without waiting for a GPU. A second Ctrl-C ends a run of one process at once.

    Args:
        group: Process group on the CPU, None for one process.
    """
    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, group: Any = None):
        self.received: Optional[signal.Signals] = None
        self._time = 0.
        self._group = group
        self._primary = group is not None and torch.distributed.get_rank() == 0
        self.restart()
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> 'StopRequest':
        for number in self.SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: Optional[FrameType]) -> None:
        now = time.monotonic()
        # `timeout` and torchrun send a signal twice, the second time at once.
        if number == self.received == signal.SIGINT and now > self._time + 0.3 and self._group is None:
            raise KeyboardInterrupt
        if self.received is None:
            self.received, self._time = signal.Signals(number), now

    def restart(self) -> None:
        """Ask the other processes in the next call, as the time between calls changes; all processes must call this."""
        self._interval, self._calls, self._asked = 1, 0, time.monotonic()

    def requested(self) -> bool:
        """Return True if any process received a signal; all processes must call this equally often."""
        received = self.received is not None
        if self._group is None:
            return received
        self._calls += 1
        if self._calls < self._interval:
            return False
        now = time.monotonic()
        per_second = round(self._calls / max(now - self._asked, 1e-3))
        # The primary process chooses when to ask again.
        interval = min(max(per_second, 1), 2 * self._interval) if self._primary else 0
        message = torch.tensor([int(received), interval])
        torch.distributed.all_reduce(message, op=torch.distributed.ReduceOp.MAX, group=self._group)
        flag, self._interval = message.tolist()
        self._calls, self._asked = 0, now
        return bool(flag)
