""" Save the checkpoints of a run, and find the one to resume """
import logging
import os
import shutil
from pathlib import Path
from typing import Any, Optional, Union

import torch
from torch import nn

from ..errors import UsageError
from ..files import atomic_write
from .read import BEST, KEY, LAST, CheckpointInfo, read_checkpoint
from .side_inputs import check_stored_options

_logger = logging.getLogger(__name__)
_RECOVERY = 'recovery-*.pth.tar'


def check_same_model(state: dict[str, Any], info: CheckpointInfo, path: Path) -> None:
    """ Refuse to resume the checkpoint of another model or of other classes.

    Args:
        state: Content of the checkpoint.
        info: Model of this run.
        path: Path of the checkpoint.
    """
    if 'arch' in state and state['arch'] != info.model_name:
        raise UsageError(f"Expected a checkpoint of {info.model_name}, but got {path} of {state['arch']}.")
    saved = state.get(KEY, {}).get('info', {})
    head, own_head = (kwargs.get('head', '') for kwargs in (saved.get('model_kwargs', {}), info.model_kwargs))
    if saved and head != own_head:
        raise UsageError(f"Expected a checkpoint with --head '{own_head}', but got {path} with '{head}'.")
    if head:
        check_stored_options(head, info.model_kwargs.get('head_kwargs', {}), saved['model_kwargs'], path)
    names = saved.get('class_names')
    if names and info.class_names and list(names) != list(info.class_names):
        raise UsageError(
            f'Expected a checkpoint with the classes of the data set ({len(info.class_names)}), but got {path} with '
            f'{len(names)} others.')


def has_checkpoints(folder: Path) -> bool:
    return (folder / LAST).is_file() or any(folder.glob(_RECOVERY))


