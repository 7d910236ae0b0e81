""" What the study trains, and in which order

All runs of a setting have the same number of steps, whatever the number of images: an epoch is a fixed number of
batches. The three arms of a setting and seed share the images, their order and the first weights.
"""
from dataclasses import dataclass
from typing import Iterator, Mapping, Optional

BATCH_SIZE = 32
SEARCH_SEED = 100  # of images and weights in the search of the learning rate; no reported run shares them
PLAIN = 'plain'
ARMS = {PLAIN: 'Plain', 'splicemix': 'SpliceMix', 'splicemix-cl': 'SpliceMix-CL'}
# The same with less weight for mixed images, in some settings
QUARTER = '-quarter'
WEIGHTED_ARMS = {f'{arm}{QUARTER}': f'{ARMS[arm]}, weight 0.25' for arm in ARMS if arm != PLAIN}
ARM_COSTS = {PLAIN: 1., 'splicemix': 1.22, 'splicemix-cl': 1.25}  # core time relative to the plain arm


def without_weight(arm: str) -> str:
    """The arm with weight 1, whose learning rate an arm has."""
    return arm.removesuffix(QUARTER)


@dataclass(frozen=True)
class Recipe:
    """ Settings that share a model, and learning rates that are searched once.

    Args:
        name: Name of the recipe.
        data: Data set: 'shapes' or 'voc'.
        flags: Flags of train.py.
        grids: Grids of SpliceMix.
        rates: Learning rates that are tried with each arm; a single one is used without a search.
        search: Setting and number of images of the search.
        weights: File of the pretrained weights, None to train from scratch.
    """
    name: str
    data: str
    flags: tuple[str, ...]
    grids: str
    rates: tuple[float, ...]
    search: tuple[str, int]
    weights: Optional[str] = None

    def arm_flags(self, arm: str) -> list[str]:
        """Flags of train.py that an arm adds."""
        grids = [] if arm == PLAIN else ['--splicemix-grids', self.grids]
        consistency = ['--splicemix-cl'] if without_weight(arm) == 'splicemix-cl' else []
        return [*grids, *consistency, *(['--splicemix-weight', '0.25'] if arm in WEIGHTED_ARMS else [])]


@dataclass(frozen=True)
class Setting:
    """ A model, an image size and a way to train, for any number of images.

    Args:
        name: Name of the setting, part of the names of its runs.
        title: Name of the setting in tables.
        recipe: Its recipe.
        size: Height and width of images.
        seconds: Core time of a plain run in seconds, for the planned cost.
        flags: Flags of train.py that this setting adds.
        epochs: Number of epochs.
        batches: Batches of an epoch.
    """
    name: str
    title: str
    recipe: Recipe
    size: int
    seconds: float
    flags: tuple[str, ...] = ()
    epochs: int = 16
    batches: int = 62


# The recipe of `timm-splicemix quickstart`
SHAPES = Recipe(
    'shapes', 'shapes',
    ('--model', 'test_resnet', '--gp', 'max', '--scale', '0.6', '1', '--color-jitter', '0',
     '--train-interpolation', 'bilinear', '--opt', 'adamw', '--weight-decay', '0.02', '--warmup-epochs', '1',
     '--val-interval', '2', '--cache', 'ram'),
    grids='1x2,2x2', rates=(2e-3, 4e-3, 8e-3), search=('shapes-12x12', 800))

# The recipe of the VOC study, whose learning rate is 0.05. SpliceMix was better with 0.02 there, and long training on
# few images prefers low rates too.
_VOC = (
    '--gp', 'max', '--train-crop-mode', 'multiscale', '--train-interpolation', 'bilinear', '--color-jitter', '0',
    '--crop-mode', 'squash', '--crop-pct', '1.0', '--opt', 'momentum', '--momentum', '0.9', '--weight-decay', '1e-4',
    '--backbone-lr-scale', '0.5', '--sched', 'cosine', '--sched-on-updates', '--warmup-epochs', '1', '--warmup-lr', '0',
    '--val-interval', '5', '--cache', 'ram')
_VOC_GRIDS = '1x2@0.3,2x2@0.4,2x3@0.3'
LITE0 = Recipe(
    'lite0', 'voc', (*_VOC, '--model', 'tf_efficientnet_lite0'), _VOC_GRIDS, rates=(0.02,),
    search=('voc-160', 300), weights='tf_efficientnet_lite0-imagenet.pth')
SHUFFLENET = Recipe(
    'shufflenet', 'voc', (*_VOC, '--model', 'shufflenetv2_x0_5'), _VOC_GRIDS, rates=(0.01, 0.02),
    search=('voc-160-shufflenet', 300), weights='shufflenetv2_x0_5-backbone-rgb-imagenet-norm.pth')

