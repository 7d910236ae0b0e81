""" Publish a model on the Hugging Face Hub: the files of its repository, with a model card, and the upload """
import copy
import logging
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import jinja2
import timm
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from timm.models import save_for_hf
from torch import nn

from ..args import CommandParser, add_train_args
from ..errors import UsageError
from ..files import os_error_reason, printable, read_json, write_json, write_text
from ..metrics import save_thresholds
from ..results import RESULTS, Result, read_result
from .export import export_model
from .load import load_checkpoint
from .read import PUBLISHED, THRESHOLDS, CheckpointInfo, best_checkpoint, tuned_thresholds
from .tracking import read_summary

_logger = logging.getLogger(__name__)
CARD = 'README.md'
_TOLERANCE = 1e-3  # of a logit
# Flags of the machine or of the author's folders, which nobody needs to train the model again
_PRIVATE = (
    'data', 'data_dir', 'output', 'experiment', 'resume', 'device', 'local_rank', 'workers', 'pin_mem', 'log_interval',
    'log_wandb', 'log_tensorboard', 'wandb_project', 'wandb_tags', 'wandb_resume_id', 'checkpoint_hist', 'save_images',
    'recovery_interval', 'cache')


@dataclass(frozen=True)
class Publication:
    """ A model to publish.

    Args:
        repository: Name on the Hub, USER/NAME.
        checkpoint: The checkpoint.
        model: Its model.
        info: Its description, with the tuned thresholds.
        result: Its evaluation, None if there is none.
    """
    repository: str
    checkpoint: Path
    model: nn.Module
    info: CheckpointInfo
    result: Optional[Result]


def open_publication(run: str, repository: str, results: Optional[str], use_ema: Optional[bool]) -> Publication:
    """ Load a model to publish, with its thresholds and its evaluation.

    Args:
        run: Folder of a run, or a checkpoint.
        repository: Name on the Hub, USER/NAME.
        results: Folder that validate.py wrote; None for one in the folder of the run.
        use_ema: See `load_checkpoint`.
    """
    if not re.fullmatch(r'[\w.-]+/[\w.-]+', repository):
        raise UsageError(f"Expected USER/NAME as the name on the Hugging Face Hub, but got '{repository}'.")
    checkpoint = best_checkpoint(run)
    if checkpoint.suffix == '.onnx':
        raise UsageError(f'Expected a run or a checkpoint to publish, but got {checkpoint}.')
    model, info = load_checkpoint(checkpoint, use_ema=use_ema)
    info = replace(info, thresholds=tuned_thresholds(checkpoint, info))
    result = read_result(results) if results else find_result(checkpoint.parent, info)
    weights, epoch = (None, None) if result is None else map(result.content.get, ('weights', 'epoch'))
    if weights not in (None, info.weights) or (None not in (epoch, info.epoch) and epoch != info.epoch):
        raise UsageError(
            f'Expected results of epoch {info.epoch} with {info.weights} weights, as in {checkpoint}, but got epoch '
            f'{epoch} with {weights} weights in {result.folder}. Evaluate the checkpoint to publish.')
    return Publication(repository, checkpoint, model, info, result)


def find_result(folder: Path, info: CheckpointInfo) -> Optional[Result]:
    """Return the evaluation of a model in the folder of its run, None if there is none."""
    found = [read_result(file) for file in sorted((*folder.glob(RESULTS), *folder.glob(f'*/{RESULTS}')))]
    found = [
        result for result in found
        if (result.content.get('weights'), result.content.get('epoch')) == (info.weights, info.epoch)]
    if len(found) > 1:
        names = ', '.join(str(result.folder) for result in found)
        raise UsageError(f'Expected one evaluation of the model, but found {names}. Choose one by --results.')
    return found[0] if found else None


def write_repository(publication: Publication, folder: Path) -> str:
    """ Write weights, config.json, thresholds.json and class names, as timm names them.

    Args:
        publication: The model.
        folder: Folder to write to.

    Returns:
        Why plain timm cannot load the model; '' if it can.
    """
    model, info = publication.model, publication.info
    export_model(model, info, folder / PUBLISHED.removesuffix('.safetensors'), 'safetensors')
    (folder / f'{PUBLISHED}.json').unlink()  # config.json and the safetensors file contain it
    reason = _save_config(model, info, folder)
    if info.thresholds is not None:
        save_thresholds(info.thresholds, folder / THRESHOLDS)
    return reason


