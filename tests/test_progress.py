import torch

from tests.helpers import raises_error
from timm_splicemix.run.progress import FiniteCheck, LossMeter

CPU = torch.device('cpu')


def test_losses_are_means_over_images_and_can_be_saved():
    losses = LossMeter(CPU)
    losses.update({'loss': torch.ones((), requires_grad=True), 'task_loss': torch.tensor(3.)}, 2)
    assert not losses.sums['loss'].requires_grad
    losses.update({'loss': torch.tensor(4.), 'task_loss': torch.tensor(0.)}, 1)
    assert losses.compute() == {'loss': 2., 'task_loss': 2.}
    again = LossMeter(CPU)
    again.load_state_dict(losses.state_dict())
    again.update({'loss': torch.tensor(6.), 'task_loss': torch.tensor(2.)}, 1)
    assert again.compute() == {'loss': 3., 'task_loss': 2.}
    assert losses.state_dict() == {'sums': {'loss': 6., 'task_loss': 6.}, 'count': 3}
    assert LossMeter(CPU).compute() == {}


def add_without_checking(check, batch, loss, indices, add=FiniteCheck.add):
    """As on a GPU."""
    check.device = torch.device('cuda')
    add(check, batch, loss, indices)


def test_on_a_gpu_the_first_bad_batch_is_found_later():
    finite = FiniteCheck(CPU, lambda indices: [f'{index}.jpg' for index in indices])
    for batch, loss in enumerate((1., float('nan'), float('inf'), 2.)):
        add_without_checking(finite, batch, torch.tensor(loss), [batch])
    with raises_error(r'at batch 1 \(files: 1.jpg\)'):
        finite.check()
