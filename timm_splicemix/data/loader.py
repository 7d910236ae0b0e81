""" A loader with timm's interface whose batches depend on (seed, epoch, rank) alone """
import logging
from collections import deque
from typing import Any, Iterator, Optional, Sequence, Union

import torch
import torch.utils.data
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.loader import PrefetchLoader
from timm.data.random_erasing import RandomErasing

from ..errors import UsageError
from .batch_memory import BatchMemory, can_share
from .collate import Batch, FastCollate, LazySamples, Sample
from .dataset import BadImageError
from .sampler import EpochBatches, SampleKey, distributed_place
from .seeding import mix_seeds, seeded
from .transforms import TRANSFORM_OPTIONS, create_transform
from .workers import ignore_signals, signals_blocked

_logger = logging.getLogger(__name__)

ON_BAD_IMAGE = ('raise', 'skip')


class _Samples(torch.utils.data.Dataset):
    """A data set indexed by `SampleKey`, which seeds the transforms."""

    def __init__(self, dataset: torch.utils.data.Dataset, seed: int):
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: SampleKey) -> Sample:
        try:
            with seeded(self.seed, *key):
                image, target, *_ = self.dataset[key.index]
        except UsageError as error:  # an unreadable image, or a bad label
            return Sample(key.index, error=error)
        return Sample(key.index, image, target)

    def __getitems__(self, keys: Sequence[SampleKey]) -> LazySamples:
        return LazySamples(self, keys)


class _Stream(torch.utils.data.IterableDataset):
    """Samples of an iterable data set of timm, which seeds its transforms itself."""

    def __init__(self, dataset: torch.utils.data.IterableDataset):
        self.dataset = dataset

    def __iter__(self) -> Iterator[Sample]:
        for image, target, *_ in self.dataset:
            yield Sample(None, image, target)

    def __len__(self) -> int:
        return len(self.dataset)


class _Source:
    """ Pairs (images, targets) of the workers' batches, as timm's prefetcher wants them.

    It holds no reference to the loader or the prefetcher: with a reference cycle, Python would shut the workers down in
    an order that makes it wait for them.
    """

    def __init__(
            self,
            loader: torch.utils.data.DataLoader,
            on_bad_image: str,
            seed: int,
            rank: int,
    ):
        self.loader: Optional[torch.utils.data.DataLoader] = loader
        self.dataset = loader.dataset.dataset
        self.on_bad_image = on_bad_image
        self.seed = seed
        self.rank = rank
        self.epoch = 0
        self.start_batch = 0
        self.num_skipped = 0
        self.waiting: deque[list[Optional[int]]] = deque()  # indices of prefetched batches of the newest pass

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.num_skipped = 0
        waiting, memory = self.waiting, self.loader.collate_fn.memory
        if memory is not None and not self.loader.persistent_workers:  # another pass may use the last one
            memory = BatchMemory(self.loader.num_workers)
            self.loader.collate_fn = FastCollate(memory)
        with signals_blocked():
            batches = iter(self.loader)  # starts the workers
        for batch in batches:
            self._check(batch)
            waiting.append(batch.indices)
            yield batch.images, batch.targets
            if batch.place is not None:  # the prefetcher has copied the images
                memory.release(batch.place)

    def filename(self, index: Optional[int]) -> str:
        if index is None or not hasattr(self.dataset, 'filename'):
            return f'sample {index}'
        return self.dataset.filename(index)

    def _check(self, batch: Batch) -> None:
        """Raise, or log, what went wrong in a worker."""
        if batch.bad_target is not None:
            index, value = batch.bad_target
            raise UsageError(
                f'Expected targets in [0, 1], or -1 for unknown, but got {value} for {self.filename(index)}.')
        for error in batch.errors:
            if not isinstance(error, BadImageError):
                raise UsageError(str(error))  # a new object: tracebacks hold references, see above
            if self.on_bad_image == 'raise':
                raise BadImageError(error.path, error.reason)
            self.num_skipped += 1
            _logger.warning(f'Skipped {error.path}: {error.reason}')
        if not batch.indices:  # skipping the batch would give processes different numbers of steps
            raise UsageError(
                f'None of the {len(batch.errors)} images of a batch can be read, such as {batch.errors[0].path}. '
                'Repair or remove them; python -m timm_splicemix.check lists all.')