def _save_config(model: nn.Module, info: CheckpointInfo, folder: Path) -> str:
    """Write config.json by timm's function such that plain timm builds the model, if it can; return why it cannot."""
    described = copy.copy(model)  # shares the weights
    config = {name: info.data_config[name] for name in (
        'input_size', 'mean', 'std', 'interpolation', 'crop_pct', 'crop_mode')}
    described.pretrained_cfg = {**model.pretrained_cfg, **config, 'num_classes': model.num_classes}
    for name in ('test_input_size', 'test_crop_pct', 'label_names', 'label_descriptions'):
        described.pretrained_cfg.pop(name, None)
    labels = {'label_names': list(info.class_names)} if info.class_names else {}
    ours = ('num_classes', 'head', 'head_kwargs')  # the first is in the configuration anyway, the others are not timm's
    own = {
        name: value for name, value in info.model_kwargs.items()
        if value is not None and name not in ours and (name, value) != ('in_chans', 3)}
    reason = ''
    for more in ({'fc_norm': False}, {}):  # with max pooling, timm's transformers move the norm unless told not to
        if more and own.get('global_pool') != 'max':
            continue
        _save_for_timm(described, labels, {**own, **more}, folder)
        reason = _why_not_timm(model, info, folder)
        if not reason:
            break
    return reason


def _save_for_timm(model: nn.Module, labels: dict[str, Any], model_args: dict[str, Any], folder: Path) -> None:
    """Write config.json by timm's function, with arguments that timm may refuse."""
    try:
        save_for_hf(model, str(folder), model_config=dict(labels), model_args=model_args)
    except ValueError:  # timm sees that its model would not have these arguments, such as max pooling
        save_for_hf(model, str(folder), model_config=dict(labels))
        config = read_json(folder / 'config.json')
        config.setdefault('model_args', {}).update(model_args)  # so that timm fails instead of predicting otherwise
        write_json(config, folder / 'config.json')
    except OSError as error:
        raise UsageError(f'Cannot write {folder}: {os_error_reason(folder, error)}.') from error
    finally:
        (folder / 'pytorch_model.bin').unlink(missing_ok=True)  # timm's weights, a pickle; model.safetensors is better


@torch.inference_mode()
def _why_not_timm(model: nn.Module, info: CheckpointInfo, folder: Path) -> str:
    """Build the published model by timm alone, and compare its logits."""
    if type(model).__module__.startswith('timm_splicemix.'):
        return f'timm has no {info.model_name}'
    if info.model_kwargs.get('head'):
        return f"timm has no head '{info.model_kwargs['head']}'"
    images = torch.randn(2, *info.data_config['input_size'], generator=torch.Generator().manual_seed(0))
    try:
        built = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
        difference = float((built(images) - model(images)).abs().max())
    except Exception as error:  # timm raises many types
        pooling = info.model_kwargs.get('global_pool')
        what = f'with {pooling} pooling' if pooling else 'with these arguments'
        _logger.debug(f'timm cannot load {folder}: {error}')
        return f'timm does not build {info.model_name} {what}'
    return '' if difference <= _TOLERANCE else f'timm builds a {info.model_name} that predicts otherwise'


# Model card

def write_card(publication: Publication, folder: Path, timm_reason: str, license_name: str, version: str) -> None:
    """ Write README.md, the model card.

    Args:
        publication: The model.
        folder: Folder of the repository, in which a picture of the AP of each class is shown.
        timm_reason: Return value of `write_repository`.
        license_name: License of the weights.
        version: Version of this package.
    """
    model, info, result = publication.model, publication.info, publication.result
    thresholds = info.thresholds
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__), trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters['cell'] = _cell
    title, metrics = _metrics(publication)
    precisions = {} if result is None else {
        name: '' if math.isnan(value) else f'{value:.1f}' for name, (value, _) in result.classes.items()}
    text = environment.get_template('card.md').render(
        name=publication.repository.split('/')[1], repository=publication.repository, license=license_name,
        version=version, architecture=info.model_name, multi_label=info.multi_label, num_classes=model.num_classes,
        parameters=sum(parameter.numel() for parameter in model.parameters()), model_rows=_model_rows(info),
        timm_reason=timm_reason, data_lines=_data_lines(publication), metrics=metrics, metrics_title=title,
        definitions='' if result is None else result.content.get('definitions', ''),
        picture=next((file.name for file in folder.glob('per_class_ap.png')), ''), precisions=precisions,
        class_names=info.class_names or (), flags=_flags(info.args),
        thresholds=() if thresholds is None else tuple(zip(thresholds.class_names, thresholds.values)),
        thresholds_origin='' if thresholds is None else
        f'{thresholds.dataset} {thresholds.split}, {thresholds.num_images:,} images'.strip())
    write_text(text, folder / CARD)


