""" Output folder of a run, and the metrics of each epoch: summary.csv, TensorBoard, Weights & Biases """
import argparse
import logging
from datetime import datetime
from pathlib import Path
from typing import Any, Optional, Sequence

import yaml

from ..args import dump_args
from ..errors import UsageError
from ..files import free_folder, read_csv, remove_temporary_files, write_csv, write_text
from .checkpoint import has_checkpoints
from .lock import FolderInUse, FolderLock

_logger = logging.getLogger(__name__)


def open_output_folder(
        output: str,
        experiment: str,
        model_name: str,
        image_size: int,
        checkpoint: Optional[Path] = None,
) -> tuple[Path, FolderLock]:
    """ Lock the folder of a run and remove temporary files that a killed run left there.

    A new run never gets a folder that another run uses, or that has checkpoints of another run.

    Args:
        output: Parent folder; '' for output/train.
        experiment: Name of the folder; '' for one of time, model and image size.
        model_name: Name of the model.
        image_size: Width of the images.
        checkpoint: Checkpoint to resume, whose folder is used unless `output` or `experiment` is given.
    """
    model_name = model_name.replace('/', '_').replace(':', '_')
    name = experiment or f'{datetime.now():%Y%m%d-%H%M%S}-{model_name}-{image_size}'
    folder = Path(output or 'output/train') / name
    if checkpoint is not None and not output and not experiment:
        folder = checkpoint.parent
    resumed = None if checkpoint is None else checkpoint.parent.resolve()
    lock = None

    def is_taken(folder: Path) -> bool:
        nonlocal lock
        is_resumed = folder.resolve() == resumed
        if not is_resumed and has_checkpoints(folder):
            return True
        try:
            lock = FolderLock(folder)
        except FolderInUse as error:
            if is_resumed:
                raise
            _logger.warning(str(error).partition('. ')[0])
            return True
        return False

    folder = free_folder(folder, is_taken)
    remove_temporary_files(folder)
    return folder, lock


def write_settings(
        folder: Path,
        settings: dict[str, Any],
        environment: dict[str, Any],
        class_names: Optional[Sequence[str]] = None,
) -> None:
    """Write args.yaml, environment.yaml and classes.txt."""
    write_text(dump_args(argparse.Namespace(**settings)), folder / 'args.yaml')
    write_text(yaml.safe_dump(environment, sort_keys=False), folder / 'environment.yaml')
    if class_names:
        write_text(''.join(f'{name}\n' for name in class_names), folder / 'classes.txt')


def read_summary(path: Path) -> list[dict[str, str]]:
    """Read the rows of a summary.csv; [] if the file does not exist."""
    rows = read_csv(path) if path.is_file() else []
    if not all(row.get('epoch', '').isdecimal() for row in rows):
        raise UsageError(f"Expected a column 'epoch' with numbers in {path}.")
    return rows


class Tracker:
    """ Writes the losses, metrics and learning rate of each epoch.

    Args:
        folder: Output folder of the run.
        first_epoch: Next epoch; rows of this and later epochs, which an earlier attempt wrote, are removed.
        settings: Settings of the run, for Weights & Biases.
        tensorboard: Write TensorBoard files.
        wandb: Arguments of `wandb.init`, None to disable it.
    """

    def __init__(
            self,
            folder: Path,
            first_epoch: int = 0,
            settings: Optional[dict[str, Any]] = None,
            tensorboard: bool = False,
            wandb: Optional[dict[str, Any]] = None,
    ):
        self.summary = folder / 'summary.csv'
        rows = read_summary(self.summary)
        self.rows = [row for row in rows if int(row['epoch']) < first_epoch]
        if len(self.rows) < len(rows):
            self._write(list(rows[0]))
        self._tensorboard = _open_tensorboard(folder, first_epoch) if tensorboard else None
        self._wandb = _open_wandb(settings or {}, wandb) if wandb is not None else None

    def add(self, epoch: int, train: dict[str, float], evaluation: dict[str, float], lr: float) -> None:
        """ Write an epoch.

        Args:
            epoch: Number of the epoch.
            train: Mean training losses.
            evaluation: Metrics, {} if the epoch was not evaluated.
            lr: Learning rate.
        """
        train_row = {f'train_{name}': value for name, value in train.items()}
        eval_row = {f'eval_{name}': value for name, value in evaluation.items()}
        row = {'epoch': epoch, **train_row, **eval_row, 'lr': lr}
        eval_columns = eval_row or (name for name in (self.rows or [{}])[0] if name.startswith('eval_'))
        self.rows.append({name: str(value) for name, value in row.items()})
        self._write(['epoch', *train_row, *eval_columns, 'lr'])
        if self._tensorboard is not None:
            for name, value in row.items():
                if name != 'epoch':
                    self._tensorboard.add_scalar(name.replace('_', '/', 1), value, epoch)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(row)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _write(self, columns: Sequence[str]) -> None:
        self.rows = [{name: row.get(name, '') for name in columns} for row in self.rows]
        if self.rows:
            write_csv(self.rows, self.summary)
        else:
            self.summary.unlink()


def _open_tensorboard(folder: Path, first_epoch: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError('--log-tensorboard requires TensorBoard: pip install tensorboard') from error
    return SummaryWriter(str(folder), purge_step=first_epoch)


def _open_wandb(settings: dict[str, Any], options: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UsageError('--log-wandb requires Weights & Biases: pip install wandb') from error
    return wandb.init(config=settings, **options)
