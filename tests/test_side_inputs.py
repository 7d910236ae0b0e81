""" Side inputs of heads: co-occurrence, vectors of labels, files of class vectors """
import argparse
import json
import logging
import math
import sys
import types

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from timm_splicemix.run import side_inputs
from timm_splicemix.run.class_vectors import embed_class_names, read_class_vectors
from timm_splicemix.run.side_inputs import count_labels, create_class_vectors, create_side_inputs, vectors_of_labels

from .helpers import raises_error, rng

NAMES = ['dog', 'traffic light', 'Fire_Hydrant']
WORDS = {
    'dog': [1., 0.], 'traffic': [0., 2.], 'light': [4., 0.], 'fire': [3., 3.], 'hydrant': [5., 1.], 'cat': [9., 9.]}
EXPECTED = torch.tensor([[1., 0.], [2., 1.], [4., 2.]])


def random_targets(number=50, classes=6):
    return torch.randint(-1, 2, (number, classes), generator=rng(3)).to(torch.int8)


# --- labels ---


def test_counts_equal_a_plain_loop(monkeypatch):
    monkeypatch.setattr(side_inputs, '_BLOCK', 7)
    targets = random_targets()
    counts, joint = count_labels(targets)
    for i in range(6):
        assert counts[i] == sum(row[i] == 1 for row in targets.tolist())
        for j in range(6):
            together = sum(row[i] == 1 and row[j] == 1 for row in targets.tolist())
            assert joint[i, j] == (0 if i == j else together)


def test_counts_are_exact_beyond_the_precision_of_float32():
    targets = torch.ones(1, 2, dtype=torch.int8).expand(2 ** 24 + 3, 2)
    counts, joint = count_labels(targets)
    assert counts.tolist() == [2 ** 24 + 3] * 2 and joint[0, 1] == 2 ** 24 + 3


def test_products_of_vectors_of_labels_are_the_positive_mutual_information():
    torch.manual_seed(0)
    targets = (torch.rand(400, 5) < torch.tensor([0.9, 0.5, 0.3, 0.1, 0.05])).int()
    targets[:, 4] = targets[:, 3]  # two classes that always occur together
    counts, joint = count_labels(targets)
    vectors = vectors_of_labels(counts, joint, 400)
    assert vectors.shape == (5, 5) and vectors.dtype == torch.float32
    assert vectors.is_contiguous()  # as safetensors demands
    expected = torch.zeros(5, 5)
    for i in range(5):
        for j in range(5):
            both = counts[i] if i == j else joint[i, j]
            expected[i, j] = max(0., math.log(both * 401 / (counts[i] * counts[j]))) if both else 0.
    products = vectors @ vectors.T
    torch.testing.assert_close(products @ products, expected @ expected)  # equal up to signs of eigenvalues
    similarities = torch.nn.functional.cosine_similarity(vectors[3], vectors, dim=1)
    assert similarities[4] == pytest.approx(1., abs=1e-4) and (similarities[:3] < 0.9).all()


@pytest.mark.parametrize('targets', [
    torch.zeros(4, 3), torch.ones(4, 3), torch.eye(3), torch.tensor([[1, 0, 0]]), -torch.ones(4, 3)])
def test_vectors_of_labels_are_finite_and_never_zero(targets):
    vectors = vectors_of_labels(*count_labels(targets), len(targets))
    assert vectors.isfinite().all() and (vectors.norm(dim=1) > 0.1).all()


def test_vectors_of_many_labels_have_300_dimensions():
    torch.manual_seed(0)
    assert vectors_of_labels(*count_labels(torch.rand(500, 310) < 0.1), 500).shape == (310, 300)


# --- files ---


def write_glove(path, header=False):
    lines = [f'{word} {" ".join(map(str, vector))}' for word, vector in WORDS.items()]
    lines.insert(2, 'at name@domain.com 0.5 0.5')  # GloVe has words with spaces
    path.write_text('\n'.join([f'{len(WORDS)} 2'] * header + lines) + '\n')


def write_npz(path):
    np.savez(path, names=np.array(list(WORDS)), vectors=np.array(list(WORDS.values())))


def write_npz_of_bytes(path):
    np.savez(path, names=np.array(list(WORDS), dtype=bytes), vectors=np.array(list(WORDS.values())))


def write_npz_of_words(path):
    np.savez(path, **{word: np.array(vector) for word, vector in WORDS.items()})


def write_npy(path):
    np.save(path, np.array(list(WORDS.values())))
    path.with_suffix('.txt').write_text('\n'.join(WORDS))


def write_safetensors(path):
    save_file({'vectors': np.array(list(WORDS.values()))}, path, metadata={'names': json.dumps(list(WORDS))})


def write_safetensors_of_words(path):
    save_file({word: np.array(vector, dtype=np.float32) for word, vector in WORDS.items()}, path)


