""" A loader with timm's names whose batches depend on (seed, epoch, rank) alone """
import logging
from collections import deque
from typing import Any, Iterator, Optional, Union

import torch
import torch.utils.data
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.loader import PrefetchLoader
from timm.data.random_erasing import RandomErasing

from ..errors import UsageError
from .collate import Batch, Sample, fast_collate
from .dataset import BadImageError
from .readers.wds import WdsDataset
from .sampler import EpochBatches, SampleKey, distributed_place
from .seeding import mix_seeds, seeded
from .transforms import TRANSFORM_OPTIONS, create_transform

_logger = logging.getLogger(__name__)

ON_BAD_IMAGE = ('raise', 'skip')


class _Samples(torch.utils.data.Dataset):
    """A data set by keys, each sample with random transforms of its own."""

    def __init__(self, dataset: torch.utils.data.Dataset, seed: int):
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: SampleKey) -> Sample:
        try:
            with seeded(self.seed, *key):
                image, target, *_ = self.dataset[key.index]
        except BadImageError as error:
            return Sample(key.index, error=error)
        return Sample(key.index, image, target)


class _Stream(torch.utils.data.IterableDataset):
    """A data set that is read from its beginning to its end, which seeds its transforms itself."""

    def __init__(self, dataset: torch.utils.data.IterableDataset):
        self.dataset = dataset

    def __iter__(self) -> Iterator[Sample]:
        if not isinstance(self.dataset, WdsDataset):
            for image, target, *_ in self.dataset:
                yield Sample(None, image, target)
            return
        epoch, start_batch = self.dataset.position
        for index in self.dataset.indices(epoch, start_batch):
            try:
                yield Sample(index, *self.dataset.load(epoch, index))
            except (BadImageError, ValueError) as error:  # an image, or a label
                yield Sample(index, error=error)

    def __len__(self) -> int:
        return len(self.dataset)


class _Source:
    """ Pairs (images, targets) of the batches that workers send, and what is known about them.

    This is what timm's prefetcher iterates over. It knows nothing of those who know it: a cycle of references would let
    python end the workers in an order that makes it wait for them.
    """

    def __init__(
            self,
            loader: torch.utils.data.DataLoader,
            on_bad_image: str,
            seed: int,
            rank: int,
    ):
        self.loader = loader
        self.on_bad_image = on_bad_image
        self.seed = seed
        self.rank = rank
        self.epoch = 0
        self.start_batch = 0
        self.num_skipped = 0
        self.waiting: deque[list[Optional[int]]] = deque()  # indices of batches that are on their way

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.num_skipped = 0
        self.waiting.clear()
        for batch in self.loader:
            self._look_at(batch)
            self.waiting.append(batch.indices)
            yield batch.images, batch.targets

    def filename(self, index: Optional[int]) -> str:
        """The file of a sample, as far as the data set knows it."""
        dataset = self.loader.dataset.dataset
        return dataset.filename(index) if index is not None and hasattr(dataset, 'filename') else f'sample {index}'

    def _look_at(self, batch: Batch) -> None:
        """Tell what went wrong while the batch was read."""
        if batch.bad_target is not None:
            index, value = batch.bad_target
            raise UsageError(
                f'Expected targets in [0, 1], or -1 for unknown, but got {value} for {self.filename(index)}.')
        for error in batch.errors:
            if not isinstance(error, BadImageError):
                raise UsageError(str(error))  # another object: see above about cycles
            if self.on_bad_image == 'raise':
                raise BadImageError(error.path, error.reason)
            self.num_skipped += 1
            _logger.warning(f'Skipped {error.path}: {error.reason}')
        if not batch.indices:  # leaving the batch out would give processes different numbers of steps
            raise UsageError(
                f'Expected a readable image in each batch, but got a batch of {len(batch.errors)} that can not be '
                f'read, such as {batch.errors[0].path}: mend or remove them (python -m timm_splicemix.data.check).')


class _SeededErasing:
    """timm's random erasing of a batch on its device, drawn from the place of the batch in the run."""

    def __init__(self, source: _Source, erasing: RandomErasing, device: torch.device):
        self.source = source
        self.erasing = erasing
        self.devices = [device] if device.type == 'cuda' else []
        self.batch = 0

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        counters = (self.source.seed, self.source.rank, self.source.epoch, self.batch)
        self.batch += 1
        with torch.random.fork_rng(self.devices, enabled=bool(self.devices)), seeded(*counters):
            if self.devices:
                torch.cuda.manual_seed(mix_seeds(*counters))
            return self.erasing(images)


