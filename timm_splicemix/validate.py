""" Score a model on multi-label images, with timm's flags

    python validate.py --dataset voc/2007 --data-dir voc --checkpoint output/train/RUN/model_best.pth.tar
    python validate.py --dataset coco/2014 --data-dir coco --checkpoint FILE --eval-sizes 448 224 112 64
    python validate.py --dataset csv --data-dir DIR --split test --checkpoint FILE --thresholds tune --tune-split val
    python validate.py --compare output/validate/A output/validate/B
    python validate.py --checkpoint output/train/RUN/model_best.pth.tar --export onnx
    torchrun --nproc-per-node 4 validate.py --dataset coco/2014 --data-dir coco --checkpoint FILE --amp

A checkpoint of train.py knows its model, pooling, image size, normalisation, crop and classes; flags win. Metrics,
average precision of each class, scores of all images and plots are written to the folder of the results.
"""
import argparse
import copy
import dataclasses
import logging
import warnings
from pathlib import Path
from typing import Any, Optional, Sequence

import torch
import yaml
from timm.layers import apply_test_time_pool
from timm.utils import decay_batch_step, reparameterize_model, set_jit_fuser, setup_default_logging
from torch import nn

from . import __version__
from .args import (
    CommandParser,
    add_validate_args,
    check_validate_args,
    command,
    map_defaults,
    parse_with_config,
)
from .data import (
    MultiLabelDataset,
    is_training_split,
)
from .draw import draw_classes, draw_sizes
from .errors import UsageError
from .files import free_folder, write_csv, write_json, write_text
from .loss import binary_cross_entropy, union_cross_entropy
from .metrics import (
    PRESETS,
    AccuracyMeter,
    AveragingMeter,
    MultilabelMeter,
    Preset,
    Thresholds,
    describe_tuning,
    parse_thresholds,
    save_thresholds,
    tune_thresholds,
)
from .models import is_max_pooled
from .results import (
    RESULTS,
    Scores,
    class_rows,
    flat_row,
    format_classes,
    format_result,
    format_sizes,
    read_results,
    write_result,
)
from .run.compare import compare_results, format_comparison
from .run.engine import evaluate
from .run.export import export_model
from .run.factory import create_dataset_from_flags, create_eval_loader, create_step
from .run.load import load_model, model_options, set_image_size
from .run.machine import (
    describe_machine,
    set_seed,
    set_up_device,
)
from .run.predictor import ChosenOutputs, FlipAverage, match_classes

_logger = logging.getLogger(__name__)


def build_parser() -> CommandParser:
    parser = CommandParser(prog='validate.py', usage='%(prog)s [DIR] [-c FILE] [flags]', description=__doc__)
    add_validate_args(parser)
    return parser


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = build_parser()
    args, given = parse_with_config(parser, argv)
    setup_default_logging()
    check_validate_args(args, parser, given)
    if args.compare:
        compare(args)
        return
    map_defaults(args, given)
    args.device_modules, args.sync_bn = None, False  # train.py alone has them
    device = set_up_device(args)
    if args.rank:
        logging.getLogger().setLevel(logging.WARNING)
    try:
        Validation(args, given, device).run()
    finally:
        if args.distributed:
            torch.distributed.destroy_process_group()


def compare(args: argparse.Namespace) -> None:
    """ Print results side by side, and write the comparison if a folder is given.

    Args:
        args: Flags.
    """
    results = read_results(args.compare)
    comparison = compare_results(results, args.bootstrap, args.seed)
    print(format_comparison(comparison))
    curves = {result.name: result.content.get('sizes') for result in results}
    if args.output:
        folder = Path(args.output)
        write_json(comparison, folder / 'compare.json')
        write_csv([{'name': row['name'], 'model': row['model'], **row['metrics']} for row in comparison['results']],
                   folder / 'compare.csv')
        if all(curves.values()):
            draw_sizes(curves, folder / 'sizes.png', 'mAP' if 'mAP' in curves[results[0].name][0] else 'top1')
        print(f'\nWritten to {folder}.')


