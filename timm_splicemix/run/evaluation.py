""" Evaluate a model with the flags of validate.py: data set, classes, thresholds, image sizes, result """
import argparse
import copy
import logging
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Optional, Sequence, Union

import torch
from timm.utils import decay_batch_step
from torch import nn

from ..data import (
    PARTITION,
    MultiLabelDataset,
    Partition,
    StrictImageDataset,
    align_classes,
    check_has_positives,
    is_training_split,
    own_split,
    read_partition,
)
from ..data.class_map import ClassNames
from ..errors import UsageError
from ..files import read_text
from ..loss import binary_cross_entropy, union_cross_entropy
from ..metrics import (
    PRESETS,
    AccuracyMeter,
    AveragingMeter,
    MultilabelMeter,
    Preset,
    Thresholds,
    parse_thresholds,
    tune_thresholds,
)
from ..results import Scores, class_rows
from .datasets import create_dataset_from_flags, is_multi_label
from .engine import evaluate
from .factory import create_eval_loader, create_step
from .load import set_image_size
from .onnx import OnnxModel
from .predictor import FlipAverage
from .read import CheckpointInfo, tuned_thresholds

_logger = logging.getLogger(__name__)
Dataset = torch.utils.data.Dataset


class Evaluation(NamedTuple):
    """Content of results.json, and for multi-label data the scores of all images and the rows of per_class_ap.csv."""
    result: dict[str, Any]
    scores: Optional[Scores] = None
    classes: Sequence[dict[str, Any]] = ()


