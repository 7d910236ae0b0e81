""" Arms of the VOC study and the recipe that they share """
from dataclasses import dataclass
from typing import Optional, Sequence

from timm_splicemix.errors import UsageError
from timm_splicemix.heads import HEADS

# One schedule for all arms. It was tuned on the baseline alone, so that the baseline is as strong as possible and no
# other arm is tuned on the split that it is scored on; RESULTS.md has the numbers. A prototype with batch statistics
# stayed near 57 mAP at 128 px and reached 73.8 in 4 epochs with frozen statistics.
MODEL = 'tf_efficientnet_lite0'
SIZE = 224
EPOCHS = 10
WARMUP_EPOCHS = 1
LR, BACKBONE_LR_SCALE = 0.05, 0.5
BATCH_SIZE = 32
WEIGHT_DECAY = 1e-4
# Stem and the first four of seven stages: 7 % of the weights, but most of the computation.
FREEZE = ('conv_stem', 'bn1', 'blocks.0', 'blocks.1', 'blocks.2', 'blocks.3')

GRIDS = '1x2@0.3,2x2@0.4,2x3@0.3'  # as in configs/voc_resnet101_splicemix.yaml
_SPLICEMIX = ('--splicemix-grids', GRIDS)
_ADAMW = ('--opt', 'adamw', '--lr', '1e-3')
RULE_40, HEADS_GROUP = 'Labels by the rule "40 %"', 'Heads'
# Smaller heads where the published size takes several times as long as the backbone. tdrg and dsdl have their published
# rates and clipping too: with those of the recipe, or with its rate of the backbone, they end at chance. dsdl does so
# with its published beta of 0.01 as well.
_SLOWER = ('--backbone-lr-scale', '0.1', '--clip-grad', '10')
HEAD_FLAGS = {
    'q2l': ('--head-kwargs', 'dim=512'),
    'ssgrl': ('--head-kwargs', 'steps=1'),
    'tdrg': ('--head-kwargs', 'layers=1', 'dim=256', 'graph_dim=256', 'ffn=1024', '--lr', '0.03', *_SLOWER),
    'dsdl': ('--head-kwargs', 'beta=0.001', '--lr', '0.01', *_SLOWER),
}
_SPLICEMIX_CL = (*_SPLICEMIX, '--splicemix-cl')


@dataclass(frozen=True)
class Arm:
    """ A training method to compare.

    Args:
        name: Name in folders and for --arms.
        title: Name in tables.
        flags: Flags of train.py in addition to the recipe.
        seeds: Number of seeds; an arm with 0 is trained only if --arms names it.
        reference: Arm that it is compared with; a reference names itself.
        paper: mAP that the paper reports, None if it does not.
        is_quoted: True if the paper quotes that number from another paper, so that its gain is not comparable.
        group: Title of the table that shows it.
    """
    name: str
    title: str
    flags: tuple[str, ...] = ()
    seeds: int = 1
    reference: str = 'baseline'
    paper: Optional[float] = None
    is_quoted: bool = False
    group: str = 'All labels'


def _missing_label_arms(kept: str, title: str, group: str, paper: Sequence[float]) -> list[Arm]:
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
            is_quoted='--loss' in flags, group=group)
        for (name, (way, flags)), number in zip(ways.items(), paper)]


def _head_arms() -> list[Arm]:
    """Each head, compared with global max pooling, and with SpliceMix, compared with the head alone."""
    arms = []
    for name in HEADS:
        flags = ('--gp', '', '--head', name, *HEAD_FLAGS.get(name, ()))
        arms += [
            Arm(f'head-{name}', name, flags, 0, group=HEADS_GROUP),
            Arm(f'head-{name}-splicemix', f'{name}, SpliceMix', (*flags, *_SPLICEMIX), 0, f'head-{name}',
                group=HEADS_GROUP)]
    return arms


# By importance. Alpha of Mixup and CutMix and two copies of each image in Batch Augmentation are the paper's choices.
# Baseline + 1/4 is the fair control: the number of images per step and the number of steps equal those of SpliceMix.
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
    *_missing_label_arms('40', 'rule "40 %"', RULE_40, (74.4, 72.7, 75.7, 76.0, 76.9)),
    *_missing_label_arms('single', 'single label', 'One label of each image', (72.2, 71.8, 73.2, 74.4, 74.7)),
    # For diagnosis, not for the comparison: mixed images with the largest possible cells.
    Arm('splicemix-1x2', 'SpliceMix, 1x2 only', ('--splicemix-grids', '1x2'), seeds=0),
    # As in the reference code for VOC: regular images get gradients from the consistency loss too.
    Arm('splicemix-cl-no-detach', 'SpliceMix-CL, not detached', (*_SPLICEMIX_CL, '--splicemix-cl-no-detach'), seeds=0),
    # Why does ASL lose? Its mean gradient is a fifth of BCE's: five times the rate, or an optimizer that rescales it.
    Arm('40-asl-5x', 'ASL, 5 times the learning rate, rule "40 %"',
        ('--keep-labels', '40', '--loss', 'asl', '--lr', '0.25'), 0, '40-baseline', group=RULE_40),
    Arm('40-baseline-adamw', 'Baseline, AdamW, rule "40 %"', ('--keep-labels', '40', *_ADAMW), 0, '40-baseline',
        group=RULE_40),
    Arm('40-asl-adamw', 'ASL, AdamW, rule "40 %"', ('--keep-labels', '40', '--loss', 'asl', *_ADAMW), 0,
        '40-baseline-adamw', group=RULE_40),
    *_head_arms(),
)}


@dataclass(frozen=True)
class Recipe:
    """ Settings that all arms share.

    Args:
        lr: Learning rate of the classifier; the backbone uses lr * backbone_lr_scale.
        batch_size: Number of regular images per step.
        freeze: Modules that are not trained.
        head_init_scale: Keep timm's initialisation of the classifier and scale it; None for the default of train.py
            (small weights, bias from the average number of labels).
        subset: Number of training images, 0 for all.
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
    """Flags of train.py for a seed, which also selects the labels to hide."""
    flags = ['--seed', str(seed)]
    return flags + ['--keep-labels-seed', str(seed)] if '--keep-labels' in arm.flags else flags


def run_order(names: Sequence[str] = (), num_seeds: Optional[int] = None) -> list[tuple[Arm, int]]:
    """ Arms and seeds in training order: the first seed of every arm, then the second ones, and so on.

    Args:
        names: Names of arms, () for all arms that have seeds.
        num_seeds: Number of seeds of every arm, None for the arm's own number.
    """
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise UsageError(f"Expected arms among {', '.join(ARMS)}, but got '{unknown[0]}'.")
    arms = [arm for arm in ARMS.values() if arm.name in names or (not names and arm.seeds)]
    seeds = {arm.name: max(arm.seeds, 1) if num_seeds is None else num_seeds for arm in arms}
    return [(arm, seed) for seed in range(max(seeds.values())) for arm in arms if seed < seeds[arm.name]]
