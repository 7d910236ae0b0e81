""" Batch sampler for any epoch, rank and first batch """
import logging
import math
import os
from typing import Callable, Iterator, NamedTuple, Optional

import torch

from ..errors import UsageError
from .seeding import mix_seeds

_logger = logging.getLogger(__name__)


class SampleKey(NamedTuple):
    """A sample and, with the seed, all that its random transforms depend on."""
    epoch: int
    index: int
    copy: int = 0


def distributed_place(rank: Optional[int] = None, world_size: Optional[int] = None) -> tuple[int, int]:
    """Rank and world size: the given ones, or those of `torch.distributed`."""
    if (rank is None) != (world_size is None):
        raise UsageError(f'Expected rank and world_size together, but got {rank} and {world_size}.')
    if rank is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    elif rank is None:
        launched = int(os.environ.get('WORLD_SIZE', 1))
        if launched > 1:  # otherwise every process would read everything
            raise UsageError(
                f'{launched} processes were launched without a process group. Call init_process_group first, or pass '
                'rank and world_size.')
        rank, world_size = 0, 1
    if not 0 <= rank < world_size:
        raise UsageError(f'Expected a rank below the world size of {world_size}, but got {rank}.')
    return rank, world_size


class EpochBatches(torch.utils.data.Sampler):
    """ A batch sampler whose batches depend on (seed, epoch, rank) alone.

    In training, samples are shuffled and every process gets the same number of full batches. In evaluation, every
    sample is in exactly one batch of one process, without padding.

    Args:
        num_samples: Size of the data set.
        batch_size: Batch size per process.
        is_training: Shuffle, and drop the samples that do not fill a batch of every process.
        seed: Seed of the order.
        repeats: Number of consecutive augmented copies of a sample; the length of the epoch does not change.
        rank: Rank of this process, by default that of `torch.distributed`.
        world_size: Number of processes, by default that of `torch.distributed`.
        copies: Number of augmented copies of each sample in its training batch, which grows by this factor. With 1.25,
            the first quarter of the batch has a second copy. Copies follow the originals.
        epoch_order: Order of the training samples as a function of (seed, epoch), by default a random permutation.
            Each process then takes a contiguous part of the samples, so that its reads stay local.
    """

    def __init__(
            self,
            num_samples: int,
            batch_size: int,
            is_training: bool = False,
            seed: int = 0,
            repeats: int = 1,
            rank: Optional[int] = None,
            world_size: Optional[int] = None,
            copies: float = 1,
            epoch_order: Optional[Callable[[int, int], torch.Tensor]] = None,
    ):
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.is_training = is_training
        self.seed = seed
        self.repeats = max(1, repeats)
        self.rank, self.world_size = distributed_place(rank, world_size)
        self.epoch_order = epoch_order
        self.epoch = 0
        self.start_batch = 0
        if batch_size < 1:
            raise UsageError(f'Expected a batch size of at least 1, but got {batch_size}.')
        if not 1 <= copies < math.inf:
            raise UsageError(f'Expected at least 1 copy of each image in a batch, but got {copies}.')
        if copies > 1 and (self.repeats > 1 or not is_training):
            raise UsageError(
                'Copies in a batch are for training without repeats, but got '
                f'{copies} copies {f"with {self.repeats} repeats" if is_training else "in evaluation"}.')
        self.copies = copies
        if is_training and num_samples < batch_size * self.world_size:
            raise UsageError(
                f'The training set of {num_samples} images does not fill one batch of {batch_size} for each of '
                f'{self.world_size} process(es). Reduce --batch-size to at most '
                f'{max(1, num_samples // self.world_size)}.')
        left_out = num_samples - self.num_batches * batch_size * self.world_size
        if is_training and epoch_order is not None and left_out and self.rank == 0:
            _logger.info(
                f'{left_out} of {num_samples} samples do not fill a batch of {batch_size} on {self.world_size} '
                'process(es) and are left out; other ones in each epoch.')

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Set the next epoch, and the number of its batches to skip when resuming."""
        self.epoch = epoch
        self.start_batch = start_batch

    @property
    def num_batches(self) -> int:
        """Batches of a whole epoch of this process."""
        if self.is_training:
            return self.num_samples // (self.batch_size * self.world_size)
        return -(-len(range(self.num_samples)[self._share()]) // self.batch_size)

    def _share(self) -> slice:
        """The part of an epoch's order that this process reads."""
        if self.epoch_order is None:
            return slice(self.rank, None, self.world_size)
        if self.is_training:
            size = self.num_batches * self.batch_size
            return slice(self.rank * size, (self.rank + 1) * size)
        return slice(*(rank * self.num_samples // self.world_size for rank in (self.rank, self.rank + 1)))

    def __len__(self) -> int:
        return max(0, self.num_batches - self.start_batch)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        order = torch.arange(self.num_samples)
        if self.is_training and self.epoch_order is not None:
            order = self.epoch_order(self.seed, self.epoch)
        elif self.is_training:
            generator = torch.Generator().manual_seed(mix_seeds(self.seed, self.epoch))
            order = torch.randperm(self.num_samples, generator=generator)
        copies = (torch.arange(self.num_samples) % self.repeats)[self._share()].tolist()
        order = order.repeat_interleave(self.repeats)[:self.num_samples][self._share()].tolist()
        for batch in range(self.start_batch, self.num_batches):
            part = slice(batch * self.batch_size, (batch + 1) * self.batch_size)
            keys = [SampleKey(self.epoch, index, copy) for index, copy in zip(order[part], copies[part])]
            for place in range(len(keys), math.floor(self.copies * len(keys) + 1e-6)):  # 1.1 * 10 is 11
                copy, original = divmod(place, self.batch_size)
                keys.append(keys[original]._replace(copy=copy))
            yield keys