class Evaluator:
    """ Evaluates a model on a split of a data set, at any image size.

    Args:
        args: Flags of validate.py, with the settings of the process.
        model: The model, on the CPU.
        info: Its description.
        device: Device of this process.
    """

    def __init__(self, args: argparse.Namespace, model: nn.Module, info: CheckpointInfo, device: torch.device):
        self.args = args
        self.model = model
        self.info = info
        self.input_size = tuple(info.data_config['input_size'])
        self.param_count = count_parameters(model)
        self.partition = find_partition(args, info)
        args.input_img_mode = args.input_img_mode or info.image_mode or None
        if args.thresholds == 'tune' and not args.tune_split:
            args.tune_split = choose_tune_split(args.split, info)
        self.dataset = self._create_dataset(args.split)
        self.multi_label = is_multi_label(self.dataset)
        self.outputs, self.class_names = self._match_classes()
        self._check_flags()
        self.thresholds, self.tune_set = None, None
        if args.thresholds == 'tune':
            self.tune_set = self._create_dataset(args.tune_split)
            check_disjoint(self.tune_set, self.dataset, args.tune_split, args.split)
        else:
            self.thresholds = self._read_thresholds()
            if isinstance(self.thresholds, Thresholds) and (
                    (self.thresholds.dataset, self.thresholds.split) == (args.dataset, args.split)):
                _logger.warning(
                    f"The thresholds were tuned on the evaluated split '{args.split}': precision, recall and F1 look "
                    'better than they are. Report another split.')
        self.step = create_step(args, device, args.log_freq)

    def evaluate(self, input_size: Optional[tuple[int, int, int]] = None, name: str = 'Validate') -> Evaluation:
        """ Evaluate the model on the data set.

        Args:
            input_size: (channels, height, width) of the images, by default that of the model.
            name: Name of the evaluation in the log.
        """
        return self._evaluate(self.dataset, input_size or self.input_size, name)

    def keep_images(self) -> None:
        """Keep decoded images in memory for several evaluations, if --cache does not keep them and they fit."""
        if self.args.scaled_decoding:  # each size needs other pixels
            return
        if not self.args.cache and isinstance(self.dataset, StrictImageDataset):
            try:
                self.dataset.use_cache('ram')
            except UsageError as error:
                _logger.info(f'Images are decoded again for each size. {error}')

    def tune(self) -> Evaluation:
        """Tune the threshold of each class on --tune-split, for the evaluations that follow."""
        args = self.args
        if is_training_split(args.tune_split):
            _logger.warning(
                f"The model may have been trained on split '{args.tune_split}', where its probabilities are higher "
                'than on new images, so that tuned thresholds are too high. Tune on images that it was not trained on.')
        tuned = self._evaluate(self.tune_set, self.input_size, 'Tune')
        logits, targets = tuned.scores.scores, tuned.scores.targets
        values = tune_thresholds(logits, targets, PRESETS[args.metrics])
        self.thresholds = Thresholds(
            tuple(values.tolist()), self.class_names, args.dataset, args.tune_split, len(logits),
            tuple((targets == 1).sum(dim=0).tolist()), self.info.weights, self.info.epoch)
        return tuned

    def _read_thresholds(self) -> Optional[Union[float, Thresholds]]:
        """Return --thresholds, or the tuned ones of the run; None for the threshold of --metrics."""
        args = self.args
        if args.thresholds is not None or not self.multi_label:
            return parse_thresholds(args.thresholds, self.class_names)
        thresholds = tuned_thresholds(args.checkpoint, self.info)
        if thresholds is None:
            return None
        if set(thresholds.class_names) != set(self.class_names):
            _logger.warning(f'Ignoring the thresholds of {thresholds.source}, which are for other classes.')
            return None
        _logger.info(f'{thresholds.describe()} --thresholds {PRESETS[args.metrics].threshold} overrides them.')
        return thresholds.ordered(self.class_names)

    def _create_dataset(self, split: str) -> Dataset:
        args, info = self.args, self.info
        is_training = is_training_split(split)
        partition = self.partition if self.partition is not None and self.partition.has(split) else None
        if partition is None and args.split_file:
            raise UsageError(f"{args.split_file} has no part '{split}'. Its parts: {', '.join(self.partition.parts)}.")
        options: dict[str, Any] = {'partition': partition}
        if partition is None:
            options['annotations'] = args.train_ann if is_training else args.val_ann
            options['images'] = args.train_images if is_training else args.val_images
            for name in ('ann', 'images'):
                given, needed = (getattr(args, f'{part}_{name}') for part in ('train', 'val'))
                if given and not needed and not any(map(is_training_split, (args.split, args.tune_split or ''))):
                    raise UsageError(f"Expected --val-{name} for split '{args.split}', but got --train-{name} {given}.")
        is_list = args.dataset.lower() in ('', 'folder', 'image_folder') and bool(args.train_ann or args.val_ann)
        takes_names = is_list or args.dataset in ('csv', 'json') or args.dataset.startswith(('hfds/', 'wds/'))
        has_names = bool(info.class_names) and not args.valid_labels
        # Labels of a run with --class-map may be indices. A checkpoint without settings may be of such a run.
        is_mapped = not info.args or bool(info.args.get('class_map'))
        if takes_names and has_names and is_mapped and info.multi_label and not args.class_map:
            options['class_names'] = ClassNames(info.class_names, source='the model')
        dataset = create_dataset_from_flags(
            args, split, in_chans=self.input_size[0], num_samples=args.num_samples, **options)
        own_names = set(getattr(dataset, 'class_names', None) or ())
        if has_names and own_names & set(info.class_names) and own_names != set(info.class_names):
            align_classes(dataset, info.class_names, f"split '{split}'", 'the model', args.drop_unknown_classes)
            check_has_positives(dataset, split)
        return dataset

    def _match_classes(self) -> tuple[Optional[list[int]], tuple[str, ...]]:
        """Return the outputs of the model to evaluate, None for all in their order, and the names of the classes."""
        args, info, number = self.args, self.info, self.model.num_classes
        outputs = read_valid_labels(args.valid_labels, number) if args.valid_labels else None
        if outputs is not None:  # the file replaces the matching by names
            info, number = replace(info, class_names=None), len(outputs)
        names = getattr(self.dataset, 'class_names', None)
        checkpoint = Path(args.checkpoint).name if args.checkpoint else info.model_name
        dataset = f"{args.dataset or 'folder'} in {args.data_dir}" if args.data_dir else args.dataset
        order = match_classes(
            info, number, names, getattr(self.dataset, 'num_classes', None), checkpoint, dataset)
        return order if outputs is None else outputs, tuple(names or self.info.class_names or map(str, range(number)))

    def _check_flags(self) -> None:
        args = self.args
        if not self.multi_label and args.thresholds is not None:
            raise UsageError('Expected a multi-label data set for --thresholds, but got a single-label one.')
        if self.multi_label and args.metrics_avg:
            raise UsageError(
                f'Expected a single-label data set for --metrics-avg {args.metrics_avg}, but got a multi-label one, '
                'whose averages are CP, CR, CF1 (over classes) and OP, OR, OF1 (over all labels).')
        if args.eval_sizes and isinstance(self.model, OnnxModel):
            raise UsageError('Expected a checkpoint for --eval-sizes, but got an ONNX file, which has one image size.')
        if args.eval_sizes and self.input_size[1] != self.input_size[2]:
            raise UsageError(f'Expected a model of square images for --eval-sizes, but got {self.input_size[1:]}.')

    def _evaluate(self, dataset: Dataset, input_size: tuple[int, int, int], name: str) -> Evaluation:
        """Evaluate, with --retry again in smaller batches if memory runs out."""
        model = self._prepare(input_size)
        batch_size = self.args.batch_size
        while True:
            try:
                return self._evaluate_once(model, dataset, input_size, name, batch_size)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                smaller = decay_batch_step(batch_size)
                if not self.args.retry or not smaller or self.args.distributed:
                    raise UsageError(
                        f'Out of memory at batch size {batch_size}. Lower --batch-size, or use --retry with one '
                        'process.') from error
            if self.step.device.type == 'cuda':
                torch.cuda.empty_cache()
            _logger.warning(f'Out of memory at batch size {batch_size}. Trying again at {smaller}.')
            batch_size = smaller

    def _evaluate_once(
            self,
            model: nn.Module,
            dataset: Dataset,
            input_size: tuple[int, int, int],
            name: str,
            batch_size: int,
    ) -> Evaluation:
        loader = create_eval_loader(
            self.args, dataset, {**self.info.data_config, 'input_size': input_size}, self.step, batch_size,
            persistent_workers=False, crop_border_pixels=self.args.crop_border_pixels)
        meter = self._create_meter(dataset)
        criterion = binary_cross_entropy if self.multi_label else union_cross_entropy
        metrics = evaluate(model, loader, meter, self.step, criterion, name)
        if not self.multi_label:
            return Evaluation(self._describe(metrics, len(dataset), input_size, batch_size))
        logits, targets, indices = meter.gather()
        files = tuple(map(dataset.filename, indices.tolist())) if indices is not None else ()
        scores = Scores(logits, targets, self.class_names, indices, files)
        result = self._describe(metrics, len(logits), input_size, batch_size)
        result.update(self._describe_labels(scores, meter.preset))
        return Evaluation(result, scores, class_rows(scores, meter.per_class()))

    def _create_meter(self, dataset: Dataset) -> Any:
        args, number = self.args, len(self.class_names)
        if self.multi_label:
            values = self.thresholds.values if isinstance(self.thresholds, Thresholds) else self.thresholds
            return MultilabelMeter(
                number, threshold=values, preset=args.metrics, class_names=self.class_names, filename=dataset.filename)
        if args.metrics_avg:
            return AveragingMeter(self.step.device, number, args.metrics_avg)
        return AccuracyMeter(self.step.device)

    def _prepare(self, input_size: tuple[int, int, int]) -> nn.Module:
        """Return the model for an image size, on its device, compiled and wrapped."""
        args, model = self.args, self.model
        if input_size != self.input_size:
            model = copy.deepcopy(model)  # so that position embeddings are not resampled twice
            set_image_size(model, input_size)
        model = model.to(self.step.device, self.step.image_dtype)
        if args.channels_last:
            model = model.to(memory_format=torch.channels_last)
        if args.torchscript:
            try:
                with warnings.catch_warnings():  # torch.jit is deprecated, and warns for each module
                    warnings.simplefilter('ignore', FutureWarning)
                    model = torch.jit.script(model)
            except Exception as error:  # the compiler raises many types
                reason = str(error).strip().splitlines()[0]
                raise UsageError(
                    f'TorchScript does not support {self.info.model_name}: {reason}. Use --torchcompile.') from error
        elif args.torchcompile:
            torch.compiler.reset()
            model = torch.compile(model, backend=args.torchcompile, mode=args.torchcompile_mode)
        elif args.aot_autograd:
            model = torch.compile(model, backend='aot_eager')
        if args.tta:
            model = FlipAverage(model, self.multi_label)
        return model if self.outputs is None else ChosenOutputs(model, self.outputs).to(self.step.device)

    def _describe(
            self,
            metrics: dict[str, float],
            num_images: int,
            input_size: tuple[int, int, int],
            batch_size: int,
    ) -> dict[str, Any]:
        args, info, config = self.args, self.info, self.info.data_config
        return {
            'model': info.model_name,
            'checkpoint': args.checkpoint or None,
            'weights': info.weights,
            'use_ema': info.weights == 'ema',
            'epoch': info.epoch,
            'param_count': self.param_count,
            'dataset': args.dataset or 'folder',
            'split': args.split,
            'num_images': num_images,
            'num_classes': len(self.class_names),
            'input_size': list(input_size),
            'crop_pct': config['crop_pct'],
            'crop_mode': config['crop_mode'],
            'interpolation': config['interpolation'],
            'tta': args.tta,
            'batch_size': batch_size,
            'preset': args.metrics if self.multi_label else None,
            'metrics': metrics,
        }

    def _describe_labels(self, scores: Scores, preset: Preset) -> dict[str, Any]:
        tuned = self.thresholds if isinstance(self.thresholds, Thresholds) else None
        present = (scores.targets == 1).any(dim=0).tolist()
        return {
            'image_folder': self.dataset.reader.image_folder,
            'definitions': str(preset),
            'threshold': list(preset.threshold) if isinstance(preset.threshold, tuple) else preset.threshold,
            'thresholds_tuned_on': tuned and f'{tuned.dataset} {tuned.split}'.strip(),
            'num_labels': int((scores.targets == 1).sum()),
            'num_unknown': int((scores.targets == -1).sum()),
            'classes_without_positives': [name for name, there in zip(scores.class_names, present) if not there],
        }


