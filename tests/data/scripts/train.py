""" A short training script that uses timm by the same names as timm's own train.py, for tests of `with_timm` """
import argparse
import json
import logging
from collections import OrderedDict
from pathlib import Path

import torch
import yaml
from timm import utils
from timm.data import FastCollateMixup, Mixup, create_dataset, create_loader, resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import create_model
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.task import ClassificationTask, load_task_ema_checkpoint, resume_task_checkpoint

_logger = logging.getLogger('train')
parser = argparse.ArgumentParser(description='Short training script')
for flag, kind, default in (
        ('--data-dir', str, None), ('--dataset', str, ''), ('--train-split', str, 'train'),
        ('--val-split', str, 'validation'), ('--class-map', str, ''), ('--model', str, 'resnet50'),
        ('--num-classes', int, None), ('--gp', str, None), ('--img-size', int, None), ('--drop', float, 0.),
        ('--initial-checkpoint', str, ''), ('--resume', str, ''), ('--device', str, 'cuda'), ('--opt', str, 'sgd'),
        ('--momentum', float, 0.9), ('--weight-decay', float, 2e-5), ('--lr', float, 0.1), ('--sched', str, 'cosine'),
        ('--epochs', int, 300), ('--start-epoch', int, None), ('--warmup-epochs', int, 5), ('--warmup-lr', float, 1e-5),
        ('--color-jitter', float, 0.4), ('--train-interpolation', str, 'random'), ('--mixup', float, 0.),
        ('--cutmix', float, 0.), ('--mixup-off-epoch', int, 0), ('--smoothing', float, 0.1), ('--aug-splits', int, 0),
        ('--train-batches-per-epoch', int, None), ('--model-ema-decay', float, 0.9998), ('--seed', int, 42),
        ('--log-interval', int, 50), ('--eval-metric', str, 'top1'), ('--output', str, ''), ('--experiment', str, '')):
    parser.add_argument(flag, type=kind, default=default)
parser.add_argument('-b', '--batch-size', type=int, default=128)
parser.add_argument('-j', '--workers', type=int, default=4)
parser.add_argument('--opt-kwargs', nargs='*', default={}, action=utils.ParseKwargs)
parser.add_argument('--amp', action='store_true')
parser.add_argument('--model-ema', action='store_true')
parser.add_argument('--no-prefetcher', action='store_true')
config_parser = argparse.ArgumentParser(add_help=False)
config_parser.add_argument('--config')


def read_flags():
    config, rest = config_parser.parse_known_args()
    if config.config:
        parser.set_defaults(**yaml.safe_load(Path(config.config).read_text()))
    args = parser.parse_args(rest)
    return args, yaml.safe_dump(vars(args))


def create_loaders(args, data_config, device):
    common = {'input_size': data_config['input_size'], 'batch_size': args.batch_size, 'num_workers': args.workers,
              'mean': data_config['mean'], 'std': data_config['std'], 'device': device,
              'use_prefetcher': not args.no_prefetcher, 'distributed': args.distributed}
    mixing = {'mixup_alpha': args.mixup, 'cutmix_alpha': args.cutmix, 'label_smoothing': args.smoothing,
              'num_classes': args.num_classes}
    collate_fn = mixup_fn = None
    if args.mixup or args.cutmix:
        if args.no_prefetcher:
            mixup_fn = Mixup(**mixing)
        else:
            collate_fn = FastCollateMixup(**mixing)
    loaders = []
    for split, is_training in ((args.train_split, True), (args.val_split, False)):
        dataset = create_dataset(
            args.dataset, root=args.data_dir, split=split, is_training=is_training, class_map=args.class_map,
            batch_size=args.batch_size)
        options = {'color_jitter': args.color_jitter, 'collate_fn': collate_fn} if is_training else {}
        loaders.append(create_loader(dataset, is_training=is_training, **common, **options))
    return *loaders, mixup_fn


