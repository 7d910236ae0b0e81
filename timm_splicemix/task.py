""" One training step as a timm task: mix, one forward of the whole batch, losses """
import logging
import re
from typing import Any, Callable, Optional, Sequence, Union

import torch
from timm.optim import auto_group_layers
from timm.task import TrainingTask
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.ops import roi_align

from .errors import UsageError
from .loss import ConsistencyLoss
from .mix import (
    MixPlan,
    RecursiveMix,
    RecursivePlan,
    SpliceMix,
    split_cells,
)
from .models import FeatureMap, check_consistency

_logger = logging.getLogger(__name__)

__all__ = ['SpliceMixModule', 'SpliceMixTask']

_PREFIX = 'model.'


class SpliceMixModule(nn.Module):
    """ Everything of a step that is trained, in one forward: this is what DDP and the moving average wrap.

    Args:
        model: A timm model.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.feature_map: Optional[FeatureMap] = None
        # Compiled ones may take their place; as functions they add nothing to the weights.
        self._whole: Optional[Callable] = None
        self._features: Optional[Callable] = None

    def forward(
            self,
            images: torch.Tensor,
            plan: Union[MixPlan, RecursivePlan, None] = None,
    ) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        """ Predict whole images and, where a plan says how they were mixed, their parts.

        Args:
            images: (K + M, C, H, W), regular images, then mixed ones in the order of the plan.
            plan: How the batch was mixed; None, or a plan that mixes nothing, asks for no parts.

        Returns:
            Logits (K + M, classes), and those of parts (N, classes), or None: all cells of mixed images in the order
            of the records, or the boxes of a RecursiveMix.
        """
        if plan is None or not plan.num_mixed:
            return (self._whole or self.model)(images), None
        if self.feature_map is None:
            self.feature_map = check_consistency(self.model, tuple(images.shape[1:]))
        features = (self._features or self.model.forward_features)(images)
        logits = self.model.forward_head(features)
        size = (images.shape[2], images.shape[3])
        if isinstance(plan, RecursivePlan):
            maps, prefix = self.feature_map.split(features, size)  # (B, C, h, w)
            boxes = _align(maps, plan.relative_box(*size))
            return logits, self.model.forward_head(self.feature_map.join(boxes, prefix))
        cell_logits = []
        start = len(plan.kept)
        for record in plan.records:
            end = start + record.num_mixed
            maps, prefix = self.feature_map.split(features[start:end], size)  # (M, C, h, w)
            cells = split_cells(maps, record.grid)  # (M * cells, C, h / rows, w / cols)
            cell_logits.append(self.model.forward_head(self.feature_map.join(cells, prefix)))
            start = end
        return logits, torch.cat(cell_logits)

    def compile(self, consistency: bool, **kwargs: Any) -> None:
        """ Compile what does the work: the backbone alone if cells need its features, else the whole model.

        Args:
            consistency: Whether cells are going to be predicted.
            **kwargs: Arguments of `torch.compile`.
        """
        if consistency:
            self._features = torch.compile(self.model.forward_features, **kwargs)
        else:
            self._whole = torch.compile(self.model.forward, **kwargs)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The model's own list, by the names that parameters have here."""
        names = self.model.no_weight_decay() if hasattr(self.model, 'no_weight_decay') else ()
        return {_PREFIX + name for name in names}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> Union[dict[str, Any], Callable]:
        """The model's own grouping of layers, by the names that parameters have here."""
        if hasattr(self.model, 'group_matcher'):
            matcher = self.model.group_matcher(coarse=coarse)
        else:
            matcher = auto_group_layers(self.model).get  # what timm does for a model that says nothing
        if callable(matcher):
            return _with_prefix(matcher)
        return {name: _with_prefix(spec) for name, spec in matcher.items()}


def _align(maps: torch.Tensor, box: tuple[float, float, float, float]) -> torch.Tensor:
    """What maps (B, C, h, w) show in a box, given by parts of their sides, at the size of the maps."""
    height, width = maps.shape[2:]
    left, top, right, bottom = box
    corners = torch.tensor([left * width, top * height, right * width, bottom * height])
    rois = torch.cat([torch.arange(len(maps)).view(-1, 1).float(), corners.expand(len(maps), 4)], dim=1)
    rois = rois.to(maps.device, non_blocking=True)
    with torch.autocast(maps.device.type, enabled=False):  # half precision has no exact row numbers
        return roi_align(maps.float(), rois, (height, width), aligned=True).to(maps.dtype)


