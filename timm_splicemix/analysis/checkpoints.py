""" Checkpoints that an analysis compares """
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Sequence, Union

from torch import nn

from ..errors import UsageError
from ..run.checkpoint import (
    BEST,
    LAST,
    CheckpointInfo,
    find_checkpoint,
)
from ..run.load import load_model


@dataclass(frozen=True)
class Checkpoint:
    """ A model to compare with others.

    Args:
        name: What to call it: the shortest end of its path that no other has.
        model: The model, in evaluation mode.
        info: What is known about it.
        class_names: Name of each output, its number if the checkpoint has no names.
    """
    name: str
    model: nn.Module
    info: CheckpointInfo
    class_names: tuple[str, ...]


def short_names(paths: Sequence[Union[str, Path]]) -> list[str]:
    """ The shortest ends of paths that tell them apart.

    Args:
        paths: Files or folders; two that are the same are refused.
    """
    parts = [Path(path).resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        twice = next(path for path, part in zip(paths, parts) if parts.count(part) > 1)
        raise UsageError(f'Expected different paths to compare, but got {twice} twice.')
    lengths = range(1, max(map(len, parts)) + 1)
    candidates = (['/'.join(part[-length:]) for part in parts] for length in lengths)
    return next(names for names in candidates if len(set(names)) == len(names))


def load_checkpoints(
        paths: Sequence[Union[str, Path]],
        names: Optional[Sequence[str]] = None,
        model_name: Optional[str] = None,
        use_ema: bool = False,
) -> list[Checkpoint]:
    """ Load models to compare.

    Args:
        paths: Checkpoint files, or folders of runs, of which the best checkpoint is taken, else the last.
        names: What to call them, by their paths if None.
        model_name: Name of the model, where a checkpoint does not say.
        use_ema: Take the moving averages of the weights.
    """
    files = []
    for path in map(Path, paths):
        best = path / BEST
        files.append(best if best.is_file() else find_checkpoint(path))
    checkpoints = []
    telling = [file.parent for file in files] if {file.name for file in files} in ({BEST}, {LAST}) else files
    own = short_names(telling)
    if names is not None and not len(names) == len(set(names)) == len(own):
        raise UsageError(f'Expected {len(own)} different --names, one for each, but got {" ".join(names)}.')
    for file, name in zip(files, names or own):
        model, info = load_model(file, model_name=model_name, use_ema=use_ema)
        classes = tuple(info.class_names or map(str, range(model.num_classes)))
        checkpoints.append(Checkpoint(name, model, info, classes))
    return checkpoints
