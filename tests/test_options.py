""" Wrong values of flags are reported before data are read and anything is downloaded """
import huggingface_hub
import pytest

from timm_splicemix.data import create_dataset, registry
from timm_splicemix.predict import build_parser as predict_parser
from timm_splicemix.predict import main as predict
from timm_splicemix.train import main as train
from timm_splicemix.validate import build_parser as validate_parser
from timm_splicemix.validate import main as validate

from .helpers import raises_error
from .runs import make_images

DOWNLOADED = ('--dataset', 'voc/2007', '--dataset-download', '--model', 'resnet18', '--pretrained')


@pytest.fixture
def downloads(monkeypatch):
    """Names of what would be downloaded; every download fails."""
    started = []

    def record(name, *_, **__):
        started.append(name)
        raise AssertionError(f'a download of {name} was started')

    monkeypatch.setattr(registry, 'download_dataset', record)
    monkeypatch.setattr('timm.models._hub.hf_hub_download', record)
    monkeypatch.setattr('timm.models._builder.load_state_dict_from_url', record)
    return started


def refusal(main, capsys, *flags):
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([str(flag) for flag in flags])
    assert left.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize('flags, message', [
    (('--splicemix-grids', '2*2'), "but got '2*2' in '2*2'"),
    (('--splicemix-grids', '2x2', '--mixup', '0.2'), '--splicemix-grids and --mixup'),
    (('--opt', 'sgdd'), "--opt, but got 'sgdd'"),
    (('--opt', 'adamw', '--opt-kwargs', 'beta=1'), 'beta'),
    (('--model', 'resnet5O'), "'resnet5O': did you mean resnet50"),
    (('--model', 'resnet50.a1_in1'), "but got 'a1_in1'"),
    (('--aa', 'random-m9'), "--aa, but got 'random-m9'"),
    (('--loss', 'focal', '--loss-clip', '0.1'), '--loss-clip with --loss'),
    (('--dataset', 'voc/2008'), "Unknown data set 'voc/2008'"),
    (('--train-split', 'trian'), 'but got trian'),
    (('--val-split', 'vla'), 'but got vla'),
    (('--no-such-flag',), '--no-such-flag'),
])
def test_a_mistyped_option_of_training_never_starts_a_download(tmp_path, capsys, downloads, flags, message):
    assert message in refusal(train, capsys, *DOWNLOADED, '--data-dir', tmp_path, *flags)
    assert downloads == []


@pytest.mark.parametrize('flags, message', [
    (('--dataset', 'voc/2008'), "Unknown data set 'voc/2008'"),
    (('--split', 'vla'), 'but got vla'),
    (('--tune-split', 'vla', '--thresholds', 'tune'), 'but got vla'),
    (('--model', 'resnet5O'), "'resnet5O': did you mean resnet50"),
])
def test_a_mistyped_option_of_validation_never_starts_a_download(tmp_path, capsys, downloads, flags, message):
    assert message in refusal(validate, capsys, *DOWNLOADED, '--data-dir', tmp_path, *flags)
    assert downloads == []


def test_a_mistyped_split_never_starts_a_download(tmp_path, downloads):
    for name, split in (('voc/2007', 'trian'), ('coco/2017', 'test'), ('csv', 'train')):
        with raises_error(f'{split}|cannot be downloaded'):
            create_dataset(name, tmp_path, split, download=True)
    assert downloads == []
    with pytest.raises(AssertionError, match='a download of coco/2014'):  # which is well spelt
        create_dataset('coco/2014', tmp_path, 'train2014', download=True)


def test_no_connection_to_the_hub_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
    data = make_images(tmp_path / 'data', 4, 4)
    for main, flags in (
            (train, ('--dataset', 'csv', '--data-dir', data, '--output', tmp_path)),
            (validate, ('--dataset', 'csv', '--data-dir', data, '--output', tmp_path)),
            (predict, (data,))):
        line = refusal(main, capsys, '--model', 'resnet18', '--pretrained', *flags)
        assert "Cannot download 'resnet18': there is no connection to the Hugging Face Hub" in line
        assert '--pretrained-path' in line


def test_only_validation_offers_to_tune_thresholds():
    assert '--thresholds P|FILE|tune' in validate_parser().format_help()
    usage = predict_parser().format_help()
    assert '--thresholds P|FILE' in usage and 'P|FILE|tune' not in usage and 'or tune' not in usage