@pytest.mark.parametrize('name, write', [
    ('glove.txt', write_glove), ('crawl.vec', lambda path: write_glove(path, header=True)), ('a.npz', write_npz),
    ('b.npz', write_npz_of_words), ('bytes.npz', write_npz_of_bytes), ('c.npy', write_npy),
    ('d.safetensors', write_safetensors), ('e.safetensors', write_safetensors_of_words)])
def test_vectors_are_matched_by_name_and_several_words_averaged(tmp_path, name, write):
    write(tmp_path / name)
    assert torch.equal(read_class_vectors(str(tmp_path / name), NAMES), EXPECTED)


@pytest.mark.parametrize('content', [
    'dog\t1\t2\ncat\t3\t4\n', '\ufeffdog 1 2\ncat 3 4\n', '\ndog  1 2 \r\n\r\ncat 3 4', '2 2\ndog 1 2\ncat 3 4\ncat\n'])
def test_text_files_of_other_programs_are_read(tmp_path, content):
    (tmp_path / 'words.txt').write_text(content, encoding='utf-8', newline='')
    assert read_class_vectors(str(tmp_path / 'words.txt'), ['cat', 'dog']).tolist() == [[3., 4.], [1., 2.]]


def test_vectors_of_one_number_have_no_header(tmp_path):
    (tmp_path / 'words.txt').write_text('dog 1\ncat 3\n')
    assert read_class_vectors(str(tmp_path / 'words.txt'), ['cat', 'dog']).tolist() == [[3.], [1.]]


@pytest.mark.parametrize('spelling', ['traffic light', 'traffic_light', 'traffic-light', 'TrafficLight'])
def test_the_vector_of_a_whole_name_wins(tmp_path, spelling):
    path = tmp_path / 'words.npz'
    np.savez(path, names=np.array([*WORDS, spelling]), vectors=np.array([*WORDS.values(), [7., 7.]]))
    assert read_class_vectors(str(path), NAMES)[1].tolist() == [7., 7.]


def test_an_exact_spelling_wins_over_another_case(tmp_path):
    path = tmp_path / 'words.txt'
    path.write_text('Apple 1 2\napple 3 4\n')
    assert read_class_vectors(str(path), ['apple', 'Apple', 'APPLE']).tolist() == [[3., 4.], [1., 2.], [3., 4.]]


def test_missing_words_are_named(tmp_path, caplog):
    path = tmp_path / 'words.txt'
    write_glove(path)
    with caplog.at_level(logging.WARNING):
        vectors = read_class_vectors(str(path), ['hot dog', 'cat'])
    assert vectors.tolist() == [[1., 0.], [9., 9.]]
    assert 'has no vectors of these words of class names, which are left out: hot.' in caplog.text
    with raises_error('but got none of teddy bear, zebra. Add them to the file'):
        read_class_vectors(str(path), ['dog', 'teddy bear', 'zebra'])


def test_rows_of_files_without_names_are_in_the_order_of_classes(tmp_path, caplog):
    rows = np.arange(6.).reshape(3, 2)
    np.save(tmp_path / 'a.npy', rows)
    np.savez(tmp_path / 'a.npz', rows)
    save_file({'anything': rows}, tmp_path / 'a.safetensors')
    for name in ('a.npy', 'a.npz', 'a.safetensors'):
        with caplog.at_level(logging.INFO):
            assert read_class_vectors(str(tmp_path / name), NAMES).tolist() == rows.tolist()
        assert f'{name} has no names of classes: its rows are used in the order of the classes.' in caplog.text
        with raises_error('Expected a row for each of 2 classes .*, but got 3 rows'):
            read_class_vectors(str(tmp_path / name), ['a', 'b'])


@pytest.mark.parametrize('name, content, message', [
    ('a.bin', b'', r'Expected a .npy, .npz, .safetensors, .txt or .vec file for --class-vectors, but got .*a.bin'),
    ('a.txt', b'', "Expected lines 'word number number ...'"),
    ('a.txt', b'dog x y\n', 'Cannot read --class-vectors .*a.txt: could not convert'),
    ('a.txt', b'dog nan 1\n', 'Expected vectors of finite numbers'),
    ('a.npy', b'no array', 'Cannot read --class-vectors .*a.npy'),
    ('a.npz', b'no archive', 'Cannot read --class-vectors .*a.npz'),
    ('a.safetensors', b'1234', 'Cannot read --class-vectors .*a.safetensors')])
def test_malformed_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with raises_error(message):
        read_class_vectors(str(tmp_path / name), ['dog'])