class Validation:
    """ A model, a data set, and what is measured.

    Args:
        args: Flags, with what the machine added.
        given: Flags that the user set.
        device: Device of this process.
    """

    def __init__(self, args: argparse.Namespace, given: set[str], device: torch.device):
        self.args = args
        self.device = device
        self.is_primary = args.rank == 0
        self.wants_data = bool(args.dataset or args.data_dir)
        if not self.wants_data and not args.export:
            raise UsageError('Expected a data set (--dataset, --data-dir), --export or --compare, but got none.')
        set_seed(args.seed)

        # Model
        if args.fuser:
            set_jit_fuser(args.fuser)
        build = {'scriptable': True} if args.torchscript else {}
        self.model, self.info = load_model(
            **model_options(args, given), model_kwargs=args.model_kwargs,
            use_test_size=not args.use_train_size and not args.eval_sizes, **build)
        self.input_size = tuple(self.info.data_config['input_size'])
        if args.eval_sizes and self.input_size[1] != self.input_size[2]:
            raise UsageError(f'Expected a model of square images for --eval-sizes, but got {self.input_size[1:]}.')
        self.name = Path(args.checkpoint).name if args.checkpoint else self.info.model_name
        self.param_count = sum(parameter.numel() for parameter in self.model.parameters())
        _logger.info(
            f'{self.info.model_name}, {self.param_count / 1e6:.1f} million parameters, '
            f'{self.model.num_classes} classes, images of {" x ".join(map(str, self.input_size))}.')
        if args.export == 'safetensors' and (args.reparam or args.test_pool):
            raise UsageError(
                'Expected --export safetensors without --reparam and --test-pool, but got one of them: weights alone '
                'can not say so; use --export onnx or torchscript.')
        if args.reparam:
            self.model = reparameterize_model(self.model)
        if args.test_pool:
            self._pool_at_test()

        # Data set
        self.folder: Optional[Path] = None
        if self.wants_data:
            self._open_data()

    def run(self) -> None:
        """Export, evaluate, and write everything down."""
        args = self.args
        if args.export and self.is_primary:
            export_model(self.model, self.info, self._folder() / self.info.model_name.replace('/', '_'), args.export)
        if not self.wants_data:
            return
        self.step = create_step(args, self.device, args.log_freq)
        if args.thresholds == 'tune':
            self._tune()
        result, scores, rows = self._evaluate(self.dataset, self.input_size, 'Validate')
        if self.tuned_on is not None and self.is_primary:
            _logger.info('\n' + describe_tuning(
                self.tuned_on, (scores.scores, scores.targets), self.thresholds, PRESETS[args.metrics]))
        if args.eval_sizes:
            result['sizes'] = self._evaluate_sizes(result['metrics'])
        if not self.is_primary:
            return
        if rows:
            _logger.info('\n' + format_classes(rows))
        folder = self._folder()
        _write(result, folder, scores, rows)
        write_text(yaml.safe_dump(describe_machine(__version__), sort_keys=False), folder / 'environment.yaml')
        if args.eval_sizes:
            write_csv(result['sizes'], folder / 'sizes.csv')
            metric = 'mAP' if self.multi_label else 'top1'
            draw_sizes({self.info.model_name: result['sizes']}, folder / 'sizes.png', metric)
            _logger.info('\n' + format_sizes(result['sizes'], metric))
        if args.results_file:
            if args.results_format == 'json':
                write_json(result, args.results_file)
            else:
                write_csv([flat_row(result)], args.results_file)
        if self.multi_label:
            _logger.info(f'\nMetrics     {result["definitions"]}')
        _logger.info(f'{result["num_images"]:,} images of {args.dataset or args.data_dir} {args.split}')
        _logger.info(format_result(result['metrics']))
        _logger.info(f'\nResults     {folder / RESULTS}')

    def _pool_at_test(self) -> None:
        if is_max_pooled(self.model, self.input_size):
            raise UsageError('Expected --test-pool with average pooling, but got a model with the maximum.')
        num_classes = self.model.num_classes
        try:
            self.model, changed = apply_test_time_pool(self.model, self.info.data_config)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise UsageError(f'Expected a model that --test-pool knows, but got {self.info.model_name}.') from error
        if not changed:
            raise UsageError(
                f'Expected images larger than those of pre-training for --test-pool, but got {self.input_size[1]} x '
                f'{self.input_size[2]}.')
        self.model.num_classes = num_classes
        self.model.eval()
        set_image_size(self.model, self.input_size, self.input_size[1:])

    def _open_data(self) -> None:
        args = self.args
        self.dataset = self._create_dataset(args.split)
        self.multi_label = isinstance(self.dataset, MultiLabelDataset)
        outputs = read_valid_labels(args.valid_labels, self.model.num_classes) if args.valid_labels else None
        class_names = getattr(self.dataset, 'class_names', None)
        info, number = self.info, self.model.num_classes
        if outputs is not None:  # the user knows which are which
            info, number = dataclasses.replace(info, class_names=None), len(outputs)
        order = match_classes(
            info, number, class_names, getattr(self.dataset, 'num_classes', None), self.name, self._data_name())
        self.outputs = order if outputs is None else outputs
        self.class_names = tuple(class_names or self.info.class_names or map(str, range(number)))
        if not self.multi_label and args.thresholds is not None:
            raise UsageError('Expected a multi-label data set for --thresholds, but got one with a class per image.')
        if self.multi_label and args.metrics_avg:
            raise UsageError(
                f'Expected a data set with a class per image for --metrics-avg {args.metrics_avg}, but got a '
                'multi-label one: CP, CR, CF1 are its means over classes, OP, OR, OF1 those over all labels.')
        self.tuned_on = self.tune_set = None
        self.thresholds = None
        if args.thresholds == 'tune':
            self.tune_set = self._create_dataset(args.tune_split)
            check_apart(self.tune_set, self.dataset, args.tune_split, args.split)
        else:
            self.thresholds = parse_thresholds(args.thresholds, self.class_names)
            if isinstance(self.thresholds, Thresholds):
                self._warn_of_own_split(self.thresholds)

    def _warn_of_own_split(self, thresholds: Thresholds) -> None:
        if (thresholds.dataset, thresholds.split) == (self.args.dataset, self.args.split):
            _logger.warning(
                f"These thresholds were tuned on split '{thresholds.split}', on which they are now scored: precision, "
                'recall and F1 look better than they are. Report another split.')

    def _create_dataset(self, split: str) -> torch.utils.data.Dataset:
        args = self.args
        is_training = is_training_split(split)
        splits = (args.split, args.tune_split or '')
        if args.train_ann and not any(map(is_training_split, splits)):
            raise UsageError(f"Expected --val-ann for split '{args.split}', but got --train-ann {args.train_ann}.")
        options: dict[str, Any] = {'annotations': args.train_ann if is_training else args.val_ann}
        if self._names_are_wanted(options):
            options['class_names'] = self.info.class_names
        return create_dataset_from_flags(
            args, split, in_chans=self.input_size[0], num_samples=args.num_samples, **options)

    def _names_are_wanted(self, kwargs: dict[str, Any]) -> bool:
        """Whether the data set can be told the classes of the checkpoint, so that a split that lacks some has them."""
        name = self.args.dataset
        listed = name.lower() in ('', 'folder', 'image_folder') and kwargs['annotations'] is not None
        takes = name == 'csv' or listed or name.startswith(('hfds/', 'wds/'))
        known = bool(self.info.class_names) and self.info.multi_label
        return takes and known and not self.args.class_map and not self.args.valid_labels

    def _data_name(self) -> str:
        return f"{self.args.dataset or 'folder'} in {self.args.data_dir}" if self.args.data_dir else self.args.dataset

    def _folder(self) -> Path:
        """Folder of the results: the one given, or one that is not there yet."""
        args = self.args
        if self.folder is None and args.output:
            self.folder = Path(args.output)
        elif self.folder is None:
            name = self.info.model_name.replace('/', '_').replace(':', '_')
            if args.checkpoint:
                checkpoint = Path(args.checkpoint).resolve()
                name = f'{checkpoint.parent.name}-{checkpoint.name.split(".")[0]}'
            name += '-ema' * args.use_ema + (f'-{args.split}' if self.wants_data else f'-{args.export}')
            self.folder = free_folder(Path('output/validate') / name.replace('/', '_'))
        return self.folder

    def _tune(self) -> None:
        """Find thresholds on their own split, and keep them beside the checkpoint."""
        args = self.args
        if is_training_split(args.tune_split):
            _logger.warning(
                f"Split '{args.tune_split}' may be what the model was trained on, where it is surer than elsewhere: "
                'thresholds come out too high. Tune on images that it has not seen.')
        _, scores, _ = self._evaluate(self.tune_set, self.input_size, 'Tune')
        values = tune_thresholds(scores.scores, scores.targets, PRESETS[args.metrics])
        positives = tuple((scores.targets == 1).sum(dim=0).tolist())
        self.thresholds = Thresholds(
            tuple(values.tolist()), self.class_names, args.dataset, args.tune_split, len(scores.scores), positives)
        self.tuned_on = (scores.scores, scores.targets)
        if self.is_primary:
            folder = Path(args.checkpoint).parent if args.checkpoint else self._folder()
            save_thresholds(self.thresholds, folder / 'thresholds.json')
            _logger.info(f'Thresholds  {folder / "thresholds.json"}')

    def _evaluate_sizes(self, own: dict[str, float]) -> list[dict[str, Any]]:
        """Metrics at each size, the size of the model among them, the largest first."""
        channels, own_size, _ = self.input_size
        metrics = {own_size: own}
        for size in self.args.eval_sizes:
            if size in metrics:
                continue
            result, scores, rows = self._evaluate(self.dataset, (channels, size, size), f'Size {size}')
            metrics[size] = result['metrics']
            if self.is_primary:
                _write(result, self._folder() / f'size-{size}', scores, rows)
        return [
            {'size': size, 'trained': size == own_size, **metrics[size]} for size in sorted(metrics, reverse=True)]

    def _evaluate(
            self,
            dataset: torch.utils.data.Dataset,
            input_size: tuple[int, int, int],
            name: str,
    ) -> tuple[dict[str, Any], Optional[Scores], list[dict[str, Any]]]:
        """Content of results.json, scores and table of classes; in smaller batches if memory runs out and --retry."""
        model = self._prepare(input_size)
        batch_size = self.args.batch_size
        while True:
            try:
                return self._evaluate_once(model, dataset, input_size, name, batch_size)
            except RuntimeError as error:
                smaller = decay_batch_step(batch_size)
                if not is_out_of_memory(error):
                    raise
                if not self.args.retry or not smaller or self.args.distributed:
                    raise UsageError(
                        f'Expected memory for batches of {batch_size}, but it ran out: lower --batch-size, or use '
                        '--retry with one process.') from error
            if self.device.type == 'cuda':
                torch.cuda.empty_cache()
            _logger.warning(f'Memory ran out with batches of {batch_size}; tries again with {smaller}.')
            batch_size = smaller

    def _evaluate_once(
            self,
            model: nn.Module,
            dataset: torch.utils.data.Dataset,
            input_size: tuple[int, int, int],
            name: str,
            batch_size: int,
    ) -> tuple[dict[str, Any], Optional[Scores], list[dict[str, Any]]]:
        args, config = self.args, self.info.data_config
        loader = create_eval_loader(
            args, dataset, {**config, 'input_size': input_size}, self.step, batch_size, persistent_workers=False,
            crop_border_pixels=args.crop_border_pixels)
        meter = self._create_meter(dataset)
        criterion = binary_cross_entropy if self.multi_label else union_cross_entropy
        metrics = evaluate(model, loader, meter, self.step, criterion, name)
        if not self.multi_label:
            return self._describe(metrics, len(dataset), input_size, batch_size), None, []
        logits, targets, indices = meter.gather()
        files = tuple(map(dataset.filename, indices.tolist())) if indices is not None else ()
        scores = Scores(logits, targets, self.class_names, indices, files)
        result = self._describe(metrics, len(logits), input_size, batch_size)
        result.update(self._describe_labels(scores, meter.preset))
        return result, scores, class_rows(scores, meter.per_class())

    def _create_meter(self, dataset: torch.utils.data.Dataset) -> Any:
        args, number = self.args, len(self.class_names)
        if self.multi_label:
            values = self.thresholds.values if isinstance(self.thresholds, Thresholds) else self.thresholds
            return MultilabelMeter(
                number, threshold=values, preset=args.metrics, class_names=self.class_names, filename=dataset.filename)
        return AveragingMeter(self.device, number, args.metrics_avg) if args.metrics_avg else AccuracyMeter(self.device)

    def _prepare(self, input_size: tuple[int, int, int]) -> nn.Module:
        """The model for a size of images, on its device, with all that is put around it."""
        args, model = self.args, self.model
        if input_size != self.input_size:
            model = copy.deepcopy(model)  # resampled position embeddings are not resampled again
            set_image_size(model, input_size)
        model = model.to(self.device, self.step.image_dtype)
        if args.channels_last:
            model = model.to(memory_format=torch.channels_last)
        if args.torchscript:
            try:
                with warnings.catch_warnings():  # one for each module: torch.jit is old
                    warnings.simplefilter('ignore', FutureWarning)
                    model = torch.jit.script(model)
            except Exception as error:  # torch's compiler has errors of many kinds
                reason = str(error).strip().splitlines()[0]
                raise UsageError(
                    f'Expected a model that TorchScript takes, but got {self.info.model_name}: {reason}; use '
                    '--torchcompile.') from error
        elif args.torchcompile:
            torch._dynamo.reset()
            model = torch.compile(model, backend=args.torchcompile, mode=args.torchcompile_mode)
        elif args.aot_autograd:
            model = torch.compile(model, backend='aot_eager')
        if args.tta:
            model = FlipAverage(model, self.multi_label)
        return model if self.outputs is None else ChosenOutputs(model, self.outputs).to(self.device)

    def _describe(
            self,
            metrics: dict[str, float],
            num_images: int,
            input_size: tuple[int, int, int],
            batch_size: int,
    ) -> dict[str, Any]:
        """Content of results.json, apart from what multi-label data sets have beside."""
        args, info, config = self.args, self.info, self.info.data_config
        return {
            'model': info.model_name,
            'checkpoint': args.checkpoint or None,
            'use_ema': args.use_ema,
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
        """What beside the images a multi-label result depends on."""
        thresholds = self.thresholds if isinstance(self.thresholds, Thresholds) else None
        present = (scores.targets == 1).any(dim=0).tolist()
        return {
            'definitions': str(preset),
            'threshold': list(preset.threshold) if isinstance(preset.threshold, tuple) else preset.threshold,
            'thresholds_tuned_on': thresholds and f'{thresholds.dataset} {thresholds.split}'.strip(),
            'num_labels': int((scores.targets == 1).sum()),
            'num_unknown': int((scores.targets == -1).sum()),
            'classes_without_positives': [name for name, there in zip(scores.class_names, present) if not there],
        }


def read_valid_labels(path: str, num_outputs: int) -> list[int]:
    """ Numbers of the outputs that count.

    Args:
        path: File with a number in each line.
        num_outputs: Number of outputs of the model.
    """
    try:
        numbers = [int(line) for line in Path(path).read_text(encoding='utf-8').split()]
    except (OSError, ValueError) as error:
        raise UsageError(f'Expected a file of numbers for --valid-labels, but got {path}: {error}') from error
    bad = [number for number in numbers if not 0 <= number < num_outputs]
    if bad or not numbers:
        what = f'{bad[0]} in {path}' if bad else f'none in {path}'
        raise UsageError(f'Expected numbers of outputs from 0 to {num_outputs - 1} for --valid-labels, but got {what}.')
    return numbers


def check_apart(
        tuned: torch.utils.data.Dataset,
        evaluated: torch.utils.data.Dataset,
        tune_split: str,
        split: str,
) -> None:
    """ Refuse to tune thresholds on images that they are scored on.

    Args:
        tuned: Images to tune on.
        evaluated: Images to evaluate on.
        tune_split: Name of the first split.
        split: Name of the second.
    """
    places = [d.reader.locations() if isinstance(d, MultiLabelDataset) else set() for d in (tuned, evaluated)]
    shared = len(places[0] & places[1])
    if shared or tune_split == split:
        what = f'{shared:,} images of both' if shared else f"'{split}' for both"
        raise UsageError(
            f"Expected --tune-split with other images than --split '{split}', but got {what}: thresholds look better "
            'than they are on the images that they were tuned on.')


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error is about memory, of a GPU or of the host."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _write(result: dict[str, Any], folder: Path, scores: Optional[Scores], rows: list[dict[str, Any]]) -> None:
    write_result(result, folder, scores, rows)
    if rows:
        draw_classes(rows, result, folder / 'per_class_ap.png')


if __name__ == '__main__':
    main()
