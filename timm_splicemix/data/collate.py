""" Samples to batches, multi-hot or not, with all that went wrong told rather than raised in a worker """
import os
from typing import Any, NamedTuple, Optional, Sequence, Union

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info


class Sample(NamedTuple):
    """A sample as a worker read it; `error` if it could not."""
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
    bad_target: Optional[tuple[Optional[int], float]] = None  # index of the sample, and the value that is none


def fast_collate(samples: Sequence[Sample]) -> Batch:
    """ Stack samples, whose targets may be multi-hot, soft or integer classes.

    Images keep their type: uint8 with a prefetcher that normalises them later, floating point without. What is wrong
    with images or targets is part of the batch, as an error from a worker process would hide in a traceback.

    Args:
        samples: The samples of a batch.
    """
    errors = [sample.error for sample in samples if sample.error is not None]
    samples = [sample for sample in samples if sample.error is None]
    indices = [sample.index for sample in samples]
    if not samples:
        return Batch(torch.empty(0), torch.empty(0), indices, errors)
    images = _stack([sample.image for sample in samples])
    targets = torch.stack([torch.as_tensor(sample.target) for sample in samples])
    return Batch(images, targets, indices, errors, _find_bad_target(targets, indices))


def _stack(images: list[Union[np.ndarray, torch.Tensor]]) -> torch.Tensor:
    """One tensor, in shared memory if made by a worker, in the memory format of the images."""
    images = [torch.from_numpy(image) if isinstance(image, np.ndarray) else image for image in images]
    channels_last = [image.permute(1, 2, 0) for image in images]
    if not images[0].is_contiguous() and all(image.is_contiguous() for image in channels_last):
        return _stack_contiguous(channels_last).permute(0, 3, 1, 2)
    return _stack_contiguous([image.contiguous() for image in images])


def _stack_contiguous(images: list[torch.Tensor]) -> torch.Tensor:
    alike = all((image.shape, image.dtype) == (images[0].shape, images[0].dtype) for image in images)
    able = hasattr(os, 'memfd_create') and hasattr(torch.UntypedStorage, '_new_shared_fd_cpu')
    if get_worker_info() is None or not able or not alike:
        return default_collate(images)  # which refuses images that differ
    # Written like a file, shared memory need be neither cleared before nor mapped page by page, as in default_collate.
    # That saves a worker a tenth of its time, and is independent of the size of /dev/shm.
    with open(os.memfd_create('images'), 'wb') as file:
        for image in images:
            file.write(image.view(-1).view(torch.uint8).numpy())
        file.flush()
        storage = torch.UntypedStorage._new_shared_fd_cpu(file.fileno(), file.tell())  # as torch.multiprocessing does
    return torch.empty(0, dtype=images[0].dtype).set_(storage, 0, (len(images), *images[0].shape))


def _find_bad_target(
        targets: torch.Tensor,
        indices: list[Optional[int]],
) -> Optional[tuple[Optional[int], float]]:
    """Looked for here, on the CPU, because in the training step it would make the GPU wait."""
    if targets.ndim == 1 or targets.dtype == torch.bool:  # classes are what the loss checks
        return None
    valid = (targets.clamp(0, 1) == targets) | (targets == -1)
    if valid.all():
        return None
    row = int((~valid).flatten(1).any(dim=1).nonzero()[0])
    return indices[row], targets[row][~valid[row]][0].item()