_STRIDE_8 = ('--model-kwargs', 'output_stride=8')
_NARROW = ('stem_width=8', 'channels=(16, 32, 32, 64)')  # the model of the quickstart
_NARROW_STEPS = {'epochs': 12, 'batches': 50}
_LITE0_STEPS = {'epochs': 10, 'batches': 32}
_SHUFFLENET_STEPS = {'epochs': 10, 'batches': 50}
_LONG_STEPS = {'epochs': 30, 'batches': 50}
_FREEZE_STAGES = ('--freeze', 'conv_stem', 'bn1', 'blocks.0', 'blocks.1', 'blocks.2', 'blocks.3')
_SHUFFLENET_TITLE = 'VOC, ShuffleNetV2 x0.5, 160 px'
SETTINGS = {setting.name: setting for setting in (
    Setting('shapes-12x12', 'shapes, wider model, 12x12 map', SHAPES, 96, 220, _STRIDE_8),
    Setting('narrow-12x12', 'shapes, 12x12 map', SHAPES, 96, 140, (*_STRIDE_8, *_NARROW), **_NARROW_STEPS),
    Setting('narrow-3x3', 'shapes, 3x3 map', SHAPES, 96, 95, ('--model-kwargs', *_NARROW), **_NARROW_STEPS),
    # `timm-splicemix quickstart`, see keep_quickstart.py: as it is, and with the wider model
    Setting('quickstart-100', 'shapes, 12x12 map (quickstart)', SHAPES, 96, 65),
    Setting('quickstart-70', 'shapes, wider model, 12x12 map, 420 steps', SHAPES, 96, 90),
    Setting('voc-160', 'VOC, lite0, 160 px', LITE0, 160, 420, ('--freeze-bn', *_FREEZE_STAGES), **_LITE0_STEPS),
    # All stages are trained, with batch statistics
    Setting('voc-160-shufflenet', _SHUFFLENET_TITLE, SHUFFLENET, 160, 210, **_SHUFFLENET_STEPS),
    Setting('voc-160-shufflenet-long', f'{_SHUFFLENET_TITLE}, 1,500 steps', SHUFFLENET, 160, 630, **_LONG_STEPS),
    # The same with one thing frozen
    Setting(
        'voc-160-shufflenet-long-bn', f'{_SHUFFLENET_TITLE}, 1,500 steps, frozen statistics', SHUFFLENET, 160, 630,
        ('--freeze-bn',), **_LONG_STEPS),
    Setting(
        'voc-160-shufflenet-long-stages', f'{_SHUFFLENET_TITLE}, 1,500 steps, frozen first stages', SHUFFLENET, 160,
        450, ('--freeze', 'conv1', 'stage2'), **_LONG_STEPS),
    Setting(
        'voc-224-shufflenet', 'VOC, ShuffleNetV2 x0.5, 224 px', SHUFFLENET, 224, 380, **_SHUFFLENET_STEPS),
)}


@dataclass(frozen=True)
class Run:
    """ One training run.

    Args:
        setting: Its setting.
        images: Number of training images.
        arm: Its arm, a key of `ARMS` or `WEIGHTED_ARMS`.
        seed: Seed of the training images, of the first weights and of the order of batches.
        lr: Learning rate.
    """
    setting: Setting
    images: int
    arm: str
    seed: int
    lr: float

    @property
    def name(self) -> str:
        return f'{self.setting.name}-{self.images}-{self.arm}-seed{self.seed}-lr{self.lr:g}'

    @property
    def seconds(self) -> float:
        """Planned core time in seconds."""
        return self.setting.seconds * ARM_COSTS[without_weight(self.arm)]

    @property
    def is_search(self) -> bool:
        return self.seed == SEARCH_SEED

    def flags(self) -> list[str]:
        """Flags of train.py without paths."""
        return [
            *self.setting.recipe.flags, *self.setting.flags, *self.setting.recipe.arm_flags(self.arm),
            '--img-size', str(self.setting.size), '--lr', f'{self.lr:g}', '--seed', str(self.seed),
            '--epochs', str(self.setting.epochs), '--train-batches-per-epoch', str(self.setting.batches),
            '--batch-size', str(BATCH_SIZE), '--channels-last', '--decoder', 'torchvision']


@dataclass(frozen=True)
class Block:
    """ Runs that follow each other in the queue.

    Args:
        setting: Name of the setting.
        images: Numbers of training images.
        seeds: Seeds; all runs of a seed come before those of the next one.
        arms: Arms.
    """
    setting: str
    images: tuple[int, ...]
    seeds: tuple[int, ...]
    arms: tuple[str, ...] = tuple(ARMS)


