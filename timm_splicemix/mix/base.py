""" The interface of mixers and plans, and the helpers that mixers share

A mixer draws a plan (`Mixer.plan`) and then applies it (`Mixer.apply`). `SpliceMixTask` uses only the methods of
`Mixer` and `Plan`, so a new mixer is one new file with a subclass of each, and one entry in `run/factory.py`.
"""
import hashlib
import math
import random
from dataclasses import dataclass
from numbers import Real
from typing import Any, Callable, Optional, Sequence

import torch
import torch.nn.functional as F

from ..errors import UsageError

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Plan:
    """ How one batch is mixed. This base class is the plan that leaves a batch as it is.

    The mixed batch holds the regular images `kept`, followed by `num_mixed` mixed images. The tensors of a plan are on
    the CPU, so that decisions based on them never wait for a GPU.

    For consistency learning, a plan selects parts of the feature maps, such as the cells of a grid. The model predicts
    each part, and the consistency loss compares this prediction with that of the part's teacher. The methods about
    parts are called only if `num_parts` is above 0.

    Args:
        kept: (K,) int64, indices of the regular images that stay in the batch, in this order.
    """
    kept: torch.Tensor

    @property
    def num_mixed(self) -> int:
        """Number of mixed images."""
        return 0

    @property
    def num_regular(self) -> int:
        """Number of leading rows of the mixed batch whose logits are the output of a training step."""
        return len(self.kept)

    @property
    def num_parts(self) -> int:
        """Number of parts of the feature maps that consistency learning needs predictions for."""
        return 0

    def parts(self, maps: torch.Tensor, image_size: tuple[int, int]) -> list[tuple[slice, torch.Tensor]]:
        """ Cut the parts out of the feature maps.

        Args:
            maps: (K + M, C, h, w), the feature maps of the whole mixed batch.
            image_size: Height and width of the images.

        Returns:
            Slices of rows of the batch with their parts, (rows * n, C, h', w'), ordered by row.
        """
        raise NotImplementedError

    def teachers(self, logits: torch.Tensor) -> torch.Tensor:
        """ The logits that the parts are compared with, one row for each part.

        Args:
            logits: (K + M, classes), logits of the whole mixed batch.
        """
        raise NotImplementedError

    def dropped_parts(self) -> Optional[torch.Tensor]:
        """(parts,) bool, the parts that the consistency loss ignores; None if it ignores none."""
        return None

    def parts_weight(self, image_size: tuple[int, int]) -> float:
        """The factor of the consistency loss of this batch."""
        return 1.

    def captions(self) -> list[str]:
        """A short description of each row of the mixed batch, for pictures."""
        return [f'#{index}' for index in self.kept.tolist()]

    def cells(self) -> dict[int, tuple[Any, int]]:
        """For pictures: the record, and the row in it, of each row of the mixed batch that shows a grid."""
        return {}


