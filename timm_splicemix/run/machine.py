""" The machine that a run is on: devices, processes, precision """
import argparse
import contextlib
import functools
import importlib
import logging
import platform
import sys
from pathlib import Path
from typing import Any, Callable, Optional

import timm
import torch
from timm.layers import set_fast_norm
from timm.utils import NativeScaler, init_distributed_device

from ..errors import UsageError

_logger = logging.getLogger(__name__)
DTYPES = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}


def set_up_device(args: argparse.Namespace) -> torch.device:
    """ Join the other processes, if there are any, and find the device of this one.

    Args:
        args: Flags; gets `distributed`, `world_size`, `rank` and `local_rank`.
    """
    for module in args.device_modules or ():
        importlib.import_module(module)
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    if not args.device.startswith('cuda'):
        try:
            torch.empty(0, device=args.device)
        except (AssertionError, RuntimeError) as error:
            raise UsageError(f"Expected a device of this machine, but got '{args.device}': {error}") from error
    device = init_distributed_device(args)
    if args.sync_bn and device.type == 'cpu':
        raise UsageError('Expected --sync-bn on GPUs, but got the CPU, which torch has no synchronised BatchNorm for.')
    if args.fast_norm:
        set_fast_norm()
    _logger.info(
        f'Process {args.rank} of {args.world_size} on {args.device}.' if args.distributed else
        f'One process on {args.device}.')
    return device


def precision(
        args: argparse.Namespace,
        device: torch.device,
) -> tuple[Callable[[], contextlib.AbstractContextManager], Optional[NativeScaler], torch.dtype]:
    """ How numbers are stored.

    Args:
        args: Flags.
        device: Device of this process.

    Returns:
        What makes the context of a forward pass, the scaler of gradients if float16 needs one, and the type of weights.
    """
    dtype = DTYPES[args.model_dtype or 'float32']
    if not args.amp:
        return contextlib.nullcontext, None, dtype
    amp_dtype = DTYPES[args.amp_dtype]
    autocast = functools.partial(torch.autocast, device_type=device.type, dtype=amp_dtype)
    scaler = NativeScaler(device=device.type) if amp_dtype == torch.float16 else None
    return autocast, scaler, dtype


def set_seed(seed: int) -> None:
    """ Seed torch's generators, those of all devices.

    Args:
        seed: 32 bits.
    """
    torch.manual_seed(seed)


def describe_machine(version: str) -> dict[str, Any]:
    """ What a result may depend on beside the flags.

    Args:
        version: Version of this package.
    """
    return {
        'timm_splicemix': version,
        'timm': timm.__version__,
        'torch': str(torch.__version__),
        'python': platform.python_version(),
        'platform': platform.platform(),
        'device': torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        'command': ' '.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
