""" How a batch becomes an update of the weights """
import contextlib
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch
from timm.task import TrainingTask
from timm.utils import dispatch_clip_grad


@dataclass
class Step:
    """ How a batch becomes an update of the weights.

    Args:
        device: Device that batches are on or go to.
        image_dtype: Type of the images.
        autocast: Makes the context of a forward pass.
        scaler: Scales losses so that small gradients survive float16; None without need.
        accumulate: Number of batches whose gradients make one update.
        clip_grad: Limit of gradients, None for none.
        clip_mode: What is limited: 'norm', 'value', or 'agc' (adaptive, all but the classifier).
        create_graph: Keep the graph of gradients, for second order optimizers.
        channels_last: Whether images are stored with channels last.
        synchronize: Wait for the device after each update.
    """
    device: torch.device
    image_dtype: Optional[torch.dtype] = None
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    scaler: Any = None
    accumulate: int = 1
    clip_grad: Optional[float] = None
    clip_mode: str = 'norm'
    create_graph: bool = False
    channels_last: bool = False
    synchronize: bool = False

    def to_device(self, images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ A batch where and how the model wants it; a prefetcher has done most of it already.

        Args:
            images: (B, C, H, W).
            targets: (B,) or (B, classes).
        """
        images = images.to(self.device, self.image_dtype, non_blocking=True)
        targets = targets.to(self.device, non_blocking=True)
        # Decoders may give either.
        memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.contiguous(memory_format=memory_format), targets

    def backward(self, task: TrainingTask, optimizer: torch.optim.Optimizer, loss: torch.Tensor, update: bool) -> None:
        """ Add the gradients of a loss, and update the weights with them if it is time.

        Args:
            task: Knows which gradients are limited.
            optimizer: Makes the update.
            loss: Loss of one batch, already divided by the number of batches of an update.
            update: Whether this is the last batch of an update.
        """
        parameters = task.get_clip_parameters(exclude_head='agc' in self.clip_mode)
        if self.scaler is not None:
            self.scaler(
                loss, optimizer, clip_grad=self.clip_grad, clip_mode=self.clip_mode, parameters=parameters,
                create_graph=self.create_graph, need_update=update)
            return
        loss.backward(create_graph=self.create_graph)
        if update:
            if self.clip_grad is not None:
                dispatch_clip_grad(parameters, self.clip_grad, mode=self.clip_mode)
            optimizer.step()
