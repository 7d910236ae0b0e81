""" No flag of validate.py is parsed and ignored: each has a test of what it does, or is refused """
# ruff: noqa: F811 - fixtures that are imported are arguments too
import csv
import json
import logging

import pytest
import timm
import timm.data
import torch
from PIL import Image
from timm.layers import is_fast_norm, set_fast_norm
from torchvision.transforms.functional import pil_to_tensor

import timm_splicemix as tsm
from tests.evaluations import (
    arguments,
    close,
    logits_of,
    look,  # noqa: F401
    place,  # noqa: F401 - used by pytest, as quiet
    quiet,  # noqa: F401
    refusal,
    score,  # noqa: F401
    validate,
    write_checkpoint,
    write_data,
    write_folders,
)
from tests.test_coco import write_coco
from tests.test_voc import make_voc
from tests.timm_flags import VALIDATE
from timm_splicemix import validate as validate_module
from timm_splicemix.args.timm import REFUSED_IN_VALIDATION
from timm_splicemix.data import registry
from timm_splicemix.data.readers.voc import VOC_CLASSES
from timm_splicemix.results import Scores
from timm_splicemix.run import evaluation
from timm_splicemix.run.predictor import FlipAverage
from timm_splicemix.validate import build_parser, main

ACTIONS = build_parser().flags
RAW = ('--mean', '0', '--std', '1')  # pixels from 0 to 1
SHOWN = set()  # flags that some test shows the effect or the refusal of


def shows(*names):
    """Say which flags a test is about, by their names in the parsed arguments."""
    assert set(names) <= ACTIONS.keys(), set(names) - ACTIONS.keys()

    def note(test):
        SHOWN.update(names)
        return test

    return note


@pytest.fixture
def handed_on(monkeypatch):
    """What timm is asked for, instead of being asked."""
    calls = []

    def create(name, **kwargs):
        calls.append({'name': name, **kwargs})
        raise RuntimeError('not here')

    monkeypatch.setattr(timm.data, 'create_dataset', create)
    return calls


def pixels_of(folder, name='val_00.png', mode='RGB', size=(32, 32), method='BILINEAR'):
    """An image by plain PIL, from 0 to 1; size is (width, height)."""
    with Image.open(folder / 'data' / name) as image:
        return pil_to_tensor(image.convert(mode).resize(size, Image.Resampling[method])) / 255


# Data sets

@shows('data', 'data_dir', 'dataset')
def test_the_folder_of_the_data_can_be_given_in_two_ways(place, tmp_path, capsys):
    model = ['--checkpoint', place / 'run' / 'last.pth.tar', '-j', 0, '--output', tmp_path]
    for where in (['--data-dir', place / 'data'], [place / 'data']):
        main([str(part) for part in (*where, '--dataset', 'csv', *model)])
        scores = Scores.load(tmp_path / 'scores.npz')
        assert close(scores.scores, logits_of(place))
        (tmp_path / 'scores.npz').unlink()
    line = refusal(capsys, [place / 'data', '--data-dir', tmp_path, '--dataset', 'csv', *model])
    assert 'Expected one folder of data' in line


@shows('split')
def test_a_split_is_chosen_by_its_name(score):
    assert score().filenames[0] == 'val_00.png'
    assert score('--split', 'test').filenames[0] == 'test_00.png'


@shows('num_samples', 'input_key', 'target_key', 'dataset_trust_remote_code', 'seed')
def test_what_a_stream_takes_is_handed_on(place, handed_on, capsys):
    refusal(capsys, arguments(
        place, '--dataset', 'hfids/some', '--num-samples', 7, '--input-key', 'picture', '--target-key', 'thing',
        '--dataset-trust-remote-code', '--seed', 5))
    call, = handed_on
    assert (call['num_samples'], call['input_key'], call['target_key']) == (7, 'picture', 'thing')
    assert call['trust_remote_code'] is True and call['seed'] == 5