def _cell(value: Any) -> str:
    """Escape what Markdown and HTML would interpret in a cell of a table."""
    return re.sub(r'([\\`*_\[\]|])', r'\\\1', printable(str(value)).replace('&', '&amp;').replace('<', '&lt;'))


def _model_rows(info: CheckpointInfo) -> list[tuple[str, str]]:
    config = info.data_config
    rows = [
        ('images', f'{" x ".join(map(str, config["input_size"]))} (channels, height, width), {info.pil_mode}'),
        ('preprocessing', f'{config["interpolation"]}, crop {config["crop_mode"] or "center"} {config["crop_pct"]:g}'),
        ('pooling', info.model_kwargs.get('global_pool') or "the model's own"),
        ('head', info.model_kwargs.get('head') or 'linear'),
        ('weights', f'{info.weights}' + ('' if info.epoch is None else f', epoch {info.epoch}'))]
    return [(name, str(value)) for name, value in rows]


def _data_lines(publication: Publication) -> list[str]:
    args, result = publication.info.args, publication.result
    lines = []
    if args:
        lines.append(f"Trained on {args.get('dataset') or 'a folder of images'}, split {args.get('train_split')}.")
        lines.append(f"The checkpoint was selected on split {args.get('val_split')}.")
    if result is not None:
        content = result.content
        where = f"{content.get('dataset')}, split {content.get('split')}"
        lines.append(f"Evaluated on {where}: {content.get('num_images'):,} images.")
    return lines or ['The data are unknown.']


def _metrics(publication: Publication) -> tuple[str, list[tuple[str, str]]]:
    """Return a title, and the metrics of the evaluation, or else those of the epoch of the checkpoint."""
    info, result = publication.info, publication.result
    if result is not None:
        content = result.content
        values = content['metrics']
        title = f"{content.get('dataset')} {content.get('split')}, {content.get('weights')} weights:"
    else:
        rows = read_summary(publication.checkpoint.parent / 'summary.csv')
        row = next((row for row in rows if int(row['epoch']) == info.epoch), {})
        prefix = 'eval_ema_' if info.weights == 'ema' else 'eval_'
        values = {
            name.removeprefix(prefix): float(value) for name, value in row.items()
            if name.startswith(prefix) and value and not (prefix == 'eval_' and name.startswith('eval_ema_'))}
        title = f'Validation during training, epoch {info.epoch}, {info.weights} weights:'
    return title, [(name, f'{value:.2f}') for name, value in values.items() if value is not None and name != 'loss']


def _flags(args: dict[str, Any]) -> list[str]:
    """Return the flags of a run that differ from their defaults, without those of the machine; paths as names."""
    parser = CommandParser()
    add_train_args(parser)
    flags = []
    for name, action in parser.flags.items():
        value = args.get(name, action.default)
        if name in _PRIVATE or value == action.default:
            continue
        if isinstance(value, dict):
            value = [f'{key}={part}' for key, part in value.items()]
        values = value if isinstance(value, (list, tuple)) else [value]
        values = [Path(part).name if isinstance(part, str) and Path(part).is_absolute() else part for part in values]
        flag = f"--{name.replace('_', '-')}"
        flags.append(printable(flag if value is True else f'{flag} {" ".join(map(str, values))}').replace('`', "'"))
    return flags


# Upload

def upload(publication: Publication, folder: Path, private: bool, message: str) -> str:
    """ Upload a folder to the Hub, and return the address of the repository.

    Args:
        publication: The model.
        folder: The folder that `write_repository` wrote.
        private: Create a private repository.
        message: Message of the commit.
    """
    try:
        api = HfApi(library_name='timm', library_version=timm.__version__)
        created = api.create_repo(publication.repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=created.repo_id, folder_path=str(folder), commit_message=message)
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UsageError(
            f'Cannot upload {publication.repository} to the Hugging Face Hub: {reason} Log in by `hf auth login`. The '
            f'files are in {folder}.') from error
    return str(created)
