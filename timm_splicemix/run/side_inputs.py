""" What heads need beside feature maps: co-occurrence of training labels, and class vectors """
import argparse
import logging
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import torch
from timm.models import clean_state_dict

from ..errors import UsageError
from ..heads import head_class, head_options, stored_side_inputs
from ..models import HEAD_PREFIX
from .class_vectors import embed_class_names, read_class_vectors
from .read import KEY, best_checkpoint, read_checkpoint

_logger = logging.getLogger(__name__)
_MAX_DIMENSIONS = 300  # of vectors from labels
_BLOCK = 1 << 16  # rows of targets that are counted at once


def create_side_inputs(
        args: argparse.Namespace,
        dataset: torch.utils.data.Dataset,
        num_classes: Optional[int],
        resumed: Optional[dict[str, Any]] = None,
) -> Optional[dict[str, Any]]:
    """ Create the side inputs of the head that the flags select, the same ones in all processes.

    Args:
        args: Flags.
        dataset: Training set.
        num_classes: Number of classes.
        resumed: Content of the checkpoint to resume, which contains them.

    Returns:
        Side inputs by name; None if the head needs none.
    """
    needed = head_class(args.head).side_inputs if args.head else ()
    if args.class_vectors and 'class_vectors' not in needed:
        raise UsageError(f'Expected a head that uses --class-vectors, but got --head {args.head}: leave it out.')
    if not needed:
        return None
    if resumed is None and args.initial_checkpoint:
        path = best_checkpoint(args.initial_checkpoint)
        initial = read_checkpoint(path)
        if _has_head(initial):
            saved = initial.get(KEY, {}).get('info', {}).get('model_kwargs', {})
            check_stored_options(args.head, args.head_kwargs, saved, path)
            if args.class_vectors:
                raise UsageError(
                    f'Expected --class-vectors or --initial-checkpoint, but got both: the head of {path} has class '
                    'vectors, which it was trained with. Leave out --class-vectors.')
            resumed = initial
    if resumed is not None and _has_head(resumed):
        if 'class_vectors' in needed:
            _logger.info('Class vectors: those of the checkpoint.')
        return stored_side_inputs(args.head, clean_state_dict(resumed['state_dict']), HEAD_PREFIX)
    targets = getattr(dataset, 'targets', None)
    names = getattr(dataset, 'class_names', None) or [str(index) for index in range(num_classes or 0)]

    def create() -> dict[str, Any]:
        counts = None if targets is None else count_labels(targets)
        if counts is None and 'cooccurrence' in needed:
            raise UsageError(
                f'Expected a multi-label training set that knows all its labels for --head {args.head}, which needs '
                'their co-occurrence.')
        found = {'cooccurrence': counts}
        if 'class_vectors' in needed:
            found['class_vectors'] = create_class_vectors(args.class_vectors, names, counts and (*counts, len(targets)))
        return {name: found[name] for name in needed}

    return on_primary(create, args.distributed)


def _has_head(checkpoint: dict[str, Any]) -> bool:
    return any(name.startswith(HEAD_PREFIX) for name in clean_state_dict(checkpoint['state_dict']))


def check_stored_options(head: str, options: dict[str, Any], saved: dict[str, Any], path: Path) -> None:
    """ Refuse other values of the options that the side inputs in a checkpoint were computed with.

    Args:
        head: Name of the head.
        options: Options of this run.
        saved: `model_kwargs` of the checkpoint; another head in it is refused elsewhere.
        path: Path of the checkpoint.
    """
    if saved.get('head') != head:
        return
    for option in head_class(head).stored_options:
        mine, other = ({**head_options(head), **found}[option] for found in (options, saved.get('head_kwargs') or {}))
        if mine != other:
            raise UsageError(
                f'Expected a checkpoint with --head-kwargs {option}={mine}, but got {path} with {other}.')


def on_primary(create: Callable[[], Any], distributed: bool) -> Any:
    """Call a function on the primary process, and return its result, or raise its error, on all processes."""
    if not distributed:
        return create()
    result: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            result[0] = create()
        except UsageError as error:
            result[1] = str(error)
    torch.distributed.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise UsageError(result[1])
    return result[0]


def count_labels(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ Count images with each class, and images with each pair of classes.

    Args:
        targets: (N, classes): 1 present, 0 absent, -1 unknown.

    Returns:
        (classes,) and (classes, classes), whose diagonal is 0, float64.
    """
    joint = torch.zeros(targets.shape[1], targets.shape[1], dtype=torch.float64)
    for block in targets.split(_BLOCK):
        present = (block == 1).float()  # exact, as a block has fewer than 2 ** 24 rows
        joint += (present.T @ present).double()
    counts = joint.diagonal().clone()
    return counts, joint.fill_diagonal_(0.)


def create_class_vectors(
        path: Optional[str],
        class_names: Sequence[str],
        counts: Optional[tuple[torch.Tensor, torch.Tensor, int]],
) -> torch.Tensor:
    """ Read class vectors from a file, or embed the names by wordllama if it is installed, or else use the labels.

    Args:
        path: File of --class-vectors, None for none.
        class_names: Names of the classes.
        counts: Result of `count_labels` and number of images, None if labels are unknown.
    """
    if path:
        return read_class_vectors(path, class_names)
    found = embed_class_names(class_names)
    if found is not None:
        _logger.info(f'Class vectors: wordllama, {found.shape[1]} dimensions.')
        return found
    if counts is None:
        raise UsageError(
            'Expected --class-vectors for a data set that does not know all its labels, or the package wordllama: '
            "pip install 'timm-splicemix[words]'.")
    found = vectors_of_labels(*counts)
    _logger.info(
        f'Class vectors: PPMI-SVD of the training labels, {found.shape[1]} dimensions, as there is no --class-vectors '
        "and wordllama is not installed (pip install 'timm-splicemix[words]').")
    return found


def vectors_of_labels(counts: torch.Tensor, joint: torch.Tensor, num_images: int) -> torch.Tensor:
    """ Vectors of classes from the singular values of the positive pointwise mutual information of their labels.

    The information of a class and itself is on the diagonal, so no vector of a class is 0. A class that no image has
    counts as one that one of all images has.

    Args:
        counts: (classes,) images with each class.
        joint: (classes, classes) images with each pair of classes.
        num_images: Number of images.

    Returns:
        (classes, dimensions) float32, at most 300 dimensions.
    """
    counts = counts.double().clamp(min=1.)
    joint = joint.double() + counts.diag() - joint.double().diagonal().diag()
    total = float(max(num_images, 1)) + 1.  # so that a class of all images has some information, too
    information = (joint * total / counts[:, None] / counts).log().clamp(min=0.)  # log(0) is -inf, and becomes 0
    left, values, _ = torch.linalg.svd(information)
    dimensions = min(_MAX_DIMENSIONS, len(counts))
    vectors = left[:, :dimensions] * values[:dimensions].sqrt()
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))  # (1, dimensions)
    return (vectors * largest.sign()).float().contiguous()  # signs of singular vectors are arbitrary