@pytest.mark.parametrize('dataset', ['csv', ''])
@pytest.mark.parametrize('flags', [('--num-samples', 7), ('--dataset-download',), ('--dataset-trust-remote-code',)])
def test_what_a_data_set_has_no_use_for_is_refused(place, dataset, flags, capsys):
    line = refusal(capsys, arguments(place, '--dataset', dataset, *flags))
    assert f'Expected {flags[0]} with a data set among' in line


@pytest.mark.parametrize('flags', [('--class-map', 'some.txt'), ('--input-img-mode', 'L')])
def test_what_torchvision_has_no_use_for_is_refused(place, flags, capsys):
    line = refusal(capsys, arguments(place, '--dataset', 'torch/cifar10', *flags))
    assert f'Expected no {flags[0]} with a data set of torchvision' in line


@shows('dataset_download', 'voc_difficult_eval')
def test_a_data_set_is_fetched_and_difficult_objects_are_what_is_said(score, tmp_path, monkeypatch, capsys):
    names = sorted(VOC_CLASSES)
    checkpoint = write_checkpoint(tmp_path / 'run', class_names=names)
    monkeypatch.setattr(registry, 'download_dataset', lambda name, root: make_voc(tmp_path / 'voc'))
    flags = ['--dataset', 'voc/2007', '--data-dir', tmp_path / 'voc', '--split', 'val', '--checkpoint', checkpoint]
    refusal(capsys, [*flags, '-j', 0])
    person = names.index('person')
    targets = score(*flags, '--dataset-download').targets
    assert targets[0, person] == -1
    assert score(*flags, '--voc-difficult-eval', 'positive').targets[0, person] == 1


@shows('class_map')
def test_a_file_orders_the_classes(place, score, tmp_path):
    (tmp_path / 'classes.txt').write_text('dog\nbird\ncat\n')
    scores = score('--class-map', tmp_path / 'classes.txt')
    assert scores.class_names == ('dog', 'bird', 'cat')
    assert close(scores.scores, logits_of(place)[:, [2, 0, 1]])


@shows('drop_unknown_classes')
def test_labels_of_unknown_classes_can_be_dropped(place, score, tmp_path, capsys):
    data = write_data(tmp_path / 'data', classes=('ant', 'bird', 'dog'))
    flags = ['--data-dir', data]
    assert "no column for class 'cat'" in refusal(capsys, arguments(place, *flags))
    scores = score(*flags, '--drop-unknown-classes')
    assert scores.class_names == ('bird', 'cat', 'dog')
    assert (scores.targets == 1).any(dim=0).tolist() == [True, False, True]


@shows('split_file')
def test_a_part_of_a_file_is_evaluated(place, score, tmp_path, capsys):
    parts = {'train': ['val_00.png', 'val_02.png'], 'val': ['val_03.png', 'val_01.png']}
    (tmp_path / 'split.json').write_text(json.dumps({'source': 'val', 'parts': parts}))
    assert score('--split-file', tmp_path / 'split.json').filenames == ('val_01.png', 'val_03.png')
    assert score('--split-file', tmp_path / 'split.json', '--split', 'train').filenames == ('val_00.png', 'val_02.png')
    line = refusal(capsys, arguments(place, '--split-file', tmp_path / 'split.json', '--split', 'test'))
    assert "has no part 'test'. Its parts: train, val" in line


@shows('valid_labels')
def test_a_file_chooses_outputs(place, score, tmp_path):
    (tmp_path / 'valid.txt').write_text('2\n0\n')
    data = write_data(tmp_path / 'data', classes=('dog', 'bird'))
    scores = score('--data-dir', data, '--valid-labels', tmp_path / 'valid.txt')
    (tmp_path / 'run').symlink_to(place / 'run')
    assert scores.class_names == ('dog', 'bird') and close(scores.scores, logits_of(tmp_path)[:, [2, 0]])


# Labels