def _with_prefix(spec: Any) -> Any:
    """Patterns of a model's `group_matcher` for names that begin with the prefix."""
    if isinstance(spec, str):
        unanchored = re.sub(r'(?<![\[\\])\^', '', spec)
        return f'{re.escape(_PREFIX)}(?:{unanchored})'
    if isinstance(spec, Sequence):  # of patterns, each alone or with a place in the order
        return [(_with_prefix(part[0]), *part[1:]) if isinstance(part, tuple) else _with_prefix(part) for part in spec]
    if callable(spec):
        return lambda name: spec(name.removeprefix(_PREFIX))
    return spec


class SpliceMixTask(TrainingTask):
    """ Train a model on SpliceMixed batches, with consistency learning if asked for.

        task = SpliceMixTask(model, torch.nn.BCEWithLogitsLoss(), SpliceMix('1x2,2x2,2x3'), consistency_weight=1.)
        task(images, targets)['loss'].backward()

    The batch is mixed where it is, after normalisation, and goes through the backbone once. The criterion sees the
    logits of regular and mixed images alike, in float32. With a consistency weight, the last feature map of mixed
    images is cut into its cells, each cell goes through the same pooling and classifier, and its prediction is pulled
    to the one of the regular image. With a `RecursiveMix` this is done to the box that shows the image of the step
    before, by the part of the image that the box is, with the prediction of that step.

    Args:
        model: A timm model, such as `create_model` returns.
        criterion: Loss of logits and targets, (B, classes) each.
        mixer: What mixes batches: a `SpliceMix`, another callable with the contract of timm's `Mixup`, or None.
        consistency_weight: Weight of the consistency loss; 0 switches it off, and nothing is computed for it.
        detach: Take the predictions of regular images as constants in the consistency loss.
        input_size: (C, H, W) of the images, to check at once that consistency learning suits the model; None checks
            at the first step.
        device: Device of the task.
        dtype: Type of the task.
        verbose: Log what the task does.
    """

    def __init__(
            self,
            model: nn.Module,
            criterion: Union[nn.Module, Callable],
            mixer: Optional[Callable] = None,
            consistency_weight: float = 0.,
            detach: bool = True,
            input_size: Optional[tuple[int, int, int]] = None,
            device: Optional[torch.device] = None,
            dtype: Optional[torch.dtype] = None,
            verbose: bool = True,
    ):
        super().__init__(device=device, dtype=dtype, verbose=verbose)
        if consistency_weight < 0:
            raise UsageError(f'Expected a consistency weight of at least 0, but got {consistency_weight}.')
        self.trainable_module = SpliceMixModule(model)
        self.criterion = criterion
        self.mixer = mixer
        self.consistency_weight = consistency_weight
        self.consistency = ConsistencyLoss(detach=detach)
        if consistency_weight:
            _check_mixer(mixer)
            if input_size is not None:
                self.trainable_module.feature_map = check_consistency(model, input_size)
        if self.verbose:
            loss_name = getattr(criterion, '__name__', None) or type(criterion).__name__
            consistency = f', consistency weight {consistency_weight:g}' if consistency_weight else ''
            _logger.info(f'{type(self).__name__}: {loss_name}, {mixer or "no mixing"}{consistency}')

    def set_step(self, epoch: int, step: int) -> None:
        """ Say which batch comes next: what is drawn depends on it.

        Args:
            epoch: Number of the epoch.
            step: Number of the batch in the epoch.
        """
        if hasattr(self.mixer, 'set_step'):
            self.mixer.set_step(epoch, step)

    def set_epoch(self, epoch: int) -> None:
        """ Say which epoch it is to a criterion that changes with epochs.

        Args:
            epoch: Number of the epoch.
        """
        if hasattr(self.criterion, 'set_epoch'):
            self.criterion.set_epoch(epoch)

    def parts(self, input: torch.Tensor, target: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """ The batches that one batch is trained as, each with an update of its own: itself, nearly always.

        Args:
            input: (B, C, H, W), normalised.
            target: (B, classes), or (B,) class indices.
        """
        if isinstance(self.mixer, SpliceMix) and self.mixer.batch == 'alternate':
            return self.mixer.batches(input, target)
        return [(input, target)]

    def prepare_distributed(self, device_ids: Optional[list] = None, **ddp_kwargs: Any) -> 'SpliceMixTask':
        """ Wrap what is trained in DDP.

        Args:
            device_ids: Device of this process, in a list; None on the CPU.
            **ddp_kwargs: Arguments of `DistributedDataParallel`.
        """
        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **ddp_kwargs)
        return self

    def compile(self, backend: str = 'inductor', mode: Optional[str] = None, **compile_kwargs: Any) -> nn.Module:
        """ Compile the model, before `prepare_distributed`.

        Args:
            backend: Backend of `torch.compile`.
            mode: Mode of `torch.compile`.
            **compile_kwargs: Its other arguments.

        Returns:
            The compiled model for evaluation.
        """
        kwargs = {'backend': backend, 'mode': mode, **compile_kwargs}
        self.trainable_module.compile(consistency=bool(self.consistency_weight), **kwargs)
        self.eval_model = torch.compile(self.trainable_module.model, **kwargs)
        return self.eval_model

    def get_eval_model(self, module: Optional[nn.Module] = None, ema: bool = False) -> Optional[nn.Module]:
        """ The plain model, whose weights a checkpoint holds.

        Args:
            module: What to take it from, the task's own if None.
            ema: Take the moving average.
        """
        found = super().get_eval_model(module, ema=ema)
        while isinstance(getattr(found, 'module', None), nn.Module):  # DDP, the moving average
            found = found.module
        return found.model if isinstance(found, SpliceMixModule) else found

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """ Mix a batch, predict it and compare.

        Args:
            input: (B, C, H, W), normalised.
            target: (B, classes), or (B,) class indices.

        Returns:
            'loss', the one to minimise; 'output', the logits of the regular images that stayed in the batch;
            'task_loss' and, with a consistency weight, 'consistency_loss', the parts of the loss without weights.
        """
        plan = None
        num_regular = len(input)
        if isinstance(self.mixer, SpliceMix) and self.mixer.batch != 'alternate':  # of which `parts` were mixed before
            plan = self.mixer.plan(len(input))
            input, target = self.mixer.apply(input, target, plan)
            num_regular = len(plan.kept)
        elif isinstance(self.mixer, RecursiveMix):
            plan = self.mixer.plan(len(input))
            input, target = self.mixer.apply(input, target, plan)
        elif self.mixer is not None and not isinstance(self.mixer, SpliceMix):
            input, target = self.mixer(input, target)
        logits, cell_logits = self.trainable_module(input, plan if self.consistency_weight else None)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if isinstance(self.mixer, RecursiveMix):
            self.mixer.remember(input, target, logits)
        task_loss = self.criterion(logits, target)
        result = {'loss': task_loss, 'output': logits[:num_regular], 'task_loss': task_loss.detach()}
        if self.consistency_weight:
            consistency = self._consistency(cell_logits, logits, plan)
            if isinstance(plan, RecursivePlan) and plan.num_mixed:
                left, top, right, bottom = plan.relative_box(input.shape[2], input.shape[3])
                consistency = (right - left) * (bottom - top) * consistency
            result['loss'] = task_loss + self.consistency_weight * consistency
            result['consistency_loss'] = consistency.detach()
        return result

    def _consistency(
            self,
            cell_logits: Optional[torch.Tensor],
            logits: torch.Tensor,
            plan: Union[MixPlan, RecursivePlan],
    ) -> torch.Tensor:
        if cell_logits is None:
            return logits.new_zeros(())
        if isinstance(plan, RecursivePlan):
            said_before = plan.partner_logits().to(cell_logits.device)  # from the CPU after a run went on
            return self.consistency(cell_logits, said_before)
        sources = torch.cat([record.sources.flatten() for record in plan.records])  # (N,), of all cells
        dropped = torch.cat([record.dropped.flatten() for record in plan.records])
        sources = sources.to(logits.device, non_blocking=True)
        return self.consistency(cell_logits, logits.index_select(0, sources), dropped)


def _check_mixer(mixer: Optional[Callable]) -> None:
    """Refuse consistency learning where a cell has no regular image in the batch to learn from."""
    if isinstance(mixer, RecursiveMix):
        return
    if not isinstance(mixer, SpliceMix):
        raise UsageError(
            f'Expected a SpliceMix for consistency learning, but got {mixer}: '
            'set --splicemix-grids, such as 1x2,2x2,2x3.')
    if mixer.batch != 'append':
        raise UsageError(
            f"Expected all regular images in the batch for consistency learning, but got batch '{mixer.batch}', which "
            'leaves some out: use --splicemix-batch append.')
