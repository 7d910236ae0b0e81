""" Names of splits: those of timm, and those of data sets """

TRAIN = ('train', 'training')
VALIDATION = ('val', 'valid', 'validation', 'eval', 'evaluation')


def is_training_split(split: str) -> bool:
    """Whether the name is that of a training split: train, training, trainval, train2014, ..."""
    return split.startswith('train')


def own_split(split: str) -> str:
    """Translate timm's 'train' and 'validation' to the names that most data sets use."""
    if split in TRAIN:
        return 'train'
    return 'val' if split in VALIDATION else split


def split_names(split: str) -> tuple[str, ...]:
    """ Names under which a data set may have a split, in the order of preference.

    A validation split may be called test, but test never means validation.
    """
    others = TRAIN if split in TRAIN else (*VALIDATION, 'test') if split in VALIDATION else ()
    return tuple(dict.fromkeys((split, *others)))