@pytest.mark.slow
@shows('train_ann', 'val_ann', 'train_images', 'val_images', 'class_order', 'keep_unlabelled')
def test_annotations_of_coco_are_read_as_asked(score, tmp_path):
    write_coco(tmp_path, 'images', file='mine.json')
    write_coco(tmp_path, 'images', file='yours.json', image_ids=(30, 4, 17, 18))
    checkpoint = write_checkpoint(tmp_path / 'run', class_names=('zebra', 'dog', 'ant'))
    flags = ['--dataset', 'coco', '--data-dir', tmp_path, '--checkpoint', checkpoint]
    mine = score(*flags, '--val-ann', 'mine.json')
    assert (mine.class_names, len(mine.scores)) == (('zebra', 'dog', 'ant'), 2)
    assert len(score(*flags, '--val-ann', 'mine.json', '--keep-unlabelled').scores) == 3
    assert len(score(*flags, '--val-ann', 'yours.json', '--keep-unlabelled').scores) == 4
    (tmp_path / 'images').rename(tmp_path / 'photos')
    flags += ['--val-images', 'photos', '--train-images', tmp_path / 'photos']
    both = ['--train-ann', 'yours.json', '--val-ann', 'mine.json', '--keep-unlabelled']
    assert len(score(*flags, *both, '--split', 'train').scores) == 4
    assert len(score(*flags, *both).scores) == 3
    other = score(*flags[:-2], '--val-ann', 'mine.json', '--class-order', 'name')
    assert other.class_names == ('ant', 'dog', 'zebra')
    torch.testing.assert_close(other.scores, mine.scores.flip(1))


@shows('csv_image_column', 'csv_label_column', 'csv_split_column', 'csv_delimiter', 'csv_empty')
def test_columns_of_a_table_can_be_named(place, score, tmp_path):
    for name in ('val_00.png', 'val_01.png', 'val_02.png'):
        (tmp_path / name).symlink_to(place / 'data' / name)
    (tmp_path / 'labels.csv').write_text('\n'.join([
        'image,other,labels,things,split,where', 'val_00.png,val_01.png,cat,bird+dog,train,val',
        'val_01.png,val_02.png,dog,cat,val,val', 'val_02.png,val_00.png,bird,,val,val']))
    flags = ['--data-dir', tmp_path, '--csv-label-column', 'things', '--csv-delimiter', '+', '--csv-empty', 'unknown']
    scores = score(*flags, '--csv-split-column', 'where', '--csv-image-column', 'other')
    assert scores.filenames == ('val_01.png', 'val_02.png', 'val_00.png')
    assert scores.targets.tolist() == [[1, 0, 1], [0, 1, 0], [-1, -1, -1]]


# Models

@shows('checkpoint', 'use_ema', 'no_ema')
def test_weights_come_from_the_checkpoint_that_was_given(place, score, tmp_path):
    assert close(score().scores, logits_of(place, use_ema=True))
    assert close(score('--no-ema').scores, logits_of(place, use_ema=False))
    assert close(score('--use-ema').scores, logits_of(place, use_ema=True))
    assert not close(logits_of(place, use_ema=False), logits_of(place, use_ema=True))
    other = score('--checkpoint', write_checkpoint(tmp_path / 'run', seed=1)).scores
    (tmp_path / 'data').symlink_to(place / 'data')
    assert close(other, logits_of(tmp_path)) and not close(other, logits_of(place))


@shows('model', 'pretrained', 'num_classes')
def test_a_model_is_named_where_its_weights_do_not(place, look, tmp_path, capsys):
    torch.save(timm.create_model('test_convnext', num_classes=3).state_dict(), tmp_path / 'bare.pth')
    bare = ['--checkpoint', tmp_path / 'bare.pth', '--img-size', 32]
    assert type(look(*bare, '--model', 'test_convnext').model).__name__ == 'ConvNeXt'
    assert '--model' in refusal(capsys, arguments(place, *bare))
    line = refusal(capsys, arguments(place, '--num-classes', 7))
    assert 'Expected --num-classes 3' in line
    assert '--checkpoint or --pretrained' in refusal(capsys, arguments(place, '--pretrained'))


