""" Training with each way of mixing """
import pytest
import torch
from torchvision.ops import roi_align

import timm_splicemix as tsm
from timm_splicemix.mix import RecursiveMix

from .helpers import make_batch
from .runs import assert_same_weights, summary, train, train_until


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


@pytest.mark.slow
def test_a_stopped_run_with_recursive_mix_resumes_exactly(data, tmp_path):
    whole = train(data, tmp_path, '--recursivemix', name='whole')
    stopped = train_until(1, 2, data, tmp_path, '--recursivemix', name='stopped')
    train(data, tmp_path, '--recursivemix', '--resume', stopped, name='stopped')
    assert summary(stopped) == summary(whole)
    assert_same_weights(stopped / 'last.pth.tar', whole / 'last.pth.tar')


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


def test_the_box_of_recursive_mix_learns_from_the_previous_prediction_of_its_image():
    torch.manual_seed(0)
    model = MapModel()
    mixer = RecursiveMix(alpha=0.9, seed=1)
    task = tsm.SpliceMixTask(model, torch.nn.BCEWithLogitsLoss(), mixer, consistency_weight=0.5, verbose=False)
    first, targets = make_batch(4, seed=1)
    second, _ = make_batch(4, seed=2)
    assert task(first, targets)['consistency_loss'] == 0  # no previous step
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
