""" Training with each way of mixing """
import pytest
import torch
from torchvision.ops import roi_align

import timm_splicemix as tsm
from timm_splicemix.mix import RecursiveMix
from timm_splicemix.run.engine import Epoch, Step, train_one_epoch

from .helpers import make_batch
from .runs import assert_same_weights, make_images, summary, train
from .test_train import stop_at


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp('data'))


@pytest.mark.parametrize('flags', [
    ['--mixup', '0.4'],
    ['--cutmix', '1', '--mixup-mode', 'elem'],
    ['--mixup', '0.4', '--cutmix', '1', '--mixup-mode', 'pair'],
    ['--resizemix'],
    ['--recursivemix'],
    ['--splice-with', 'cutmix'],
    ['--batch-augment', '1.5'],
    ['--splicemix-grids', '2x2', '--splicemix-batch', 'alternate'],
    ['--splicemix-grids', '2x2-3', '--splicemix-batch', 'alternate', '--splicemix-ratio', 'ref'],
    ['--splicemix-grids', '2x2', '--splicemix-batch', 'exclusive'],
    ['--splicemix-grids', '2x2', '--splicemix-batch', 'only'],
], ids=lambda flags: ' '.join(flags).replace('--', ''))
def test_each_way_of_mixing_trains(data, tmp_path, flags):
    folder = train(data, tmp_path, '--epochs', '1', *flags)
    row, = summary(folder)
    assert 0 < float(row['train_loss']) < 5
    assert ('train_consistency_loss' in row) == (flags[0] == '--recursivemix')


def test_a_run_with_recursive_mix_goes_on_exactly_after_a_stop(data, tmp_path, monkeypatch):
    whole = train(data, tmp_path, '--recursivemix', name='whole')
    with monkeypatch.context() as patch:
        stop_at(patch, 1, 2)
        with pytest.raises(SystemExit):
            train(data, tmp_path, '--recursivemix', name='stopped')
    stopped = train(data, tmp_path, '--recursivemix', '--resume', tmp_path / 'stopped', name='stopped')
    assert summary(stopped) == summary(whole)
    assert_same_weights(stopped / 'last.pth.tar', whole / 'last.pth.tar')


def test_alternate_updates_the_weights_once_for_regular_and_once_for_mixed_images():
    images, targets = make_batch(8)

    class Loader:
        def set_epoch(self, epoch, start_batch=0):
            pass

        def __len__(self):
            return 1

        def __iter__(self):
            yield images, targets

        def filenames(self):
            return []

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 12 * 12, 5))
    expected = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 12 * 12, 5))
    expected.load_state_dict(model.state_dict())
    mixer = tsm.SpliceMix('2x2', batch='alternate', ratio=0.5, seed=3)
    task = tsm.SpliceMixTask(model, torch.nn.BCEWithLogitsLoss(), mixer, verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averages = train_one_epoch(
        task, Loader(), optimizer, Step(torch.device('cpu'), is_primary=False), Epoch(0, 1))

    plan = tsm.SpliceMix('2x2', ratio=0.5, seed=3).plan(8)
    mixed = tsm.splice(images, targets, plan.records[0])
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    losses = []
    for x, y in ((images, targets), mixed):
        losses.append(torch.nn.functional.binary_cross_entropy_with_logits(expected(x), y))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, expected.state_dict()[name], atol=1e-6)
    assert averages['loss'] == pytest.approx(float((8 * losses[0] + 4 * losses[1]) / 12), rel=1e-5)


class MapModel(torch.nn.Module):
    """A map of 6 x 6 positions, its mean, and a classifier."""

    def __init__(self):
        super().__init__()
        self.num_features = 4
        self.conv = torch.nn.Conv2d(3, 4, 2, 2)
        self.fc = torch.nn.Linear(4, 5)

    def forward_features(self, x):
        return self.conv(x)

    def forward_head(self, x, pre_logits=False):
        x = x.mean(dim=(2, 3))
        return x if pre_logits else self.fc(x)

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


def test_the_box_of_recursive_mix_is_pulled_to_what_was_said_about_its_image():
    torch.manual_seed(0)
    model = MapModel()
    mixer = RecursiveMix(alpha=0.9, seed=1)
    task = tsm.SpliceMixTask(model, torch.nn.BCEWithLogitsLoss(), mixer, consistency_weight=0.5, verbose=False)
    first, targets = make_batch(4, seed=1)
    second, _ = make_batch(4, seed=2)
    assert task(first, targets)['consistency_loss'] == 0  # nothing came before
    with torch.no_grad():
        previous = model(first)
    mixer.set_step(0, 1)
    plan = mixer.plan(4)
    images, mixed_targets = mixer.apply(second, targets, plan)
    mixer.set_step(0, 1)
    result = task(second, targets)

    left, top, right, bottom = plan.relative_box(12, 12)
    rois = torch.tensor([[i, left * 6, top * 6, right * 6, bottom * 6] for i in range(4)])
    box_logits = model.forward_head(roi_align(model.forward_features(images), rois, (6, 6), aligned=True))
    per_box = torch.nn.functional.binary_cross_entropy_with_logits(box_logits, previous.sigmoid())
    area = (right - left) * (bottom - top)
    assert area > 0
    assert torch.allclose(result['consistency_loss'], area * per_box, rtol=1e-5)
    task_loss = torch.nn.functional.binary_cross_entropy_with_logits(model(images), mixed_targets.float())
    assert torch.allclose(result['loss'], task_loss + 0.5 * area * per_box, rtol=1e-5)
