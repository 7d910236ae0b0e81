""" Models in ONNX files that `timm-splicemix export` wrote """
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn

from ..errors import UsageError
from ..files import read_json
from .read import CheckpointInfo, parse_info


class OnnxModel(nn.Module):
    """ Runs an ONNX file on the CPU.

    Args:
        path: The file.
        num_classes: Number of its outputs.
    """

    def __init__(self, path: Path, num_classes: int):
        super().__init__()
        try:
            import onnxruntime
        except ImportError as error:
            raise UsageError(
                f"Expected onnxruntime for {path}, but got: {error}. pip install 'timm-splicemix[export]'.") from None
        try:
            self.session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
        except Exception as error:  # onnxruntime has an exception for each kind of problem
            reason = str(error).strip().splitlines()[0]
            raise UsageError(f'Expected an ONNX file, but got {path}: {reason}') from error
        self.num_classes = num_classes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x.detach().cpu().float().numpy()
        return torch.from_numpy(self.session.run(None, {'images': images})[0]).to(x.device)


def load_onnx(path: Path, use_ema: Optional[bool], changes: dict[str, Any]) -> tuple[OnnxModel, CheckpointInfo]:
    """ Load an exported model with the JSON file beside it.

    Args:
        path: The ONNX file.
        use_ema: Weights that the file must contain, None for any.
        changes: Options that would change the model, which an ONNX file does not allow.
    """
    changed = [name for name, value in changes.items() if value is not None]
    if changed:
        raise UsageError(f'Expected no {changed[0]} for {path}: an exported model cannot be changed.')
    file = path.with_name(f'{path.name}.json')
    if not path.is_file() or not file.is_file():
        missing = file if path.is_file() else path
        raise UsageError(f'Expected a model of timm-splicemix export and its JSON file, but {missing} does not exist.')
    content = read_json(file)
    try:
        info = parse_info(content, file, args={})
        num_classes = int(info.model_kwargs['num_classes'])
        info.data_config['input_size'] = tuple(info.data_config['input_size'])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f'Expected the description of an exported model, but got {file}: {error!r}') from error
    if use_ema is not None and use_ema != (info.weights == 'ema'):
        raise UsageError(f'Expected the {"EMA" if use_ema else "plain"} weights, but got {info.weights} in {path}.')
    return OnnxModel(path, num_classes), info
