""" Leaving a run in good order when it is asked to end """
import signal
from types import FrameType
from typing import Optional

import torch


class StopRequest:
    """ Notes SIGINT and SIGTERM, so that a run can save before it leaves.

        with StopRequest(distributed) as stop:
            ...
            if stop.requested():
                save(); leave()

    With several processes all of them leave at the same step if any was asked to: they ask each other over the CPU, so
    that no GPU is waited for. A second signal to a run of one process ends it at once.

    Args:
        distributed: Whether there are other processes.
    """
    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, distributed: bool = False):
        self.received: Optional[signal.Signals] = None
        self._distributed = distributed
        self._group = torch.distributed.new_group(backend='gloo') if distributed else None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> 'StopRequest':
        for number in self.SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        if self.received is not None and not self._distributed:  # torchrun sends a second one by itself
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def requested(self) -> bool:
        """Whether any process was asked to end; all have to call this equally often."""
        asked = self.received is not None
        if not self._distributed:
            return asked
        flag = torch.tensor(int(asked))
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(flag)