@shows('in_chans', 'input_img_mode')
def test_images_have_the_channels_that_the_model_takes(place, look, tmp_path, capsys):
    torch.save(timm.create_model('test_resnet', num_classes=3, in_chans=1).state_dict(), tmp_path / 'grey.pth')
    grey = ['--checkpoint', tmp_path / 'grey.pth', '--model', 'test_resnet', '--img-size', 32, '--crop-mode', 'squash']
    grey += ['--crop-pct', 1, '--interpolation', 'bilinear', *RAW]
    images = look(*grey, '--in-chans', 1).images
    torch.testing.assert_close(images[0], pixels_of(place, mode='L'))
    refusal(capsys, arguments(place, *grey))
    torch.testing.assert_close(look(*RAW, '--input-img-mode', 'HSV').images[0], pixels_of(place, mode='HSV'))
    line = refusal(capsys, arguments(place, '--input-img-mode', 'L'))
    assert 'Expected images of 3 channels' in line
    assert "mode of Pillow's" in refusal(capsys, arguments(place, '--input-img-mode', 'some'))


def test_grey_images_are_normalised_without_being_told_how(look, tmp_path):
    torch.save(timm.create_model('test_resnet', num_classes=3, in_chans=1).state_dict(), tmp_path / 'grey.pth')
    grey = ['--checkpoint', tmp_path / 'grey.pth', '--model', 'test_resnet', '--img-size', 32, '--in-chans', 1]
    assert look(*grey).images.shape == (11, 1, 32, 32)


@shows('gp', 'model_kwargs')
def test_the_model_is_built_as_asked(look):
    plain, average = look().model, look('--gp', 'avg').model
    assert tsm.models.is_max_pooled(plain) and not tsm.models.is_max_pooled(average)
    dilated = look('--model-kwargs', 'output_stride=8').model
    images = torch.zeros(1, 3, 32, 32)
    assert plain.forward_features(images).shape[-1] == 1 and dilated.forward_features(images).shape[-1] == 4


@shows('img_size', 'input_size', 'use_train_size')
def test_images_have_the_size_that_was_asked_for(look, tmp_path):
    assert look('--img-size', 48).images.shape == (11, 3, 48, 48)
    assert look('--input-size', 3, 24, 40).images.shape == (11, 3, 24, 40)
    torch.save(timm.create_model('test_mambaout', num_classes=3).state_dict(), tmp_path / 'bare.pth')
    bare = ['--checkpoint', tmp_path / 'bare.pth', '--model', 'test_mambaout']
    assert look(*bare).images.shape[-1] == 192  # which timm tests it at
    assert look(*bare, '--use-train-size').images.shape[-1] == 160


@shows('test_pool')
def test_images_larger_than_trained_are_pooled_at_the_end(look, tmp_path):
    flags = ['--checkpoint', write_checkpoint(tmp_path / 'run', global_pool='avg'), '--img-size', 224]
    plain, pooled = look(*flags), look(*flags, '--test-pool')
    assert type(pooled.model).__name__ == 'TestTimePoolHead' and not close(plain.output(), pooled.output())


@shows('reparam')
def test_branches_are_folded(look, tmp_path):
    flags = ['--checkpoint', write_checkpoint(tmp_path / 'run', 'repghostnet_050', size=64)]
    plain, folded = look(*flags), look(*flags, '--reparam')
    assert len(list(folded.model.parameters())) < len(list(plain.model.parameters()))
    assert close(plain.output(), folded.output())


@shows('channels_last', 'no_prefetcher')
def test_batches_are_laid_out_as_asked(place, look):
    seen = look('--channels-last', '--no-prefetcher', *RAW)
    assert seen.model.conv1[0].weight.is_contiguous(memory_format=torch.channels_last)
    images, _ = seen.step.to_device(*next(iter(seen.loader)))
    assert images.is_contiguous(memory_format=torch.channels_last) and seen.loader._prefetcher is None
    torch.testing.assert_close(images[0], pixels_of(place).contiguous(memory_format=torch.contiguous_format))
    seen = look()
    images, _ = seen.step.to_device(*next(iter(seen.loader)))
    assert images.is_contiguous() and seen.loader._prefetcher is not None