class _SeededErasing:
    """timm's random erasing of a batch on its device, seeded by (seed, rank, epoch, batch)."""

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
    """ Batches (images, targets) of a data set, created by `create_loader`.

    `indices` and `filenames()` are the samples and files of the current batch, for error messages.
    """
    mixup_enabled = False  # as of timm's loader, which its train script reads; the task mixes

    def __init__(self, source: _Source, batches: Optional[EpochBatches], prefetcher: Optional[PrefetchLoader]):
        self.batches = batches
        self.indices: list[Optional[int]] = []
        self._source = source
        self._prefetcher = prefetcher

    @property
    def dataset(self) -> torch.utils.data.Dataset:
        return self._source.dataset

    @property
    def sampler(self) -> Optional[EpochBatches]:
        return self.batches

    @property
    def batch_sampler(self) -> Optional[EpochBatches]:
        return self.batches

    @property
    def num_skipped(self) -> int:
        """Unreadable images of this epoch."""
        return self._source.num_skipped

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Set the next epoch, and the number of its batches to skip when resuming."""
        self._source.epoch, self._source.start_batch = epoch, start_batch
        if self.batches is not None:
            self.batches.set_epoch(epoch, start_batch)
        elif start_batch:
            raise UsageError(
                f'A {type(self.dataset).__name__} cannot be resumed at batch {start_batch}. Resume from a checkpoint '
                'at the end of an epoch.')
        elif hasattr(self.dataset, 'set_epoch'):
            self.dataset.set_epoch(epoch)

    def filenames(self, indices: Optional[Sequence[Optional[int]]] = None) -> list[str]:
        """Return the file names of samples, by default those of the current batch."""
        return [self._source.filename(index) for index in (self.indices if indices is None else indices)]

    def close(self) -> None:
        """End the workers. Otherwise they end when Python collects reference cycles, which waits for each of them."""
        self._source.loader = None

    def __len__(self) -> int:
        return len(self._source.loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        source = self._source
        erasing = getattr(self._prefetcher, 'random_erasing', None)
        if erasing is not None:
            erasing.batch = source.start_batch
        waiting = source.waiting = deque()  # each pass has its own
        for images, targets in source if self._prefetcher is None else self._prefetcher:
            self.indices = waiting.popleft()
            yield images, targets
        if source.num_skipped:
            _logger.warning(
                f'{source.num_skipped} unreadable image(s) were skipped in epoch {source.epoch}.')


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
        scaled_decoding: bool = False,
        on_bad_image: str = 'raise',
        batch_copies: float = 1,
        seed: int = 0,
        rank: Optional[int] = None,
        world_size: Optional[int] = None,
        **transform_kwargs: Any,
) -> MultiLabelLoader:
    """ Create a loader, with the names and defaults of timm's function.

    Order and transforms depend on (seed, epoch, index) alone, for any number of workers. Call `set_epoch` before each
    epoch.

    Args:
        dataset: The images; its `transform` is set here.
        input_size: Image size, (channels, height, width) or one number.
        batch_size: Batch size per process.
        is_training: Shuffle, drop the last incomplete batch, transform at random.
        no_aug: Train without augmentation.
        re_prob: Probability of random erasing.
        re_mode: Fill of erased areas: 'const', 'rand' or 'pixel'.
        re_count: Number of erased areas.
        re_split: Erase in the second half of the batch only.
        num_aug_repeats: Number of consecutive augmented copies of an image; the length of the epoch does not change.
        mean: Mean of the normalisation.
        std: Standard deviation of the normalisation.
        num_workers: Number of worker processes.
        pin_memory: Pin batches in memory.
        img_dtype: Type of the images that the prefetcher returns.
        device: Device of the prefetcher.
        use_prefetcher: Send uint8 images to the device, and normalise and erase them there.
        persistent_workers: Keep the worker processes between epochs.
        decoder: 'pil' or 'torchvision'.
        scaled_decoding: Decode JPEG files at 1/2, 1/4 or 1/8 of their size where the crop needs no more.
        on_bad_image: 'raise' an error for unreadable images or, in training, 'skip' and log them.
        batch_copies: Batch augmentation: the number of augmented copies of each image in its batch, which grows to
            batch_copies * batch_size images. With 1.25, the first quarter of the batch has a second copy.
        seed: Seed of order, transforms and erasing.
        rank: Rank of this process, by default that of `torch.distributed`.
        world_size: Number of processes, by default that of `torch.distributed`.
        **transform_kwargs: Arguments of `create_transform`: `train_crop_mode`, `scale`, `hflip`, `crop_pct`, ...
    """
    if on_bad_image not in ON_BAD_IMAGE:
        raise UsageError(f"Expected on_bad_image to be {' or '.join(ON_BAD_IMAGE)}, but got '{on_bad_image}'.")
    if on_bad_image == 'skip' and not is_training:
        raise UsageError(
            "on_bad_image 'skip' is for training alone, as an evaluation must score all images. Repair or remove the "
            'unreadable ones.')
    unknown = sorted(set(transform_kwargs) - set(TRANSFORM_OPTIONS))
    if unknown:
        raise UsageError(f"Unknown options of the loader: {', '.join(unknown)}. See docs/data.md.")
    rank, world_size = distributed_place(rank, world_size)
    re_num_splits = 2 if re_split else 0
    dataset.transform = create_transform(
        input_size, is_training=is_training, decoder=decoder, use_prefetcher=use_prefetcher, no_aug=no_aug, mean=mean,
        std=std, re_prob=re_prob, re_mode=re_mode, re_count=re_count, re_num_splits=re_num_splits,
        scaled_decoding=scaled_decoding, **transform_kwargs)
    if hasattr(dataset, 'decoder'):
        dataset.decoder = decoder
        dataset.scaled_decoding = scaled_decoding
    elif decoder != 'pil' or scaled_decoding:
        raise UsageError(
            f"A data set of type {type(dataset).__name__} supports decoder 'pil' without scaled decoding only.")

    # On the CPU, the prefetcher has copied a batch when it asks for the next one; with pin_memory, a thread has copied
    # it before. Other devices, and CUDA without pin_memory, may still be copying when the call returns.
    device_type = torch.device(device).type
    recycle = use_prefetcher and num_workers > 0 and can_share() and (
        device_type == 'cpu' or (device_type == 'cuda' and pin_memory))
    kwargs = {
        'num_workers': num_workers,
        'collate_fn': FastCollate(BatchMemory(num_workers) if recycle else None),
        'pin_memory': pin_memory,
        'persistent_workers': persistent_workers and num_workers > 0,
        'worker_init_fn': ignore_signals,
        'generator': torch.Generator(),  # keeps the DataLoader from drawing from the global one
    }
    if isinstance(dataset, torch.utils.data.IterableDataset):
        if num_aug_repeats or batch_copies != 1:
            raise UsageError(
                'num_aug_repeats and batch_copies need a data set with random access, but got one of type '
                f'{type(dataset).__name__}.')
        batches = None
        loader = torch.utils.data.DataLoader(
            _Stream(dataset), batch_size=batch_size, drop_last=is_training, **kwargs)
    else:
        batches = EpochBatches(
            len(dataset), batch_size, is_training, seed, num_aug_repeats, rank, world_size, batch_copies,
            epoch_order=getattr(getattr(dataset, 'reader', None), 'epoch_order', None))
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