class MultiLabelLoader:
    """ Batches (images, targets) of a data set; made by `create_loader`.

    While a batch is worked on, `indices` says which samples it holds and `filenames()` which files, so that an error
    can name them.

    Args:
        source: Gives pairs (images, targets).
        batches: Batch sampler behind the source, None if the data set is streamed.
        prefetcher: Gives the same pairs on a device, None to leave them where they are.
    """

    def __init__(self, source: _Source, batches: Optional[EpochBatches], prefetcher: Optional[PrefetchLoader]):
        self.batches = batches
        self.indices: list[Optional[int]] = []
        self._source = source
        self._prefetcher = prefetcher

    @property
    def dataset(self) -> torch.utils.data.Dataset:
        return self._source.loader.dataset.dataset

    @property
    def sampler(self) -> Optional[EpochBatches]:
        return self.batches

    @property
    def num_skipped(self) -> int:
        """Images of this epoch that could not be read."""
        return self._source.num_skipped

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """ Say which epoch is next, and which of its batches comes first.

        Args:
            epoch: Number of the epoch.
            start_batch: Number of batches to leave out, as they were trained on before.
        """
        self._source.epoch, self._source.start_batch = epoch, start_batch
        if self.batches is not None:
            self.batches.set_epoch(epoch, start_batch)
        elif isinstance(self.dataset, WdsDataset):
            self.dataset.set_epoch(epoch, start_batch)
        elif start_batch:
            raise UsageError(
                f'Expected to begin at batch 0 of a {type(self.dataset).__name__}, but got {start_batch}: '
                'resume at the end of an epoch.')
        elif hasattr(self.dataset, 'set_epoch'):
            self.dataset.set_epoch(epoch)

    def filenames(self) -> list[str]:
        """Files of the batch that is worked on."""
        return [self._source.filename(index) for index in self.indices]

    def __len__(self) -> int:
        return len(self._source.loader) - (self._source.start_batch if self.batches is None else 0)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        source = self._source
        erasing = getattr(self._prefetcher, 'random_erasing', None)
        if erasing is not None:
            erasing.batch = source.start_batch
        for images, targets in source if self._prefetcher is None else self._prefetcher:
            self.indices = source.waiting.popleft()
            yield images, targets
        if source.num_skipped:
            _logger.warning(
                f'{source.num_skipped} image(s) that could not be read were skipped in epoch {source.epoch}.')


