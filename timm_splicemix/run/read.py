""" Read checkpoints: files, what they record about their model, and which of their weights to load

All readers of checkpoints use the same rule for the exponential moving average (EMA) of the weights: the weights that
the best metric was measured with are the default. These are the EMA weights if the checkpoint has them.
"""
import argparse
import contextlib
import json
import logging
import pickletools
import re
import zipfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Optional, Union

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from ..errors import UsageError
from ..metrics import Thresholds, load_thresholds, parse_thresholds_content

_logger = logging.getLogger(__name__)
LAST, BEST = 'last.pth.tar', 'model_best.pth.tar'
PUBLISHED = 'model.safetensors'  # name of the weights on the Hugging Face Hub
THRESHOLDS = 'thresholds.json'
KEY = 'timm_splicemix'  # our entry in a checkpoint, and in the metadata of a safetensors file
_EMA_KEYS = ('state_dict_ema', 'model_ema')


@dataclass(frozen=True)
class CheckpointInfo:
    """ What a checkpoint records about its model.

    Args:
        model_name: Name of the model in timm's registry.
        model_kwargs: Arguments of `create_model` that rebuild it.
        data_config: Size, normalisation, interpolation and crop of the images, with timm's names.
        class_names: Names of the classes in the order of the outputs, None if unknown.
        multi_label: True if an image can have any number of classes.
        epoch: Last epoch that was completed, None if unknown.
        metric: Value of the metric that selects the best checkpoint, None if unknown.
        args: Settings of the run.
        weights: Weights that were loaded: 'ema', 'plain', or 'pretrained' for those of timm.
        image_mode: PIL mode of the images, such as 'RGB'; '' if it follows from the number of channels.
        thresholds: Thresholds that an exported model contains; see `tuned_thresholds`.
    """
    model_name: str
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    data_config: dict[str, Any] = field(default_factory=dict)
    class_names: Optional[tuple[str, ...]] = None
    multi_label: bool = True
    epoch: Optional[int] = None
    metric: Optional[float] = None
    args: dict[str, Any] = field(default_factory=dict)
    weights: str = 'plain'
    image_mode: str = ''
    thresholds: Optional[Thresholds] = None

    @property
    def pil_mode(self) -> str:
        """PIL mode to read images in."""
        channels = self.data_config['input_size'][0]
        return self.image_mode or {1: 'L', 2: 'LA', 4: 'RGBA'}.get(channels, 'RGB')

    def state(self) -> dict[str, Any]:
        """Return the entries that all checkpoints of a run share, as plain values."""
        return {
            'model_name': self.model_name,
            'model_kwargs': self.model_kwargs,
            'data_config': self.data_config,
            'class_names': None if self.class_names is None else list(self.class_names),
            'multi_label': self.multi_label,
            'image_mode': self.image_mode,
        }


