""" `--splicemix-grids auto`: grids for the image size and the feature map of a run, and a weight of mixed images """
import argparse
import logging
from typing import Any, Optional, Sequence

from torch import nn

from ..mix import AUTO_WEIGHT, GridChoice, choose_grids, is_auto
from ..models import describe_features
from ..models.feature_map import NoFeatureMap, model_name

_logger = logging.getLogger(__name__)


def set_auto_grids(
        args: argparse.Namespace,
        input_size: Sequence[int],
        model: Optional[nn.Module] = None,
        resumed: Optional[dict[str, Any]] = None,
) -> str:
    """ Replace --splicemix-grids auto by grids, with one log line; other grids stay as they are.

    With a model, this also sets --splicemix-weight, unless the user did.

    Args:
        args: Flags; changed in place.
        input_size: (channels, height, width) of the images.
        model: The model, on its device; without a model, only the image size counts.
        resumed: Content of the checkpoint to resume, whose grids and weight are kept.

    Returns:
        The grids.
    """
    if not is_auto(args.splicemix_grids):
        return args.splicemix_grids
    saved = _saved_args(resumed)
    if saved:
        args.splicemix_grids = grids = str(saved['splicemix_grids'])
        args.splicemix_weight = getattr(args, 'splicemix_weight', None) or saved.get('splicemix_weight')
        _logger.info(f'Using --splicemix-grids {grids} for auto: these are the grids of the resumed run.')
        return grids
    choice, remark = _choose(input_size, model)
    args.splicemix_grids = str(choice)
    weight = ''
    if model is not None and _takes_weight(args):
        args.splicemix_weight = AUTO_WEIGHT
        weight = f' and --splicemix-weight {AUTO_WEIGHT:g}'
    message = f'Using --splicemix-grids {choice}{weight} for auto: {choice.reason}{remark}.'
    if choice.fits:
        _logger.info(message)
    elif not getattr(args, 'rank', 0):
        _logger.warning(f'{message} Use larger images (--img-size), or train without --splicemix-grids.')
    return args.splicemix_grids


def _choose(input_size: Sequence[int], model: Optional[nn.Module]) -> tuple[GridChoice, str]:
    """Choose grids, and say why no feature map counts if there is none."""
    image_size = (input_size[-2], input_size[-1])
    if model is None:
        return choose_grids(image_size), '; there is no model here, so its feature map does not count'
    try:
        # One forward pass of one image. `feature_info` of timm would save it, but is not the map of all families.
        map_size = describe_features(model, tuple(input_size)).grid
    except NoFeatureMap:
        return choose_grids(image_size), f'; {model_name(model)} has no single feature map, so none counts'
    return choose_grids(image_size, map_size), ''


def _takes_weight(args: argparse.Namespace) -> bool:
    """Whether mixed images have no weight yet, and are part of a mean with regular ones, see `SpliceMixTask`."""
    return (
        getattr(args, 'splicemix_weight', None) is None and getattr(args, 'loss_reduction', None) != 'sum'
        and getattr(args, 'splicemix_batch', 'append') not in ('alternate', 'only'))


def _saved_args(resumed: Optional[dict[str, Any]]) -> dict[str, Any]:
    """The flags of a checkpoint, also of one that timm's script has saved; {} if it has no grids."""
    saved = (resumed or {}).get('args') or {}
    saved = saved if isinstance(saved, dict) else vars(saved)
    grids = saved.get('splicemix_grids')
    return saved if grids and not is_auto(grids) else {}
