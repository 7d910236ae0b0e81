""" Run timm's own train.py or validate.py, unchanged, with the flags of this package

    python -m timm_splicemix.with_timm PATH/train.py --data-dir coco --dataset coco/2014 --model resnet101 --gp max \\
        --splicemix-grids 1x2,2x2,2x3 --splicemix-cl
    torchrun --nproc-per-node 4 -m timm_splicemix.with_timm PATH/train.py ...
    python -m timm_splicemix.with_timm PATH/validate.py --checkpoint FILE --data-dir coco --dataset coco/2014
    python -m timm_splicemix.with_timm PATH/train.py --help

The script is loaded, and some of the names that it uses are replaced in memory; the file stays as it is. Without a flag
of this package and on single-label data, nothing is replaced.
"""
import argparse
import functools
import importlib.util
import logging
import os
import re
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Optional, Sequence

import timm
import torch
from torch import nn

from .args import (
    CommandParser,
    ScriptFlags,
    add_our_train_args,
    add_our_validate_args,
    add_train_args,
    add_validate_args,
    check_train_args,
    check_validate_args,
    command,
    dump_args,
    map_defaults,
    map_label_defaults,
)
from .data import (
    PARTITION,
    MultiLabelLoader,
    has_multi_label_reader,
    is_training_split,
    mix_seeds,
    write_partition,
)
from .errors import UsageError
from .files import read_yaml, write_text
from .loss import binary_cross_entropy, union_cross_entropy
from .mix import is_auto
from .results import format_metrics
from .run.datasets import create_dataset_from_flags, create_datasets, is_multi_label
from .run.engine import evaluate
from .run.evaluation import Evaluator
from .run.factory import (
    create_criterion,
    create_eval_loader,
    create_meter,
    create_mixer,
    create_task,
    create_train_loader,
    create_training_step,
)
from .run.grids import set_auto_grids
from .run.load import load_from_flags, transform_model
from .run.machine import set_seed, set_up_device
from .run.model import create_model_and_info, freeze_modules, set_training
from .run.optimizer import apply_lr_scale, create_optimizer
from .run.read import KEY, best_checkpoint, read_checkpoint
from .task import SpliceMixTask

_logger = logging.getLogger(__name__)
KNOWN_VERSIONS = '1.0.27, 1.0.28 and 1.0.29.dev0'