class ChosenOutputs(nn.Module):
    """ Selects and orders the outputs of a model.

    Args:
        model: Returns logits (B, outputs).
        outputs: Indices of the outputs.
    """

    def __init__(self, model: nn.Module, outputs: Sequence[int]):
        super().__init__()
        self.model = model
        self.register_buffer('outputs', torch.tensor(outputs), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)[:, self.outputs]


def match_classes(
        info: CheckpointInfo,
        num_outputs: int,
        class_names: Optional[Sequence[str]],
        num_classes: Optional[int],
        checkpoint: str,
        dataset: str,
) -> Optional[list[int]]:
    """ Match the outputs of a model with the classes of a data set, by their names.

    Args:
        info: Description of the model.
        num_outputs: Number of outputs of the model.
        class_names: Classes of the data set, None if unknown.
        num_classes: Number of classes of the data set, None if unknown.
        checkpoint: Name of the model in messages.
        dataset: Name of the data set in messages.

    Returns:
        The output of each class, None if both have the same order or names are unknown.
    """
    if num_classes is not None and num_classes != num_outputs:
        unnamed = [what for what, names in ((checkpoint, info.class_names), (dataset, class_names)) if not names]
        hint = f' ({" and ".join(unnamed)} without class names)' if unnamed else ''
        raise UsageError(
            f'Expected a model and a data set with the same classes, but got {num_outputs} in {checkpoint} and '
            f'{num_classes} in {dataset}{hint}. Evaluate on the data set that the model was trained for, give '
            '--class-map, or choose outputs by --valid-labels.')
    if not info.class_names or not class_names or list(info.class_names) == list(class_names):
        return None
    if sorted(info.class_names) != sorted(class_names):
        saved, found = next((a, b) for a, b in zip(info.class_names, class_names) if a != b)
        raise UsageError(
            f"Expected the classes of {checkpoint}, such as '{saved}', but got '{found}' in {dataset}. Evaluate on the "
            'data set that the model was trained for, or give --class-map.')
    _logger.info(f'Reordering the outputs of {checkpoint} to the classes of {dataset}.')
    return [info.class_names.index(name) for name in class_names]


