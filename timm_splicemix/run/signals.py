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

    If one of several processes receives a signal, all of them stop at the same batch: they exchange a flag over the
    CPU, without waiting for a GPU. A second Ctrl-C ends a run of one process at once.

    Args:
        group: Process group on the CPU, None for one process.
    """
    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, group: Any = None):
        self.received: Optional[signal.Signals] = None
        self._time = 0.
        self._group = group
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

    def requested(self) -> bool:
        """Return True if any process received a signal; all processes must call this equally often."""
        received = self.received is not None
        if self._group is None:
            return received
        flag = torch.tensor(int(received))
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(flag)
