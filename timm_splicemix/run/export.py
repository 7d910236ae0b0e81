""" Export a model to another format, and check the file by running it """
import argparse
import contextlib
import copy
import io
import json
import logging
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterator, Union

import torch
from safetensors.torch import save_file
from torch import nn

from ..errors import UsageError
from ..files import atomic_write, free_folder, write_json
from ..metrics import thresholds_content
from ..models import has_head
from .load import ema_flag, load_from_flags, load_model, transform_model
from .predictor import read_class_names
from .read import KEY, CheckpointInfo, best_checkpoint, tuned_thresholds

_logger = logging.getLogger(__name__)
_SUFFIXES = {'onnx': '.onnx', 'pt2': '.pt2', 'torchscript': '.pt', 'safetensors': '.safetensors'}
_TOLERANCE = 1e-3  # of a logit, as other kernels sum in another order
Runner = Callable[[torch.Tensor], torch.Tensor]


def export_from_flags(args: argparse.Namespace) -> None:
    """Load a model and export it, as the flags of export.py select."""
    check_format(args.format, args)
    if args.checkpoint:
        args.checkpoint = str(best_checkpoint(args.checkpoint))
    model, info = load_from_flags(args)
    if args.class_map:
        info = replace(info, class_names=read_class_names(args.class_map, None, model.num_classes))
    info = replace(info, thresholds=tuned_thresholds(args.checkpoint, info))
    model = transform_model(model, info, args.reparam, args.test_pool)
    export_to_folder(model, info, output_folder(args, info, 'output/export', args.format), args.format)


def check_format(export: str, args: argparse.Namespace) -> None:
    """Raise an error if a model cannot be exported, or if a format cannot represent the changes of the model."""
    if str(args.checkpoint).endswith('.onnx'):
        raise UsageError(f'Expected a checkpoint to export, but got {args.checkpoint}, which is exported already.')
    if export == 'safetensors' and (args.reparam or args.test_pool):
        raise UsageError(
            'Expected no --reparam and --test-pool for the safetensors export, which contains weights alone. Export to '
            'onnx or torchscript.')


def output_folder(args: argparse.Namespace, info: CheckpointInfo, parent: str, purpose: str) -> Path:
    """Return --output, or a new folder that is named after the checkpoint, its weights and the purpose."""
    if args.output:
        return Path(args.output)
    name = info.model_name
    if args.checkpoint:
        checkpoint = Path(args.checkpoint).resolve()
        name = f'{checkpoint.parent.name}-{checkpoint.name.split(".")[0]}'
    weights = {True: '-ema', False: '-plain', None: ''}[ema_flag(args)]
    return free_folder(Path(parent) / re.sub('[/:]', '_', f'{name}{weights}-{purpose}'))


def export_to_folder(model: nn.Module, info: CheckpointInfo, folder: Path, export: str) -> None:
    """Export a model to a file that is named after it."""
    export_model(model, info, folder / info.model_name.replace('/', '_'), export)


def describe(info: CheckpointInfo) -> dict[str, Any]:
    """What a program needs to use an exported model: images, class names, which weights, and tuned thresholds."""
    thresholds = info.thresholds and thresholds_content(info.thresholds)
    return json.loads(json.dumps({**info.state(), 'weights': info.weights, 'thresholds': thresholds}))


def export_model(model: nn.Module, info: CheckpointInfo, path: Union[str, Path], export: str) -> float:
    """ Write a model, run the written file, and compare; a JSON file of the same name describes the model.

    The exported model takes any number of normalised float32 images of its input size, and returns logits.

    Args:
        model: The model.
        info: Its description.
        path: File to write, without the suffix of the format.
        export: 'onnx', 'pt2' (of torch.export), 'torchscript' (deprecated by torch) or 'safetensors'.

    Returns:
        Largest difference between the logits of the model and of the written file.
    """
    path = Path(f'{path}{_SUFFIXES[export]}')
    model = copy.deepcopy(model).to('cpu', torch.float32).eval()
    if has_head(model):
        model.get_classifier().fold_class_weights()  # ONNX lacks some operators that compute them
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, *info.data_config['input_size'], generator=generator)
    with atomic_write(path) as temporary:
        run = _EXPORTERS[export](model, info, images[:2], temporary)
        difference = _compare(model, run, images)
        if not difference <= _TOLERANCE:  # also NaN
            raise UsageError(
                f'The logits of {info.model_name} exported as {export} differ from those of the model by '
                f'{difference:.3g}; nothing was written. Use another format.')
    write_json(describe(info), f'{path}.json')
    _logger.info(f'Exported    {path} ({info.weights} weights; logits differ by at most {difference:.1e})')
    return difference