def main():
    utils.setup_default_logging()
    args, args_text = read_flags()
    args.prefetcher = not args.no_prefetcher
    device = utils.init_distributed_device(args)
    utils.random_seed(args.seed, args.rank)
    model = create_model(
        args.model, num_classes=args.num_classes, global_pool=args.gp, drop_rate=args.drop,
        checkpoint_path=args.initial_checkpoint)
    args.num_classes = model.num_classes
    data_config = resolve_data_config(vars(args), model=model)
    model.to(device)
    loader_train, loader_eval, mixup_fn = create_loaders(args, data_config, device)
    criterion = torch.nn.CrossEntropyLoss()
    if args.mixup or args.cutmix:
        criterion = SoftTargetCrossEntropy()
    elif args.smoothing:
        criterion = LabelSmoothingCrossEntropy(args.smoothing)
    task = ClassificationTask(model=model, criterion=criterion, device=device, verbose=utils.is_primary(args))
    optimizer = create_optimizer_v2(task.get_trainable_module(), **optimizer_kwargs(cfg=args), **args.opt_kwargs)
    first_epoch = resume_task_checkpoint(task, args.resume, optimizer=optimizer) if args.resume else 0
    if args.model_ema:
        task.setup_ema(decay=args.model_ema_decay)
        if args.resume:
            load_task_ema_checkpoint(task, args.resume)
    if args.distributed:
        task.prepare_distributed(device_ids=[device])
    saver = folder = None
    if utils.is_primary(args):
        folder = Path(utils.get_outdir(args.output, args.experiment))
        saver = utils.CheckpointSaver(
            model=task.get_trainable_module(), optimizer=optimizer, args=args, checkpoint_dir=str(folder),
            recovery_dir=str(folder), decreasing=args.eval_metric == 'loss', task=task)
        (folder / 'args.yaml').write_text(args_text)
    scheduler, num_epochs = create_scheduler_v2(
        optimizer, **scheduler_kwargs(args), updates_per_epoch=len(loader_train))
    if first_epoch:
        scheduler.step(first_epoch)
    for epoch in range(first_epoch, num_epochs):
        for sampler in (loader_train.batch_sampler, loader_train.sampler):
            if hasattr(sampler, 'set_epoch'):
                sampler.set_epoch(epoch)
        train_metrics = train_one_epoch(
            epoch, task.get_trainable_module(), loader_train, optimizer, args, task=task, mixup_fn=mixup_fn,
            output_dir=folder, device=device)
        if args.distributed:
            for ema in (False, True) if args.model_ema else (False,):
                utils.distribute_bn(task.get_trainable_module(ema=ema), args.world_size, reduce=True)
        metrics = validate(task.get_eval_model(), loader_eval, torch.nn.CrossEntropyLoss(), args, device=device)
        if args.model_ema:
            metrics = validate(
                task.get_eval_model(ema=True), loader_eval, torch.nn.CrossEntropyLoss(), args, device=device,
                log_suffix=' (EMA)')
        if folder is not None:
            utils.update_summary(
                epoch, train_metrics, metrics, str(folder / 'summary.csv'), lr=optimizer.param_groups[0]['lr'],
                write_header=epoch == first_epoch)
            best, best_epoch = saver.save_checkpoint(epoch, metric=metrics[args.eval_metric])
            _logger.info(f'Best {args.eval_metric}: {best} (epoch {best_epoch})')
        scheduler.step(epoch + 1, metrics[args.eval_metric])
    if folder is not None:
        print(json.dumps(metrics))


def train_one_epoch(
        epoch, model, loader, optimizer, args, task=None, mixup_fn=None, output_dir=None, device=None):
    if args.mixup_off_epoch and epoch >= args.mixup_off_epoch and args.prefetcher and loader.mixup_enabled:
        loader.mixup_enabled = False
    model.train()
    losses = utils.AverageMeter()
    for index, (images, targets) in enumerate(loader):
        images, targets = images.to(device), targets.to(device)
        if mixup_fn is not None:
            images, targets = mixup_fn(images, targets)
        loss = task(images, targets)['loss']
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.update_ema(step=epoch * len(loader) + index + 1)
        losses.update(loss.item(), len(images))
        if index % args.log_interval == 0 and utils.is_primary(args):
            _logger.info(f'Epoch {epoch}, batch {index}: loss {losses.val:.6f}')
    return OrderedDict(loss=losses.avg)


def validate(model, loader, loss_fn, args, device=None, log_suffix=''):
    model.eval()
    losses, top1 = utils.AverageMeter(), utils.AverageMeter()
    with torch.inference_mode():
        for images, targets in loader:
            images, targets = images.to(device), targets.to(device)
            output = model(images)
            losses.update(loss_fn(output, targets).item(), len(images))
            top1.update(utils.accuracy(output, targets)[0].item(), len(images))
    _logger.info(f'Test{log_suffix}: loss {losses.avg:.6f}, top1 {top1.avg:.3f}')
    return OrderedDict(loss=losses.avg, top1=top1.avg)


if __name__ == '__main__':
    main()