class Mixer:
    """ Draw a plan for a batch, then apply it.

    The draws depend on (seed, rank, epoch, step) alone. The mixer counts the steps itself; a training script that can
    be resumed calls `set_step` instead. Set `mixup_enabled` to False to stop mixing.

    A subclass defines `plan` and `apply`, and overrides the other methods where it differs.

    Args:
        num_classes: Number of classes, required for integer targets, which become one-hot.
        seed: Seed of all draws.
        rank: Rank of this process, that of `torch.distributed` if None.
    """
    # True if the batches of `batches` are trained one after the other, each with its own update of the weights. They
    # are mixed already, so the task doesn't call `plan` and `apply`.
    separate_batches = False
    # True if known labels can become unknown (-1), so that the loss has to ignore unknown labels.
    makes_unknown = False

    def __init__(self, num_classes: Optional[int] = None, seed: int = 0, rank: Optional[int] = None):
        if num_classes is not None and num_classes < 1:
            raise UsageError(f'Expected num_classes of at least 1, but got {num_classes}.')
        self.num_classes = num_classes
        self.seed = seed
        self.rank = rank
        self.mixup_enabled = True
        self._epoch = 0
        self._step = 0

    def __repr__(self) -> str:
        settings = {name: value for name, value in vars(self).items() if name[0] != '_' and name != 'mixup_enabled'}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"

    def __call__(self, images: torch.Tensor, targets: torch.Tensor) -> Batch:
        return self.apply(images, targets, self.plan(len(images)))

    def plan(self, batch_size: int) -> Plan:
        """Draw how the next batch is mixed, and advance to the following step."""
        raise NotImplementedError

    def apply(self, images: torch.Tensor, targets: torch.Tensor, plan: Plan) -> Batch:
        """ Mix a batch according to a plan; this draws nothing.

        Args:
            images: (B, C, H, W).
            targets: (B, classes) multi-hot, soft or with -1 for unknown, or (B,) integer classes.
            plan: The plan that `plan(B)` returned.

        Returns:
            The kept regular images followed by the mixed images, and their targets.
        """
        raise NotImplementedError

    def batches(self, images: torch.Tensor, targets: torch.Tensor) -> list[Batch]:
        """Mix a batch, and return the batches to train on, each in its own step."""
        return [self(images, targets)]

    def remember(self, images: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor) -> None:
        """ Called after each forward pass, for mixers that reuse the previous batch.

        Args:
            images: (K + M, C, H, W), mixed images as returned by `apply`.
            targets: (K + M, classes), mixed targets as returned by `apply`.
            logits: (K + M, classes), logits of the mixed images.
        """

    def check_consistency(self) -> None:
        """Raise a `UsageError` with the reason if the plans of this mixer don't support consistency learning."""
        raise UsageError(
            f'Expected a SpliceMix for consistency learning, but got {self}: '
            'set --splicemix-grids, such as 1x2,2x2,2x3.')

    def set_step(self, epoch: int, step: int) -> None:
        """Set the epoch and step of the next batch; following batches are counted from there."""
        self._epoch = epoch
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        return {'epoch': self._epoch, 'step': self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set_step(state['epoch'], state['step'])

    def _next_generator(self, batch_size: int) -> torch.Generator:
        """The generator of this step; advances the step."""
        if batch_size < 1:
            raise UsageError(f'Expected a batch of at least one image, but got batch_size={batch_size}.')
        place = (self.seed, distributed_rank(self.rank), self._epoch, self._step)
        counters = ' '.join(str(int(counter)) for counter in place)
        digest = hashlib.blake2b(counters.encode(), digest_size=4).digest()
        self._step += 1
        return torch.Generator().manual_seed(int.from_bytes(digest, 'little'))  # torch's CPU generator uses 32 bits


class _CallableMixer(Mixer):
    """The `Mixer` interface of a callable with the contract of timm's `Mixup`; None leaves batches unmixed."""

    def __init__(self, function: Optional[Callable]):
        super().__init__()
        self.function = function

    def __repr__(self) -> str:
        return str(self.function)

    def plan(self, batch_size: int) -> Plan:
        return Plan(torch.arange(batch_size))

    def apply(self, images: torch.Tensor, targets: torch.Tensor, plan: Plan) -> Batch:
        return (images, targets) if self.function is None else self.function(images, targets)

    def set_step(self, epoch: int, step: int) -> None:
        if hasattr(self.function, 'set_step'):
            self.function.set_step(epoch, step)


def as_mixer(mixer: Optional[Callable]) -> Mixer:
    """Give any callable with the contract of timm's `Mixup`, or None, the interface of a `Mixer`."""
    return mixer if isinstance(mixer, Mixer) else _CallableMixer(mixer)


def distributed_rank(rank: Optional[int] = None) -> int:
    """The given rank, or that of `torch.distributed`."""
    if rank is not None:
        return rank
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if distributed else 0


def draw_beta(alpha: float, count: int, generator: torch.Generator) -> torch.Tensor:
    """(count,) float64 from Beta(alpha, alpha), by Python's `random`, as torch's distributions take no generator."""
    source = random.Random(int(torch.randint(2 ** 62, (), generator=generator)))
    return torch.tensor([source.betavariate(alpha, alpha) for _ in range(count)], dtype=torch.float64)


# --- checks ---


def check_probability(name: str, value: float) -> float:
    if not isinstance(value, Real) or not 0 <= value <= 1:
        raise UsageError(f'Expected {name} to be a probability from 0 to 1, but got {value}.')
    return float(value)


def check_alpha(name: str, value: float, *, positive: bool = True) -> float:
    if not isinstance(value, Real) or not 0 <= value < math.inf or (positive and value == 0):
        raise UsageError(f'Expected {name} to be a number {"above" if positive else "of at least"} 0, but got {value}.')
    return float(value)


def check_choice(name: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise UsageError(f'Expected {name} to be one of {", ".join(choices)}, but got {value!r}.')
    return value


def check_sides(name: str, sides: Sequence[float]) -> tuple[float, ...]:
    """Check the smallest and the largest side of a box, as parts of the image's sides."""
    if len(sides) != 2 or not 0 <= sides[0] <= sides[1] <= 1:
        raise UsageError(f'Expected {name} to be the smallest and the largest side, from 0 to 1, but got {sides}.')
    return tuple(sides)


def check_batch(images: torch.Tensor, targets: torch.Tensor) -> None:
    if images.ndim != 4:
        raise UsageError(f'Expected images of shape (B, C, H, W), but got {tuple(images.shape)}.')
    if not images.is_floating_point() and images.dtype != torch.uint8:
        raise UsageError(f'Expected images of a floating point type or uint8, but got {images.dtype}.')
    if targets.ndim != 2:
        raise UsageError(f'Expected targets of shape (B, classes), but got {tuple(targets.shape)}.')
    if len(targets) != len(images):
        raise UsageError(
            f'Expected as many targets as images, but got {len(targets)} targets for {len(images)} images.')
    if targets.device != images.device:
        raise UsageError(f'Expected images and targets on one device, but got {images.device} and {targets.device}.')
    if targets.device.type == 'cpu' and targets.dtype != torch.bool:  # reading values on a GPU would synchronise
        valid = (targets.clamp(0, 1) == targets) | (targets == -1)
        if not valid.all():
            raise UsageError(
                'Expected targets in [0, 1], or -1 for unknown, '
                f'but got {targets[~valid][0].item()}: are these logits, counts or class indices?')


def check_mixer_input(
        images: torch.Tensor,
        targets: torch.Tensor,
        plan_size: Optional[int],
        num_classes: Optional[int],
) -> torch.Tensor:
    """Check a batch and its plan, and return the targets as (B, classes); integer classes become one-hot."""
    if targets.ndim == 1 and not targets.is_floating_point():
        if num_classes is None:
            raise UsageError(
                'Expected num_classes to be given for integer targets, but got None: set it when creating the mixer.')
        targets = _one_hot(targets, num_classes)
    check_batch(images, targets)
    if num_classes is not None and targets.shape[1] != num_classes:
        raise UsageError(f'Expected targets of {num_classes} classes, but got {targets.shape[1]}.')
    if plan_size not in (None, len(images)):
        raise UsageError(f'Expected a plan for {len(images)} images, but got one for {plan_size}.')
    return targets


def _one_hot(targets: torch.Tensor, num_classes: int) -> torch.Tensor:
    if targets.device.type == 'cpu' and len(targets):  # reading values on a GPU would synchronise
        lowest, highest = int(targets.min()), int(targets.max())
        if lowest < 0 or highest >= num_classes:
            raise UsageError(f'Expected integer targets from 0 to {num_classes - 1}, but got {lowest} to {highest}.')
    zeros = torch.zeros(len(targets), num_classes, device=targets.device)
    return zeros.scatter_(1, targets.long().unsqueeze(1), 1.)


# --- images ---


def is_channels_last(images: torch.Tensor) -> bool:
    return not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)


def resize(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    return F.interpolate(images, size=(height, width), mode='bilinear', align_corners=True)


def gather(
        images: torch.Tensor,
        index: torch.Tensor,
        channels_last: bool,
        scratch: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """images[index] in the given memory format, stored in the flat tensor `scratch` if given."""
    view = images.permute(0, 2, 3, 1) if channels_last else images
    shape = (len(index), *view.shape[1:])
    out = None if scratch is None else scratch[:math.prod(shape)].view(shape)
    picked = torch.index_select(view, 0, index, out=out)
    return picked.permute(0, 3, 1, 2) if channels_last else picked


def gather_resized(
        images: torch.Tensor,
        index: torch.Tensor,
        height: int,
        width: int,
        scratch: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """ images[index], resized bilinearly with aligned corners.

    The branches for the CPU give the same values for finite images and differ in speed alone, by up to four times. For
    floating point images of up to three channels, and for uint8 images, torch resizes both memory formats with the
    same arithmetic, but channels_last faster with one thread (and it fails on contiguous uint8 images that shrink to
    one pixel). If the height stays, only the rows have to be resized.
    """
    on_cpu = images.device.type == 'cpu'
    if not on_cpu or is_channels_last(images) or images.shape[1] > 3:
        picked = gather(images, index, is_channels_last(images), scratch)
    elif images.dtype == torch.float32 and height == images.shape[2]:
        rows = gather(images, index, False, scratch).flatten(0, 1)  # (M * C, H, W)
        return F.interpolate(rows, size=width, mode='linear', align_corners=True).unflatten(0, (len(index), -1))
    elif images.dtype == torch.uint8:
        planes = gather(images, index, False, scratch).unbind(1)  # faster than gathering in channels_last
        picked = torch.stack(planes, dim=-1).permute(0, 3, 1, 2)
    else:
        picked = gather(images, index, torch.get_num_threads() == 1, scratch)
    if picked.dtype == torch.uint8 and not on_cpu:  # torch interpolates integers on the CPU only
        return resize(picked.float(), height, width).round_().to(torch.uint8)
    return resize(picked, height, width)
