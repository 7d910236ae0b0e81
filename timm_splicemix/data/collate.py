""" Collation of samples and of what went wrong in the workers """
import os
from typing import Any, Iterator, NamedTuple, Optional, Sequence, Union

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from ..errors import UsageError
from .batch_memory import BatchMemory, Place, can_share, shared_bytes


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
    place: Optional[Place] = None  # of the images in a `BatchMemory`


class LazySamples:
    """ Samples of a data set that are read when they are needed.

    An image that is copied into its batch at once is still in the cache of the processor, and the next image reuses its
    memory.
    """

    def __init__(self, dataset: Dataset, keys: Sequence[Any]):
        self.dataset = dataset
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Sample]:
        return map(self.dataset.__getitem__, self.keys)


class FastCollate:
    """ Stack samples, whose targets are multi-hot, soft or integer classes.

    Images keep their type: uint8 with a prefetcher, which normalises them, and floating point without. Errors are part
    of the batch, because an error that a worker raises ends in a traceback.

    Args:
        memory: Memory for uint8 images of workers.
    """

    def __init__(self, memory: Optional[BatchMemory] = None):
        self.memory = memory
        self._channels_last = True  # the last batch

    def __call__(self, samples: Union[Sequence[Sample], LazySamples]) -> Batch:
        images = _Images(self.memory, len(samples), self._channels_last)
        targets, indices, errors = [], [], []
        for sample in samples:
            if sample.error is not None:
                errors.append(sample.error)
                continue
            images.add(sample.image)
            targets.append(torch.as_tensor(sample.target))
            indices.append(sample.index)
        if not indices:
            return Batch(torch.empty(0), torch.empty(0), indices, errors)
        targets = torch.stack(targets)
        self._channels_last = images.channels_last
        return Batch(images.stack(), targets, indices, errors, _find_bad_target(targets, indices), images.place)


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


def _as_tensor(image: Union[np.ndarray, torch.Tensor]) -> torch.Tensor:
    return torch.from_numpy(image) if isinstance(image, np.ndarray) else image


def _are_channels_last(images: Sequence[torch.Tensor]) -> bool:
    return not images[0].is_contiguous() and all(image.permute(1, 2, 0).is_contiguous() for image in images)


class _Images:
    """ The images of a batch.

    Args:
        memory: Where a worker copies uint8 images to as they come.
        number: Number of images.
        channels_last: Whether to expect that all images are channels-last; the batch is planar if one of them is not.
    """

    def __init__(self, memory: Optional[BatchMemory], number: int, channels_last: bool):
        self.memory = None if get_worker_info() is None else memory
        self.number = number
        self.channels_last = True  # all images
        self.place: Optional[Place] = None
        self._expect_channels_last = channels_last
        self._batch: Optional[torch.Tensor] = None
        self._images: list[torch.Tensor] = []

    def add(self, image: Union[np.ndarray, torch.Tensor]) -> None:
        image = _as_tensor(image)
        self.channels_last = self.channels_last and _are_channels_last([image])
        if not self._images and self.memory is not None and image.dtype == torch.uint8:
            self._take_memory(image)
        if self._batch is not None:
            if image.shape == self._batch.shape[1:] and image.dtype == torch.uint8:
                image = self._batch[len(self._images)].copy_(image)
            else:
                self._batch = None  # stacking raises an error
        self._images.append(image)

    def _take_memory(self, image: torch.Tensor) -> None:
        self.place, pixels = self.memory.take(self.number * image.numel())
        if pixels is not None:
            channels, height, width = image.shape
            self._batch = (
                pixels.view(-1, height, width, channels).permute(0, 3, 1, 2)
                if self._expect_channels_last and self.channels_last else pixels.view(-1, channels, height, width))

    def stack(self) -> torch.Tensor:
        if self._batch is None:
            return _stack(self._images)
        memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        return self._batch[:len(self._images)].contiguous(memory_format=memory_format)


def _stack(images: Sequence[Union[np.ndarray, torch.Tensor]]) -> torch.Tensor:
    """Stack images, in their memory format; in a worker, in shared memory."""
    images = [_as_tensor(image) for image in images]
    if _are_channels_last(images):
        return _stack_contiguous([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    return _stack_contiguous([image.contiguous() for image in images])


def _stack_contiguous(images: list[torch.Tensor]) -> torch.Tensor:
    alike = all((image.shape, image.dtype) == (images[0].shape, images[0].dtype) for image in images)
    if get_worker_info() is None or not can_share() or not alike:
        return default_collate(images)  # raises an error if the images differ
    # default_collate, which clears shared memory and maps it page by page, takes 1.15 times the time to read, decode,
    # crop and stack 448 px images (benchmarks/loader.py --workers 1).
    with open(os.memfd_create('images'), 'wb') as file:
        for image in images:
            file.write(image.view(-1).view(torch.uint8).numpy())
        file.flush()
        pixels = shared_bytes(file.fileno(), file.tell())
    return pixels.view(images[0].dtype).view(len(images), *images[0].shape)


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
