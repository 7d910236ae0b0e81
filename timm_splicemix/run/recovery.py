""" Save the state in the middle of an epoch: at intervals, before the run stops, and after an error """
import logging
from collections import defaultdict
from typing import Any, Callable, Optional

import torch

from ..errors import UsageError
from ..task import SpliceMixTask
from .checkpoint import RunSaver
from .progress import FiniteCheck, LossMeter, NonFiniteLoss
from .ranks import gather_states, get_buffers, persistent_buffers

_logger = logging.getLogger(__name__)


class _Copies:
    """Copies of tensors, one kernel per type on a GPU."""

    def __init__(self, tensors: list[torch.Tensor]):
        groups = defaultdict(list)
        for tensor in tensors:
            groups[tensor.dtype].append(tensor)
        self.groups = [(group, [tensor.clone() for tensor in group]) for group in groups.values()]

    # torch._foreach_copy_ is private, but the only way to copy many small tensors at once.
    def take(self) -> None:
        for tensors, copies in self.groups:
            torch._foreach_copy_(copies, tensors)

    def restore(self) -> None:
        for tensors, copies in self.groups:
            torch._foreach_copy_(tensors, copies)


class Recovery:
    """ Saves recovery checkpoints of the last completed update.

    A batch that fails may already have changed the losses, the mixer and the statistics of BatchNorm, so these are
    recorded after each update.

    Args:
        task: The task.
        group: Process group on the CPU, None for one process.
        progress: Returns what else to save to resume the training loop.
    """

    def __init__(self, task: SpliceMixTask, group: Any, progress: Callable[[], dict[str, Any]]):
        self.task = task
        self.group = group
        self.progress = progress
        self.saver: Optional[RunSaver] = None  # on the primary process
        self.epoch = 0
        self.num_done = 0
        self.is_saved = True
        self._finite: Optional[FiniteCheck] = None

    def begin_epoch(self, epoch: int, num_done: int, losses: LossMeter) -> None:
        """ Record the state at the beginning of an epoch, or where it is resumed.

        Args:
            epoch: Number of the epoch.
            num_done: Number of batches done.
            losses: Losses of these batches.
        """
        self.epoch = epoch
        self._finite = None
        self._copies = _Copies(list(persistent_buffers(self.task.get_eval_model()).values()))
        self.record(num_done, losses)
        self.is_saved = True

    def record(self, num_done: int, losses: LossMeter, finite: Optional[FiniteCheck] = None) -> None:
        """ Record the state after an update.

        Args:
            num_done: Number of batches done.
            losses: Losses of these batches.
            finite: Knows which losses are finite.
        """
        self._copies.take()
        mixer = self.task.mixer
        self._mixer = {} if mixer is None else mixer.state_dict()
        self._losses = losses.copy()
        self._finite = finite or self._finite
        self.num_done = num_done
        self.is_saved = False
        self._confirm()

    def _confirm(self) -> None:
        if self._finite is not None and self.saver is not None:
            self.saver.confirm_recovery(self.epoch, self._finite.num_finite)

    def end_epoch(self) -> None:
        """Called before the state of the end of the epoch is saved."""
        self.is_saved = True

    def save(self) -> None:
        """Save the recorded state of all processes, which must all call this."""
        if self._finite is not None:
            self._finite.check()
        self._confirm()
        self._save(self.group)

    def _save(self, group: Any) -> None:
        self._copies.restore()
        state = {'losses': self._losses.state_dict(), 'mixer': self._mixer, **get_buffers(self.task)}
        states = gather_states(state, group)
        if self.saver is not None:
            self.saver.progress = {'ranks': states, **self.progress()}
            self.saver.save_recovery(self.epoch, self.num_done)
        self.is_saved = True

    def save_after_error(self, error: Exception) -> bool:
        """ Save the recorded state if it is good; returns True if it was saved now.

        Other processes may have ended, so that the primary process saves its own state only.

        Args:
            error: The error that ends the run.
        """
        if self.saver is None:
            return False
        try:
            if isinstance(error, NonFiniteLoss):
                raise error
            if self.is_saved:
                return False
            if self._finite is not None:
                self._finite.check()
            if not all(bool(torch.isfinite(value).all()) for value in self.task.parameters()):
                return False  # the loss of another process was not finite
            self._save(None)
            return True
        except NonFiniteLoss as found:
            self.saver.remove_poisoned_recovery(self.epoch, found.batch)
        except (UsageError, RuntimeError) as failure:
            _logger.warning(f'The state could not be saved: {failure}')
        return False
