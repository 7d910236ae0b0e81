""" Names of splits: timm's, and those that data sets give them """

TRAIN = ('train', 'training')
VALIDATION = ('val', 'valid', 'validation', 'eval', 'evaluation')


def is_training_split(split: str) -> bool:
    """Whether a split is one to train on, by its name: train, training, trainval, train2014, ..."""
    return split.startswith('train')


def own_split(split: str) -> str:
    """The name that most data sets give to a split that timm calls 'train' or 'validation'."""
    if split in TRAIN:
        return 'train'
    return 'val' if split in VALIDATION else split


def split_names(split: str) -> tuple[str, ...]:
    """ The names under which a data set may have a split, in the order in which to look for them.

    What validates may be called test, but what is asked for as test is never validation.
    """
    others = TRAIN if split in TRAIN else (*VALIDATION, 'test') if split in VALIDATION else ()
    return tuple(dict.fromkeys((split, *others)))