def read_valid_labels(path: str, num_outputs: int) -> list[int]:
    """Read --valid-labels, a file with the index of an output in each line."""
    try:
        numbers = [int(line) for line in read_text(path).split()]
    except ValueError as error:
        raise UsageError(f'Expected a file of output indices for --valid-labels, but got {path}: {error}') from error
    bad = [number for number in numbers if not 0 <= number < num_outputs]
    if bad or not numbers:
        raise UsageError(
            f'Expected output indices from 0 to {num_outputs - 1} for --valid-labels, but got '
            f'{bad[0] if bad else "none"} in {path}.')
    return numbers


def find_partition(args: argparse.Namespace, info: CheckpointInfo) -> Optional[Partition]:
    """The parts of --split-file or, on the data that it was trained on, those of the run; None if there are none."""
    if args.split_file:
        return read_partition(args.split_file)
    file = Path(args.checkpoint).parent / PARTITION
    if not args.checkpoint or not file.is_file():
        return None
    trained_in = info.args.get('data_dir') or info.args.get('data')
    places = [place and os.path.realpath(place) for place in (trained_in, args.data_dir)]
    is_same = info.args.get('dataset') == args.dataset and places[0] == places[1]
    if not is_same or args.val_ann or args.train_ann not in (None, info.args.get('train_ann')):
        _logger.info(f'The run was validated on a part of its data. Use --split-file {file} to evaluate that part.')
        return None
    partition = read_partition(file)
    if partition.has(args.split):
        args.train_ann = info.args.get('train_ann')
        args.train_images = args.train_images or info.args.get('train_images')
        _logger.info(f"Using part '{args.split}' of {file}.")
    return partition


