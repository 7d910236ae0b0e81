""" What a user is told who asks for what can't be: one line, and exit code 2 """
import os
import re
import shutil

import pytest
import torch

from timm_splicemix import train as train_module

from .runs import TINY, make_images, train
from .test_train import stop_at


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp('data'))


@pytest.fixture(scope='module')
def finished(data, tmp_path_factory):
    return train(data, tmp_path_factory.mktemp('finished'), '--epochs', '1')


def refusal(capsys, *flags):
    """The line that a command says before it leaves with code 2."""
    with pytest.raises(SystemExit) as left:
        train_module.main([str(flag) for flag in flags])
    lines = [line for line in capsys.readouterr().err.splitlines() if 'error:' in line]
    assert left.value.code == 2, lines
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize('flags, words', [
    (['--model', 'resnet5O'], "'resnet5O'.*resnet50"),
    (['--batch-size', '0'], "--batch-size: .* at least 1, but got '0'"),
    (['--epochs', '0'], '--epochs: .* at least 1'),
    (['--mixup', '0.2', '--splicemix-grids', '2x2'], '--splicemix-grids and --mixup'),
    (['--splicemix-cl'], '--splicemix-grids'),
    (['--splicemix-grids', '2x2', '--splicemix-cl', '--splicemix-batch', 'fixed'], '--splicemix-batch append'),
    (['--splicemix-grids', '2by2'], '2by2'),
    (['--mixup-prob', '0.5'], '--mixup or --cutmix.* with --mixup-prob'),
    (['--cooldown-epochs', '2', '--sched', 'step'], '--sched cosine'),
    (['--splicemix-cl-no-detach'], '--splicemix-cl'),
    (['--model', 'pit_ti_224', '--img-size', '224', '--gp', 'max'], 'pit_ti_224.*'),
    (['--model', 'pit_ti_224', '--img-size', '224', '--splicemix-grids', '2x2', '--splicemix-cl'], 'feature map'),
    (['--model', 'test_vit', '--img-size', '50'], 'image size'),
    (['--gp', 'nonsense'], 'nonsense'),
    (['--opt', 'nonsense'], '--opt.*nonsense'),
    (['--sched', 'nonsense'], '--sched.*nonsense'),
    (['--sched', 'plateau', '--sched-on-updates'], '--sched-on-updates'),
    (['--amp-dtype', 'int8'], '--amp-dtype.*int8'),
    (['--clip-mode', 'some'], '--clip-mode.*some'),
    (['--eval-metric', 'top1'], '--eval-metric.*mAP'),
    (['--loss', 'nonsense'], 'nonsense'),
    (['--loss', 'asl', '--bce-pos-weight', '2'], '--bce-pos-weight with binary cross entropy'),
    (['--loss', 'asl', '--bce-loss'], 'one loss'),
    (['--class-weights', 'auto', '--bce-pos-weight', '2'], '--class-weights auto or --bce-pos-weight'),
    (['--num-classes', '7'], '--num-classes 3'),
    (['--freeze', 'nowhere'], "--freeze.*layer1.*'nowhere'"),
    (['--device', 'cuda'], '--device cpu'),
    (['--sync-bn'], '--sync-bn on GPUs'),
    (['--drop-path', '0.1', '--drop-connect', '0.1'], '--drop-path or its old name'),
    (['--torchcompile-mode', 'default'], '--torchcompile with'),
    (['--model-dtype', 'bfloat16', '--amp'], '--amp or --model-dtype'),
    (['--model-dtype', 'float16'], 'bfloat16'),
    (['--resume', 'nowhere.pth.tar'], 'nowhere.pth.tar, which is not a file'),
    (['--initial-checkpoint', 'nowhere.pth.tar'], '--initial-checkpoint, but got nowhere.pth.tar'),
    (['--pretrained-path', 'nowhere.pth.tar'], '--pretrained-path, but got nowhere.pth.tar'),
    (['--config', 'nowhere.yaml'], 'nowhere.yaml'),
    (['--train-split', 'nowhere'], 'nowhere'),
    (['--epoch-repeats', '2'], 'repeats'),
    (['--train-num-samples', '4'], '--train-num-samples with a data set among'),
    (['--train-crop-mode', 'some'], 'some'),
    (['--decoder', 'torchvision', '--aa', 'rand-m9'], '--aa'),
    (['--head-init-bias', 'some'], 'some'),
    (['--checkpoint-hist', '0'], '--checkpoint-hist: .* at least 1'),
    (['--batch-size', '17'], '--batch-size to at most 16'),
    (['--backbone-lr-scale', '-1'], '--backbone-lr-scale: .* at least 0'),
])
def test_bad_flags_are_one_line(data, tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    line = refusal(capsys, *TINY, '--data-dir', data, '--output', tmp_path, *flags)
    assert_matches(line, words)
    assert not list(tmp_path.glob('*/last.pth.tar'))


def assert_matches(line, words):
    assert re.search(words, line), line


def test_an_unknown_key_of_a_config_is_refused(data, tmp_path, capsys):
    (tmp_path / 'config.yaml').write_text('batch_size: 4\nlearning_rate: 0.1\n')
    line = refusal(capsys, *TINY, '--data-dir', data, '--config', tmp_path / 'config.yaml')
    assert 'learning_rate' in line and 'config.yaml' in line


def test_an_output_folder_that_cannot_be_written_is_refused(data, tmp_path, capsys):
    (tmp_path / 'file').write_text('')
    line = refusal(capsys, *TINY, '--data-dir', data, '--output', tmp_path / 'file')
    assert 'Cannot write' in line and 'file is not a folder' in line


@pytest.mark.parametrize('content', [b'', b'no checkpoint', None], ids=['empty', 'text', 'truncated'])
def test_a_file_that_is_no_checkpoint_is_refused(data, finished, tmp_path, capsys, content):
    path = tmp_path / 'some.pth.tar'
    if content is None:
        whole = (finished / 'last.pth.tar').read_bytes()
        content = whole[:len(whole) // 2]
    path.write_bytes(content)
    line = refusal(capsys, *TINY, '--data-dir', data, '--output', tmp_path, '--resume', path)
    assert 'some.pth.tar is not a checkpoint, or it is truncated' in line


def test_a_checkpoint_that_would_run_code_is_refused(data, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'evil'),)

    torch.save({'state_dict': Evil()}, tmp_path / 'evil.pth.tar')
    line = refusal(capsys, *TINY, '--data-dir', data, '--output', tmp_path, '--resume', tmp_path / 'evil.pth.tar')
    assert 'evil.pth.tar contains code (posix.mkdir)' in line
    assert not (tmp_path / 'evil').exists()


def test_a_checkpoint_of_another_model_is_refused(data, finished, tmp_path, capsys):
    line = refusal(
        capsys, *TINY, '--data-dir', data, '--output', tmp_path, '--model', 'test_vit', '--img-size', '160', '--resume',
        finished)
    assert 'a checkpoint of test_vit' in line and 'test_resnet' in line


def test_a_checkpoint_of_other_classes_is_refused(data, finished, tmp_path, capsys):
    other = tmp_path / 'data'
    shutil.copytree(data, other)
    text = (other / 'labels.csv').read_text().splitlines()
    (other / 'labels.csv').write_text('\n'.join(
        line + (',fourth' if number == 0 else f',{number % 2}') for number, line in enumerate(text)))
    line = refusal(capsys, *TINY, '--data-dir', other, '--output', tmp_path, '--resume', finished)
    assert 'classes of the data set (4)' in line
    line = refusal(
        capsys, *TINY, '--data-dir', other, '--output', tmp_path, '--initial-checkpoint', finished / 'last.pth.tar')
    assert 'fc.weight' in line


def test_weights_alone_of_another_model_are_refused(data, tmp_path, capsys):
    torch.save({'layer.weight': torch.zeros(3)}, tmp_path / 'weights.pth')
    line = refusal(capsys, *TINY, '--data-dir', data, '--output', tmp_path, '--resume', tmp_path / 'weights.pth')
    assert 'Missing key bn1.bias in checkpoint' in line


def test_a_folder_without_checkpoints_is_refused(data, tmp_path, capsys):
    line = refusal(capsys, *TINY, '--data-dir', data, '--output', tmp_path, '--resume', tmp_path)
    assert 'which has no last.pth.tar' in line


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_batch(data, tmp_path, capsys):
    line = refusal(
        capsys, *TINY, '--data-dir', data, '--output', tmp_path, '--experiment', 'run', '--lr', '1e30', '--epochs', '3')
    assert 'Non-finite loss at batch' in line and '.png' in line and '--lr' in line


def test_the_last_good_checkpoint_outlives_a_loss_that_is_no_number(data, finished, tmp_path, capsys):
    folder = tmp_path / 'run'
    shutil.copytree(finished, folder)
    before = (folder / 'last.pth.tar').read_bytes()
    line = refusal(
        capsys, *TINY, '--data-dir', data, '--output', tmp_path, '--experiment', 'run', '--lr', '1e30', '--epochs', '9',
        '--resume', folder, '--no-resume-opt', '--start-epoch', '1', '--recovery-interval', '1')
    assert 'Non-finite loss at batch' in line
    assert (folder / 'last.pth.tar').read_bytes() == before


def test_a_disk_that_is_full_leaves_earlier_checkpoints_whole(data, finished, tmp_path, capsys, monkeypatch):
    folder = tmp_path / 'run'
    shutil.copytree(finished, folder)
    before = (folder / 'last.pth.tar').read_bytes()

    def save(state, path):
        path.write_bytes(b'half')
        raise RuntimeError('[enforce fail at inline_container.cc:664] . unexpected pos')

    monkeypatch.setattr(torch, 'save', save)
    line = refusal(
        capsys, *TINY, '--data-dir', data, '--output', tmp_path, '--experiment', 'run', '--epochs', '2', '--resume',
        folder)
    assert 'Cannot write' in line and '--resume' in line
    assert (folder / 'last.pth.tar').read_bytes() == before
    assert not list(folder.glob('.*'))


def test_a_corrupt_image_is_named(data, tmp_path, capsys):
    other = tmp_path / 'data'
    shutil.copytree(data, other)
    (other / '3.png').write_bytes(b'no image')
    line = refusal(capsys, *TINY, '--data-dir', other, '--output', tmp_path)
    assert '3.png' in line


def test_a_corrupt_image_may_be_skipped(data, tmp_path, caplog):
    other = tmp_path / 'data'
    shutil.copytree(data, other)
    (other / '3.png').write_bytes(b'no image')
    train(other, tmp_path, '--epochs', '1', '--on-bad-image', 'skip')
    assert '1 unreadable image(s) were skipped in epoch 0' in caplog.text


def test_splits_with_other_classes_are_refused(data, tmp_path, capsys):
    images = tmp_path / 'data'
    shutil.copytree(data, images)
    (images / 'labels.csv').unlink()
    (images / 'train.csv').write_text('image,labels\n' + ''.join(f'{index}.png,red;blue\n' for index in range(8)))
    (images / 'val.csv').write_text('image,labels\n' + ''.join(f'{index}.png,red;green\n' for index in range(8)))
    line = refusal(capsys, *TINY, '--data-dir', images, '--output', tmp_path)
    assert 'have different classes' in line


def test_weights_of_another_model_or_none_are_refused_to_start_from(data, finished, tmp_path, capsys):
    torch.save({'a': torch.zeros(2)}, tmp_path / 'none.pth')
    (tmp_path / 'text.pth').write_text('hello')
    vit = ('--model', 'test_vit', '--img-size', '160')
    for flags, words in (
            ([*vit, '--pretrained-path', finished / 'last.pth.tar'], 'weights of VisionTransformer.* has 0 of its'),
            (['--pretrained-path', tmp_path / 'none.pth'], 'has 0 of its'),
            (['--pretrained-path', tmp_path / 'text.pth'], 'text.pth is not a checkpoint'),
            (['--initial-checkpoint', tmp_path / 'text.pth'], 'text.pth is not a checkpoint'),
            ([*vit, '--initial-checkpoint', finished / 'last.pth.tar'], 'test_vit')):
        line = refusal(capsys, *TINY, '--data-dir', data, '--output', tmp_path, *flags)
        assert_matches(line, words)
        assert len(line) < 500


def test_a_run_cut_in_an_epoch_does_not_go_on_with_other_batches(data, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 0, 2)
        with pytest.raises(SystemExit):
            train(data, tmp_path)
    line = refusal(capsys, '--resume', tmp_path / 'run', '--batch-size', '8')
    assert 'num_batches of 4' in line and '--batch-size' in line