class TrainScript:
    """ What timm's train.py calls instead of timm's functions; each method replaces the name that it has.

    Args:
        script: The module of the script.
        flags: Our flags in the parser of the script.
    """
    # The names that a script must have: those that are replaced, those that are called, and
    # resume_task_checkpoint, which shows that the script leaves EMA, DDP and checkpoints to its task.
    REPLACED = (
        'create_model', 'create_dataset', 'create_loader', 'Mixup', 'FastCollateMixup', 'ClassificationTask',
        'create_optimizer_v2', 'train_one_epoch', 'validate')
    NEEDED = ('parser', 'main', 'resume_task_checkpoint', *REPLACED)
    add_ours = staticmethod(add_our_train_args)
    add_all = staticmethod(add_train_args)

    def __init__(self, script: ModuleType, flags: ScriptFlags):
        self.flags = flags
        self.script_args: argparse.Namespace
        self.run_epoch = script.train_one_epoch
        self.task: Optional[SpliceMixTask] = None
        self.frozen: list[nn.Module] = []
        self.epoch, self.step_index = 0, 0

    @property
    def args(self) -> argparse.Namespace:
        """The flags as the script has changed them, with those that it lacks."""
        return self.flags.complete(self.script_args)

    @staticmethod
    def split(args: argparse.Namespace) -> str:
        return args.train_split

    def check(self, args: argparse.Namespace, given: set[str], multi_label: bool) -> None:
        """Check all flags, and replace defaults that do not fit the machine and the labels."""
        self.flags.check_supported(args)
        if args.splicemix_batch == 'alternate':
            raise UsageError(
                "Expected another --splicemix-batch, but got alternate: timm's script makes one update for each batch. "
                'Use python -m timm_splicemix.train.')
        if args.train_batches_per_epoch:
            raise UsageError(
                "Expected no --train-batches-per-epoch, but got it: timm's script supports it with its own loader "
                'alone. Use python -m timm_splicemix.train.')
        check_train_args(args, self.flags.known)
        map_defaults(args, given)
        if 'eval_metric' not in given:  # a script may have another default
            args.eval_metric = 'top1'
        map_label_defaults(args, given, multi_label)

    # The names of the script, in the order of their calls

    def create_model(self, *_: Any, **__: Any) -> nn.Module:
        args = self.args
        if args.rank:
            logging.getLogger('timm_splicemix').setLevel(logging.WARNING)
        if args.val_split:
            self.train_set, self.val_set = create_datasets(args)
        else:
            self.train_set = create_dataset_from_flags(
                args, args.train_split, is_training=True, num_samples=args.train_num_samples)
        self.multi_label = is_multi_label(self.train_set)
        # The script does these itself: a scale of 1 keeps the classifier as it is.
        args.head_init_scale = None if args.head_init_scale is None else 1.
        args.grad_checkpointing = args.sync_bn = False
        self.step = create_training_step(args, torch.device(args.device))
        resumed = read_checkpoint(args.resume) if args.resume and Path(args.resume).is_file() else None
        model, self.info = create_model_and_info(args, self.train_set, self.step, resumed)
        self.script_args.splicemix_grids = set_auto_grids(args, self.info.data_config['input_size'], model, resumed)
        self.script_args.splicemix_weight = args.splicemix_weight
        self.frozen = freeze_modules(model, args.freeze)
        return model

    def create_dataset(self, *_: Any, is_training: bool = False, **__: Any) -> torch.utils.data.Dataset:
        return self.train_set if is_training else self.val_set

    def create_loader(
            self,
            dataset: torch.utils.data.Dataset,
            *_: Any,
            batch_size: int,
            is_training: bool = False,
            **__: Any,
    ) -> MultiLabelLoader:
        args = self.args
        if is_training:
            return create_train_loader(args, dataset, self.info.data_config, self.step)
        return create_eval_loader(args, dataset, self.info.data_config, self.step, batch_size)

    def Mixup(self, **_: Any) -> None:
        """The task mixes, so the script gets no mixer of its own."""

    FastCollateMixup = Mixup

    def ClassificationTask(self, model: nn.Module, *_: Any, **__: Any) -> SpliceMixTask:
        args = self.args
        args.model_ema = False  # the script calls task.setup_ema
        mixer = create_mixer(
            args, num_classes=model.num_classes, seed=args.seed, class_names=self.info.class_names)
        criterion = create_criterion(args, self.multi_label, model.num_classes, self.train_set)
        task = create_task(args, model, criterion, mixer, self.info.data_config['input_size'], self.step)
        task.register_forward_pre_hook(self._before_step)
        get_state = task.get_checkpoint_state

        def with_info(**kwargs: Any) -> dict[str, Any]:
            """Checkpoints record classes, pooling and images, so that our commands read them without flags."""
            return {**get_state(**kwargs), KEY: {'info': self.info.state()}}

        task.get_checkpoint_state = with_info
        self.task = task
        return task

    def create_optimizer_v2(self, module: nn.Module, **_: Any) -> torch.optim.Optimizer:
        args = self.args
        optimizer = create_optimizer(self.task.get_eval_model(), args)
        if args.sched == 'none':
            apply_lr_scale(optimizer)
        return optimizer

    def train_one_epoch(self, epoch: int, model: nn.Module, loader: MultiLabelLoader, *rest: Any, **kwargs: Any) -> Any:
        args = self.args
        self.epoch, self.step_index = epoch, 0
        loader.set_epoch(epoch)
        self.task.set_epoch(epoch)
        if self.task.mixer is not None:
            off_epoch = args.splicemix_off_epoch or args.mixup_off_epoch
            self.task.mixer.mixup_enabled = not off_epoch or epoch < off_epoch
        if kwargs.get('output_dir'):
            self._complete_folder(Path(kwargs['output_dir']))
        return self.run_epoch(epoch, model, loader, *rest, **kwargs)

    def _complete_folder(self, folder: Path) -> None:
        """Write what the script lacks: the split of the data, and in args.yaml what 'auto' stands for."""
        partition = getattr(self.train_set, 'partition', None)
        if partition is not None:
            write_partition(partition, folder / PARTITION)
        path = folder / 'args.yaml'
        settings = read_yaml(path) if path.is_file() else {}
        if is_auto(settings.get('splicemix_grids')):
            settings['splicemix_grids'] = self.script_args.splicemix_grids
            settings['splicemix_weight'] = self.script_args.splicemix_weight
            write_text(dump_args(argparse.Namespace(**settings)), path)

    def _before_step(self, task: SpliceMixTask, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        args = self.script_args
        if not self.step_index and (self.frozen or args.freeze_bn):  # after the script's own call of train()
            set_training(self.task, self.frozen, args.freeze_bn)
        self.task.set_step(self.epoch, self.step_index)
        set_seed(mix_seeds(args.seed, args.rank, self.epoch, self.step_index))  # for dropout, stochastic depth, ...
        self.step_index += 1
        return self.step.to_device(*batch)  # some decoders return channels-last images

    def validate(self, model: nn.Module, loader: MultiLabelLoader, *_: Any, **kwargs: Any) -> dict[str, float]:
        info, name = self.info, f"Test{kwargs.get('log_suffix', '')}"
        number = info.model_kwargs['num_classes']
        meter = create_meter(
            self.multi_label, number, self.step.device, info.class_names or (), self.script_args.metrics)
        criterion = binary_cross_entropy if self.multi_label else union_cross_entropy
        metrics = evaluate(model, loader, meter, self.step, criterion, name)
        if self.step.is_primary:
            _logger.info(format_metrics(metrics, f'{name}: '))
        return OrderedDict(metrics)


class _Results(OrderedDict):
    """Results of a checkpoint; timm's script sorts those of several ones by 'top1', which multi-label data lack."""

    def __missing__(self, key: str) -> float:
        if key == 'top1':
            return self['mAP']
        raise KeyError(key)


class ValidateScript:
    """ What timm's validate.py calls instead of its own function; see `TrainScript`.

    Args:
        script: The module of the script.
        flags: Our flags in the parser of the script.
    """
    REPLACED = ('validate',)
    NEEDED = ('parser', 'main', *REPLACED)
    add_ours = staticmethod(add_our_validate_args)
    add_all = staticmethod(add_validate_args)

    def __init__(self, script: ModuleType, flags: ScriptFlags):
        self.flags = flags
        self.given: set[str] = set()
        self.script_args: argparse.Namespace

    @staticmethod
    def split(args: argparse.Namespace) -> str:
        return args.split

    def check(self, args: argparse.Namespace, given: set[str], multi_label: bool) -> None:
        """Check all flags, and replace defaults that do not fit the machine."""
        self.flags.check_supported(args)
        check_validate_args(args, self.flags.known, given)
        map_defaults(args, given)
        self.given = given

    @functools.cached_property
    def device(self) -> torch.device:
        args = self.script_args
        flags = argparse.Namespace(**{**vars(self.flags.complete(args)), 'device_modules': None, 'sync_bn': False})
        device = set_up_device(flags)
        for name in ('device', 'distributed', 'world_size', 'rank', 'local_rank'):
            setattr(args, name, getattr(flags, name))
        if args.rank:  # the script prints and writes results in each process
            logging.getLogger('timm_splicemix').setLevel(logging.WARNING)
            sys.stdout = open(os.devnull, 'w')  # noqa: SIM115 - until the process ends
            args.results_file = ''
        return device

    def validate(self, script_args: argparse.Namespace) -> dict[str, Any]:
        device = self.device
        args = self.flags.complete(script_args)
        set_seed(args.seed)
        if args.checkpoint:
            args.checkpoint = str(best_checkpoint(args.checkpoint))
        model, info = load_from_flags(
            args, self.given, use_test_size=not args.use_train_size, scriptable=args.torchscript)
        model = transform_model(model, info, args.reparam, args.test_pool)
        evaluator = Evaluator(args, model, info, device)
        if args.thresholds == 'tune':
            evaluator.tune()
        result = evaluator.evaluate().result
        if args.rank == 0:
            _logger.info(format_metrics(result['metrics'], ' * '))
        return _Results(
            model=result['model'],
            **{name: round(value, 4) for name, value in result['metrics'].items()},
            num_images=result['num_images'],
            param_count=round(result['param_count'] / 1e6, 2),
            img_size=result['input_size'][-1],
            crop_pct=result['crop_pct'],
            interpolation=result['interpolation'],
        )


def load_script(path: Path) -> ModuleType:
    """Load a script as a module; it is not run."""
    if not path.is_file():
        raise UsageError(f"Expected timm's train.py or validate.py, but got {path}, which is not a file.")
    _warn_about_other_timm(path.parent / 'timm' / 'version.py')
    spec = importlib.util.spec_from_file_location(f'timm_script_{path.stem}', path)
    if spec is None:
        raise UsageError(f"Expected timm's train.py or validate.py, but got {path}, which is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # worker processes look its functions up there
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise UsageError(
            f'Cannot load {path} with timm {timm.__version__}: {error}. Use the script of this version of timm.'
        ) from error
    return module


def _warn_about_other_timm(file: Path) -> None:
    """Log that the timm beside the script is not the one that is used, if their versions differ."""
    found = re.search(r"__version__ = '(.+)'", file.read_text()) if file.is_file() else None
    if found and found[1] != timm.__version__:
        _logger.warning(
            f'Using the installed timm {timm.__version__}, not timm {found[1]} beside the script. To use that one, set '
            f'PYTHONPATH={file.parents[1]}.')


def adapt(script: ModuleType, path: Path) -> None:
    """ Add our flags to a script's parser, and replace the names that it uses once the flags or the data ask for it.

    Args:
        script: The module of the script.
        path: Its file, for messages.
    """
    kind = TrainScript if hasattr(script, 'train_one_epoch') else ValidateScript
    missing = [name for name in kind.NEEDED if not hasattr(script, name)]
    if missing:
        raise UsageError(
            f"Expected timm's {'train.py' if kind is TrainScript else 'validate.py'}, but {path} lacks the name "
            f'{missing[0]}. This command is known to work with the scripts of timm {KNOWN_VERSIONS}.')
    known = CommandParser()
    kind.add_all(known)
    flags = ScriptFlags(script.parser, kind.add_ours, known)
    script.parser.parse_args = _parse_function(script, kind(script, flags))


def _parse_function(script: ModuleType, adapter: Any) -> Callable[..., argparse.Namespace]:
    flags = adapter.flags

    def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
        args, given = flags.parse(argv)
        everything = flags.complete(args)
        split = adapter.split(everything)
        multi_label = has_multi_label_reader(
            everything.dataset, everything.data_dir or everything.data, split, everything.class_map,
            target_key=everything.target_key,
            annotations=everything.train_ann if is_training_split(split) else everything.val_ann)
        if not multi_label and not given & flags.ours:
            return flags.without_ours(args)
        adapter.check(everything, given, multi_label)
        for name in vars(args).keys() - flags.shared:
            setattr(args, name, getattr(everything, name))
        for name in adapter.REPLACED:
            setattr(script, name, getattr(adapter, name))
        adapter.script_args = args
        return args

    return parse_args


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog='with_timm', usage='python -m timm_splicemix.with_timm SCRIPT [flags]', description=__doc__)
    parser.add_argument('script', metavar='SCRIPT', help="timm's train.py or validate.py")
    parser.add_argument('flags', nargs=argparse.REMAINDER, help="timm's flags and ours; SCRIPT --help lists them")
    return parser


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = build_parser().parse_args(argv)
    path = Path(args.script)
    own_argv, own_path = sys.argv, list(sys.path)
    sys.argv = [args.script, *args.flags]
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script that is run
    try:
        script = load_script(path)
        adapt(script, path)
        script.main()
    finally:
        sys.argv, sys.path[:] = own_argv, own_path
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == '__main__':
    main()