def read_checkpoint(path: Union[str, Path]) -> dict[str, Any]:
    """ Read a checkpoint of this package or of timm, or weights alone, without running code that the file may contain.

    Returns:
        The content of the file, with the weights under 'state_dict'.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f'Expected a checkpoint, but got {path}, which is not a file.')
    if path.suffix == '.safetensors':
        return _read_safetensors(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # type of the settings in timm's checkpoints
            state = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:  # damaged pickles raise all kinds
        code = _find_code(path, error)
        if code == 'TorchScript' or path.suffix == '.pt2':
            raise UsageError(
                f'{path} is an exported program, which is not read as a checkpoint. Give the checkpoint, or export it '
                'to onnx or safetensors.') from error
        if code:
            raise UsageError(
                f'{path} contains code ({code}), which is not run. Save the weights alone: '
                'torch.save(model.state_dict(), ...).') from error
        raise UsageError(f'{path} is not a checkpoint, or it is truncated or damaged.') from error
    if not isinstance(state, dict):
        raise UsageError(f'Expected a checkpoint, but got {path}, which contains a {type(state).__name__}.')
    if 'state_dict' not in state:
        others = ('arch', 'args', *_EMA_KEYS) if 'model' in state else ()
        weights = state.get('model', state)
        if not isinstance(weights, dict) or not weights or not _are_tensors(weights):
            raise UsageError(f'Expected a checkpoint, but got {path}, which contains no weights of a model.')
        state = {'state_dict': weights, **{name: state[name] for name in others if name in state}}
    return state


def _find_code(path: Path, error: Exception) -> Optional[str]:
    """Return the name of code in a file that `torch.load` has refused with an error; nothing of the file is run."""
    named = re.search(r'GLOBAL (\S+)|(TorchScript)', str(error))
    if named:
        return named[1] or named[2]
    with contextlib.suppress(Exception):  # torch does not parse the newer protocols of pickle; the file may be damaged
        data = path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                data = archive.read(next(name for name in archive.namelist() if name.endswith('/data.pkl')))
        texts: list[str] = []
        names = []
        for operation, argument, _ in pickletools.genops(data):
            if operation.name in ('GLOBAL', 'INST'):
                names.append(argument.replace(' ', '.'))
            elif operation.name == 'STACK_GLOBAL':
                names.append('.'.join(texts[-2:]))
            elif isinstance(argument, str):
                texts.append(argument)
        return next((name for name in names if not name.startswith(('torch.', 'collections.OrderedDict'))), None)
    return None


def _are_tensors(weights: dict[str, Any]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in weights.values())


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        with safe_open(str(path), 'pt') as file:
            description = (file.metadata() or {}).get(KEY)
            state: dict[str, Any] = {'state_dict': {name: file.get_tensor(name) for name in file.keys()}}  # noqa: SIM118
        if description is not None:
            state[KEY] = {'info': json.loads(description)}
            if not _is_info(state[KEY]['info']):
                raise ValueError(f'its description of the model is {description!r:.200}')
    except (OSError, RecursionError, SafetensorError, ValueError) as error:
        raise UsageError(f'Expected a safetensors file, but got {path}: {error}') from error
    return state


def _is_info(info: Any) -> bool:
    """True if JSON has the form of `CheckpointInfo.state`."""
    if not isinstance(info, dict) or not isinstance(info.get('model_name'), str):
        return False
    names = info.get('class_names') or []
    are_dicts = all(isinstance(info.get(key, {}), dict) for key in ('model_kwargs', 'data_config'))
    return are_dicts and isinstance(names, list) and all(isinstance(name, str) for name in names)


def read_tensors(path: Union[str, Path]) -> Optional[list[torch.Tensor]]:
    """Read all weights of a file, also the EMA weights; return None for NumPy files, which only timm reads."""
    if Path(path).suffix.lower() in ('.npz', '.npy'):
        return None
    state = read_checkpoint(path)
    parts = [state.get(name) or {} for name in ('state_dict', 'state_dict_ema')]
    return [value for part in parts for value in part.values() if isinstance(value, torch.Tensor)]


def best_checkpoint(path: Union[str, Path]) -> Path:
    """ Return the file itself, or the checkpoint of a folder.

    Args:
        path: A file; the folder of a run, whose best checkpoint is returned, else the last or a recovery checkpoint; or
            a folder that `timm-splicemix push` wrote.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    recoveries = sorted(path.glob('recovery-*.pth.tar'), key=lambda file: file.stat().st_mtime, reverse=True)
    candidates = (path / BEST, path / LAST, *recoveries, path / PUBLISHED)
    found = next((file for file in candidates if file.is_file()), None)
    if found is None:
        raise UsageError(f'Expected a folder with checkpoints, but got {path}, which has no {BEST} or {LAST}.')
    return found


def read_info(state: dict[str, Any], path: Path) -> Optional[CheckpointInfo]:
    """Return what a checkpoint records about its model, None if it does not name it."""
    args = state.get('args') or {}
    args = vars(args) if isinstance(args, argparse.Namespace) else dict(args)
    common = {'epoch': state.get('epoch'), 'metric': state.get('metric'), 'args': args}
    if KEY in state:
        return parse_info(state[KEY]['info'], path, **common)
    name = state.get('arch') or args.get('model')
    if not isinstance(name, str):
        return None
    in_chans = args['input_size'][0] if args.get('input_size') else args.get('in_chans')
    kwargs = {'num_classes': args.get('num_classes'), 'global_pool': args.get('gp') or None, 'in_chans': in_chans}
    kwargs = {**kwargs, **(args.get('model_kwargs') or {})}
    return CheckpointInfo(
        name, {key: value for key, value in kwargs.items() if value is not None}, multi_label=False,
        image_mode=args.get('input_img_mode') or '', **common)


