""" What docs/training.md says about differences from timm's script """
import timm
import torch
from timm.data import create_loader
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed

from .runs import summary, train
from .train_flags import build, model_of


def test_the_same_seed_gives_other_initial_weights(data):
    random_seed(42, 0)  # as timm's script
    theirs = timm.create_model('test_resnet', num_classes=3)
    ours = model_of(build(data, '--seed', '42'))
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    assert not torch.equal(next(theirs.parameters()), next(ours.parameters()))
    again = model_of(build(data, '--seed', '42'))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in ours.state_dict().items())


def test_a_run_of_few_batches_with_ema_and_without_a_schedule(data, tmp_path):
    folder = train(
        data, tmp_path, '--model-ema', '--model-ema-decay', '0.9', '--sched', 'none', '--train-batches-per-epoch', '2')
    rows = summary(folder)
    assert {float(row['lr']) for row in rows} == {0.05}
    assert all(row['eval_mAP'] != row['eval_ema_mAP'] or row['eval_loss'] != row['eval_ema_loss'] for row in rows)


def test_timm_ignores_the_number_of_batches_and_has_no_schedule(data):
    images = timm.data.ImageDataset(str(data.parent))
    sizes = [
        len(create_loader(images, (3, 64, 64), 4, is_training=True, num_batches=number, use_prefetcher=False))
        for number in (None, 2)]
    assert sizes[0] == sizes[1] > 2
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler, _ = create_scheduler_v2(optimizer, 'none', num_epochs=2)
    assert scheduler is None  # its script reads an attribute of it
