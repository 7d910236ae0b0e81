""" Multi-label heads on feature maps """
import inspect
from typing import Any, Mapping, Optional, Sequence, Union

import torch

from ..errors import UsageError
from .add_gcn import ADDGCN
from .base import SIDE_INPUTS, Head
from .csra import CSRA
from .dsdl import DSDL
from .ml_decoder import MLDecoder
from .ml_gcn import MLGCN
from .q2l import Q2L
from .ssgrl import SSGRL
from .tdrg import TDRG

__all__ = [
    'ADDGCN',
    'CSRA',
    'DSDL',
    'HEADS',
    'MLGCN',
    'Q2L',
    'SIDE_INPUTS',
    'SSGRL',
    'TDRG',
    'Head',
    'MLDecoder',
    'create_head',
    'head_class',
    'head_options',
    'list_heads',
    'stored_side_inputs',
]

HEADS: dict[str, type[Head]] = {
    'csra': CSRA,
    'ml-decoder': MLDecoder,
    'q2l': Q2L,
    'ml-gcn': MLGCN,
    'ssgrl': SSGRL,
    'add-gcn': ADDGCN,
    'tdrg': TDRG,
    'dsdl': DSDL,
}


def list_heads() -> list[str]:
    """Names of all heads."""
    return list(HEADS)


def head_class(name: str) -> type[Head]:
    """ The class of a head, whose attributes tell what it needs: `num_maps`, `side_inputs`, `supports_cells`.

    Args:
        name: A name in `list_heads()`.
    """
    if name not in HEADS:
        raise UsageError(f"Expected a head among {', '.join(HEADS)}, but got '{name}'.")
    return HEADS[name]


def head_options(name: str) -> dict[str, Any]:
    """ Options of a head and their defaults.

    Args:
        name: A name in `list_heads()`.
    """
    found = head_class(name)
    parameters = inspect.signature(found).parameters.values()
    not_options = ('in_channels', 'num_classes', *found.side_inputs)
    return {parameter.name: parameter.default for parameter in parameters if parameter.name not in not_options}


def create_head(
        name: str,
        in_channels: Union[int, Sequence[int]],
        num_classes: int,
        *,
        side_inputs: Optional[Mapping[str, Any]] = None,
        **kwargs: Any,
) -> Head:
    """ Create a head.

        head = create_head('csra', in_channels=2048, num_classes=80, heads=4, lam=0.5)

    Args:
        name: A name in `list_heads()`.
        in_channels: Channels of the feature map; a sequence for a head that needs several maps.
        num_classes: Number of classes.
        side_inputs: By name, what the head needs beside feature maps, as tensors or arrays; others are ignored.
            'class_vectors': (num_classes, D) word vectors, whose floating-point type the head keeps for its buffers
            until it is converted as a whole. 'cooccurrence': a tuple of label counts (num_classes,), images with each
            class, and joint counts (num_classes, num_classes), images with both classes, whose diagonal is ignored.
        **kwargs: Options of the head.
    """
    found, options = head_class(name), head_options(name)
    for option in kwargs:
        if option not in options:
            choices = f"its options are {', '.join(options)}" if options else 'it has no options'
            raise UsageError(f"Unknown option '{option}' of head '{name}': {choices}.")
    side_inputs = side_inputs or {}
    for key in found.side_inputs:
        if side_inputs.get(key) is None:
            raise UsageError(f"Head '{name}' needs {_MEANING[key]}: pass it as side_inputs[{key!r}].")
    needed = {key: _convert_side_input(name, key, side_inputs[key], num_classes) for key in found.side_inputs}
    return found(in_channels, num_classes, **needed, **kwargs)


_MEANING = {
    'class_vectors': 'a vector per class',
    'cooccurrence': 'the label counts and joint counts of the training set',
}


def _convert_side_input(name: str, key: str, value: Any, num_classes: int) -> Any:
    """One tensor, or a tuple of two tensors, of the right shapes."""
    one = key == 'class_vectors'
    expected: list[tuple] = [(num_classes, 'D')] if one else [(num_classes,), (num_classes, num_classes)]
    try:
        tensors = tuple(torch.as_tensor(part) for part in ([value] if one else value))
    except (TypeError, ValueError, RuntimeError) as error:
        found = type(value).__name__
        raise UsageError(f"Expected {_MEANING[key]} in side_inputs['{key}'], but got {found}: {error}") from error
    shapes = [tuple(tensor.shape) for tensor in tensors]
    fits = len(shapes) == len(expected) and all(
        len(shape) == len(wanted) and all(size == want or (want == 'D' and size) for size, want in zip(shape, wanted))
        for shape, wanted in zip(shapes, expected))
    if one and not tensors[0].is_floating_point():
        raise UsageError(f"Expected floating-point numbers in side_inputs['{key}'], but got {tensors[0].dtype}.")
    if fits and not all(tensor.isfinite().all() for tensor in tensors):
        raise UsageError(f"Expected finite numbers in side_inputs['{key}'] for head '{name}', but got others.")
    if not fits:
        wanted = ' and '.join(f"({', '.join(map(str, shape))})" for shape in expected)
        raise UsageError(
            f"Expected side_inputs['{key}'] of shape {wanted} for head '{name}' with {num_classes} classes, but got "
            f"{' and '.join(map(str, shapes))}.")
    return tensors[0] if one else tensors


def stored_side_inputs(name: str, state_dict: Mapping[str, torch.Tensor], prefix: str = '') -> dict[str, Any]:
    """ Side inputs of the right shapes for `create_head`, if `state_dict` will be loaded into the head.

    Heads keep class vectors in the buffer `class_vectors`, and the matrix that they compute from counts in the buffer
    `adjacency`. A checkpoint therefore restores a head completely. Counts cannot be recovered from the matrix; those
    that are returned are 0, and loading the state dict replaces the matrix that the head computes from them.

    Args:
        name: A name in `list_heads()`.
        state_dict: Contains the tensors of the head.
        prefix: What their names begin with.
    """
    found: dict[str, Any] = {}
    for key in head_class(name).side_inputs:
        stored = f'{prefix}class_vectors' if key == 'class_vectors' else f'{prefix}adjacency'
        if stored not in state_dict:
            raise UsageError(f"Expected the tensor '{stored}' of head '{name}' in the checkpoint, but it is missing.")
        tensor = state_dict[stored]
        found[key] = tensor if key == 'class_vectors' else (tensor.new_zeros(len(tensor)), torch.zeros_like(tensor))
    return found
