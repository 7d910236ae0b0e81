""" Checkpoints that are always whole, remember the run they belong to, and rebuild their model """
import argparse
import logging
import os
import pickle
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import clean_state_dict
from torch import nn

from ..errors import UsageError
from ..files import atomic_write
from ..models import create_model

_logger = logging.getLogger(__name__)
LAST, BEST = 'last.pth.tar', 'model_best.pth.tar'
_RECOVERY = 'recovery-*.pth.tar'
_OURS = 'timm_splicemix'  # key of what timm's checkpoints don't have


@dataclass(frozen=True)
class CheckpointInfo:
    """ What a checkpoint knows beside weights.

    Args:
        model_name: Name of the model in timm's registry.
        model_kwargs: Arguments of `create_model` that make it again.
        data_config: Size, normalisation, interpolation and crop of images, with timm's names.
        class_names: Names of the classes in their order, None if unknown.
        multi_label: Whether an image has any number of classes.
        epoch: Last epoch that was trained to its end, None if unknown.
        metric: Value of the metric that checkpoints are compared by, None if unknown.
        args: Settings of the run.
    """
    model_name: str
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    data_config: dict[str, Any] = field(default_factory=dict)
    class_names: Optional[tuple[str, ...]] = None
    multi_label: bool = True
    epoch: Optional[int] = None
    metric: Optional[float] = None
    args: dict[str, Any] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Plain values of what is the same in all checkpoints of a run."""
        names = None if self.class_names is None else list(self.class_names)
        return {
            'model_name': self.model_name,
            'model_kwargs': self.model_kwargs,
            'data_config': self.data_config,
            'class_names': names,
            'multi_label': self.multi_label,
        }


def read_checkpoint(path: Union[str, Path]) -> dict[str, Any]:
    """ Read a checkpoint, without running any code that it may hold.

    Args:
        path: File that `torch.save` wrote: a checkpoint of a run, of timm, or weights alone.

    Returns:
        What it holds; weights alone come under 'state_dict'.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f'Expected a checkpoint, but got {path}, which is no file.')
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm keeps its settings so
            state = torch.load(path, map_location='cpu', weights_only=True)
    except (EOFError, KeyError, OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()
        raise UsageError(
            f'Expected a checkpoint, but got {path}, which is not one or is not whole '
            f'({reason[0][:120] if reason else type(error).__name__}).') from error
    if not isinstance(state, dict):
        raise UsageError(f'Expected a checkpoint, but got {path}, which holds a {type(state).__name__}.')
    if 'state_dict' not in state:
        weights = state.get('model', state)
        if not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
            raise UsageError(f'Expected a checkpoint, but got {path}, which holds no weights of a model.')
        state = {'state_dict': weights}
    return state


def read_tensors(path: Union[str, Path]) -> Optional[list[torch.Tensor]]:
    """ All weights of a file, or None for formats that only timm reads.

    Args:
        path: File of weights, in the format that its name ends in.
    """
    suffix = Path(path).suffix.lower()
    if suffix in ('.npz', '.npy'):
        return None
    if suffix == '.safetensors':
        try:
            return list(load_file(path).values())
        except (OSError, SafetensorError) as error:
            raise UsageError(f'Expected a file of safetensors, but got {path}: {error}') from error
    state = read_checkpoint(path)
    parts = [state.get(name) or {} for name in ('state_dict', 'state_dict_ema')]
    return [value for part in parts for value in part.values() if isinstance(value, torch.Tensor)]


def load_checkpoint(
        path: Union[str, Path],
        use_ema: bool = True,
        **overrides: Any,
) -> tuple[nn.Module, CheckpointInfo]:
    """ Rebuild the model of a checkpoint, with its pooling and weights.

        model, info = load_checkpoint('output/train/run/model_best.pth.tar')
        names = info.class_names

    Args:
        path: A checkpoint that `train.py` wrote.
        use_ema: Take the moving average of the weights if there is one.
        **overrides: Arguments of `create_model` that differ, such as `img_size`.

    Returns:
        The model in evaluation mode, and what the checkpoint knows beside.
    """
    state = read_checkpoint(path)
    ours = state.get(_OURS)
    if ours is None:
        raise UsageError(
            f'Expected a checkpoint of train.py, but got {path}, which does not say what model it is: '
            'give --model, --num-classes and --gp.')
    info = CheckpointInfo(
        **{**ours['info'], 'class_names': ours['info']['class_names'] and tuple(ours['info']['class_names'])},
        epoch=state.get('epoch'), metric=state.get('metric'), args=dict(state.get('args', {})))
    model = create_model(info.model_name, **{**info.model_kwargs, **overrides})
    weights = state.get('state_dict_ema') if use_ema else None
    load_weights(model, state['state_dict'] if weights is None else weights, path)
    return model.eval(), info


def load_weights(model: nn.Module, state_dict: dict[str, torch.Tensor], path: Union[str, Path]) -> None:
    """ Load weights, or say in a sentence why they don't fit.

    Args:
        model: Model that gets them.
        state_dict: The weights.
        path: Where they come from.
    """
    state_dict = clean_state_dict(state_dict)
    mine = model.state_dict()
    missing, unknown = sorted(mine.keys() - state_dict.keys()), sorted(state_dict.keys() - mine.keys())
    if missing or unknown:
        what = f'no {missing[0]}' if missing else f'{unknown[0]}, which the model has not'
        raise UsageError(f'Expected a checkpoint of the same model, but got {path} with {what}.')
    for name, value in mine.items():
        if value.shape != state_dict[name].shape:
            raise UsageError(
                f'Expected {name} of shape {tuple(value.shape)}, but got {tuple(state_dict[name].shape)} in {path}: '
                'it is of another model, image size or number of classes.')
    model.load_state_dict(state_dict)


def check_same_model(state: dict[str, Any], info: CheckpointInfo, path: Path) -> None:
    """ Refuse to resume the checkpoint of another model or of other classes.

    Args:
        state: Content of the checkpoint.
        info: Model of this run.
        path: Path of the checkpoint.
    """
    if 'arch' in state and state['arch'] != info.model_name:
        raise UsageError(f"Expected a checkpoint of {info.model_name}, but got {path} of {state['arch']}.")
    names = state.get(_OURS, {}).get('info', {}).get('class_names')
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
        return state.get('epoch', -1), state.get(_OURS, {}).get('next_batch', 0)

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
        if max_history < 1:
            raise UsageError(f'Expected --checkpoint-hist of at least 1, but got {max_history}.')
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

    def restore(self, state: dict[str, Any], path: Path) -> None:
        """ Continue the history of the run that saved a checkpoint to this folder.

        Args:
            state: Content of the checkpoint.
            path: Path of the checkpoint.
        """
        ours = state.get(_OURS, {})
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
        return self.best_metric, self.best_epoch

    def save_recovery(self, epoch: int, num_done: int = 0) -> Path:
        """Save the middle of an epoch, of which `num_done` batches are done, in place of earlier recovery files."""
        path = self.folder / f'recovery-{epoch}-{num_done}.pth.tar'
        self._save(path, epoch - 1, next_batch=num_done)
        for file in self.folder.glob(_RECOVERY):
            if file != path:
                file.unlink()
        return path

    def _save(self, path: Path, epoch: int, metric: Optional[float] = None, next_batch: int = 0) -> None:
        state = {
            'epoch': epoch,  # last finished epoch
            'arch': self.info.model_name,
            'version': 2,
            'args': self.settings,
            'optimizer': self.optimizer.state_dict(),
            **self.task.get_checkpoint_state(),
            **self.task.get_checkpoint_state(ema=True),
            _OURS: {
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
