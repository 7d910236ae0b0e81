""" Evaluate a model on multi-label images, with timm's flags

    python validate.py --dataset voc/2007 --data-dir voc --checkpoint output/train/RUN
    python validate.py --dataset coco/2014 --data-dir coco --checkpoint FILE --eval-sizes 448 224 112 64
    python validate.py --dataset csv --data-dir DIR --split test --checkpoint FILE --thresholds tune --tune-split val
    torchrun --nproc-per-node 4 validate.py --dataset coco/2014 --data-dir coco --checkpoint FILE --amp

A checkpoint of train.py contains its model, pooling, image size, normalisation, crop and classes; flags override them.
Metrics, average precision of each class, scores of all images and plots are written to the output folder.
--export and --compare do the same as the commands export and compare.
"""
import argparse
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Sequence

import torch
import yaml
from timm.utils import set_jit_fuser

from . import __version__
from .args import (
    CommandParser,
    add_validate_args,
    check_validate_args,
    command,
    map_defaults,
    parse_with_config,
    setup_logging,
)
from .draw import draw_classes, draw_sizes
from .errors import UsageError
from .files import write_csv, write_json, write_text
from .metrics import PRESETS, describe_tuning, save_thresholds
from .results import (
    RESULTS,
    flat_row,
    format_classes,
    format_metrics,
    format_sizes,
    write_result,
)
from .run.compare import compare_files
from .run.evaluation import Evaluation, Evaluator, count_parameters
from .run.export import check_format, export_to_folder, output_folder
from .run.load import load_from_flags, transform_model
from .run.machine import describe_machine, set_seed, set_up_device
from .run.options import check_validate_options
from .run.read import THRESHOLDS, best_checkpoint, tuned_thresholds

_logger = logging.getLogger(__name__)


def build_parser() -> CommandParser:
    parser = CommandParser(prog='validate.py', usage='%(prog)s [DIR] [-c FILE] [flags]', description=__doc__)
    add_validate_args(parser)
    return parser


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = build_parser()
    args, given = parse_with_config(parser, argv)
    setup_logging()
    check_validate_args(args, parser, given)
    if args.compare:
        print(compare_files(args.compare, args.output, args.bootstrap, args.seed, draw_sizes))
        return
    map_defaults(args, given)
    check_validate_options(args)
    args.device_modules, args.sync_bn = None, False  # flags of train.py alone
    device = set_up_device(args)
    if args.rank:
        logging.getLogger().setLevel(logging.WARNING)
    try:
        validate(args, given, device)
    finally:
        if args.distributed:
            torch.distributed.destroy_process_group()


def validate(args: argparse.Namespace, given: set[str], device: torch.device) -> None:
    """ Load, export and evaluate a model, and write the results.

    Args:
        args: Flags, with the settings of the process.
        given: Names of the flags that the user set.
        device: Device of this process.
    """
    has_data = bool(args.dataset or args.data_dir)
    if not has_data and not args.export:
        raise UsageError('Expected a data set (--dataset, --data-dir), --export or --compare, but got none.')
    set_seed(args.seed)
    if args.fuser:
        set_jit_fuser(args.fuser)
    if args.export:
        check_format(args.export, args)

    # Model
    if args.checkpoint:
        args.checkpoint = str(best_checkpoint(args.checkpoint))
    model, info = load_from_flags(
        args, given, use_test_size=not args.use_train_size and not args.eval_sizes, scriptable=args.torchscript)
    model = transform_model(model, info, args.reparam, args.test_pool)
    parameters = count_parameters(model)
    number = f'{parameters / 1e6:.1f} million parameters, ' if parameters else ''  # an ONNX file has none
    _logger.info(
        f'{info.model_name} ({info.weights} weights), {number}'
        f'{model.num_classes} classes, images of {" x ".join(map(str, info.data_config["input_size"]))}.')

    # Data set
    evaluator = Evaluator(args, model, info, device) if has_data else None
    folder = output_folder(args, info, 'output/validate', args.split if has_data else args.export)
    if args.export and args.rank == 0:
        thresholds = tuned_thresholds(args.checkpoint, info)
        export_to_folder(model, replace(info, thresholds=thresholds), folder, args.export)
    if evaluator is None:
        return

    # Evaluation
    tuned = evaluator.tune() if args.thresholds == 'tune' else None
    if tuned is not None and evaluator.step.is_primary:
        path = (Path(args.checkpoint).parent if Path(args.checkpoint).is_file() else folder) / THRESHOLDS
        save_thresholds(evaluator.thresholds, path)
        _logger.info(f'Thresholds  {path}')
    if args.eval_sizes:
        evaluator.keep_images()
    evaluation = evaluator.evaluate()
    if args.eval_sizes:
        evaluation.result['sizes'] = evaluate_sizes(evaluator, evaluation, folder)

    # Results
    if evaluator.step.is_primary:
        if tuned is not None:
            pairs = [(part.scores.scores, part.scores.targets) for part in (tuned, evaluation)]
            _logger.info('\n' + describe_tuning(*pairs, evaluator.thresholds, PRESETS[args.metrics]))
        write_evaluation(evaluation, folder)
        write_text(yaml.safe_dump(describe_machine(__version__), sort_keys=False), folder / 'environment.yaml')
        log_results(args, evaluation, folder)


def evaluate_sizes(evaluator: Evaluator, evaluation: Evaluation, folder: Path) -> list[dict[str, Any]]:
    """Evaluate at --eval-sizes, and return the metrics at each size and at the model's own, the largest first."""
    channels, own_size, _ = evaluator.input_size
    metrics = {own_size: evaluation.result['metrics']}
    for size in evaluator.args.eval_sizes:
        if size not in metrics:
            other = evaluator.evaluate((channels, size, size), f'Size {size}')
            metrics[size] = other.result['metrics']
            if evaluator.step.is_primary:
                write_evaluation(other, folder / f'size-{size}')
    return [{'size': size, 'trained': size == own_size, **metrics[size]} for size in sorted(metrics, reverse=True)]


def write_evaluation(evaluation: Evaluation, folder: Path) -> None:
    write_result(evaluation.result, folder, evaluation.scores, evaluation.classes)
    if evaluation.classes:
        draw_classes(evaluation.classes, evaluation.result, folder / 'per_class_ap.png')


def log_results(args: argparse.Namespace, evaluation: Evaluation, folder: Path) -> None:
    """Log the results, and write --results-file and the files of --eval-sizes."""
    result = evaluation.result
    if evaluation.classes:
        _logger.info('\n' + format_classes(evaluation.classes))
    if args.eval_sizes:
        metric = 'mAP' if evaluation.classes else 'top1'
        write_csv(result['sizes'], folder / 'sizes.csv')
        draw_sizes({result['model']: result['sizes']}, folder / 'sizes.png', metric)
        _logger.info('\n' + format_sizes(result['sizes'], metric))
    if args.results_file:
        if args.results_format == 'json':
            write_json(result, args.results_file)
        else:
            write_csv([flat_row(result)], args.results_file)
    if evaluation.classes:
        _logger.info(f'\nMetrics     {result["definitions"]}')
    _logger.info(
        f'{result["num_images"]:,} images of {args.dataset or args.data_dir} {args.split}, {result["weights"]} weights')
    _logger.info(format_metrics(result['metrics']))
    _logger.info(f'\nResults     {folder / RESULTS}')


if __name__ == '__main__':
    main()
