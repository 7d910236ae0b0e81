""" One training step as a timm task: mix the batch, one forward pass, losses """
import logging
import re
from typing import Any, Callable, Optional, Sequence, Union

import torch
from timm.optim import auto_group_layers
from timm.task import TrainingTask
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .errors import UsageError
from .loss import ConsistencyLoss, ignores_unknown
from .mix import Grid, Plan, SpliceMix, as_mixer, cell_size, coarse_grids
from .models import FeatureMap, check_consistency, classifier_parameters, has_head

_logger = logging.getLogger(__name__)

__all__ = ['SpliceMixModule', 'SpliceMixTask']

_PREFIX = 'model.'


class SpliceMixModule(nn.Module):
    """ The trainable part of a step in a single forward pass; DDP and EMA wrap this module.

    Args:
        model: A timm model.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.feature_map: Optional[FeatureMap] = None
        # Compiled functions that replace the model's own; being functions, they add no keys to the state dict.
        self._whole: Optional[Callable] = None
        self._features: Optional[Callable] = None
        self._head: Optional[Callable] = None  # of whole images; the sizes of parts vary too much to be compiled

    def forward(
            self,
            images: torch.Tensor,
            plan: Optional[Plan] = None,
    ) -> tuple[Any, ...]:
        """ Predict whole images and the parts of their feature maps that a plan selects.

        Args:
            images: (K + M, C, H, W), regular images, then mixed images in the order of the plan.
            plan: How the batch was mixed; without a plan, or with one that selects no parts, none are predicted.

        Returns:
            Logits (K + M, classes), and logits of the parts (N, classes) or None. The parts of a `SpliceMix` are all
            cells of mixed images in the order of the records. If the head of the model has losses of its own, the
            tensors that they need follow, in a dictionary.
        """
        if has_head(self.model):
            logits, part_logits, aux = self._forward_with_head(images, plan)
            return (logits, part_logits, aux) if aux else (logits, part_logits)
        has_parts = self._check_parts(images, plan)
        if not has_parts and self._features is None:
            return (self._whole or self.model)(images), None
        features = (self._features or self.model.forward_features)(images)
        logits = (self._head or self.model.forward_head)(features)
        if not has_parts:
            return logits, None
        image_size = (images.shape[2], images.shape[3])
        maps, prefix = self.feature_map.split(features, image_size)  # (K + M, C, h, w)
        part_logits = []
        for rows, parts in plan.parts(maps, image_size):
            part_features = self.feature_map.join(parts, None if prefix is None else prefix[rows])
            part_logits.append(self.model.forward_head(part_features))
        return logits, torch.cat(part_logits)

    def _forward_with_head(
            self,
            images: torch.Tensor,
            plan: Optional[Plan],
    ) -> tuple[torch.Tensor, Optional[torch.Tensor], dict[str, torch.Tensor]]:
        has_parts = self._check_parts(images, plan)
        if not has_parts and self._features is None:
            logits, aux = (self._whole or self.model.forward_train)(images)
            return logits, None, aux
        image_size = (images.shape[2], images.shape[3])
        features = (self._features or self.model.forward_features)(images)
        maps = self.model.head_maps(features, image_size)  # (K + M, C, h, w)
        head = self.model.get_classifier()
        weights = head.class_weights()  # once for images and parts
        logits, aux = (self._head or head.forward_train)(maps, weights)
        if not has_parts:
            return logits, None, aux
        parts = [head.forward_cells(parts, weights) for _, parts in plan.parts(maps, image_size)]
        return logits, torch.cat(parts), aux

    def _check_parts(self, images: torch.Tensor, plan: Optional[Plan]) -> bool:
        """Whether the plan selects parts; raises an error if the model cannot predict them."""
        has_parts = plan is not None and plan.num_parts > 0
        if has_parts and self.feature_map is None:
            self.feature_map = check_consistency(self.model, tuple(images.shape[1:]))
        return has_parts

    def compile(self, consistency: bool, **kwargs: Any) -> None:
        """ Compile backbone and head separately if consistency learning needs features, otherwise the whole model.

        Args:
            consistency: Whether parts of the feature maps will be predicted.
            **kwargs: Arguments of `torch.compile`.
        """
        if consistency:
            self._features = torch.compile(self.model.forward_features, **kwargs)
            head = self.model.get_classifier().forward_train if has_head(self.model) else self.model.forward_head
            self._head = torch.compile(head, **kwargs)
        else:
            forward = self.model.forward_train if has_head(self.model) else self.model.forward
            self._whole = torch.compile(forward, **kwargs)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The model's parameters without weight decay, with their names in this module."""
        names = self.model.no_weight_decay() if hasattr(self.model, 'no_weight_decay') else ()
        return {_PREFIX + name for name in names}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> Union[dict[str, Any], Callable]:
        """The model's layer groups, for the names of parameters in this module."""
        if hasattr(self.model, 'group_matcher'):
            matcher = self.model.group_matcher(coarse=coarse)
        else:
            matcher = auto_group_layers(self.model).get  # timm's fallback
        if callable(matcher):
            return _with_prefix(matcher)
        return {name: _with_prefix(spec) for name, spec in matcher.items()}


