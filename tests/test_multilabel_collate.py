""" `multilabel_collate` and `MultilabelMeter` with timm's own loader """
import timm.data
import torch
from timm.data.distributed_sampler import OrderedDistributedSampler

import timm_splicemix as tsm

from .helpers import raises_error

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def make_loader(data, split='val', **kwargs):
    dataset = tsm.create_dataset('csv', data, split)
    options = {
        'input_size': (3, 48, 40), 'batch_size': 4, 'mean': MEAN, 'std': STD, 'device': torch.device('cpu'),
        'num_workers': 0, 'collate_fn': tsm.multilabel_collate}
    return dataset, timm.data.create_loader(dataset, **{**options, **kwargs})


def test_the_loader_of_timm_returns_multi_hot_targets_with_and_without_its_prefetcher(data):
    batches = {}
    for name, options in (
            ('prefetcher', {}), ('plain', {'use_prefetcher': False}), ('workers', {'num_workers': 2})):
        dataset, loader = make_loader(data, **options)
        batches[name] = list(loader)
        images, targets = (torch.cat(parts) for parts in zip(*batches[name]))
        assert images.shape == (9, 3, 48, 40) and images.dtype == torch.float32, name
        assert torch.equal(targets, dataset.targets.float()), name
    for (images, _), (plain, _), (workers, _) in zip(*batches.values(), strict=True):
        assert torch.allclose(images, plain, atol=1e-5)
        assert torch.equal(images, workers)


def test_augmentation_and_erasing_of_timm_work_on_its_batches(data):
    dataset, loader = make_loader(data, 'train', is_training=True, re_prob=1., re_mode='const')
    images, targets = next(iter(loader))
    assert images.shape == (4, 3, 48, 40) and (images == 0).flatten(1).any(dim=1).all()
    rows = {tuple(row) for row in dataset.targets.tolist()}
    assert {tuple(row) for row in targets.int().tolist()} <= rows


def test_images_of_another_kind_keep_their_type():
    image, target = torch.rand(3, 4, 5), torch.tensor([1, -1, 0], dtype=torch.int8)
    images, targets = tsm.multilabel_collate([(image, target, 'a feature'), (image * 2, target)])
    assert torch.equal(images, torch.stack([image, image * 2]))
    assert targets.tolist() == [[1., -1., 0.]] * 2 and targets.dtype == torch.float32


def test_targets_that_are_not_multi_hot_are_refused():
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)
    with raises_error("Expected targets of shape .classes,., but got .*timm's own collate function"):
        tsm.multilabel_collate([(image, 2), (image, 0)])
    with raises_error('Expected targets in .0, 1., or -1 for unknown, but got 7.0 in sample 1 of a batch'):
        tsm.multilabel_collate([(image, [1., 0.]), (image, [0., 7.])])
    with raises_error('Expected one view of each image'):
        tsm.multilabel_collate([((image, image), [1., 0.])])


def test_the_sampler_of_timm_gives_the_meter_the_samples_that_it_repeats():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 3, generator=generator)
    targets = (torch.rand(9, 3, generator=generator) < 0.5).int()
    whole = tsm.MultilabelMeter(3)
    whole.update(logits, targets)
    samplers = [OrderedDistributedSampler(range(9), num_replicas=4, rank=rank) for rank in range(4)]
    order = [index for sampler in samplers for index in sampler]
    assert len(order) == 12
    meter = tsm.MultilabelMeter(3, sampler=order)
    padded = tsm.MultilabelMeter(3)
    for start in range(0, 12, 5):
        batch = order[start:start + 5]
        meter.update(logits[batch], targets[batch])
        padded.update(logits[batch], targets[batch])
    assert meter.compute() == whole.compute() != padded.compute()
    assert (meter.num_samples, padded.num_samples) == (9, 12)
    with raises_error('Expected 12 samples, as many as the sampler has, but got more. Call reset'):
        meter.update(logits[:1], targets[:1])
    meter.reset()
    meter.update(logits[order[:1]], targets[order[:1]])
    with raises_error('Expected no indices'):
        meter.update(logits[:1], targets[:1], indices=[0])
