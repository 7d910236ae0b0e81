""" Which samples make up which batch, for any epoch, rank and place to start from """
import math
import os
from typing import Iterator, NamedTuple, Optional

import torch

from ..errors import UsageError
from .seeding import mix_seeds


class SampleKey(NamedTuple):
    """What a sample and its random transforms depend on, beside the seed."""
    epoch: int
    index: int
    copy: int = 0


def distributed_place(rank: Optional[int] = None, world_size: Optional[int] = None) -> tuple[int, int]:
    """Rank and number of processes, as given or as `torch.distributed` says."""
    if (rank is None) != (world_size is None):
        raise UsageError(f'Expected rank and world_size together, but got {rank} and {world_size}.')
    if rank is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    elif rank is None:
        launched = int(os.environ.get('WORLD_SIZE', 1))
        if launched > 1:  # else every process would read everything
            raise UsageError(
                f'Expected a process group, but got none where {launched} processes were launched: call '
                'init_process_group before, or give rank and world_size.')
        rank, world_size = 0, 1
    if not 0 <= rank < world_size:
        raise UsageError(f'Expected a rank below the world size of {world_size}, but got {rank}.')
    return rank, world_size


class EpochBatches(torch.utils.data.Sampler):
    """ A batch sampler whose batches depend on (seed, epoch, rank) alone.

    In training, samples are shuffled and every process gets the same number of full batches. In evaluation, every
    sample is in exactly one batch of one process: nothing is padded, nothing is left out.

    Args:
        num_samples: Size of the data set.
        batch_size: Size of a batch of one process.
        is_training: Shuffle, and drop what does not fill a batch of every process.
        seed: Seed of the order.
        repeats: How often a sample comes in a row, each time transformed anew; the length of the epoch stays.
        rank: Rank of this process, that of `torch.distributed` if None.
        world_size: Number of processes, that of `torch.distributed` if None.
        copies: How often each sample is in its batch, each time transformed anew, which makes the batches of training
            larger; of 1.25 copies, the first quarter of the batch is there twice. The copies follow the originals.
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
    ):
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.is_training = is_training
        self.seed = seed
        self.repeats = max(1, repeats)
        self.rank, self.world_size = distributed_place(rank, world_size)
        self.epoch = 0
        self.start_batch = 0
        if batch_size < 1:
            raise UsageError(f'Expected a batch size of at least 1, but got {batch_size}.')
        if not 1 <= copies < math.inf:
            raise UsageError(f'Expected at least 1 copy of each image in a batch, but got {copies}.')
        if copies > 1 and (self.repeats > 1 or not is_training):
            raise UsageError(
                f'Expected copies in a batch in training only, and not with repeats, but got {copies} copies '
                f'{f"with {self.repeats} repeats" if is_training else "in evaluation"}.')
        self.copies = copies
        if is_training and num_samples < batch_size * self.world_size:
            raise UsageError(
                f'Expected at least one batch of {batch_size} images for each of {self.world_size} process(es), '
                f'but got a training set of {num_samples}: reduce --batch-size to at most '
                f'{max(1, num_samples // self.world_size)}.')

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """ Say which epoch is next, and which of its batches comes first.

        Args:
            epoch: Number of the epoch.
            start_batch: Number of batches to leave out, as they were trained on before.
        """
        self.epoch = epoch
        self.start_batch = start_batch

    @property
    def num_batches(self) -> int:
        """Batches of a whole epoch."""
        if self.is_training:
            return self.num_samples // (self.batch_size * self.world_size)
        mine = len(range(self.rank, self.num_samples, self.world_size))
        return -(-mine // self.batch_size)

    def __len__(self) -> int:
        return max(0, self.num_batches - self.start_batch)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        order = torch.arange(self.num_samples)
        if self.is_training:
            generator = torch.Generator().manual_seed(mix_seeds(self.seed, self.epoch))
            order = torch.randperm(self.num_samples, generator=generator)
        copies = torch.arange(self.num_samples) % self.repeats
        order = order.repeat_interleave(self.repeats)[:self.num_samples]
        order, copies = order[self.rank::self.world_size].tolist(), copies[self.rank::self.world_size].tolist()
        for batch in range(self.start_batch, self.num_batches):
            part = slice(batch * self.batch_size, (batch + 1) * self.batch_size)
            keys = [SampleKey(self.epoch, index, copy) for index, copy in zip(order[part], copies[part])]
            for place in range(len(keys), math.floor(self.copies * len(keys) + 1e-6)):  # 1.1 * 10 is 11
                copy, original = divmod(place, self.batch_size)
                keys.append(keys[original]._replace(copy=copy))
            yield keys