def _with_prefix(spec: Any) -> Any:
    """Patterns of a model's `group_matcher`, changed to match names that begin with the prefix."""
    if isinstance(spec, str):
        unanchored = re.sub(r'(?<![\[\\])\^', '', spec)
        return f'{re.escape(_PREFIX)}(?:{unanchored})'
    if isinstance(spec, Sequence):  # of patterns, or of tuples of a pattern and its position in the order
        return [(_with_prefix(part[0]), *part[1:]) if isinstance(part, tuple) else _with_prefix(part) for part in spec]
    if callable(spec):
        return lambda name: spec(name.removeprefix(_PREFIX))
    return spec


def _warn_about_coarse_cells(mixer: SpliceMix, feature_map: FeatureMap) -> None:
    """Log one line if cells have few positions on the feature map, which SpliceMix-CL cuts into cells."""
    height, width = size = feature_map.grid
    coarse = coarse_grids(mixer.grids, size)
    if not coarse:
        return
    cells = ', '.join('{}x{}: {} x {}'.format(grid.rows, grid.cols, *cell_size(grid, size)) for grid in coarse)
    ways_out = ['larger images (--img-size)']
    if feature_map.layout == 'NCHW':
        ways_out.append('a finer feature map (--model-kwargs output_stride=16, if the model supports it)')
    if not coarse_grids([Grid(1, 2)], size):
        ways_out.append('larger cells (--splicemix-grids 1x2)')
    _logger.warning(
        f'SpliceMix-CL predicts cells of few positions on the feature map of {height} x {width} ({cells}), which also '
        f'depend on the cells beside them. Use {", ".join(ways_out)}, or leave out --splicemix-cl; see docs/when.md.')


