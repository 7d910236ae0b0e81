""" Collation of samples and of what went wrong in the workers """
import os
from typing import Any, NamedTuple, Optional, Sequence, Union

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from ..errors import UsageError


class Sample(NamedTuple):
    """A sample as a worker read it, or the error that it met."""
    index: Optional[int]
    image: Any = None
    target: Any = None
    error: Optional[Exception] = None


class Batch(NamedTuple):
    """A batch as workers send it."""
    images: torch.Tensor
    targets: torch.Tensor
    indices: list[Optional[int]]
    errors: list[Exception]
    bad_target: Optional[tuple[Optional[int], float]] = None  # index and value


def fast_collate(samples: Sequence[Sample]) -> Batch:
    """ Stack samples, whose targets are multi-hot, soft or integer classes.

    Images keep their type: uint8 with a prefetcher, which normalises them, and floating point without. Errors are part
    of the batch, because an error that a worker raises ends in a traceback.
    """
    errors = [sample.error for sample in samples if sample.error is not None]
    samples = [sample for sample in samples if sample.error is None]
    indices = [sample.index for sample in samples]
    if not samples:
        return Batch(torch.empty(0), torch.empty(0), indices, errors)
    images = _stack([sample.image for sample in samples])
    targets = torch.stack([torch.as_tensor(sample.target) for sample in samples])
    return Batch(images, targets, indices, errors, _find_bad_target(targets, indices))


def multilabel_collate(samples: Sequence[tuple[Any, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """ Collate samples with multi-hot targets for timm's `create_loader`, with and without its prefetcher.

        loader = timm.data.create_loader(dataset, input_size=224, batch_size=32, collate_fn=multilabel_collate)

    timm's own collate function takes one class index per image before version 1.0.31.

    Args:
        samples: Images, as timm's transforms return them, with targets (classes,): 1, 0, soft, or -1 for unknown.
            Further features of a sample are left out.

    Returns:
        Images (B, C, H, W) of their type, uint8 for the prefetcher, and targets (B, classes) float32.
    """
    images = [sample[0] for sample in samples]
    if isinstance(images[0], tuple):
        raise UsageError('Expected one view of each image, but got several: multilabel_collate has no --aug-splits.')
    targets = torch.stack([torch.as_tensor(sample[1], dtype=torch.float32) for sample in samples])
    if targets.ndim != 2:
        raise UsageError(
            f'Expected targets of shape (classes,), but got {tuple(targets.shape[1:])}: class indices are for '
            "timm's own collate function.")
    bad = _find_bad_target(targets, list(range(len(targets))))
    if bad is not None:
        raise UsageError(
            f'Expected targets in [0, 1], or -1 for unknown, but got {bad[1]} in sample {bad[0]} of a batch.')
    return _stack(images), targets


def _stack(images: list[Union[np.ndarray, torch.Tensor]]) -> torch.Tensor:
    """Stack images, in their memory format; in a worker, in shared memory."""
    images = [torch.from_numpy(image) if isinstance(image, np.ndarray) else image for image in images]
    channels_last = [image.permute(1, 2, 0) for image in images]
    if not images[0].is_contiguous() and all(image.is_contiguous() for image in channels_last):
        return _stack_contiguous(channels_last).permute(0, 3, 1, 2)
    return _stack_contiguous([image.contiguous() for image in images])


def _stack_contiguous(images: list[torch.Tensor]) -> torch.Tensor:
    alike = all((image.shape, image.dtype) == (images[0].shape, images[0].dtype) for image in images)
    able = hasattr(os, 'memfd_create') and hasattr(torch.UntypedStorage, '_new_shared_fd_cpu')
    if get_worker_info() is None or not able or not alike:
        return default_collate(images)  # raises an error if the images differ
    # With default_collate, which clears shared memory and maps it page by page, a worker needs 1.15 times the time to
    # read, decode, crop and stack 448 px images (benchmarks/loader.py --workers 1); and it needs room in /dev/shm.
    # _new_shared_fd_cpu is private, but the only way to a storage on a file descriptor; torch.multiprocessing uses it.
    with open(os.memfd_create('images'), 'wb') as file:
        for image in images:
            file.write(image.view(-1).view(torch.uint8).numpy())
        file.flush()
        storage = torch.UntypedStorage._new_shared_fd_cpu(file.fileno(), file.tell())
    return torch.empty(0, dtype=images[0].dtype).set_(storage, 0, (len(images), *images[0].shape))


def _find_bad_target(
        targets: torch.Tensor,
        indices: list[Optional[int]],
) -> Optional[tuple[Optional[int], float]]:
    """Checked here, on the CPU, because a check in the training step would synchronise with the GPU."""
    if targets.ndim == 1 or targets.dtype == torch.bool:  # the loss checks integer classes
        return None
    valid = (targets.clamp(0, 1) == targets) | (targets == -1)
    if valid.all():
        return None
    row = int((~valid).flatten(1).any(dim=1).nonzero()[0])
    return indices[row], targets[row][~valid[row]][0].item()
