""" Train a timm model on multi-label images, with SpliceMix and timm's flags

    python train.py --dataset shapes --model resnet18 --img-size 128 --gp max --splicemix-grids 1x2,2x2 --splicemix-cl
    python train.py --data-dir coco --config configs/coco_resnet101_splicemix_cl.yaml
    torchrun --nproc-per-node 4 train.py --data-dir voc --dataset voc/2007 --model vit_base_patch16_384 --pretrained
    python train.py --resume output/train/RUN

A run writes checkpoints, args.yaml, classes.txt, summary.csv and curves.png to its folder.
"""
import argparse
import logging
import math
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import torch
import yaml
from timm.layers import convert_sync_batchnorm
from timm.utils import distribute_bn, setup_default_logging

from . import __version__
from .args import (
    CommandParser,
    add_label_args,
    add_loss_args,
    add_mixer_args,
    add_splicemix_args,
    add_timm_train_args,
    add_train_args,
    command,
    dump_args,
    map_defaults,
    map_defaults_of_data,
    parse_with_config,
    refuse_unsupported,
    uses_config,
)
from .data import (
    MultiLabelDataset,
    MultiLabelLoader,
    WdsDataset,
    create_loader,
    mix_seeds,
)
from .draw import draw_curves, save_batch
from .errors import UsageError
from .files import free_folder, write_text
from .loss import LOSSES, binary_cross_entropy, union_cross_entropy
from .mix import as_mixer
from .results import format_metrics
from .run.checkpoint import (
    CheckpointInfo,
    RunSaver,
    check_same_model,
    find_checkpoint,
    has_checkpoints,
    load_weights,
    read_checkpoint,
)
from .run.engine import (
    Step,
    StopTraining,
    loader_length,
    train_one_epoch,
)
from .run.evaluate import evaluate
from .run.factory import (
    build_model,
    check_image_size,
    checkpoint_gradients,
    count_classes,
    create_criterion,
    create_datasets,
    create_meter,
    create_mixer,
    freeze_modules,
    resolve_images,
    set_training,
    start_classifier,
)
from .run.machine import (
    describe_machine,
    precision,
    set_seed,
    set_up_device,
)
from .run.optimizer import (
    create_optimizer,
    create_scheduler,
    learning_rate,
    load_optimizer,
    load_scheduler_state,
    scheduler_state,
)
from .run.progress import LossMeter
from .run.signals import StopRequest
from .run.tracking import Tracker, read_summary
from .task import SpliceMixTask

_logger = logging.getLogger(__name__)


def build_parser() -> CommandParser:
    parser = CommandParser(prog='train.py', description=__doc__)
    add_timm_train_args(parser)
    add_label_args(parser)
    add_splicemix_args(parser)
    add_mixer_args(parser)
    add_train_args(parser, list(LOSSES))
    add_loss_args(parser)
    return parser


