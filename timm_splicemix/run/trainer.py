""" A training run: epochs, evaluation, checkpoints, resuming and stopping """
import argparse
import contextlib
import logging
import math
import sys
import time
from pathlib import Path
from typing import Any, Optional, Sequence

import torch
from timm.utils import distribute_bn
from torch import nn

from ..data import PARTITION, MultiLabelLoader, mix_seeds, write_partition
from ..draw import draw_curves, save_batch
from ..errors import UsageError
from ..loss import binary_cross_entropy, union_cross_entropy
from ..mix import as_mixer
from ..results import format_epoch
from ..task import SpliceMixTask
from .advice import advise
from .checkpoint import RunSaver, check_same_model
from .engine import Epoch, Hooks, Step, StopTraining, evaluate, loader_length, train_one_epoch
from .factory import create_meter, wrap_task
from .hints import resume_command, validate_command
from .load import load_weights
from .lock import FolderLock
from .machine import broadcast_flag, set_seed
from .model import set_training
from .optimizer import create_scheduler, load_optimizer, load_scheduler_state, resume_scheduler, scheduler_state
from .progress import FiniteCheck, LossMeter
from .ranks import gather_states, get_buffers, load_buffers
from .read import CheckpointInfo
from .recovery import Recovery
from .signals import StopRequest
from .tracking import Tracker, open_output_folder, write_settings

_logger = logging.getLogger(__name__)
_CURVES_INTERVAL = 10.  # seconds between two drawings of the curves at least, and
_CURVES_SHARE = 0.02  # of the time at most: drawing takes a second or more