def choose_tune_split(split: str, info: CheckpointInfo) -> str:
    """ Return the validation split of a run, to tune thresholds on if there is no --tune-split.

    Args:
        split: Split to evaluate.
        info: Description of the model.
    """
    found = info.args.get('val_split') or 'validation'
    if own_split(found) == own_split(split):
        raise UsageError(
            f"Expected --tune-split with --thresholds tune, but got none: thresholds must not be tuned on '{split}', "
            f"on which they are evaluated. Evaluate another split (--split test tunes on '{found}'), or divide "
            'the images by timm-splicemix split, and give --split-file and --tune-split.')
    _logger.info(f"Tuning the thresholds on '{found}', the validation split of the run; --tune-split sets another one.")
    return found


def check_disjoint(tuned: Dataset, evaluated: Dataset, tune_split: str, split: str) -> None:
    """Raise an error if thresholds would be tuned on images that they are evaluated on."""
    places = [part.reader.locations() if isinstance(part, MultiLabelDataset) else [] for part in (tuned, evaluated)]
    shared = len(set(places[0]).intersection(places[1]))
    if shared or tune_split == split:
        what = f'{shared:,} images of both' if shared else f"'{split}' for both"
        raise UsageError(
            f"Expected --tune-split with other images than --split '{split}', but got {what}: on the images that "
            'thresholds were tuned on, results look better than they are. Give --tune-split a split that has none of '
            'them.')


def is_out_of_memory(error: RuntimeError) -> bool:
    """True for errors about the memory of a GPU or of the host."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
