"""Training steps on fake CUDA tensors, which have no values: whatever would wait for a GPU raises an error."""
import contextlib

import pytest
import torch

# Private: torch has no public fake tensors. If these names move, the import fails; if they stop noticing that a value
# is read, the tests of the harness below fail.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from timm_splicemix import SpliceMixTask, create_model
from timm_splicemix import mix as mixers
from timm_splicemix.loss import LOSSES, PARTIAL, MultilabelLoss, create_loss, union_cross_entropy
from timm_splicemix.mix import Mixer, Mixup, RecursiveMix, ResizeMix, SpliceMix, SpliceWith
from timm_splicemix.run.progress import FiniteCheck, LossMeter

CUDA = torch.device('cuda')
CLASSES = 5
READS = (DataDependentOutputException, DynamicOutputShapeException)


class CopyToHostError(RuntimeError):
    pass


class HostGuard(TorchDispatchMode):
    """Compute real CPU tensors, such as plans of mixers, for real; refuse fake CUDA tensors that become CPU tensors."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = tree_leaves((args, kwargs))
        devices = {leaf.device.type for leaf in inputs if isinstance(leaf, FakeTensor)}
        if not devices and CUDA.type not in {leaf.type for leaf in inputs if isinstance(leaf, torch.device)}:
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        result = function(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if CUDA.type in devices and any(leaf.device.type == 'cpu' for leaf in outputs):
            raise CopyToHostError(f'{function} copies a tensor of the device to the host.')
        return result


@contextlib.contextmanager
def no_sync():
    """Within the block, tensors made on CUDA are fake, and reading or copying their values raises an error."""
    with FakeTensorMode(allow_non_fake_inputs=True), HostGuard():
        yield


def move_to_fake_cuda(module):
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, value in tensors.items():
                if value is not None:
                    fake = torch.empty(value.shape, dtype=value.dtype, device=CUDA)
                    is_parameter = isinstance(value, torch.nn.Parameter)
                    tensors[name] = torch.nn.Parameter(fake, value.requires_grad) if is_parameter else fake


def run_steps(mixer=None, criterion=None, consistency=0., model='test_resnet', size=64, num_steps=2, integer=False):
    """Mix, forward, losses and their mean of a few steps; the weights are not updated."""
    task = SpliceMixTask(
        create_model(model, num_classes=CLASSES, global_pool='max', **({'img_size': size} if 'vit' in model else {})),
        criterion or create_loss('bce', CLASSES), mixer, consistency, input_size=(3, size, size), verbose=False)
    task.set_epoch(3)
    with no_sync():
        move_to_fake_cuda(task)
        images = torch.empty(8, 3, size, size, device=CUDA)
        targets = torch.zeros(8, dtype=torch.int64, device=CUDA) if integer else torch.empty(8, CLASSES, device=CUDA)
        losses, finite = LossMeter(CUDA), FiniteCheck(CUDA, list)
        for step in range(num_steps):
            task.set_step(0, step)
            for part in task.parts(images, targets):
                result = task(*part)
                losses.update({name: value for name, value in result.items() if name.endswith('loss')}, len(part[0]))
                finite.add(step, result['loss'], [])
        assert result['loss'].device.type == result['output'].device.type == 'cuda'
        assert ('consistency_loss' in result) == bool(consistency)
        with pytest.raises(READS):  # the log line reads, and may
            losses.compute()


READING = {
    'item': lambda x: x.sum().item(),
    'float': lambda x: float(x.sum()),
    'if': lambda x: 1 if x.any() else 0,
    'tolist': lambda x: x.tolist(),
    'nonzero': lambda x: x.nonzero(),
    'mask': lambda x: x[x > 0],
    'unique': lambda x: x.unique(),
    'equal': lambda x: torch.equal(x, x + 1),
    'repeats': lambda x: x.repeat_interleave(x.long()),
}
COPYING = {
    'cpu': lambda x: x.cpu(),
    'to': lambda x: x.to('cpu', non_blocking=True),
    'copy into a tensor': lambda x: torch.empty(3).copy_(x),
    'write into a tensor': lambda x: torch.empty(2, 3).__setitem__(0, x),
    'new tensor': lambda x: x.new_tensor([1.], device='cpu').copy_(x[:1]),
}


@pytest.mark.parametrize('name', READING)
def test_the_harness_finds_values_that_are_read(name):
    with no_sync(), pytest.raises(READS):
        READING[name](torch.ones(3, device=CUDA))


@pytest.mark.parametrize('name', COPYING)
def test_the_harness_finds_copies_to_the_host(name):
    with no_sync(), pytest.raises(CopyToHostError):
        COPYING[name](torch.ones(3, device=CUDA))


def test_the_harness_finds_both_in_a_step():
    with pytest.raises(READS):
        run_steps(criterion=lambda logits, targets: logits.mean() * logits.max().item())
    with pytest.raises(CopyToHostError):
        run_steps(criterion=lambda logits, targets: (logits - targets).square().mean().cpu())


def test_the_harness_computes_cpu_tensors_and_copies_them_to_the_device():
    with no_sync():
        plan = torch.arange(4)
        assert plan.sum().item() == 6 and plan[plan > 1].tolist() == [2, 3]
        assert (torch.ones(4, device=CUDA)[plan.to(CUDA)] * torch.tensor(2.)).device.type == 'cuda'


def name_of(mixer):
    return repr(mixer) if mixer else 'no mixing'


SPLICEMIX = [SpliceMix(batch=batch, mode=mode) for batch in SpliceMix.BATCHES for mode in SpliceMix.MODES]
MIXERS = [
    None,
    *SPLICEMIX,
    SpliceMix(ratio='ref', fill=(.1, .2, .3)),
    *(SpliceMix(batch=batch, unknown_classes=[0, 3], all_classes=[1]) for batch in SpliceMix.BATCHES),
    *(Mixup(mixup_alpha=1., cutmix_alpha=1., mode=mode) for mode in Mixup.MODES),
    Mixup(mixup_alpha=0., cutmix_alpha=1.),
    Mixup(mixup_alpha=0., cutmix_minmax=(.2, .8), mode='elem'),
    *(SpliceWith(kind, mode=mode) for kind in SpliceWith.KINDS for mode in SpliceWith.MODES),
    ResizeMix(),
    RecursiveMix(),
]
CONSISTENT = [SpliceMix(mode=mode) for mode in SpliceMix.MODES] + [SpliceMix(ratio='ref', drop_prob=1.), RecursiveMix()]


def test_every_mixer_is_among_those_tested():
    public = {value for value in vars(mixers).values() if isinstance(value, type) and issubclass(value, Mixer)}
    assert {type(mixer) for mixer in MIXERS if mixer} == public - {Mixer}


@pytest.mark.parametrize('mixer', MIXERS, ids=name_of)
def test_mixers_do_not_synchronise(mixer):
    run_steps(mixer)


@pytest.mark.parametrize('model', ['test_resnet', 'test_vit', 'test_convnext', 'shufflenetv2_x0_5'])
@pytest.mark.parametrize('mixer', CONSISTENT, ids=name_of)
def test_consistency_learning_does_not_synchronise(mixer, model):
    run_steps(mixer, consistency=1., model=model)


CRITERIA = {
    **{name: (name, {}) for name in LOSSES},
    'bce with options': ('bce', {'pos_weight': torch.rand(CLASSES), 'target_threshold': .2, 'sum_classes': True}),
    **{f'p-asl {partial}': ('p-asl', {'partial': partial}) for partial in PARTIAL},
    'p-asl prior': ('p-asl', {'partial': 'selective', 'prior': torch.rand(CLASSES)}),
    'sum': ('asl', {'reduction': 'sum'}),
}


@pytest.mark.parametrize('consistency', [0., 1.])
@pytest.mark.parametrize('name', CRITERIA)
def test_losses_do_not_synchronise(name, consistency):
    loss, parameters = CRITERIA[name]
    run_steps(SpliceMix(), create_loss(loss, CLASSES, **parameters), consistency, num_steps=1)


@pytest.mark.parametrize('mixer', [SpliceMix(num_classes=CLASSES), Mixup(num_classes=CLASSES)], ids=name_of)
def test_class_indices_do_not_synchronise(mixer):
    run_steps(mixer, MultilabelLoss(union_cross_entropy), integer=True)
