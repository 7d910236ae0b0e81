""" Errors that a user can correct: one line, and exit code 2 """
import logging
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import save_file

from timm_splicemix.run.read import read_checkpoint
from timm_splicemix.train import main

from .runs import flags_of, train, train_until


@pytest.fixture(scope='module')
def finished(data, tmp_path_factory):
    return train(data, tmp_path_factory.mktemp('finished'), '--epochs', '1')


@pytest.fixture
def refusal(data, tmp_path, capsys):
    """Call train.py with flags that it must reject; returns its error message."""
    def call(*flags, data=data):
        with pytest.raises(SystemExit) as left:
            main(flags_of(data, tmp_path, *flags))
        lines = [line for line in capsys.readouterr().err.splitlines() if 'error:' in line]
        assert left.value.code == 2, lines
        assert len(lines) == 1
        return lines[0]

    return call


@pytest.fixture
def own_data(data, tmp_path):
    """A copy of the data, to be changed."""
    return shutil.copytree(data, tmp_path / 'data')


@pytest.fixture
def own_run(finished, tmp_path):
    """A copy of the finished run, in the folder to which the next run writes."""
    return shutil.copytree(finished, tmp_path / 'run')


@pytest.mark.parametrize('flags, words', [
    (['--model', 'resnet5O'], "'resnet5O'.*resnet50"),
    (['--batch-size', '0'], "--batch-size: .* at least 1, but got '0'"),
    (['--epochs', '0'], '--epochs: .* at least 1'),
    (['--mixup', '0.2', '--splicemix-grids', '2x2'], '--splicemix-grids and --mixup'),
    (['--splicemix-cl'], '--splicemix-grids'),
    (['--splicemix-grids', '2x2', '--splicemix-cl', '--splicemix-batch', 'fixed'], '--splicemix-batch append'),
    (['--splicemix-grids', '2by2'], '2by2'),
    (['--splicemix-grids', '2*2'], "such as '1x2,2x2.*2\\*2"),
    (['--mixup-prob', '0.5'], '--mixup or --cutmix.* with --mixup-prob'),
    (['--cooldown-epochs', '2', '--sched', 'step'], '--sched cosine'),
    (['--splicemix-cl-no-detach'], '--splicemix-cl'),
    (['--splicemix-grids', '2x2', '--splicemix-cl-mean', 'all'], 'Expected --splicemix-cl with --splicemix-cl-mean'),
    (['--model', 'pit_ti_224', '--img-size', '224', '--gp', 'max'], 'pit_ti_224.*'),
    (['--model', 'pit_ti_224', '--img-size', '224', '--splicemix-grids', '2x2', '--splicemix-cl'],
     'pit_ti_224 cannot be used for consistency learning'),
    (['--model', 'test_vit', '--img-size', '50'], 'VisionTransformer does not take images of 50 x 50'),
    (['--gp', 'nonsense'], 'nonsense'),
    (['--opt', 'nonsense'], '--opt.*nonsense'),
    (['--sched', 'nonsense'], '--sched.*nonsense'),
    (['--lr-base-scale', 'cubic'], '--lr-base-scale.*cubic'),
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
    (['--lr', 'nan'], "--lr: .* at least 0, but got 'nan'"),
    (['--std', '0', '0', '0'], "--std: .* above 0, but got '0'"),
    (['--clip-grad', 'nan'], '--clip-grad: '),
    (['--splicemix-grids', '2x2', '--splicemix-cl', 'nan'], '--splicemix-cl: '),
    (['--splicemix-grids', '2x2@nan'], 'ROWSxCOLS'),
    (['--keep-labels', 'nan'], '--keep-labels'),
    (['--backbone-lr-scale', '-1'], '--backbone-lr-scale: .* at least 0'),
])
def test_bad_flags_are_one_line(refusal, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    assert_matches(refusal(*flags), words)
    assert not list(tmp_path.glob('*/last.pth.tar'))


def assert_matches(line, words):
    assert re.search(words, line), line


def test_an_unknown_key_in_a_config_is_an_error(refusal, tmp_path):
    (tmp_path / 'config.yaml').write_text('batch_size: 4\nlearning_rate: 0.1\n')
    assert_matches(refusal('--config', tmp_path / 'config.yaml'), 'learning_rate.*config.yaml')


def test_an_output_folder_that_cannot_be_written_is_an_error(refusal, tmp_path):
    (tmp_path / 'file').write_text('')
    assert_matches(refusal('--output', tmp_path / 'file'), f'Cannot write .*{tmp_path / "file"} is not a folder')


# --- checkpoints and weights ---


@pytest.mark.parametrize('content', [b'', b'no checkpoint', None], ids=['empty', 'text', 'truncated'])
def test_a_file_that_is_no_checkpoint_is_an_error(refusal, finished, tmp_path, content):
    path = tmp_path / 'some.pth.tar'
    whole = (finished / 'last.pth.tar').read_bytes()
    path.write_bytes(whole[:len(whole) // 2] if content is None else content)
    assert 'some.pth.tar is not a checkpoint, or it is truncated' in refusal('--resume', path)


def test_a_checkpoint_that_would_run_code_is_an_error(refusal, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'evil'),)

    torch.save({'state_dict': Evil()}, tmp_path / 'evil.pth.tar')
    assert 'evil.pth.tar contains code (posix.mkdir)' in refusal('--resume', tmp_path / 'evil.pth.tar')
    assert not (tmp_path / 'evil').exists()


def test_a_checkpoint_of_another_model_is_an_error(refusal, finished, tmp_path):
    line = refusal('--model', 'test_vit', '--img-size', '160', '--resume', finished)
    assert 'a checkpoint of test_vit' in line and 'test_resnet' in line
    torch.save({'layer.weight': torch.zeros(3)}, tmp_path / 'weights.pth')
    assert 'Missing key bn1.bias in checkpoint' in refusal('--resume', tmp_path / 'weights.pth')


def test_a_checkpoint_of_other_classes_is_an_error(refusal, finished, own_data):
    header, *lines = (own_data / 'labels.csv').read_text().splitlines()
    lines = [f'{line},{number % 2}' for number, line in enumerate(lines)]
    (own_data / 'labels.csv').write_text('\n'.join([f'{header},fourth', *lines]))
    assert 'classes of the data set (4)' in refusal('--resume', finished, data=own_data)
    assert 'fc.weight' in refusal('--initial-checkpoint', finished / 'last.pth.tar', data=own_data)


def test_a_checkpoint_of_another_optimizer_is_an_error(refusal, finished):
    line = refusal('--opt', 'adamw', '--layer-decay', '0.5', '--epochs', '2', '--resume', finished)
    assert_matches(line, 'last.pth.tar is of another optimizer.*--no-resume-opt')


def test_a_folder_without_checkpoints_is_an_error(refusal, tmp_path):
    assert 'which has no last.pth.tar' in refusal('--resume', tmp_path)


def test_a_run_stopped_in_an_epoch_does_not_resume_with_other_batches(refusal, data, tmp_path):
    folder = train_until(0, 2, data, tmp_path)
    assert_matches(refusal('--resume', folder, '--batch-size', '8'), 'num_batches of 4.*--batch-size')


def test_weights_of_another_model_are_an_error(refusal, finished, tmp_path):
    torch.save({'a': torch.zeros(2)}, tmp_path / 'none.pth')
    (tmp_path / 'text.pth').write_text('hello')
    vit = ('--model', 'test_vit', '--img-size', '160')
    for flags, words in (
            ([*vit, '--pretrained-path', finished / 'last.pth.tar'], 'weights of VisionTransformer.* has 0 of its'),
            (['--pretrained-path', tmp_path / 'none.pth'], 'has 0 of its'),
            (['--pretrained-path', tmp_path / 'text.pth'], 'text.pth is not a checkpoint'),
            (['--initial-checkpoint', tmp_path / 'text.pth'], 'text.pth is not a checkpoint'),
            ([*vit, '--initial-checkpoint', finished / 'last.pth.tar'], 'test_vit')):
        line = refusal(*flags)
        assert_matches(line, words)
        assert len(line) < 500


# --- labels ---


@pytest.mark.parametrize('value, words', [('0', 'negative or unknown'), ('-1', 'unknown')])
@pytest.mark.parametrize('split', ['train', 'val'])
def test_labels_without_any_positive_are_an_error(refusal, own_data, tmp_path, split, value, words):
    header, *lines = (own_data / 'labels.csv').read_text().splitlines()
    lines = [re.sub(f'(,{split},).*', rf'\g<1>{value},{value},{value}', line) for line in lines]
    (own_data / 'labels.csv').write_text('\n'.join([header, *lines]))
    line = refusal(data=own_data)
    name = 'validation' if split == 'val' else split
    assert f"of split '{name}' in {own_data / 'labels.csv'} are {words}. " in line
    assert not (tmp_path / 'run').exists()


def test_a_class_without_positives_is_a_warning(own_data, tmp_path, caplog):
    header, *lines = (own_data / 'labels.csv').read_text().splitlines()
    (own_data / 'labels.csv').write_text('\n'.join([header, *(line[:-1] + '0' for line in lines)]))
    train(own_data, tmp_path, '--epochs', '1')
    assert "No image of split 'train' has: blue." in caplog.text


# --- while training ---


def test_a_non_finite_loss_stops_the_run_with_the_names_of_the_files(refusal):
    assert_matches(refusal('--lr', '1e30', '--epochs', '3'), 'Non-finite loss at batch .*png.*--lr')


def test_a_non_finite_loss_leaves_the_last_checkpoint_intact(refusal, own_run):
    before = (own_run / 'last.pth.tar').read_bytes()
    line = refusal(
        '--lr', '1e30', '--epochs', '9', '--resume', own_run, '--no-resume-opt', '--start-epoch', '1',
        '--recovery-interval', '1')
    assert 'Non-finite loss at batch' in line
    assert (own_run / 'last.pth.tar').read_bytes() == before


def test_a_full_disk_leaves_earlier_checkpoints_intact(refusal, own_run, monkeypatch):
    before = (own_run / 'last.pth.tar').read_bytes()

    def save(state, path):
        path.write_bytes(b'half')
        raise RuntimeError('[enforce fail at inline_container.cc:664] . unexpected pos')

    monkeypatch.setattr(torch, 'save', save)
    assert_matches(refusal('--epochs', '2', '--resume', own_run), 'Cannot write .*unexpected pos.*--resume')
    assert (own_run / 'last.pth.tar').read_bytes() == before
    assert not list(own_run.glob('.*'))


def test_a_corrupt_image_is_an_error_with_its_name_or_is_skipped(refusal, own_data, tmp_path, caplog):
    (own_data / '3.png').write_bytes(b'no image')
    assert '3.png' in refusal(data=own_data)
    train(own_data, tmp_path, '--epochs', '1', '--on-bad-image', 'skip')
    assert '1 unreadable image(s) were skipped in epoch 0' in caplog.text


def test_splits_with_other_classes_are_an_error(refusal, own_data):
    (own_data / 'labels.csv').unlink()
    for split, other in (('train', 'blue'), ('val', 'green')):
        rows = ''.join(f'{index}.png,red;{other}\n' for index in range(8))
        (own_data / f'{split}.csv').write_text(f'image,labels\n{rows}')
    assert 'classes of the validation set are no classes of the training set: green' in refusal(data=own_data)


def test_a_safetensors_file_is_resumed_at_epoch_0_and_a_damaged_one_is_named(data, finished, tmp_path, refusal):
    weights = read_checkpoint(finished / 'last.pth.tar')['state_dict']
    save_file(weights, tmp_path / 'weights.safetensors')
    folder = train(data, tmp_path, '--resume', tmp_path / 'weights.safetensors', '--epochs', '1')
    assert read_checkpoint(folder / 'last.pth.tar')['epoch'] == 0
    save_file(weights, tmp_path / 'bad.safetensors', {'timm_splicemix': '[' * 100000})
    assert 'Expected a safetensors file' in refusal('--resume', tmp_path / 'bad.safetensors')


def test_a_finished_run_says_that_it_is_finished(own_run, caplog):
    caplog.set_level(logging.INFO)
    main(['--resume', str(own_run)])
    assert 'The run is finished (epochs: 1). Set --epochs to a larger number' in caplog.text
    assert 'Training test_resnet' not in caplog.text
    assert f'--checkpoint {own_run}/model_best.pth.tar' in caplog.text
    caplog.clear()
    main(['--resume', str(own_run), '--output', str(own_run / 'other')])
    assert 'The run is finished' in caplog.text and '--checkpoint' not in caplog.text  # the new folder has none