@shows('torchscript', 'fuser')
def test_the_model_is_scripted(look, monkeypatch):
    fusers = []
    monkeypatch.setattr(validate_module, 'set_jit_fuser', fusers.append)
    seen = look('--torchscript', '--fuser', 'te')
    assert isinstance(seen.model, torch.jit.ScriptModule) and fusers == ['te']


@shows('torchcompile', 'torchcompile_mode', 'aot_autograd')
def test_the_model_is_compiled_as_asked(look, monkeypatch):
    calls = []

    def compile_model(model, backend='inductor', mode=None):
        calls.append((backend, mode))
        return model

    monkeypatch.setattr(torch, 'compile', compile_model)
    look()
    assert not calls
    look('--torchcompile')
    look('--torchcompile', 'eager', '--torchcompile-mode', 'max-autotune')
    look('--aot-autograd')
    assert calls == [('inductor', None), ('eager', 'max-autotune'), ('aot_eager', None)]


@shows('fast_norm')
def test_norms_compute_in_low_precision(look):
    try:
        set_fast_norm(False)
        look()
        assert not is_fast_norm()
        look('--fast-norm')
        assert is_fast_norm()
    finally:
        set_fast_norm(False)


@shows('amp', 'amp_dtype', 'model_dtype')
def test_numbers_have_the_precision_that_was_asked_for(look):
    def dtypes(*flags):
        seen = look(*flags)
        return next(seen.model.parameters()).dtype, seen.output().dtype

    float32, float16, bfloat16 = torch.float32, torch.float16, torch.bfloat16
    assert dtypes() == (float32, float32)
    assert dtypes('--amp') == (float32, bfloat16)  # the default for a CPU
    assert dtypes('--amp', '--amp-dtype', 'float16') == (float32, float16)
    assert dtypes('--model-dtype', 'bfloat16') == (bfloat16, bfloat16)


@shows('device')
def test_a_device_that_is_not_there_is_refused(place, look, capsys):
    assert look('--device', 'cpu').step.device.type == 'cpu'
    line = refusal(capsys, arguments(place, '--device', 'nonsense'))
    assert "Expected a device of this machine, but got 'nonsense'" in line


# Images

