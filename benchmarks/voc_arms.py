""" What benchmarks/voc.py trains: the arms, and the recipe that all of them share """
from dataclasses import dataclass
from typing import Optional, Sequence

# One schedule for all arms, chosen on the baseline alone, so that it is as strong as it gets and no other arm is tuned
# on what it is scored on; RESULTS.md has the numbers. A prototype stayed near 57 mAP at 128 px with batch statistics,
# and reached 73.8 in 4 epochs with frozen ones. Of the rates 0.02, 0.05 and 0.1 the middle one was best at 128 px, and
# twice as many epochs brought the baseline nothing.
MODEL = 'tf_efficientnet_lite0'
SIZE = 224
EPOCHS = 10
WARMUP_EPOCHS = 1
LR, BACKBONE_LR_SCALE = 0.05, 0.5
BATCH_SIZE = 32
WEIGHT_DECAY = 1e-4
# Stem and the first four of seven stages: 7 % of the weights, but on the largest maps.
FREEZE = ('conv_stem', 'bn1', 'blocks.0', 'blocks.1', 'blocks.2', 'blocks.3')

GRIDS = '1x2@0.3,2x2@0.4,2x3@0.3'  # as in configs/voc_resnet101_splicemix.yaml
_SPLICEMIX = ('--splicemix-grids', GRIDS)
_SPLICEMIX_CL = (*_SPLICEMIX, '--splicemix-cl')


@dataclass(frozen=True)
class Arm:
    """ A way to train.

    Args:
        name: What folders and --arms call it.
        title: What tables call it.
        flags: Flags of train.py beside those of the recipe.
        seeds: Number of seeds to train it with; one with 0 is trained only if it is named.
        reference: Arm that it is compared with, its own name for one that others are compared with.
        paper: mAP that the paper reports for it, None if it does not.
        is_quoted: Whether the paper has that number from another one, so that it is no gain over its baseline.
    """
    name: str
    title: str
    flags: tuple[str, ...] = ()
    seeds: int = 1
    reference: str = 'baseline'
    paper: Optional[float] = None
    is_quoted: bool = False


def _missing_label_arms(kept: str, title: str, paper: Sequence[float]) -> list[Arm]:
    ways = {
        'baseline': ('Baseline', ()),
        'asl': ('ASL', ('--loss', 'asl')),
        'splc': ('SPLC', ('--loss', 'splc')),
        'splicemix': ('SpliceMix', _SPLICEMIX),
        'splicemix-cl': ('SpliceMix-CL', _SPLICEMIX_CL),
    }
    return [
        Arm(
            f'{kept}-{name}', f'{way}, {title}', ('--keep-labels', kept, *flags), 1, f'{kept}-baseline', number,
            is_quoted='--loss' in flags)
        for (name, (way, flags)), number in zip(ways.items(), paper)]


# In the order of their importance. Alpha of Mixup and CutMix, and twice each image, are the paper's choice for them.
# Baseline + 1/4 is the fair control: as many images in a step as SpliceMix has, in as many steps.
ARMS = {arm.name: arm for arm in (
    Arm('baseline', 'Baseline', seeds=3, paper=93.3),
    Arm('splicemix', 'SpliceMix', _SPLICEMIX, seeds=3, paper=94.6),
    Arm('splicemix-cl', 'SpliceMix-CL', _SPLICEMIX_CL, seeds=3, paper=94.8),
    Arm('baseline-more', 'Baseline + 1/4', ('--batch-augment', '1.25'), seeds=3),
    Arm('splicemix-fixed', 'SpliceMix, fixed', (*_SPLICEMIX, '--splicemix-batch', 'fixed')),
    Arm('mixup', 'Mixup', ('--mixup', '0.5'), paper=93.8),
    Arm('cutmix', 'CutMix', ('--cutmix', '0.5'), paper=93.8),
    Arm('resizemix', 'ResizeMix', ('--resizemix',), paper=93.3),
    Arm('recursivemix', 'RecursiveMix', ('--recursivemix',), paper=93.3),
    Arm('batch-augment', 'Batch Augmentation', ('--batch-augment', '2'), paper=93.9),
    *_missing_label_arms('40', 'rule "40 %"', (74.4, 72.7, 75.7, 76.0, 76.9)),
    *_missing_label_arms('single', 'single label', (72.2, 71.8, 73.2, 74.4, 74.7)),
    # To find out why, not to compare: mixed images of two halves only, the largest cells that there are.
    Arm('splicemix-1x2', 'SpliceMix, 1x2 only', ('--splicemix-grids', '1x2'), seeds=0),
    # As the reference code has it for VOC: the consistency loss moves the predictions of regular images too.
    Arm('splicemix-cl-no-detach', 'SpliceMix-CL, not detached', (*_SPLICEMIX_CL, '--splicemix-cl-no-detach'), seeds=0),
)}