class SpliceMixTask(TrainingTask):
    """ Train a model on mixed batches, optionally with consistency learning.

        task = SpliceMixTask(model, torch.nn.BCEWithLogitsLoss(), SpliceMix('1x2,2x2,2x3'), consistency_weight=1.)
        task(images, targets)['loss'].backward()

    The batch is mixed on its device, after normalisation, and passes through the backbone once. The criterion gets the
    logits of regular and mixed images in float32. With a consistency weight above 0, the last feature map of the mixed
    images is split into cells, the model's pooling and classifier predict each cell, and the consistency loss compares
    this with the prediction of the cell's regular image. With `RecursiveMix`, it compares the prediction of the box
    with the previous step's prediction of the image in the box, weighted by the area of the box.

    Args:
        model: A timm model, such as `create_model` returns.
        criterion: Loss of logits and targets, (B, classes) each.
        mixer: A `SpliceMix` or another `Mixer`, a callable with the contract of timm's `Mixup`, or None.
        consistency_weight: Weight of the consistency loss; 0 switches it off and computes nothing for it.
        detach: Treat the predictions of regular images as constants in the consistency loss.
        input_size: (C, H, W) of the images, to check that the model supports consistency learning now instead of in
            the first step.
        device: Device of the task.
        dtype: Type of the task.
        verbose: Log the settings of the task.
        consistency_mean: Divide the consistency loss by the number of 'visible' cells or of 'all' cells.
        mixed_weight: Weight of a mixed image in the mean of the criterion; that of a regular image is 1.
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
            consistency_mean: str = 'visible',
            mixed_weight: float = 1.,
    ):
        super().__init__(device=device, dtype=dtype, verbose=verbose)
        if consistency_weight < 0:
            raise UsageError(f'Expected a consistency weight of at least 0, but got {consistency_weight}.')
        if mixed_weight <= 0:
            raise UsageError(f'Expected a weight of mixed images above 0, but got {mixed_weight}.')
        if mixed_weight != 1 and getattr(mixer, 'batch', '') in ('alternate', 'only'):
            raise UsageError(
                'Expected regular and mixed images in one batch to weight mixed images (--splicemix-weight), but got '
                f"the batch '{mixer.batch}'.")
        if mixed_weight != 1 and getattr(criterion, 'reduction', '') == 'sum':
            raise UsageError('Expected a mean as loss to weight mixed images (--splicemix-weight), but got a sum.')
        self.trainable_module = SpliceMixModule(model)
        self.criterion = criterion
        self.mixer = mixer
        self.consistency_weight = consistency_weight
        self.mixed_weight = mixed_weight
        self.consistency = ConsistencyLoss(detach, consistency_mean)
        name = getattr(criterion, 'name', None) or getattr(criterion, '__name__', type(criterion).__name__)
        if as_mixer(mixer).makes_unknown and not ignores_unknown(criterion, model.num_classes):
            raise UsageError(
                'Expected a loss that ignores unknown labels with unknown_classes (--splicemix-unknown), but got '
                f'{name}: use the loss bce, bce-ls, focal, asl, hill or splc, or p-asl with partial ignore.')
        if consistency_weight:
            as_mixer(mixer).check_consistency()
            if input_size is not None:
                self.trainable_module.feature_map = check_consistency(model, input_size)
        if self.verbose:
            weights = f', weight of mixed images {mixed_weight:g}' if mixed_weight != 1 else ''
            weights += f', consistency weight {consistency_weight:g}' if consistency_weight else ''
            _logger.info(f'{type(self).__name__}: {name}, {mixer or "no mixing"}{weights}')
            if isinstance(mixer, SpliceMix) and self.trainable_module.feature_map is not None:
                _warn_about_coarse_cells(mixer, self.trainable_module.feature_map)

    def set_step(self, epoch: int, step: int) -> None:
        """ Set the step that the mixer draws for next.

        Args:
            epoch: Index of the epoch.
            step: Index of the batch in the epoch.
        """
        as_mixer(self.mixer).set_step(epoch, step)

    def set_epoch(self, epoch: int) -> None:
        """ Set the epoch of a criterion that depends on it.

        Args:
            epoch: Index of the epoch.
        """
        if hasattr(self.criterion, 'set_epoch'):
            self.criterion.set_epoch(epoch)

    def parts(self, input: torch.Tensor, target: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """ The batches that a batch is trained as, each with its own update of the weights; usually just the batch.

        Args:
            input: (B, C, H, W), normalised.
            target: (B, classes), or (B,) class indices.
        """
        mixer = as_mixer(self.mixer)
        return mixer.batches(input, target) if mixer.separate_batches else [(input, target)]

    def prepare_distributed(self, device_ids: Optional[list] = None, **ddp_kwargs: Any) -> 'SpliceMixTask':
        """ Wrap the trainable module in DDP.

        Args:
            device_ids: Device of this process, in a list; None or the CPU, which DDP takes no list for.
            **ddp_kwargs: Arguments of `DistributedDataParallel`.
        """
        if device_ids and device_ids[0] == torch.device('cpu'):
            device_ids = None
        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **ddp_kwargs)
        return self

    def compile(self, backend: str = 'inductor', mode: Optional[str] = None, **compile_kwargs: Any) -> nn.Module:
        """ Compile the model; call this before `prepare_distributed`.

        Args:
            backend: Backend of `torch.compile`.
            mode: Mode of `torch.compile`.
            **compile_kwargs: Other arguments of `torch.compile`.

        Returns:
            The compiled model for evaluation.
        """
        kwargs = {'backend': backend, 'mode': mode, **compile_kwargs}
        self.trainable_module.compile(consistency=bool(self.consistency_weight), **kwargs)
        self.eval_model = torch.compile(self.trainable_module.model, **kwargs)
        return self.eval_model

    def get_clip_parameters(self, exclude_head: bool = False) -> Any:
        """ The parameters whose gradients are clipped.

        Args:
            exclude_head: Leave out the classifier, or the multi-label head.
        """
        model = self.get_trainable_module()
        model = getattr(model, 'module', model).model
        if not exclude_head or not has_head(model):
            return super().get_clip_parameters(exclude_head)
        excluded = {id(parameter) for parameter in classifier_parameters(model)}
        return [parameter for parameter in model.parameters() if id(parameter) not in excluded]

    def get_eval_model(self, module: Optional[nn.Module] = None, ema: bool = False) -> Optional[nn.Module]:
        """ The plain model, whose weights are saved in checkpoints.

        Args:
            module: Module to unwrap, that of the task if None.
            ema: Return the EMA model.
        """
        found = super().get_eval_model(module, ema=ema)
        while isinstance(getattr(found, 'module', None), nn.Module):  # DDP, EMA
            found = found.module
        return found.model if isinstance(found, SpliceMixModule) else found

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """ Mix a batch and compute its losses.

        Args:
            input: (B, C, H, W), normalised.
            target: (B, classes), or (B,) class indices.

        Returns:
            'loss', the total loss; 'output', the logits of the regular images that stayed in the batch; 'task_loss'
            and, with a consistency weight, 'consistency_loss', the terms of the loss without their weights; the
            weighted losses of the head by name, if it has any.
        """
        mixer = as_mixer(self.mixer)
        if mixer.separate_batches:  # `parts` has mixed the batch
            plan = Plan(torch.arange(len(input)))
        else:
            plan = mixer.plan(len(input))
            input, target = mixer.apply(input, target, plan)
        logits, part_logits, *aux = self.trainable_module(input, plan if self.consistency_weight else None)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        mixer.remember(input, target, logits)
        task_loss = self._task_loss(logits, target, plan.num_regular)
        result = {'loss': task_loss, 'output': logits[:plan.num_regular], 'task_loss': task_loss.detach()}
        if aux:
            result.update(self._head_losses(task_loss, aux[0], target, plan.num_regular))
        if self.consistency_weight:
            if part_logits is None:
                consistency = logits.new_zeros(())
            else:
                consistency = self.consistency(part_logits, plan.teachers(logits), plan.dropped_parts())
                consistency = plan.parts_weight(tuple(input.shape[2:])) * consistency
            result['loss'] = result['loss'] + self.consistency_weight * consistency
            result['consistency_loss'] = consistency.detach()
        return result

    def _task_loss(self, logits: torch.Tensor, target: torch.Tensor, num_regular: int) -> torch.Tensor:
        """The criterion: the weighted mean of its values for regular and mixed images, unless all weights are 1."""
        num_mixed = len(logits) - num_regular
        if self.mixed_weight == 1 or not num_regular or not num_mixed:
            return self.criterion(logits, target)
        regular = self.criterion(logits[:num_regular], target[:num_regular])
        mixed = self.criterion(logits[num_regular:], target[num_regular:])
        share = self.mixed_weight * num_mixed / (num_regular + self.mixed_weight * num_mixed)
        return (1 - share) * regular + share * mixed

    def _head_losses(
            self,
            task_loss: torch.Tensor,
            aux: dict[str, torch.Tensor],
            target: torch.Tensor,
            num_regular: int,
    ) -> dict[str, torch.Tensor]:
        """The loss with the head's own losses, and these by name."""
        aux = {name: value if value.dtype == torch.float64 else value.float() for name, value in aux.items()}
        head = self.get_eval_model(self.trainable_module).get_classifier()
        loss, terms = head.losses(task_loss, aux, lambda logits: self._task_loss(logits, target, num_regular))
        return {'loss': loss, **{f'{name}_loss': value.detach() for name, value in terms.items()}}