def find_checkpoint(path: Union[str, Path]) -> Path:
    """ Find the checkpoint to resume.

    Args:
        path: A checkpoint, or the output folder of a run, of which the checkpoint with the most batches is returned.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    candidates = [file for file in (path / LAST, *path.glob(_RECOVERY)) if file.is_file()]
    if not candidates:
        raise UsageError(f'Expected a folder with checkpoints, but got {path}, which has no {LAST}.')

    def progress(file: Path) -> tuple[int, int]:
        state = read_checkpoint(file)
        return state.get('epoch', -1), state.get(KEY, {}).get('next_batch', 0)

    return candidates[0] if len(candidates) == 1 else max(candidates, key=progress)


class RunSaver:
    """ Saves checkpoints that timm can read: the last one, the best one, and the best `max_history` ones.

    It does the work of timm's `CheckpointSaver`, with two differences. A file is written under a temporary name and
    then moved into place, so that a crash never leaves a partial checkpoint or none. Each checkpoint holds the
    best metric, the list of checkpoints kept, and `progress`, so that a resumed run equals an uninterrupted one.

    Args:
        task: Provides the weights.
        optimizer: Its state is saved, too.
        folder: Output folder of the run.
        info: Description of the model.
        settings: Settings of the run, plain values.
        scaler: Loss scaler, if there is one.
        decreasing: True if a lower metric is better.
        max_history: Number of checkpoints to keep.
    """

    def __init__(
            self,
            task: nn.Module,
            optimizer: torch.optim.Optimizer,
            folder: Union[str, Path],
            info: CheckpointInfo,
            settings: dict[str, Any],
            scaler: Any = None,
            decreasing: bool = False,
            max_history: int = 10,
    ):
        self.task = task
        self.optimizer = optimizer
        self.folder = Path(folder)
        self.info = info
        self.settings = settings
        self.scaler = scaler
        self.decreasing = decreasing
        self.max_history = max_history
        self.best_metric: Optional[float] = None
        self.best_epoch: Optional[int] = None
        self.checkpoint_files: list[tuple[str, float]] = []  # names with their metrics, the best one first
        self.progress: dict[str, Any] = {}  # state of the training loop
        self.recovery: Optional[tuple[int, int, Path]] = None  # epoch, batch and file that no finite loss followed yet

    def restore(self, state: dict[str, Any], path: Path) -> None:
        """ Continue the history of the run that saved a checkpoint to this folder.

        Args:
            state: Content of the checkpoint.
            path: Path of the checkpoint.
        """
        ours = state.get(KEY, {})
        self.best_metric, self.best_epoch = ours.get('best_metric'), ours.get('best_epoch')
        self.checkpoint_files = []
        for name, metric in ours.get('checkpoint_files', ()):
            file = self.folder / name
            if not file.exists() and name == _checkpoint_name(state.get('epoch')) and path.name == LAST:
                _duplicate(path, file)  # the run ended after it saved the last checkpoint and before it copied it
            if file.exists():
                self.checkpoint_files.append((name, metric))
        if self.best_epoch is not None and self.best_epoch == state.get('epoch') and 'metric' in state:
            _duplicate(path, self.folder / BEST)

    def save_checkpoint(
            self,
            epoch: int,
            metric: Optional[float] = None,
    ) -> tuple[Optional[float], Optional[int]]:
        """ Save the end of an epoch, and remove the recovery checkpoints.

        Args:
            epoch: Number of the epoch.
            metric: Metric that ranks the checkpoints; if it is None only the last checkpoint is written.

        Returns:
            Best metric so far and its epoch.
        """
        name = _checkpoint_name(epoch)
        before = self.checkpoint_files
        is_best = metric is not None and (
            self.best_metric is None
            or (metric < self.best_metric if self.decreasing else metric > self.best_metric))
        if is_best:
            self.best_metric, self.best_epoch = metric, epoch
        if metric is not None:
            files = sorted([*before, (name, metric)], key=lambda file: file[1], reverse=not self.decreasing)
            self.checkpoint_files = files[:self.max_history]
        self._save(self.folder / LAST, epoch, metric)
        if is_best:
            _duplicate(self.folder / LAST, self.folder / BEST)
        kept = {file for file, _ in self.checkpoint_files}
        if name in kept:
            _duplicate(self.folder / LAST, self.folder / name)
        for file, _ in before:
            if file not in kept:
                (self.folder / file).unlink(missing_ok=True)
        for file in self.folder.glob(_RECOVERY):
            file.unlink()
        self.recovery = None
        return self.best_metric, self.best_epoch

    def save_recovery(self, epoch: int, num_done: int = 0) -> Path:
        """ Save the middle of an epoch.

        Args:
            epoch: Number of the epoch.
            num_done: Number of its batches that are done.
        """
        path = self.folder / f'recovery-{epoch}-{num_done}.pth.tar'
        self._save(path, epoch - 1, next_batch=num_done)
        self.recovery = epoch, num_done, path
        return path

    def confirm_recovery(self, epoch: int, num_finite: int) -> None:
        """ Remove older recovery checkpoints once a loss after the last one was finite.

        Args:
            epoch: Number of the epoch.
            num_finite: Number of its batches whose losses are known to be finite.
        """
        if self.recovery is None or (epoch, num_finite) <= self.recovery[:2]:
            return
        for file in self.folder.glob(_RECOVERY):
            if file != self.recovery[2]:
                file.unlink()
        self.recovery = None

    def remove_poisoned_recovery(self, epoch: int, batch: int) -> None:
        """ Remove the last recovery checkpoint if the first loss after it was not finite: its weights may be ruined.

        Args:
            epoch: Number of the epoch.
            batch: First batch with a non-finite loss.
        """
        if self.recovery is not None and self.recovery[:2] == (epoch, batch):
            _logger.warning(f'Removing {self.recovery[2]}, because the next loss was not finite.')
            self.recovery[2].unlink(missing_ok=True)
            self.recovery = None

    def _save(self, path: Path, epoch: int, metric: Optional[float] = None, next_batch: int = 0) -> None:
        state = {
            'epoch': epoch,  # last finished epoch
            'arch': self.info.model_name,
            'version': 2,
            'args': self.settings,
            'optimizer': self.optimizer.state_dict(),
            **self.task.get_checkpoint_state(),
            **self.task.get_checkpoint_state(ema=True),
            KEY: {
                'info': self.info.state(),
                'next_batch': next_batch,
                'best_metric': self.best_metric,
                'best_epoch': self.best_epoch,
                'checkpoint_files': self.checkpoint_files,
                'progress': self.progress,
            },
        }
        if self.scaler is not None:
            state[self.scaler.state_dict_key] = self.scaler.state_dict()
        if metric is not None:
            state['metric'] = metric
        try:
            with atomic_write(path) as temporary:
                torch.save(state, temporary)
        except (UsageError, RuntimeError) as error:  # torch.save raises a RuntimeError if the disk is full
            reason = str(error).splitlines()[0].removeprefix(f'Cannot write {path}: ').rstrip('.')
            raise UsageError(
                f'Cannot write {path}: {reason}. Checkpoints saved before are intact; free disk space, then use '
                f'--resume {self.folder}') from error


def _checkpoint_name(epoch: Optional[int]) -> str:
    return f'checkpoint-{epoch}.pth.tar'


def _duplicate(source: Path, target: Path) -> None:
    with atomic_write(target) as temporary:
        temporary.unlink()
        try:
            os.link(source, temporary)
        except (OSError, NotImplementedError):  # a file system without hard links
            shutil.copy2(source, temporary)