def create_loader(
        dataset: torch.utils.data.Dataset,
        input_size: Union[int, tuple[int, ...]],
        batch_size: int,
        is_training: bool = False,
        no_aug: bool = False,
        re_prob: float = 0.,
        re_mode: str = 'const',
        re_count: int = 1,
        re_split: bool = False,
        num_aug_repeats: int = 0,
        mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN,
        std: tuple[float, ...] = IMAGENET_DEFAULT_STD,
        num_workers: int = 1,
        pin_memory: bool = False,
        img_dtype: torch.dtype = torch.float32,
        device: torch.device = torch.device('cuda'),  # noqa: B008 - as in timm
        use_prefetcher: bool = True,
        persistent_workers: bool = True,
        decoder: str = 'pil',
        on_bad_image: str = 'raise',
        batch_copies: float = 1,
        seed: int = 0,
        rank: Optional[int] = None,
        world_size: Optional[int] = None,
        **transform_kwargs: Any,
) -> MultiLabelLoader:
    """ Create a loader, with the names and defaults of timm's function.

    Order and transforms depend on (seed, epoch, index) alone, whatever the number of workers; call `set_epoch` before
    each epoch. Processes get parts of their own as `torch.distributed` says.

    Args:
        dataset: The images; its `transform` is set here.
        input_size: Size of an image, (channels, height, width) or one number.
        batch_size: Size of a batch of one process.
        is_training: Shuffle, drop the last incomplete batch, transform at random.
        no_aug: Train without augmentation.
        re_prob: Probability of random erasing.
        re_mode: What is erased is filled with, 'const', 'rand' or 'pixel'.
        re_count: Number of areas erased.
        re_split: Erase in the second half of the batch only.
        num_aug_repeats: How often an image comes in a row, each time transformed anew; the epoch's length stays.
        mean: Mean of the normalisation.
        std: Standard deviation of the normalisation.
        num_workers: Processes that read images.
        pin_memory: Read to memory that a GPU copies from fast.
        img_dtype: Type of the images that a prefetcher gives.
        device: Where a prefetcher puts batches.
        use_prefetcher: Send uint8 images, and normalise and erase them on the device.
        persistent_workers: Keep the processes from epoch to epoch.
        decoder: 'pil' or 'torchvision'.
        on_bad_image: 'raise' an error or, in training, 'skip' images that can't be read, telling which and how many.
        batch_copies: Batch augmentation: how often each image is in its batch, each time transformed anew. Batches have
            batch_copies * batch_size images; their number stays. With 1.25, only the first quarter is there twice.
        seed: Seed of everything that is drawn.
        rank: Rank of this process, that of `torch.distributed` if None.
        world_size: Number of processes, that of `torch.distributed` if None.
        **transform_kwargs: What `create_transform` takes: `train_crop_mode`, `scale`, `hflip`, `crop_pct`, ...
    """
    if on_bad_image not in ON_BAD_IMAGE:
        raise UsageError(f"Expected on_bad_image to be {' or '.join(ON_BAD_IMAGE)}, but got '{on_bad_image}'.")
    if on_bad_image == 'skip' and not is_training:
        raise UsageError(
            "Expected on_bad_image 'raise' in evaluation, but got 'skip': "
            'a result must be over all images; mend or remove the bad ones.')
    left_out = sorted(set(transform_kwargs) - set(TRANSFORM_OPTIONS))
    if left_out:
        raise UsageError(f"Expected options that this loader has, but got {', '.join(left_out)}, see docs/data.md.")
    rank, world_size = distributed_place(rank, world_size)
    re_num_splits = 2 if re_split else 0
    dataset.transform = create_transform(
        input_size, is_training=is_training, decoder=decoder, use_prefetcher=use_prefetcher, no_aug=no_aug, mean=mean,
        std=std, re_prob=re_prob, re_mode=re_mode, re_count=re_count, re_num_splits=re_num_splits, **transform_kwargs)
    if hasattr(dataset, 'decoder'):
        dataset.decoder = decoder
    elif decoder != 'pil':
        raise UsageError(
            f"Expected decoder 'pil' for a data set of type {type(dataset).__name__}, but got '{decoder}'.")

    kwargs = {
        'num_workers': num_workers,
        'collate_fn': fast_collate,
        'pin_memory': pin_memory,
        'persistent_workers': persistent_workers and num_workers > 0,
        'generator': torch.Generator(),  # of seeds that nothing here uses; the global one is left alone
    }
    if isinstance(dataset, torch.utils.data.IterableDataset):
        if num_aug_repeats:
            raise UsageError('Expected num_aug_repeats 0 for a data set that is streamed, but got a number.')
        if batch_copies != 1:
            raise UsageError(f'Expected batch_copies 1 for a data set that is streamed, but got {batch_copies}.')
        batches = None
        if isinstance(dataset, WdsDataset):
            dataset.set_batches(batch_size, is_training, seed, rank, world_size)
        loader = torch.utils.data.DataLoader(
            _Stream(dataset), batch_size=batch_size, drop_last=is_training, **kwargs)
    else:
        batches = EpochBatches(
            len(dataset), batch_size, is_training, seed, num_aug_repeats, rank, world_size, batch_copies)
        loader = torch.utils.data.DataLoader(_Samples(dataset, seed), batch_sampler=batches, **kwargs)

    source = _Source(loader, on_bad_image, seed, rank)
    prefetcher = None
    if use_prefetcher:
        channels = input_size[0] if isinstance(input_size, (tuple, list)) and len(input_size) == 3 else len(mean)
        prefetcher = PrefetchLoader(
            source, mean=mean, std=std, channels=channels, device=device, img_dtype=img_dtype,
            re_prob=re_prob if is_training and not no_aug else 0., re_mode=re_mode, re_count=re_count,
            re_num_splits=re_num_splits)
        if prefetcher.random_erasing is not None:
            prefetcher.random_erasing = _SeededErasing(source, prefetcher.random_erasing, device)
    return MultiLabelLoader(source, batches, prefetcher)