def parse_info(content: dict[str, Any], path: Path, **common: Any) -> CheckpointInfo:
    """ Turn the content of `CheckpointInfo.state`, or the description of an exported model, into a `CheckpointInfo`.

    Args:
        content: The plain values.
        path: File that contains them.
        **common: Fields that they do not contain.
    """
    names = {entry.name for entry in fields(CheckpointInfo)}
    info = {**{name: value for name, value in content.items() if name in names}, **common}
    info['class_names'] = info['class_names'] and tuple(info['class_names'])
    info['image_mode'] = info.get('image_mode') or info.get('args', {}).get('input_img_mode') or ''
    if info.get('thresholds') is not None:
        info['thresholds'] = parse_thresholds_content(info['thresholds'], path)
    return CheckpointInfo(**info)


def published_weights(name: Union[str, Path]) -> Optional[Path]:
    """ Return the weights of a model that `timm-splicemix push` published, None for any other model of timm.

    Args:
        name: 'hf-hub:USER/NAME', which is downloaded, 'local-dir:FOLDER', or anything else.
    """
    source, place = str(name).partition(':')[::2]
    if source == 'local-dir':
        file = Path(place) / PUBLISHED
    elif source in ('hf-hub', 'hf_hub'):
        file = _download(place)
    else:
        return None
    if file is None or not file.is_file():
        return None
    try:
        with safe_open(str(file), 'pt') as opened:
            return file if KEY in (opened.metadata() or {}) else None
    except (OSError, SafetensorError) as error:
        raise UsageError(f'Expected a safetensors file, but got {file}: {error}') from error


def _download(place: str) -> Optional[Path]:
    """Return the downloaded weights of a repository 'USER/NAME[@REVISION]', None if it has no safetensors file."""
    repository, _, revision = place.partition('@')
    try:
        return Path(hf_hub_download(repository, PUBLISHED, revision=revision or None))
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError):  # without a connection
            raise UsageError(f'Cannot download {repository} from the Hugging Face Hub: {error}') from error
        return None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f'Cannot download {repository} from the Hugging Face Hub: {reason}') from error


def tuned_thresholds(path: Union[str, Path], info: CheckpointInfo) -> Optional[Thresholds]:
    """ Return the thresholds that an exported model contains, or those of the thresholds.json beside a checkpoint.

    Thresholds of other weights, of another epoch or of other classes are not used, with a log line that says so.

    Args:
        path: The checkpoint, or the folder of a run; '' for none.
        info: Its description, with the weights in use.
    """
    thresholds = info.thresholds
    if thresholds is None and path:
        file = best_checkpoint(path).parent / THRESHOLDS
        thresholds = load_thresholds(file, None) if file.is_file() else None
    if thresholds is None or not info.multi_label:
        return None
    reason = ''
    if thresholds.weights not in ('', info.weights):
        reason = f'the {thresholds.weights} weights'
    elif None not in (thresholds.epoch, info.epoch) and thresholds.epoch != info.epoch:
        reason = f'the checkpoint of epoch {thresholds.epoch}'
    elif info.class_names and set(info.class_names) != set(thresholds.class_names):
        reason = 'other classes'
    if reason:
        _logger.warning(f'Ignoring the thresholds of {thresholds.source}, which are for {reason}.')
        return None
    return thresholds.ordered(info.class_names) if info.class_names else thresholds


def choose_weights(
        state: dict[str, Any],
        info: Optional[CheckpointInfo],
        use_ema: Optional[bool],
        path: Path,
) -> tuple[dict[str, torch.Tensor], str]:
    """Return the weights, and which ones they are: see `CheckpointInfo.weights`."""
    ema = next((state[key] for key in _EMA_KEYS if state.get(key) is not None), None)
    if ema is None:
        kind = 'plain' if info is None else info.weights  # an exported file may contain the EMA weights alone
        if use_ema and kind != 'ema':
            raise UsageError(f'Expected EMA weights for --use-ema, but got none in {path}.')
        if use_ema is False and kind == 'ema':
            raise UsageError(f'Expected plain weights for --no-ema, but got only EMA weights in {path}.')
        return state['state_dict'], kind
    if use_ema is None:  # --model-ema-force-cpu keeps the EMA from being evaluated during training
        use_ema = not (info is not None and info.args.get('model_ema_force_cpu'))
    if use_ema:
        _logger.info(f'Loading the EMA weights of {path} (--no-ema loads the plain weights).')
        return ema, 'ema'
    _logger.info(f'Loading the plain weights of {path} (--use-ema loads the EMA weights).')
    return state['state_dict'], 'plain'