@shows('mean', 'std')
def test_images_are_normalised(place, look):
    images = look('--mean', 0.5, 0.4, 0.3, '--std', 0.25).images
    torch.testing.assert_close(images[0], (pixels_of(place) - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / 0.25)


@shows('interpolation', 'crop_pct')
def test_images_are_resized_as_asked(place, look):
    images = look(*RAW, '--interpolation', 'nearest').images
    torch.testing.assert_close(images[0], pixels_of(place, method='NEAREST'))
    images = look(*RAW, '--crop-pct', 0.5).images
    torch.testing.assert_close(images[0], pixels_of(place, size=(64, 64))[:, 16:48, 16:48])


@shows('crop_mode', 'crop_border_pixels')
def test_images_are_cropped_as_asked(place, look):
    images = look(*RAW, '--crop-mode', 'center').images  # images are 40 x 36
    torch.testing.assert_close(images[0], pixels_of(place, size=(35, 32))[:, :, 2:34])
    images = look(*RAW, '--crop-border-pixels', 4).images
    with Image.open(place / 'data' / 'val_00.png') as image:
        trimmed = image.crop((4, 4, 36, 32)).resize((32, 32), Image.Resampling.BILINEAR)
    torch.testing.assert_close(images[0], pil_to_tensor(trimmed) / 255)


@shows('cache', 'cache_size', 'scaled_decoding')
def test_images_are_decoded_once_or_in_part(look, tmp_path):
    pixels = look('--cache', tmp_path / 'cache', '--cache-size', 30).loader.dataset.pixels  # images are 40 x 36
    assert pixels.num_written == len(pixels) and pixels.read(0).shape == (30, 33, 3)
    assert look('--scaled-decoding').loader.dataset.scaled_decoding


@shows('batch_size', 'workers', 'pin_mem', 'decoder')
def test_images_are_loaded_as_asked(look):
    seen = look('-b', 3, '-j', 1, '--pin-mem', '--decoder', 'torchvision')
    loader = seen.loader._source.loader
    assert (loader.num_workers, loader.pin_memory, seen.loader.dataset.decoder) == (1, True, 'torchvision')
    assert len(seen.loader) == 4
    seen = look()
    loader = seen.loader._source.loader
    assert (loader.num_workers, loader.pin_memory, seen.loader.dataset.decoder) == (0, False, 'pil')


# Results

@shows('log_freq')
def test_lines_of_the_log_come_at_an_interval(look, caplog):
    caplog.set_level(logging.INFO)
    counts = []
    for number in (1, 2, 100):
        caplog.clear()
        look('-b', 1, '--log-freq', number)
        counts.append(sum('Validate' in line and '/' in line for line in caplog.messages))
    assert counts[0] == 11 and 5 <= counts[1] <= 6 and counts[2] < 3


@shows('results_file', 'results_format', 'output')
def test_results_are_written_where_was_asked(place, tmp_path):
    result = validate(place, tmp_path / 'out', '--results-file', tmp_path / 'more.csv')
    with open(tmp_path / 'more.csv') as file:
        row, = csv.DictReader(file)
    assert float(row['mAP']) == result['metrics']['mAP']
    result = validate(
        place, tmp_path / 'out', '--results-file', tmp_path / 'more.json', '--results-format', 'json')
    assert json.loads((tmp_path / 'more.json').read_text()) == result


@shows('retry')
def test_smaller_batches_are_tried_when_memory_runs_out(place, tmp_path, monkeypatch, capsys):
    sizes = []

    def forward(self, x):
        sizes.append(len(x))
        if len(x) > 2:
            raise torch.OutOfMemoryError('CUDA out of memory')
        return self.model(x)[:, self.outputs]

    monkeypatch.setattr(evaluation.ChosenOutputs, 'forward', forward)
    (tmp_path / 'classes.txt').write_text('dog\nbird\ncat\n')
    flags = ['--class-map', tmp_path / 'classes.txt']
    assert '--retry' in refusal(capsys, [*arguments(place, *flags), '--output', tmp_path])
    result = validate(place, tmp_path, *flags, '--retry')
    assert result['batch_size'] == 2 and result['num_images'] == 11 and sizes[-6:] == [2, 2, 2, 2, 2, 1]
    assert not evaluation.is_out_of_memory(RuntimeError('shape mismatch'))


@shows('metrics', 'thresholds')
def test_metrics_are_defined_as_asked(place, tmp_path):
    paper, asl = (validate(place, tmp_path, '--metrics', name) for name in ('paper', 'asl'))
    assert (paper['preset'], paper['threshold'], asl['preset'], asl['threshold']) == ('paper', 0.5, 'asl', 0.8)
    interpolated = validate(place, tmp_path, '--metrics', 'interpolated')
    assert interpolated['metrics']['mAP'] > paper['metrics']['mAP']
    assert validate(place, tmp_path, '--thresholds', 0)['metrics']['OR'] == 100


@shows('thresholds', 'tune_split')
def test_thresholds_are_tuned_on_a_split_of_their_own_and_used_again(place, tmp_path, caplog):
    write_checkpoint(tmp_path / 'run')
    own = tmp_path / 'run' / 'model_best.pth.tar'
    tuned = validate(place, tmp_path / 'tuned', '--checkpoint', own, '--thresholds', 'tune', '--tune-split', 'test')
    content = json.loads((tmp_path / 'run' / 'thresholds.json').read_text())
    assert (content['dataset'], content['split'], content['num_images']) == ('csv', 'test', 11)
    assert tuned['threshold'] == [entry['threshold'] for entry in content['classes']]
    assert tuned['thresholds_tuned_on'] == 'csv test'
    assert 'are overfitting' in caplog.text and 'fewer than 10 positives' in caplog.text
    file = tmp_path / 'run' / 'thresholds.json'
    again = validate(place, tmp_path / 'again', '--checkpoint', own, '--thresholds', file)
    assert again['metrics'] == tuned['metrics']
    caplog.clear()
    validate(place, tmp_path / 'same', '--checkpoint', own, '--thresholds', file, '--split', 'test')
    assert 'look better than they are' in caplog.text


@shows('tta', 'eval_sizes')
def test_images_are_mirrored_and_shrunk_when_asked(place, look):
    seen = look('--tta', 'flip')
    assert isinstance(seen.model, FlipAverage)
    mean = (logits_of(place).sigmoid() + logits_of(place, flip=True).sigmoid()) / 2
    assert close(seen.meter.gather()[0].sigmoid(), mean)
    seen = look('--eval-sizes', 24)
    assert close(seen.meter.gather()[0], logits_of(place, size=24))


@shows('export')
def test_the_model_is_written_in_another_format(place, tmp_path):
    validate(place, tmp_path, '--export', 'safetensors')
    file, = tmp_path.glob('*.safetensors')
    result = validate(place, tmp_path / 'again', '--checkpoint', file)
    assert result['metrics'] == pytest.approx(json.loads((tmp_path / 'results.json').read_text())['metrics'])


@shows('compare', 'bootstrap', 'seed', 'output')
def test_results_are_compared_on_samples_of_the_images(place, tmp_path):
    validate(place, tmp_path / 'a')
    validate(place, tmp_path / 'b', '--tta', 'flip')

    def compare(*flags):
        main(['--compare', str(tmp_path / 'a'), str(tmp_path / 'b'), '--output', str(tmp_path / 'c'), *flags])
        return json.loads((tmp_path / 'c' / 'compare.json').read_text())

    first, other = compare('--bootstrap', '20'), compare('--bootstrap', '20', '--seed', '7')
    assert first['num_samples'] == 20 and [row['name'] for row in first['results']] == ['a', 'b']
    assert first['results'][1]['mAP_interval'] != other['results'][1]['mAP_interval']


@shows('metrics_avg')
def test_one_label_per_image_is_averaged_as_asked(tmp_path):
    data, _ = write_folders(tmp_path / 'data')
    flags = [data, '--split', '', '--checkpoint', write_checkpoint(tmp_path / 'run'), '-j', 0, '--output', tmp_path]
    for more in ([], ['--metrics-avg', 'macro'], ['--metrics-avg', 'micro']):
        main([str(part) for part in (*flags, *more)])
        result = json.loads((tmp_path / 'results.json').read_text())
        names = set(result['metrics'])
        assert result['metrics']['top5'] == 100 and result['num_images'] == 9 and result['preset'] is None
        averages = {f'{name}_{more[1]}' for name in ('precision', 'recall', 'f1')} if more else set()
        assert names == {'loss', 'top1', 'top5'} | averages


# Completeness

@shows(*REFUSED_IN_VALIDATION)
@pytest.mark.parametrize('name', REFUSED_IN_VALIDATION)
def test_what_cannot_be_done_is_refused_with_the_reason(name, place, capsys):
    action = ACTIONS[name]
    flag, = action.option_strings
    line = refusal(capsys, arguments(place, flag, *([] if action.nargs == 0 else ['2'])))
    assert f'argument {flag}: ' in line and f'supported: {REFUSED_IN_VALIDATION[name][1]}' in line


def test_every_flag_is_shown_to_work_or_refused():
    assert set(VALIDATE) <= ACTIONS.keys()
    assert ACTIONS.keys() - SHOWN == set()