class Trainer(Hooks):
    """ Trains a task: `start()` resumes a checkpoint and opens the output folder, `train()` runs the epochs.

    Args:
        args: Flags, with those that `set_up_device` adds.
        info: Description of the model.
        task: The task to train.
        optimizer: Optimizer of the model.
        loaders: Loaders of the training set and the validation set.
        step: How batches are processed and logged.
        frozen: Modules of the model that stay in evaluation mode.
    """

    def __init__(
            self,
            args: argparse.Namespace,
            info: CheckpointInfo,
            task: SpliceMixTask,
            optimizer: torch.optim.Optimizer,
            loaders: tuple[MultiLabelLoader, MultiLabelLoader],
            step: Step,
            frozen: Sequence[nn.Module] = (),
    ):
        self.args = args
        self.info = info
        self.class_names = info.class_names
        self.data_config = info.data_config
        self.task = task
        self.mixer = task.mixer
        self.optimizer = optimizer
        self.train_loader, self.val_loader = loaders
        self.partition = getattr(self.val_loader.dataset, 'partition', None)
        self.step = step
        self.frozen = frozen
        self.num_batches = args.train_batches_per_epoch or loader_length(self.train_loader)
        self.updates_per_epoch = math.ceil(self.num_batches / args.grad_accum_steps)
        self.scheduler, self.num_epochs = create_scheduler(optimizer, args, self.updates_per_epoch)
        self.epoch = self.start_epoch = args.start_epoch or 0
        self.start_batch = 0
        self.losses = LossMeter(step.device)
        self.group = torch.distributed.new_group(backend='gloo') if args.distributed else None
        self.recovery = Recovery(task, self.group, self._progress)
        # Only the primary process writes.
        self.folder: Optional[Path] = None
        self.lock: Optional[FolderLock] = None
        self.saver: Optional[RunSaver] = None
        self.tracker: Optional[Tracker] = None
        self._can_draw = True
        self._drawn = -math.inf, 0, 0.  # time, number of epochs, and seconds that it took

    # Start and resume

    def start(
            self,
            settings: dict[str, Any],
            environment: dict[str, Any],
            checkpoint: Optional[tuple[Path, dict[str, Any]]] = None,
    ) -> None:
        """ Resume a checkpoint, compile and distribute the task, and open the output folder.

        Args:
            settings: Flags to save, without machine-specific changes.
            environment: Versions and machine, to save.
            checkpoint: Path and content of the checkpoint to resume.
        """
        own_state = {} if checkpoint is None else self._resume(*checkpoint)
        num_updates = math.ceil(self.start_batch / self.args.grad_accum_steps)
        resume_scheduler(self.scheduler, self.start_epoch, self.start_epoch * self.updates_per_epoch + num_updates)
        wrap_task(self.task, self.args, self.step.device)
        load_buffers(self.task, own_state)
        if self.step.is_primary:
            self.folder, self.lock = open_output_folder(
                self.args.output, self.args.experiment, self.args.model, self.data_config['input_size'][-1],
                checkpoint and checkpoint[0])
            try:
                self._open_files(settings, environment, *checkpoint or (None, None))
            except BaseException:
                self.lock.release()
                raise

    def _resume(self, path: Path, state: dict[str, Any]) -> dict[str, Any]:
        """Load a checkpoint; returns the state of this process (see `ranks`)."""
        args = self.args
        own_state = {}
        check_same_model(state, self.info, path)
        load_weights(self.task.get_eval_model(), state['state_dict'], path)
        if args.model_ema:
            load_weights(self.task.get_eval_model(ema=True), state.get('state_dict_ema', state['state_dict']), path)
        ours = state.get('timm_splicemix', {})
        progress = ours.get('progress', {})
        if not args.no_resume_opt and 'optimizer' in state:
            load_optimizer(self.optimizer, state['optimizer'], path, keep_lr=self.scheduler is None)
            scaler = self.step.scaler
            if scaler is not None and scaler.state_dict_key in state:
                scaler.load_state_dict(state[scaler.state_dict_key])
            load_scheduler_state(self.scheduler, progress.get('scheduler', {}))
        if args.start_epoch is None:
            # timm's checkpoints of version 1 hold the next epoch.
            self.start_epoch = state.get('epoch', -1) + (state.get('version', 2) > 1)
            self.start_batch = ours.get('next_batch', 0)
            self._check_same_batches(progress, path)
            own_state = self._own_state(progress)
            if own_state.get('losses'):
                self.losses.load_state_dict(own_state['losses'])
            if self.mixer is not None and own_state.get('mixer'):
                self.mixer.load_state_dict(own_state['mixer'])
        _logger.info(f'Resuming {path} at epoch {self.start_epoch}, batch {self.start_batch}.')
        return own_state

    def _own_state(self, progress: dict[str, Any]) -> dict[str, Any]:
        states = progress.get('ranks')
        if states is not None:  # after an error there may be the state of the primary process only
            is_same = self.start_batch or len(states) == self.args.world_size
            return states[self.args.rank] if is_same and self.args.rank < len(states) else {}
        losses = progress.get('averages')  # version 0.1.0 saved the sums of all processes
        if losses is not None and self.args.rank:
            losses = {'sums': dict.fromkeys(losses['sums'], 0.), 'count': 0}
        return {'losses': losses, 'mixer': progress.get('mixer')}

    def _check_same_batches(self, progress: dict[str, Any], path: Path) -> None:
        for name, value in (('num_batches', self.num_batches), ('world_size', self.args.world_size)):
            if self.start_batch and progress.get(name, value) != value:
                raise UsageError(
                    f'Cannot resume {path} in the middle of an epoch: it was saved with a {name} of {progress[name]}, '
                    f'but this run has {value}. Keep --batch-size and the number of processes, or resume '
                    'last.pth.tar.')

    def _open_files(
            self,
            settings: dict[str, Any],
            environment: dict[str, Any],
            path: Optional[Path],
            state: Optional[dict[str, Any]],
    ) -> None:
        args = self.args
        write_settings(self.folder, settings, environment, self.class_names)
        if self.partition is not None:
            write_partition(self.partition, self.folder / PARTITION)
        self.saver = RunSaver(
            self.task, self.optimizer, self.folder, self.info, settings, self.step.scaler,
            decreasing='loss' in args.eval_metric, max_history=args.checkpoint_hist)
        self.recovery.saver = self.saver
        if state is not None and path.parent.resolve() == self.folder.resolve():
            if self.start_epoch:
                self.saver.restore(state, path)
            if self.start_batch:
                self.saver.recovery = self.start_epoch, self.start_batch, path
        wandb = None
        if args.log_wandb:
            resume = {'id': args.wandb_resume_id, 'resume': 'must'} if args.wandb_resume_id else {}
            wandb = {'project': args.wandb_project, 'name': self.folder.name, 'tags': args.wandb_tags, **resume}
        self.tracker = Tracker(self.folder, self.start_epoch, settings, args.log_tensorboard, wandb)
        _logger.info(f'Output folder: {self.folder}')

    # Epochs

    def train(self) -> None:
        """Train until the last epoch, early stopping, or a signal."""
        args = self.args
        if args.resume and self.start_epoch >= self.num_epochs:
            _logger.info(
                f'The run is finished (epochs: {self.num_epochs}). Set --epochs to a larger number to train longer.')
        else:
            _logger.info(
                f'Training {args.model} on {len(self.train_loader.dataset):,} images for {self.num_epochs} epochs of '
                f'{self.num_batches} batches, learning rate {args.lr:.4g}.')
        try:
            with StopRequest(self.group) as self.stop:
                self._run_epochs()
            if self.step.is_primary:
                self._draw_curves()
                self.tracker.close()
                self._log_results()
        finally:
            self.train_loader.close()
            self.val_loader.close()
            if self.lock is not None:
                self.lock.release()

    def _run_epochs(self) -> None:
        try:
            for epoch in range(self.start_epoch, self.num_epochs):
                if self._should_stop_early(epoch - 1):
                    _logger.info(f'Stopping early: no better {self.args.eval_metric} for {self.args.patience} epochs.')
                    break
                self._run_epoch(epoch)
        except StopTraining:
            self._exit()
        except Exception as error:
            if self.recovery.save_after_error(error):
                _logger.warning(
                    f'The state after batch {self.recovery.num_done} of epoch {self.epoch} is saved; resume with: '
                    f'{resume_command(self.folder)}')
            if self.step.is_primary:
                with contextlib.suppress(UsageError):  # the first error is the one to report
                    self._draw_curves()
            raise

    def _should_stop_early(self, epoch: int) -> bool:
        best = self.saver.best_epoch if self.step.is_primary else None
        value = bool(self.args.patience) and best is not None and epoch - best >= self.args.patience
        return broadcast_flag(value, self.step.device, self.args.distributed)

    def _run_epoch(self, epoch: int) -> None:
        args = self.args
        self.epoch = epoch
        self.recovery.begin_epoch(epoch, self.start_batch, self.losses)
        train_metrics = self._train_epoch()
        lr = max(group['lr'] for group in self.optimizer.param_groups)
        metric, eval_metrics = None, {}
        if (epoch + 1) % args.val_interval == 0 or epoch + 1 == self.num_epochs:
            eval_metrics = self._evaluate()
            metric = eval_metrics[f'ema_{args.eval_metric}' if self._evaluates_ema else args.eval_metric]
        self.recovery.end_epoch()
        self.start_batch, self.losses = 0, LossMeter(self.step.device)
        if self.scheduler is not None:
            self.scheduler.step(epoch + 1, metric)
        states = gather_states(get_buffers(self.task), self.group)  # they differ with --dist-bn ''
        if not self.step.is_primary:
            return
        self.tracker.add(epoch, train_metrics, eval_metrics, lr)
        self.saver.progress = {'scheduler': scheduler_state(self.scheduler), 'ranks': states}
        best, best_epoch = self.saver.save_checkpoint(epoch, metric)
        self._draw_curves(at_once=False)
        if metric is not None:
            _logger.info(
                f'Epoch {epoch}: {self._metric_name} {metric:.3f}, best {best:.3f} '
                f'(epoch {best_epoch}), loss {train_metrics["loss"]:.4f}')

    def _train_epoch(self) -> dict[str, float]:
        args = self.args
        set_training(self.task, self.frozen, args.freeze_bn)
        self.task.set_epoch(self.epoch)
        if self.mixer is not None:
            off_epoch = args.splicemix_off_epoch or args.mixup_off_epoch
            self.mixer.mixup_enabled = not off_epoch or self.epoch < off_epoch
        self.stop.restart()
        metrics = train_one_epoch(
            self.task, self.train_loader, self.optimizer, self.step,
            Epoch(self.epoch, self.num_batches, self.start_batch, self.losses), self.scheduler, hooks=self)
        if self.start_batch < self.num_batches:  # otherwise the checkpoint was saved after this
            for ema in (False, True):
                model = self.task.get_eval_model(ema=ema)
                if args.distributed and args.dist_bn and model is not None and not (ema and args.model_ema_force_cpu):
                    distribute_bn(model, args.world_size, args.dist_bn == 'reduce')
            self.recovery.record(self.num_batches, self.losses)
        return metrics

    def _evaluate(self) -> dict[str, float]:
        """Return the metrics of the model and, with the prefix 'ema_', those of its moving average."""
        multi_label = self.info.multi_label
        criterion = binary_cross_entropy if multi_label else union_cross_entropy
        metrics = {}
        for prefix in ('', 'ema_') if self._evaluates_ema else ('',):
            meter = create_meter(
                multi_label, self.task.get_eval_model().num_classes, self.step.device, self.class_names or (),
                self.args.metrics)
            name = f'Validate {self.epoch}{" (EMA)" if prefix else ""}'
            self.stop.restart()
            result = evaluate(
                self.task.get_eval_model(ema=bool(prefix)), self.val_loader, meter, self.step, criterion, name, self)
            metrics.update({f'{prefix}{name}': value for name, value in result.items()})
        return metrics

    @property
    def _metric_name(self) -> str:
        return f'{"EMA " * self._evaluates_ema}{self.args.eval_metric}'

    @property
    def _evaluates_ema(self) -> bool:
        return self.args.model_ema and not self.args.model_ema_force_cpu

    # Hooks

    def before_batch(self, batch: int, images: torch.Tensor, targets: torch.Tensor) -> None:
        args = self.args
        self.task.set_step(self.epoch, batch)
        if args.save_images and self.step.is_primary and batch % args.log_interval == 0:
            self._save_images(batch, images, targets)
            self.task.set_step(self.epoch, batch)  # the task draws the same plan again
        set_seed(mix_seeds(args.seed, args.rank, self.epoch, batch))  # for dropout, stochastic depth, ...

    def _save_images(self, batch: int, images: torch.Tensor, targets: torch.Tensor) -> None:
        mixer = as_mixer(self.mixer)
        plan = mixer.plan(len(images))
        images, targets = mixer.apply(images, targets, plan)
        save_batch(
            images, targets, plan, self.class_names, self.data_config['mean'], self.data_config['std'],
            self.folder / f'train-batch-{self.epoch}-{batch}.jpg')

    def after_update(self, num_done: int, losses: LossMeter, finite: FiniteCheck) -> None:
        self.recovery.record(num_done, losses, finite)
        if num_done == self.num_batches:  # the first batch of the evaluation saves it, or the end of the epoch
            return
        interval = self.args.recovery_interval
        stops = self.stop.requested()
        if stops or (interval and num_done % interval < self.args.grad_accum_steps):
            self.recovery.save()
        if stops:
            raise StopTraining

    def after_eval_batch(self, num_done: int) -> None:
        # Some processes may have one batch more than others, after which they must not ask the others.
        batch_size = self.args.validation_batch_size or self.args.batch_size
        common = len(self.val_loader.dataset) // self.args.world_size // batch_size
        if num_done <= common and self.stop.requested():
            self.recovery.save()
            raise StopTraining

    def _progress(self) -> dict[str, Any]:
        return {
            'scheduler': scheduler_state(self.scheduler), 'num_batches': self.num_batches,
            'world_size': self.args.world_size}

    # End

    def _exit(self) -> None:
        received = self.stop.received
        if self.step.is_primary:
            self._draw_curves()
            self.tracker.close()
            _logger.warning(
                f'Stopped by {received.name if received else "another process"}. The state is saved; resume with: '
                f'{resume_command(self.folder)}')
        sys.exit(128 + (received or 15))

    def _draw_curves(self, at_once: bool = True) -> None:
        """Draw the epochs that are not drawn yet, at once or only if enough time has passed since the last drawing."""
        time_drawn, num_drawn, seconds = self._drawn
        now, rows = time.monotonic(), self.tracker.rows
        is_time = at_once or now >= time_drawn + max(_CURVES_INTERVAL, seconds / _CURVES_SHARE)
        if self._can_draw and len(rows) > num_drawn and is_time:
            self._can_draw = draw_curves(rows, self.folder / 'curves.png')
            self._drawn = now, len(rows), time.monotonic() - now

    def _log_results(self) -> None:
        best = self.folder / 'model_best.pth.tar'
        if self.saver.best_epoch is not None:
            rows = {int(row['epoch']): row for row in self.tracker.rows}
            _logger.info(f'\nBest epoch {self.saver.best_epoch}, by {self._metric_name}:')
            _logger.info(format_epoch(rows.get(self.saver.best_epoch, {})))
        if not best.is_file():  # a finished run that was resumed in a new folder
            return
        _logger.info(f'\nCheckpoint  {best}\nCurves      {self.folder / "curves.png"}')
        partition = None if self.partition is None else self.folder / PARTITION
        _logger.info(f'Validate    {validate_command(self.args, best, partition)}')
        advice = advise(self.args, self.info.multi_label, self.tracker.rows)
        if advice:
            _logger.info(f'\n{advice}')