def test_files_that_do_not_fit_are_refused(tmp_path):
    with raises_error('Expected a file for --class-vectors, but got .*none.txt, which does not exist'):
        read_class_vectors(str(tmp_path / 'none.txt'), ['dog'])
    np.savez(tmp_path / 'two.npz', coco=np.zeros((3, 2)), voc=np.zeros((2, 2)))
    with raises_error("Expected 'names' .* and 'vectors', .* but got coco, voc"):
        read_class_vectors(str(tmp_path / 'two.npz'), ['dog'])
    np.savez(tmp_path / 'long.npz', dog=np.zeros(2), cat=np.zeros(3))
    with raises_error(r'Expected vectors of one length .* but got \[2, 3\]'):
        read_class_vectors(str(tmp_path / 'long.npz'), ['dog'])
    np.savez(tmp_path / 'short.npz', names=np.array(['dog']), vectors=np.zeros((2, 2)))
    with raises_error('Expected a name for each of 2 vectors in .*short.npz, but got 1'):
        read_class_vectors(str(tmp_path / 'short.npz'), ['dog'])
    np.save(tmp_path / 'code.npy', np.array([{'a': 1}]), allow_pickle=True)
    with raises_error('Cannot read --class-vectors .*code.npy'):
        read_class_vectors(str(tmp_path / 'code.npy'), ['dog'])
    np.save(tmp_path / 'text.npy', np.array([['a', 'b']]))
    with raises_error('Cannot read --class-vectors .*text.npy: could not convert string to float'):
        read_class_vectors(str(tmp_path / 'text.npy'), ['dog'])
    np.save(tmp_path / 'flat.npy', np.zeros(3))
    with raises_error(r'Expected an array of shape \(classes, dimensions\)'):
        read_class_vectors(str(tmp_path / 'flat.npy'), ['dog'])


# --- the choice of vectors ---


class Recorded:
    """The part of wordllama that is used."""
    texts: list

    @classmethod
    def load(cls, cache_dir, disable_download):
        assert disable_download and cache_dir.name == 'wordllama'
        return cls()

    def embed(self, texts):
        type(self).texts = texts
        return np.ones((len(texts), 4), dtype=np.float32)


def test_wordllama_embeds_names_if_it_is_installed(monkeypatch, caplog):
    fake = types.SimpleNamespace(WordLlama=Recorded, __file__='/somewhere/wordllama/__init__.py')
    monkeypatch.setitem(sys.modules, 'wordllama', fake)
    with caplog.at_level(logging.INFO):
        vectors = create_class_vectors(None, NAMES, None)
    assert vectors.shape == (3, 4) and 'Class vectors: wordllama, 4 dimensions.' in caplog.text
    assert Recorded.texts == ['dog', 'traffic light', 'Fire Hydrant']


def test_vectors_of_wordllama_are_those_of_words():
    pytest.importorskip('wordllama')
    vectors = embed_class_names(['dog', 'cat', 'traffic light'])
    similarities = torch.nn.functional.cosine_similarity(vectors[0], vectors, dim=1)
    assert vectors.shape == (3, 256) and similarities[1] > 2 * similarities[2]


def test_labels_give_the_vectors_if_nothing_else_does(monkeypatch, caplog, tmp_path):
    monkeypatch.setitem(sys.modules, 'wordllama', None)
    assert embed_class_names(NAMES) is None
    targets = random_targets(classes=3)
    with caplog.at_level(logging.INFO):
        vectors = create_class_vectors(None, NAMES, (*count_labels(targets), 50))
    assert torch.equal(vectors, vectors_of_labels(*count_labels(targets), 50))
    assert len(caplog.messages) == 1 and 'PPMI-SVD of the training labels, 3 dimensions' in caplog.text
    write_glove(tmp_path / 'words.txt')
    assert torch.equal(create_class_vectors(str(tmp_path / 'words.txt'), NAMES, None), EXPECTED)
    with raises_error('Expected --class-vectors for a data set that does not know all its labels'):
        create_class_vectors(None, NAMES, None)


def flags(**kwargs):
    return argparse.Namespace(**{
        'head': 'ml-gcn', 'class_vectors': None, 'initial_checkpoint': '', 'distributed': False, **kwargs})


def test_a_head_gets_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, 'wordllama', None)
    dataset = types.SimpleNamespace(targets=random_targets(classes=3), class_names=NAMES)
    found = create_side_inputs(flags(), dataset, 3)
    assert set(found) == {'class_vectors', 'cooccurrence'}
    assert torch.equal(found['cooccurrence'][1], count_labels(dataset.targets)[1])
    assert set(create_side_inputs(flags(head='dsdl'), dataset, 3)) == {'class_vectors'}
    assert create_side_inputs(flags(head='csra'), dataset, 3) is None
    assert create_side_inputs(flags(head=''), dataset, 3) is None


def test_unused_and_missing_inputs_are_refused():
    dataset = types.SimpleNamespace(targets=None, class_names=NAMES)
    with raises_error('Expected a head that uses --class-vectors, but got --head csra'):
        create_side_inputs(flags(head='csra', class_vectors='a.txt'), dataset, 3)
    with raises_error('Expected a multi-label training set that knows all its labels for --head ml-gcn'):
        create_side_inputs(flags(), dataset, 3)