@dataclass(frozen=True)
class Recipe:
    """ What all arms have in common.

    Args:
        model: Model of timm.
        size: Height and width of images.
        epochs: Number of epochs.
        warmup_epochs: Epochs in which the learning rate climbs.
        lr: Learning rate of the head.
        backbone_lr_scale: That of the backbone, relative to it.
        batch_size: Number of regular images in a step.
        weight_decay: Weight decay.
        freeze: Modules that are not trained.
        head_init_scale: Scale of the model's own first weights of the classifier, with its bias; None for small weights
            and a bias that is right on average, the default of train.py.
        subset: Number of images to train on, 0 for all.
    """
    model: str = MODEL
    size: int = SIZE
    epochs: int = EPOCHS
    warmup_epochs: int = WARMUP_EPOCHS
    lr: float = LR
    backbone_lr_scale: float = BACKBONE_LR_SCALE
    batch_size: int = BATCH_SIZE
    weight_decay: float = WEIGHT_DECAY
    freeze: tuple[str, ...] = FREEZE
    head_init_scale: Optional[float] = None
    subset: int = 0

    @property
    def train_split(self) -> str:
        return f'train{self.subset}' if self.subset else 'train-only'

    def flags(self) -> list[str]:
        """Flags of train.py; crops are those of the paper's configs, all else is in the constants above."""
        flags = [
            '--dataset', 'voc/2007', '--train-split', self.train_split, '--val-split', 'val',
            '--model', self.model, '--gp', 'max', '--img-size', self.size,
            '--train-crop-mode', 'multiscale', '--train-interpolation', 'bilinear', '--color-jitter', 0,
            '--crop-mode', 'squash', '--crop-pct', 1.0, '--decoder', 'torchvision',
            '--opt', 'momentum', '--momentum', 0.9, '--weight-decay', self.weight_decay,
            '--lr', self.lr, '--backbone-lr-scale', self.backbone_lr_scale,
            '--sched', 'cosine', '--sched-on-updates', '--warmup-epochs', self.warmup_epochs, '--warmup-lr', 0,
            '--epochs', self.epochs, '--batch-size', self.batch_size, '--freeze-bn', '--channels-last']
        if self.freeze:
            flags += ['--freeze', *self.freeze]
        if self.head_init_scale is not None:
            flags += ['--head-init-scale', self.head_init_scale]
        return [str(flag) for flag in flags]


def seed_flags(arm: Arm, seed: int) -> list[str]:
    """Flags of train.py for a seed; which labels are hidden depends on it too, in all arms alike."""
    flags = ['--seed', str(seed)]
    return flags + ['--keep-labels-seed', str(seed)] if '--keep-labels' in arm.flags else flags


def run_order(names: Sequence[str] = (), num_seeds: Optional[int] = None) -> list[tuple[Arm, int]]:
    """ Arms and seeds in the order to train them: the first seed of every arm, then the second ones, and so on.

    Args:
        names: Names of arms, () for all that have seeds.
        num_seeds: Number of seeds of every arm, None for its own, at least one for an arm that is named.
    """
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise ValueError(f"Expected arms among {', '.join(ARMS)}, but got '{unknown[0]}'.")
    arms = [arm for arm in ARMS.values() if arm.name in names or (not names and arm.seeds)]
    seeds = {arm.name: max(arm.seeds, 1) if num_seeds is None else num_seeds for arm in arms}
    return [(arm, seed) for seed in range(max(seeds.values())) for arm in arms if seed < seeds[arm.name]]
