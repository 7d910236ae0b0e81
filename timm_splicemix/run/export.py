""" A model in formats that others read, checked by running what was written

    python validate.py --checkpoint output/train/RUN/model_best.pth.tar --export onnx
"""
import copy
import json
import logging
import warnings
from pathlib import Path
from typing import Any, Callable, Optional, Union

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ..errors import UsageError
from ..files import atomic_write
from ..models import create_model
from .checkpoint import CheckpointInfo, load_weights

_logger = logging.getLogger(__name__)
_KEY = 'timm_splicemix'  # of the description in a safetensors file
_SUFFIXES = {'onnx': '.onnx', 'torchscript': '.pt', 'safetensors': '.safetensors'}
_TOLERANCE = 1e-3  # of a logit; other kernels sum in another order
Runner = Callable[[torch.Tensor], torch.Tensor]


def is_safetensors(path: Union[str, Path]) -> bool:
    return Path(path).suffix == _SUFFIXES['safetensors']


def read_safetensors(path: Union[str, Path]) -> tuple[dict[str, torch.Tensor], Optional[CheckpointInfo]]:
    """ Read weights, and the description of their model if this project wrote the file.

    Args:
        path: The file.
    """
    if not Path(path).is_file():
        raise UsageError(f'Expected a checkpoint, but got {path}, which is no file.')
    try:
        with safe_open(str(path), 'pt') as file:
            description = (file.metadata() or {}).get(_KEY)
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError) as error:
        raise UsageError(f'Expected a safetensors file, but got {path}: {error}') from error
    if description is None:
        return weights, None
    info = json.loads(description)
    return weights, CheckpointInfo(**{**info, 'class_names': info['class_names'] and tuple(info['class_names'])})


def describe(info: CheckpointInfo) -> dict[str, Any]:
    """What a program needs to use an exported model: sizes, normalisation, crop and class names."""
    return json.loads(json.dumps(info.state()))


def export_model(model: nn.Module, info: CheckpointInfo, path: Union[str, Path], export: str) -> float:
    """ Write a model, run what was written, and compare; a JSON file of the same name describes the model.

    The model takes normalised float32 images of its input size, any number of them, and gives logits.

    Args:
        model: The model, of float32.
        info: What is known about it.
        path: File to write; its ending is replaced by that of the format.
        export: 'onnx', 'torchscript' or 'safetensors'.

    Returns:
        Largest difference between the logits of the model and those of what was written.
    """
    path = Path(path)
    path = path.with_name(path.name + _SUFFIXES[export])
    model = copy.deepcopy(model).to('cpu', torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, *info.data_config['input_size'], generator=generator)
    with atomic_write(path) as temporary:
        run = _EXPORTERS[export](model, info, images[:2], temporary)
        difference = _compare(model, run, images)
        if not difference <= _TOLERANCE:  # NaN too
            raise UsageError(
                f'Expected {export} to give the same logits as the model, but got a difference of {difference:.3g}: '
                f'{info.model_name} can not be exported so; nothing was written.')
    with atomic_write(path.with_name(path.name + '.json')) as temporary:
        temporary.write_text(json.dumps(describe(info), indent=2) + '\n', encoding='utf-8')
    _logger.info(f'Exported    {path} (logits differ by at most {difference:.1e})')
    return difference


@torch.inference_mode()
def _compare(model: nn.Module, run: Runner, images: torch.Tensor) -> float:
    """Largest difference over batches of one and of several images, none of them of the size that was exported with."""
    return max(float((model(batch) - run(batch)).abs().max()) for batch in (images[:1], images))


def _export_onnx(model: nn.Module, info: CheckpointInfo, images: torch.Tensor, path: Path) -> Runner:
    try:
        import onnx  # noqa: F401 - torch needs both to export
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"Expected onnx, onnxscript and onnxruntime for --export onnx, but got: {error}; "
            "pip install 'timm-splicemix[export]'.") from None
    batch = torch.export.Dim('batch', min=1)
    torch.onnx.export(
        model, (images,), str(path), input_names=['images'], output_names=['logits'], dynamo=True,
        dynamic_shapes=({0: batch},), external_data=False)
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    return lambda batch: torch.from_numpy(session.run(None, {'images': batch.numpy()})[0])


def _export_torchscript(model: nn.Module, info: CheckpointInfo, images: torch.Tensor, path: Path) -> Runner:
    with warnings.catch_warnings():  # that torch.jit is old, and that a trace is of one size, which is checked
        warnings.simplefilter('ignore')
        traced = torch.jit.trace(model, images, check_trace=False)
        torch.jit.save(traced, str(path), _extra_files={'config.json': json.dumps(describe(info))})
        loaded = torch.jit.load(str(path), map_location='cpu')

    def run(batch: torch.Tensor) -> torch.Tensor:
        try:
            return loaded(batch)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise UsageError(
                f'Expected TorchScript to run with {len(batch)} image(s), but got: {reason}; {info.model_name} can not '
                'be exported so.') from error

    return run


def _export_safetensors(model: nn.Module, info: CheckpointInfo, images: torch.Tensor, path: Path) -> Runner:
    weights = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, str(path), metadata={'format': 'pt', _KEY: json.dumps(info.state())})
    loaded, known = read_safetensors(path)
    again = create_model(known.model_name, **known.model_kwargs).eval()
    load_weights(again, loaded, path)
    return again


_EXPORTERS = {'onnx': _export_onnx, 'torchscript': _export_torchscript, 'safetensors': _export_safetensors}
