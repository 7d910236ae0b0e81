""" The state that differs between the processes of a run, saved in one checkpoint

DDP keeps the weights of all processes equal. Statistics of BatchNorm and of the EMA model, losses and the mixer's
previous batch are those of one process.
"""
from typing import Any, Optional

import torch
from timm.utils import unwrap_model
from torch import nn

from ..task import SpliceMixTask


def persistent_buffers(model: Optional[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the buffers that a state dict contains, not copied; {} without a model."""
    if model is None:
        return {}
    model = unwrap_model(model)  # of torch.compile
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


def get_buffers(task: SpliceMixTask) -> dict[str, dict[str, torch.Tensor]]:
    return {
        'buffers': persistent_buffers(task.get_eval_model()),
        'buffers_ema': persistent_buffers(task.get_eval_model(ema=True))}


@torch.no_grad()
def load_buffers(task: SpliceMixTask, state: dict[str, Any]) -> None:
    """ Load the buffers of a process. DDP must wrap the task before, because it overwrites the buffers.

    Args:
        task: The task.
        state: State of a process, as `gather_states` returns it.
    """
    for key, buffers in get_buffers(task).items():
        for name, value in state.get(key, {}).items():
            buffers[name].copy_(value)


def gather_states(state: dict[str, Any], group: Any = None) -> list[dict[str, Any]]:
    """ Gather the states of all processes, which must all call this.

    Args:
        state: State of this process.
        group: Process group on the CPU, None for one process.

    Returns:
        On the primary process the states by rank. Buffers that equal those of the primary process are left out.
    """
    state = _to_cpu(state)
    states = [state]
    if group is not None:
        is_primary = torch.distributed.get_rank() == 0
        states = [None] * torch.distributed.get_world_size() if is_primary else None
        torch.distributed.gather_object(state, states, dst=0, group=group)
    for other in states or ():
        for key in ('buffers', 'buffers_ema'):
            other[key] = {
                name: value for name, value in other[key].items() if not torch.equal(value, state[key][name])}
    return states or []


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_cpu(part) for key, part in value.items()}
    return value
