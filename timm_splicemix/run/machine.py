""" Device, processes, precision, seeds and versions of a run """
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
    """ Join the other processes, if there are any, and return the device of this process.

    Args:
        args: Flags; `distributed`, `world_size`, `rank` and `local_rank` are added.
    """
    for module in args.device_modules or ():
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(f'Cannot import {module} of --device-modules: {error}') from error
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
        raise UsageError('Expected --sync-bn on GPUs, but got the CPU, where torch has no synchronised BatchNorm.')
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
    """Return a function that creates the autocast context, the loss scaler (float16 only), and the type of weights."""
    dtype = DTYPES[args.model_dtype or 'float32']
    if not args.amp:
        return contextlib.nullcontext, None, dtype
    amp_dtype = DTYPES[args.amp_dtype]
    autocast = functools.partial(torch.autocast, device_type=device.type, dtype=amp_dtype)
    scaler = NativeScaler(device=device.type) if amp_dtype == torch.float16 else None
    return autocast, scaler, dtype


def set_seed(seed: int) -> None:
    """Seed torch's generators on all devices."""
    torch.manual_seed(seed)


def broadcast_flag(value: bool, device: torch.device, distributed: bool) -> bool:
    """Return the value of the primary process on all processes, which must all call this."""
    if not distributed:
        return value
    flag = torch.tensor(int(value), device=device)
    torch.distributed.broadcast(flag, src=0)
    return bool(flag)


def describe_machine(version: str) -> dict[str, Any]:
    """ Return what a result may depend on in addition to the flags.

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