@dataclass(frozen=True)
class Search:
    """ The search of the learning rate of all arms of a recipe.

    Args:
        recipe: The recipe.
    """
    recipe: Recipe


ORDER = (
    # The wider model has the search, and six reported runs.
    Block('shapes-12x12', (400, 2000), (0,)),
    Search(SHAPES),
    Block('narrow-12x12', (400, 2000), (0, 1, 2)),
    Search(SHUFFLENET),
    Block('voc-160-shufflenet', (300, 600), (0,)),
    Block('narrow-12x12', (200,), (0, 1, 2), (*ARMS, *WEIGHTED_ARMS)),
    Block('narrow-12x12', (2000,), (0, 1, 2), tuple(WEIGHTED_ARMS)),
    Block('voc-160', (300,), (0,)),
    Block('voc-160', (300,), (0,), ('splicemix-quarter',)),
    Block('narrow-3x3', (400, 2000), (0,)),
    Block('voc-160-shufflenet', (300,), (1, 2)),
    Block('voc-160-shufflenet', (300,), (0,), tuple(WEIGHTED_ARMS)),
    Block('voc-160-shufflenet', (600,), (1, 2)),
    Block('voc-160-shufflenet-long', (300,), (0,)),
    Block('voc-160', (300,), (1, 2)),
    Block('narrow-3x3', (400, 2000), (1, 2)),
    Block('voc-160-shufflenet-long', (300,), (1, 2), (PLAIN, 'splicemix')),
    Block('voc-160-shufflenet-long-bn', (300,), (0,), (PLAIN, 'splicemix')),
    Block('voc-160-shufflenet-long-stages', (300,), (0,), (PLAIN, 'splicemix')),
    Block('narrow-12x12', (800,), (0, 1, 2)),
    Block('voc-224-shufflenet', (300,), (0,)),
    Block('voc-160-shufflenet-long', (300,), (1, 2)),
    Block('voc-160', (600,), (0, 1, 2)),
    Block('narrow-3x3', (200, 800), (0, 1, 2)),
    Block('voc-160-shufflenet', (2500,), (0, 1, 2)),
)


def search_runs(recipe: Recipe, arm: str) -> list[Run]:
    """All runs of the search of an arm's learning rate."""
    setting, images = recipe.search
    return [Run(SETTINGS[setting], images, arm, SEARCH_SEED, lr) for lr in recipe.rates]


def chosen_rate(recipe: Recipe, arm: str, scores: Mapping[str, float]) -> Optional[float]:
    """ The learning rate with the best mAP of the search, None while a run of it is missing.

    Args:
        recipe: The recipe.
        arm: The arm.
        scores: mAP of each finished run, by its name.
    """
    runs = search_runs(recipe, without_weight(arm))
    if len(runs) == 1:
        return runs[0].lr
    if any(run.name not in scores for run in runs):
        return None
    return max(runs, key=lambda run: scores[run.name]).lr


def runs_in_order(scores: Mapping[str, float], assume: bool = False) -> Iterator[Run]:
    """ All runs in the order of the queue, each once.

    Args:
        scores: mAP of each finished run, by its name.
        assume: Use the middle rate where the search isn't finished; such runs are left out otherwise.
    """
    seen = set()
    for block in ORDER:
        if isinstance(block, Search):
            found = [run for arm in ARMS for run in search_runs(block.recipe, arm)]
        else:
            setting = SETTINGS[block.setting]
            rates = {}
            for arm in block.arms:
                rate = chosen_rate(setting.recipe, arm, scores)
                rates[arm] = rate or (setting.recipe.rates[1] if assume else None)
            found = [
                Run(setting, images, arm, seed, rates[arm])
                for seed in block.seeds for images in block.images for arm in block.arms if rates[arm] is not None]
        for run in found:
            if run.name not in seen:
                seen.add(run.name)
                yield run


def find_run(name: str) -> Run:
    """ The run of a name, whatever the search has chosen.

    Args:
        name: Name of a run.
    """
    for block in ORDER:
        recipe = block.recipe if isinstance(block, Search) else SETTINGS[block.setting].recipe
        runs = [run for arm in ARMS for run in search_runs(recipe, arm)]
        if isinstance(block, Block):
            runs = [
                Run(SETTINGS[block.setting], images, arm, seed, lr)
                for images in block.images for seed in block.seeds for arm in block.arms for lr in recipe.rates]
        for run in runs:
            if run.name == name:
                return run
    raise ValueError(f"Expected the name of a run of the plan, but got '{name}'.")