def parse_args(
        parser: CommandParser,
        argv: Optional[Sequence[str]] = None,
) -> tuple[argparse.Namespace, set[str]]:
    """ Parse the command line; a run that goes on has the flags that it had, unless told otherwise.

    Args:
        parser: Parser of the flags.
        argv: The command line, that of the process if None.

    Returns:
        The flags, and the names of those that the user set.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    args, given = parse_with_config(parser, argv)
    settings = Path(args.resume) / 'args.yaml' if Path(args.resume).is_dir() else Path(args.resume).parent / 'args.yaml'
    if not args.resume or uses_config(parser, argv) or not settings.is_file():
        return args, given
    args, all_given = parse_with_config(parser, [*argv, '--config', str(settings)])
    for name in {'output', 'experiment', 'start_epoch', 'no_resume_opt'} - given:  # of how it was started
        setattr(args, name, parser.get_default(name))
    return args, all_given


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = build_parser()
    args, given = parse_args(parser, argv)
    setup_default_logging()
    refuse_unsupported(args, parser)
    settings = dict(vars(args))  # what is made of them on a machine is no setting
    map_defaults(args, given)
    device = set_up_device(args)
    if args.rank:
        logging.getLogger().setLevel(logging.WARNING)
    try:
        Run(args, given, settings, device).train()
    finally:
        if args.distributed:
            torch.distributed.destroy_process_group()


class Run:
    """ A training run: data, model, task, optimizer, and the loop over epochs.

    Args:
        args: Flags, with what the machine added.
        given: Flags that the user set.
        settings: Flags alone, to be written down.
        device: Device of this process.
    """

    def __init__(self, args: argparse.Namespace, given: set[str], settings: dict[str, Any], device: torch.device):
        self.args = args
        self.device = device
        self.is_primary = args.rank == 0
        checkpoint = find_checkpoint(args.resume) if args.resume else None
        self.resumed = None if checkpoint is None else read_checkpoint(checkpoint)

        # Data set
        self.train_set, self.val_set = create_datasets(args)
        self.multi_label = isinstance(self.train_set, (MultiLabelDataset, WdsDataset))
        map_defaults_of_data(args, given, self.multi_label)
        settings.update(smoothing=args.smoothing, eval_metric=args.eval_metric)
        self.class_names = getattr(self.train_set, 'class_names', None)
        num_classes = count_classes(args, self.train_set)

        # Model and head
        set_seed(mix_seeds(args.seed))  # the same weights in all processes
        self.autocast, self.scaler, self.dtype = precision(args, device)
        model, model_kwargs = build_model(args, num_classes)
        num_classes = model.num_classes
        self.data_config = resolve_images(args, model, model_kwargs['in_chans'])
        start_classifier(model, args, self.train_set if self.multi_label else None)
        check_image_size(model, self.data_config['input_size'])
        if args.grad_checkpointing:
            checkpoint_gradients(model)
        model.to(device=device, dtype=self.dtype)
        if args.channels_last:
            model.to(memory_format=torch.channels_last)
        if args.distributed and args.sync_bn:
            model = convert_sync_batchnorm(model)
        self.frozen = freeze_modules(model, args.freeze)

        # Loader
        self.train_loader, self.val_loader = self._create_loaders()
        self.num_batches = args.train_batches_per_epoch or loader_length(self.train_loader)

        # Mix, model, head, loss: the task
        self.mixer = create_mixer(args, num_classes=num_classes, seed=args.seed)
        varies = args.splicemix_prob < 1 or args.splicemix_mode != 'batch'
        if args.distributed and args.splicemix_batch == 'alternate' and varies:
            raise UsageError(
                'Expected --splicemix-prob 1 and --splicemix-mode batch for --splicemix-batch alternate with several '
                'processes, but got others: processes would make different numbers of updates.')
        self.task = SpliceMixTask(
            model, create_criterion(args, self.multi_label, num_classes, self.train_set), self.mixer,
            consistency_weight=args.splicemix_cl or (args.recursivemix_cl if args.recursivemix else 0.),
            detach=not args.splicemix_cl_no_detach,
            input_size=self.data_config['input_size'], device=device, dtype=self.dtype, verbose=self.is_primary)
        self.task.to(device)

        # Optimizer
        args.lr = learning_rate(args, args.world_size)
        self.optimizer = create_optimizer(model, args)
        updates_per_epoch = math.ceil(self.num_batches / args.grad_accum_steps)
        self.scheduler, self.num_epochs = create_scheduler(self.optimizer, args, updates_per_epoch)
        if args.model_ema:
            self.task.setup_ema(
                decay=args.model_ema_decay, use_warmup=args.model_ema_warmup,
                device='cpu' if args.model_ema_force_cpu else None)

        # Where the run is, and where it writes
        self.info = CheckpointInfo(
            args.model, model_kwargs, {**self.data_config}, self.class_names and tuple(self.class_names),
            self.multi_label)
        self.start_epoch, self.start_batch, self.averages_state = self._resume(checkpoint, updates_per_epoch)
        if args.torchcompile:
            self.task.compile(backend=args.torchcompile, mode=args.torchcompile_mode)
            self.task.compile_ema(backend=args.torchcompile, mode=args.torchcompile_mode)
        if args.distributed:
            device_ids = [device] if device.type != 'cpu' else None
            self.task.prepare_distributed(device_ids=device_ids, broadcast_buffers=not args.no_ddp_bb)
        self.step = Step(
            device, self.dtype, self.autocast, self.scaler, args.grad_accum_steps, args.clip_grad, args.clip_mode,
            create_graph=getattr(self.optimizer, 'is_second_order', False), channels_last=args.channels_last,
            synchronize=args.synchronize_step)
        self.saver = self.tracker = None
        if self.is_primary:
            self._open_folder(settings, checkpoint)

    def train(self) -> None:
        """Train until the last epoch, early stopping, or a signal."""
        args = self.args
        _logger.info(
            f'Training {args.model} on {len(self.train_set):,} images for {self.num_epochs} epochs of '
            f'{self.num_batches} batches, learning rate {args.lr:.4g}.')
        with StopRequest(args.distributed) as self.stop:
            try:
                for epoch in range(self.start_epoch, self.num_epochs):
                    if self._has_lost_patience(epoch - 1):
                        _logger.info(f'Stops after {args.patience} epochs without a better {args.eval_metric}.')
                        break
                    self._epoch(epoch)
            except StopTraining:
                self._leave()
        if self.is_primary:
            self.tracker.close()
            self._tell_results()

    def _has_lost_patience(self, epoch: int) -> bool:
        """Whether the last epochs up to this one, as many as --patience says, brought nothing better."""
        best = self.saver.best_epoch if self.is_primary else None
        return self._agree(bool(self.args.patience) and best is not None and epoch - best >= self.args.patience)

    def _epoch(self, epoch: int) -> None:
        """Train and evaluate."""
        args = self.args
        self.epoch = epoch
        set_training(self.task, self.frozen, args.freeze_bn)
        self.task.set_epoch(epoch)
        if self.mixer is not None:
            off_epoch = args.splicemix_off_epoch or args.mixup_off_epoch
            self.mixer.mixup_enabled = not off_epoch or epoch < off_epoch
        averages = LossMeter(self.device)
        if self.averages_state is not None:
            averages.load_state_dict(self.averages_state)
        train_metrics = train_one_epoch(
            self.task, self.train_loader, self.optimizer, self.step, epoch, self.num_batches, self.start_batch,
            averages, self.scheduler, args.log_interval, self.is_primary, args.distributed, self._before_batch,
            self._after_update)
        self.start_batch, self.averages_state = 0, None
        lr = max(group['lr'] for group in self.optimizer.param_groups)
        for ema in (False, True):
            model = self.task.get_eval_model(ema=ema)
            if args.distributed and args.dist_bn and model is not None and not (ema and args.model_ema_force_cpu):
                distribute_bn(model, args.world_size, args.dist_bn == 'reduce')

        metric, eval_metrics = None, {}
        if (epoch + 1) % args.val_interval == 0 or epoch + 1 == self.num_epochs:
            eval_metrics = self._evaluate(averages)
            metric = eval_metrics[f'ema_{args.eval_metric}' if self._evaluates_ema else args.eval_metric]
        if self.scheduler is not None:
            self.scheduler.step(epoch + 1, metric)
        if not self.is_primary:
            return
        self.tracker.add(epoch, train_metrics, eval_metrics, lr)
        if self._draws_curves:
            self._draws_curves = draw_curves(read_summary(self.tracker.summary), self.folder / 'curves.png')
        self.saver.progress = {'scheduler': scheduler_state(self.scheduler)}
        best, best_epoch = self.saver.save_checkpoint(epoch, metric)
        if metric is not None:
            _logger.info(
                f'Epoch {epoch}: {args.eval_metric} {metric:.3f}, best {best:.3f} (epoch {best_epoch}), '
                f'loss {train_metrics["loss"]:.4f}')

    def _evaluate(self, averages: LossMeter) -> dict[str, float]:
        """Metrics of the model and, with other names, of its moving average."""
        args = self.args
        criterion = binary_cross_entropy if self.multi_label else union_cross_entropy
        smallest_part = len(self.val_set) // args.world_size // self._val_batch_size  # processes may have one more

        def after_batch(done: int) -> None:
            if done <= smallest_part and self.stop.requested():
                self._save_recovery(self.num_batches, averages)
                raise StopTraining

        metrics = {}
        for prefix in ('', 'ema_') if self._evaluates_ema else ('',):
            meter = create_meter(
                self.multi_label, self.task.get_eval_model().num_classes, self.device, self.class_names or (),
                args.metrics)
            result = evaluate(
                self.task.get_eval_model(ema=bool(prefix)), self.val_loader, meter, self.step, criterion,
                f'Validate {self.epoch}{" (EMA)" if prefix else ""}', args.log_interval, self.is_primary,
                args.distributed, after_batch)
            metrics.update({f'{prefix}{name}': value for name, value in result.items()})
        return metrics

    @property
    def _evaluates_ema(self) -> bool:
        return self.args.model_ema and not self.args.model_ema_force_cpu

    @property
    def _val_batch_size(self) -> int:
        return self.args.validation_batch_size or self.args.batch_size

    def _before_batch(self, batch: int, images: torch.Tensor, targets: torch.Tensor) -> None:
        args = self.args
        self.task.set_step(self.epoch, batch)
        if args.save_images and self.is_primary and batch % args.log_interval == 0:
            self._save_images(batch, images, targets)
            self.task.set_step(self.epoch, batch)  # what was drawn for the picture is drawn again
        set_seed(mix_seeds(args.seed, args.rank, self.epoch, batch))  # of dropout and the like

    def _save_images(self, batch: int, images: torch.Tensor, targets: torch.Tensor) -> None:
        mixer = as_mixer(self.mixer)
        plan = mixer.plan(len(images))
        images, targets = mixer.apply(images, targets, plan)
        save_batch(
            images, targets, plan, self.class_names, self.data_config['mean'], self.data_config['std'],
            self.folder / f'train-batch-{self.epoch}-{batch}.jpg')

    def _after_update(self, done: int, averages: LossMeter, check: Callable[[], None]) -> None:
        """Save what could be lost: now and then, and before the run is left."""
        interval = self.args.recovery_interval
        leaves = self.stop.requested()
        if leaves or (interval and done < self.num_batches and done % interval < self.args.grad_accum_steps):
            check()
            self._save_recovery(done, averages)
        if leaves:
            raise StopTraining

    def _save_recovery(self, done: int, averages: LossMeter) -> None:
        state = averages.state_dict(self.args.distributed)
        if self.is_primary:
            mixer = {} if self.mixer is None else self.mixer.state_dict()
            self.saver.progress = {
                'scheduler': scheduler_state(self.scheduler), 'averages': state, 'mixer': mixer,
                'num_batches': self.num_batches, 'world_size': self.args.world_size}
            self.saver.save_recovery(self.epoch, done)

    def _leave(self) -> None:
        received = self.stop.received
        if self.is_primary:
            self.tracker.close()
            _logger.warning(
                f'Stopped by {received.name if received else "another process"}; the state is saved, go on by: '
                f'train.py --resume {self.folder}')
        sys.exit(128 + (received or 15))

    def _agree(self, value: bool) -> bool:
        """What the first process says, in all of them."""
        if not self.args.distributed:
            return value
        flag = torch.tensor(int(value), device=self.device)
        torch.distributed.broadcast(flag, src=0)
        return bool(flag)

    def _create_loaders(self) -> tuple[MultiLabelLoader, MultiLabelLoader]:
        args = self.args
        common = {
            'input_size': self.data_config['input_size'],
            'mean': self.data_config['mean'],
            'std': self.data_config['std'],
            'num_workers': args.workers,
            'pin_memory': args.pin_mem,
            'img_dtype': self.dtype,
            'device': self.device,
            'use_prefetcher': not args.no_prefetcher,
            'decoder': args.decoder,
            'seed': args.seed,
        }
        interpolation = args.train_interpolation
        if args.no_aug or not interpolation:
            interpolation = self.data_config['interpolation']
        try:
            train_loader = create_loader(
                self.train_set, batch_size=args.batch_size, is_training=True, no_aug=args.no_aug, re_prob=args.reprob,
                re_mode=args.remode, re_count=args.recount, re_split=args.resplit,
                num_aug_repeats=int(args.aug_repeats), batch_copies=args.batch_augment,
                train_crop_mode=args.train_crop_mode, scale=args.scale, ratio=args.ratio, hflip=args.hflip,
                vflip=args.vflip, color_jitter=args.color_jitter, color_jitter_prob=args.color_jitter_prob,
                grayscale_prob=args.grayscale_prob, gaussian_blur_prob=args.gaussian_blur_prob, auto_augment=args.aa,
                interpolation=interpolation, on_bad_image=args.on_bad_image, **common)
        except AssertionError as error:  # what timm raises at a policy
            raise UsageError(f"Expected a policy of timm for --aa, but got '{args.aa}': {error}") from error
        val_loader = create_loader(
            self.val_set, batch_size=self._val_batch_size, interpolation=self.data_config['interpolation'],
            crop_pct=self.data_config['crop_pct'], crop_mode=self.data_config['crop_mode'], **common)
        return train_loader, val_loader

    def _resume(
            self,
            checkpoint: Optional[Path],
            updates_per_epoch: int,
    ) -> tuple[int, int, Optional[dict[str, Any]]]:
        """Be as the run was; returns epoch and batch to begin with, and the sums over the batches before."""
        args, state = self.args, self.resumed
        epoch, batch, averages = args.start_epoch or 0, 0, None
        if state is not None:
            check_same_model(state, self.info, checkpoint)
            load_weights(self.task.get_eval_model(), state['state_dict'], checkpoint)
            if args.model_ema:
                ema = state.get('state_dict_ema', state['state_dict'])
                load_weights(self.task.get_eval_model(ema=True), ema, checkpoint)
            ours = state.get('timm_splicemix', {})
            progress = ours.get('progress', {})
            if not args.no_resume_opt and 'optimizer' in state:
                load_optimizer(self.optimizer, state['optimizer'], checkpoint)
                if self.scaler is not None and self.scaler.state_dict_key in state:
                    self.scaler.load_state_dict(state[self.scaler.state_dict_key])
                load_scheduler_state(self.scheduler, progress.get('scheduler', {}))
            if args.start_epoch is None:
                epoch = state.get('epoch', -1) + (state.get('version', 2) > 1)  # timm's oldest were one ahead
                batch, averages = ours.get('next_batch', 0), progress.get('averages')
                for name, value in (('num_batches', self.num_batches), ('world_size', args.world_size)):
                    if batch and progress.get(name, value) != value:
                        raise UsageError(
                            f'Expected to go on in the middle of an epoch with a {name} of {progress[name]}, as in '
                            f'{checkpoint}, but got {value}: keep --batch-size and the number of processes, or resume '
                            'last.pth.tar.')
                if self.mixer is not None and progress.get('mixer'):
                    self.mixer.load_state_dict(progress['mixer'])
            if averages is not None and not self.is_primary:
                averages = {'sums': dict.fromkeys(averages['sums'], 0.), 'count': 0}  # the first one has all of them
            _logger.info(f'Goes on from {checkpoint}, at batch {batch} of epoch {epoch}.')
        if self.scheduler is not None and (epoch or batch) and not hasattr(self.scheduler, 'lr_scheduler'):
            self.scheduler.step(epoch)
            self.scheduler.step_update(epoch * updates_per_epoch + math.ceil(batch / args.grad_accum_steps))
        return epoch, batch, averages

    def _open_folder(self, settings: dict[str, Any], checkpoint: Optional[Path]) -> None:
        args = self.args
        self.folder = output_folder(args, checkpoint, self.data_config['input_size'])
        lists = {'args.yaml': dump_args(argparse.Namespace(**settings)),
                 'environment.yaml': yaml.safe_dump(describe_machine(__version__), sort_keys=False)}
        if self.class_names:
            lists['classes.txt'] = ''.join(f'{name}\n' for name in self.class_names)
        for name, text in lists.items():
            write_text(text, self.folder / name)
        self.saver = RunSaver(
            self.task, self.optimizer, self.folder, self.info, settings, self.scaler,
            decreasing='loss' in args.eval_metric, max_history=args.checkpoint_hist)
        if self.resumed is not None and self.start_epoch and checkpoint.parent.resolve() == self.folder.resolve():
            self.saver.restore(self.resumed, checkpoint)
        wandb = None
        if args.log_wandb:
            resume = {'id': args.wandb_resume_id, 'resume': 'must'} if args.wandb_resume_id else {}
            wandb = {'project': args.wandb_project, 'name': self.folder.name, 'tags': args.wandb_tags, **resume}
        self.tracker = Tracker(self.folder, self.start_epoch, settings, args.log_tensorboard, wandb)
        self._draws_curves = True  # until matplotlib turns out to be missing
        _logger.info(f'Writes to {self.folder}.')

    def _tell_results(self) -> None:
        best = self.folder / 'model_best.pth.tar'
        if self.saver.best_epoch is not None:
            _logger.info(f'\nBest epoch {self.saver.best_epoch}:')
            rows = {int(row['epoch']): row for row in read_summary(self.tracker.summary)}
            _logger.info(format_metrics(rows.get(self.saver.best_epoch, {})))
        _logger.info(f'\nCheckpoint  {best}\nCurves      {self.folder / "curves.png"}')
        args = self.args
        flags = {
            '--data-dir': args.data_dir, '--dataset': args.dataset, '--class-map': args.class_map,
            '--val-ann': args.val_ann, '--split': args.val_split if args.val_split != 'validation' else None,
            '--metrics': args.metrics if args.metrics != 'paper' else None, '--checkpoint': str(best)}
        flags = ' '.join(f'{flag} {shlex.quote(value)}' for flag, value in flags.items() if value)
        _logger.info(f'Validate    python validate.py {flags}')


def output_folder(args: argparse.Namespace, checkpoint: Optional[Path], input_size: Sequence[int]) -> Path:
    """ Folder of the run: a new one, or that of the checkpoint if the run goes on and nothing else is said.

    Args:
        args: Flags.
        checkpoint: Where the run goes on from.
        input_size: (C, H, W).
    """
    if checkpoint is not None and not args.output and not args.experiment:
        return checkpoint.parent
    model = args.model.replace('/', '_').replace(':', '_')
    name = args.experiment or f'{datetime.now():%Y%m%d-%H%M%S}-{model}-{input_size[-1]}'
    resumed = checkpoint.parent.resolve() if checkpoint is not None else None
    return free_folder(
        Path(args.output or 'output/train') / name,
        lambda folder: has_checkpoints(folder) and folder.resolve() != resumed)


if __name__ == '__main__':
    main()