@torch.inference_mode()
def _compare(model: nn.Module, run: Runner, images: torch.Tensor) -> float:
    """Return the largest difference over two batch sizes, none of which is the one that the export used."""
    return max(float((model(batch) - run(batch)).abs().max()) for batch in (images[:1], images))


def _any_batch_size() -> tuple[dict[int, Any]]:
    return ({0: torch.export.Dim('batch', min=1)},)


def _export_pt2(model: nn.Module, info: CheckpointInfo, images: torch.Tensor, path: Path) -> Runner:
    try:
        program = torch.export.export(model, (images,), dynamic_shapes=_any_batch_size())
    except Exception as error:  # the exporter raises many types
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UsageError(f'torch.export does not support {info.model_name}: {reason}. Use another format.') from error
    buffer = io.BytesIO()  # a full disk is an error of `write_bytes`
    torch.export.save(program, buffer, extra_files={'config.json': json.dumps(describe(info))})
    path.write_bytes(buffer.getvalue())
    return torch.export.load(str(path)).module()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the steps that torch.onnx and its passes print and log; errors and warnings of the log stay."""
    before = logging.root.manager.disable
    logging.disable(max(logging.INFO, before))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter('ignore')
            yield
    finally:
        logging.disable(before)


@_quiet()
def _export_onnx(model: nn.Module, info: CheckpointInfo, images: torch.Tensor, path: Path) -> Runner:
    try:
        import onnx  # noqa: F401 - torch needs both to export
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"Expected onnx, onnxscript and onnxruntime for the ONNX export, but got: {error}. "
            "pip install 'timm-splicemix[export]'.") from None
    torch.onnx.export(
        model, (images,), str(path), input_names=['images'], output_names=['logits'], dynamo=True,
        dynamic_shapes=_any_batch_size(), external_data=False)
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    return lambda batch: torch.from_numpy(session.run(None, {'images': batch.numpy()})[0])


def _export_torchscript(model: nn.Module, info: CheckpointInfo, images: torch.Tensor, path: Path) -> Runner:
    _logger.warning('torch has deprecated TorchScript: prefer --format pt2, which torch.export.load reads, or onnx.')
    with warnings.catch_warnings():  # torch.jit is deprecated, and a trace may hold for one size, which is checked
        warnings.simplefilter('ignore')
        traced = torch.jit.trace(model, images, check_trace=False)
        buffer = io.BytesIO()  # torch.jit.save aborts the process if a disk is full
        torch.jit.save(traced, buffer, _extra_files={'config.json': json.dumps(describe(info))})
        path.write_bytes(buffer.getvalue())
        loaded = torch.jit.load(str(path), map_location='cpu')

    def run(batch: torch.Tensor) -> torch.Tensor:
        try:
            return loaded(batch)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise UsageError(
                f'{info.model_name} exported as TorchScript does not run with {len(batch)} image(s): {reason}. Use '
                'another format.') from error

    return run


def _export_safetensors(model: nn.Module, info: CheckpointInfo, images: torch.Tensor, path: Path) -> Runner:
    weights = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, str(path), metadata={'format': 'pt', KEY: json.dumps(describe(info))})
    return load_model(path)[0]


_EXPORTERS = {
    'onnx': _export_onnx, 'pt2': _export_pt2, 'torchscript': _export_torchscript, 'safetensors': _export_safetensors}
