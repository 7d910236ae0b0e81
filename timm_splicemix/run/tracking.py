""" What becomes of the numbers of each epoch: summary.csv, TensorBoard, Weights & Biases """
import csv
import shutil
from pathlib import Path
from typing import Any, Optional

from timm.utils import update_summary

from ..files import atomic_write


def read_summary(path: Path) -> list[dict[str, str]]:
    """ Rows of a summary, none if there is no file.

    Args:
        path: summary.csv of a run.
    """
    if not path.is_file():
        return []
    with open(path, newline='') as file:
        return list(csv.DictReader(file))


class Tracker:
    """ Writes down the numbers of each epoch, in the folder of the run and where else they are wanted.

    Args:
        folder: Folder of the run.
        first_epoch: Epoch that comes next; what an earlier attempt wrote of it and after it is forgotten.
        settings: Settings of the run.
        tensorboard: Write for TensorBoard too.
        wandb: Arguments of `wandb.init`, None not to use it.
    """

    def __init__(
            self,
            folder: Path,
            first_epoch: int = 0,
            settings: Optional[dict[str, Any]] = None,
            tensorboard: bool = False,
            wandb: Optional[dict[str, Any]] = None,
    ):
        self.folder = folder
        self.summary = folder / 'summary.csv'
        self._forget_from(first_epoch)
        self._tensorboard = _open_tensorboard(folder, first_epoch) if tensorboard else None
        self._wandb = _open_wandb(settings or {}, wandb) if wandb is not None else None

    def add(self, epoch: int, train: dict[str, float], evaluation: dict[str, float], lr: float) -> None:
        """ Write down an epoch.

        Args:
            epoch: Its number.
            train: Means of the losses.
            evaluation: Metrics, empty if the epoch was not evaluated.
            lr: Learning rate.
        """
        rows = read_summary(self.summary)
        columns = ['epoch', *(f'train_{name}' for name in train), *(f'eval_{name}' for name in evaluation), 'lr']
        if not evaluation and rows:  # keep the columns of an epoch that was evaluated
            evaluation = {name[5:]: '' for name in rows[0] if name.startswith('eval_')}
        elif rows and list(rows[0]) != columns:
            self._rewrite(rows, columns)
        with atomic_write(self.summary) as temporary:
            if rows:
                shutil.copyfile(self.summary, temporary)
            update_summary(
                epoch, train, evaluation, temporary, lr=lr, write_header=not rows, log_wandb=self._wandb is not None)
        if self._tensorboard is not None:
            for name, value in {**_named('train', train), **_named('eval', evaluation), 'lr': lr}.items():
                if value != '':
                    self._tensorboard.add_scalar(name, value, epoch)
            self._tensorboard.flush()

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _forget_from(self, epoch: int) -> None:
        rows = read_summary(self.summary)
        kept = [row for row in rows if int(row['epoch']) < epoch]
        if rows and not kept:
            self.summary.unlink()
        elif len(kept) < len(rows):
            self._rewrite(kept, list(rows[0]))

    def _rewrite(self, rows: list[dict[str, str]], columns: list[str]) -> None:
        with atomic_write(self.summary) as temporary, open(temporary, 'w', newline='') as file:
            writer = csv.DictWriter(file, columns, restval='', extrasaction='ignore')
            writer.writeheader()
            writer.writerows(rows)


def _named(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {f'{prefix}/{name}': value for name, value in values.items()}


def _open_tensorboard(folder: Path, first_epoch: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError('Expected TensorBoard for --log-tensorboard, but it is not installed: '
                          'pip install tensorboard') from None
    return SummaryWriter(str(folder), purge_step=first_epoch)


def _open_wandb(settings: dict[str, Any], options: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError:
        raise ImportError(
            'Expected Weights & Biases for --log-wandb, but it is not installed: pip install wandb') from None
    return wandb.init(config=settings, **options)
