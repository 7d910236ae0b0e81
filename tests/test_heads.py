""" What all heads have in common: registry, sizes, gradients, types, export """
import re
import sys

import pytest
import torch
from torch import nn

from timm_splicemix.heads import create_head, head_class, head_options, list_heads, stored_side_inputs
from timm_splicemix.heads.base import Head, batch_norm

from .conftest import REPOSITORY
from .helpers import raises_error
from .test_no_sync import CUDA, move_to_fake_cuda, no_sync

NAMES = list_heads()


def no_influence(name, num_classes, size):
    """ Parameters without influence

    Softmax ignores what is added to all positions, one class has no messages, and a single position no attention.
    """
    if name == 'q2l' and size == (1, 1):
        return ('queries',)
    if name != 'ssgrl':
        return ()
    messages = ('update_w.weight', 'reset_w.weight', 'state_w.weight') if num_classes == 1 else ()
    scores = ('fc1.weight', 'fc2.weight', 'fc3.weight', 'fc_a.weight') if size == (1, 1) else ()
    return 'fc3.bias', 'fc_a.bias', *messages, *scores


def side_inputs(num_classes, dim=6):
    generator = torch.Generator().manual_seed(1)
    labels = (torch.rand(40, num_classes, generator=generator) < 0.5).double()
    return {
        'class_vectors': torch.randn(num_classes, dim, generator=generator),
        'cooccurrence': (labels.sum(dim=0), labels.T @ labels)}


SMALL = {
    'ml-decoder': {'dim': 16, 'ffn': 32}, 'ml-gcn': {'hidden': 16}, 'ssgrl': {'hidden': 16}, 'dsdl': {'hidden': 16},
    'add-gcn': {'node_dim': 16}, 'tdrg': {'dim': 16, 'graph_dim': 12, 'ffn': 32}}


def make_head(name, num_classes=4, **kwargs):
    torch.manual_seed(0)
    channels = (6, 8) if head_class(name).num_maps == 2 else 8
    kwargs = {**SMALL.get(name, {}), **kwargs}
    return create_head(name, channels, num_classes, side_inputs=side_inputs(num_classes), **kwargs)


def make_maps(name, batch=3, size=(3, 5), dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    last = torch.randn(batch, 8, *size, generator=generator).to(dtype)
    if head_class(name).num_maps == 1:
        return last
    return torch.randn(batch, 6, *(2 * n for n in size), generator=generator).to(dtype), last


def test_all_heads_are_listed_and_unknown_ones_refused():
    assert NAMES == ['csra', 'ml-decoder', 'q2l', 'ml-gcn', 'ssgrl', 'add-gcn', 'tdrg', 'dsdl']
    with raises_error("Expected a head among .*csra.*, but got 'gap'"):
        create_head('gap', 8, 4)


@pytest.mark.parametrize('name', NAMES)
def test_unknown_options_are_refused_with_the_known_ones(name):
    options = ', '.join(head_options(name))
    with raises_error(f"Unknown option 'foo' of head '{name}': its options are {options}"):
        make_head(name, foo=1)


@pytest.mark.parametrize('name', NAMES)
def test_the_documentation_lists_each_head_with_its_options_and_needs(name):
    rows = re.findall(rf'^\| `{name}` \| (.*) \|$', (REPOSITORY / 'docs' / 'heads.md').read_text(), re.MULTILINE)
    assert re.findall(r'`(\w+=[^`]+)`', rows[1]) == [f'{key}={value!r}' for key, value in head_options(name).items()]
    needs = rows[0].split('|')[1]
    assert ('class vectors' in needs) == ('class_vectors' in head_class(name).side_inputs)
    assert ('co-occurrence' in needs) == ('cooccurrence' in head_class(name).side_inputs)
    assert ('strides 16 and 32' in needs) == (head_class(name).num_maps == 2)
    paper = re.search(r'https://arxiv.org/abs/[\d.]+', rows[2]).group()
    assert paper in sys.modules[head_class(name).__module__].__doc__


@pytest.mark.parametrize('name', NAMES)
def test_missing_and_misshapen_side_inputs_are_refused(name):
    for key in head_class(name).side_inputs:
        given = {k: v for k, v in side_inputs(4).items() if k != key}
        with raises_error(f"Head '{name}' needs .*side_inputs\\['{key}'\\]"):
            create_head(name, 8, 4, side_inputs=given)
        with raises_error(f"Expected side_inputs\\['{key}'\\] of shape .* with 5 classes, but got"):
            create_head(name, 8, 5, side_inputs={**side_inputs(5), key: side_inputs(4)[key]})


def test_side_inputs_may_be_arrays_and_lists():
    given = side_inputs(4)
    vectors, (counts, joint) = given['class_vectors'], given['cooccurrence']
    expected = make_head('ml-gcn').state_dict()
    for others in (
            {'class_vectors': vectors.numpy(), 'cooccurrence': (counts.numpy(), joint.numpy())},
            {'class_vectors': vectors.tolist(), 'cooccurrence': [counts.tolist(), joint.tolist()]}):
        head = create_head('ml-gcn', 8, 4, side_inputs=others)
        assert torch.equal(head.class_vectors, expected['class_vectors'])
        assert torch.equal(head.adjacency, expected['adjacency'])
    for wrong in (3, {'nums': counts}, (counts, [[1], [2, 3]])):
        with raises_error("Expected the label counts and joint counts .* in side_inputs\\['cooccurrence'\\], but got"):
            create_head('ml-gcn', 8, 4, side_inputs={**given, 'cooccurrence': wrong})
    with raises_error("Expected finite numbers in side_inputs\\['class_vectors'\\] for head 'ml-gcn'"):
        create_head('ml-gcn', 8, 4, side_inputs={**given, 'class_vectors': vectors.log()})
    with raises_error('of shape \\(4, D\\) .* but got \\(4, 0\\)'):
        create_head('ml-gcn', 8, 4, side_inputs={**given, 'class_vectors': vectors[:, :0]})


@pytest.mark.parametrize('name', [name for name in NAMES if 'class_vectors' in head_class(name).side_inputs])
def test_class_vectors_keep_their_type_and_may_differ_from_that_of_the_head(name):
    given = side_inputs(4)
    wide = create_head(name, 8, 4, side_inputs={**given, 'class_vectors': given['class_vectors'].double()})
    assert wide.class_vectors.dtype == torch.float64
    narrow = create_head(name, 8, 4, side_inputs=given)
    narrow.load_state_dict(wide.state_dict())
    logits, aux = wide.forward_train(make_maps(name))
    torch.testing.assert_close(logits, narrow(make_maps(name)))
    assert all(value.dtype == torch.float32 for value in (logits, *aux.values()))
    with raises_error("Expected floating-point numbers in side_inputs\\['class_vectors'\\], but got torch.int64"):
        create_head(name, 8, 4, side_inputs={**given, 'class_vectors': torch.ones(4, 6, dtype=torch.int64)})


@pytest.mark.parametrize('name', NAMES)
def test_wrong_numbers_of_classes_and_maps_are_refused(name):
    with raises_error('Expected at least 1 class'):
        create_head(name, (8, 8) if head_class(name).num_maps == 2 else 8, 0, side_inputs=side_inputs(0))
    with raises_error('Expected the channels of . feature map'):
        create_head(name, (8, 8, 8), 4, side_inputs=side_inputs(4))


@pytest.mark.parametrize('name', NAMES)
def test_a_checkpoint_restores_side_inputs(name):
    head = make_head(name).eval()
    state = {f'head.{key}': value for key, value in head.state_dict().items()}
    stored = stored_side_inputs(name, state, 'head.')
    assert set(stored) == set(head.side_inputs)
    restored = create_head(name, head.in_channels, 4, side_inputs=stored, **SMALL.get(name, {})).eval()
    restored.load_state_dict(head.state_dict())
    assert torch.equal(head(make_maps(name)), restored(make_maps(name)))
    if head.side_inputs:
        with raises_error(f"of head '{name}' in the checkpoint, but it is missing"):
            stored_side_inputs(name, {})


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('size', [(1, 1), (3, 5), (14, 14)])
@pytest.mark.parametrize('num_classes', [1, 20, 1000])
def test_logits_are_finite_and_gradients_reach_every_parameter(name, num_classes, size):
    if name == 'ssgrl' and num_classes == 1000 and size != (3, 5):
        pytest.skip('ssgrl is slow with 1,000 classes, which are tested with one size')
    if head_class(name).num_maps == 2:
        size = tuple(max(n, 3) for n in size)
    head = make_head(name, num_classes).train()
    logits, aux = head.forward_train(make_maps(name, batch=2, size=size), head.class_weights())
    assert logits.shape == (2, num_classes) and logits.isfinite().all()
    targets = (torch.arange(2 * num_classes).view(2, -1) % 3 == 0).float()

    def criterion(values):
        return nn.functional.binary_cross_entropy_with_logits(values, targets)

    loss, terms = head.losses(criterion(logits), aux, criterion)
    assert loss.shape == () and all(term.shape == () and term.isfinite() for term in terms.values())
    loss.backward()
    for key, value in head.named_parameters():
        assert value.grad is not None and value.grad.isfinite().all(), key
        assert value.grad.any() or key in no_influence(name, num_classes, size), key


@pytest.mark.parametrize('name', NAMES)
def test_images_do_not_influence_each_other(name):
    head, maps = make_head(name).eval(), make_maps(name)
    first = tuple(m[:1] for m in maps) if isinstance(maps, tuple) else maps[:1]
    torch.testing.assert_close(head(maps)[:1], head(first), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', NAMES)
def test_a_single_image_can_be_trained(name):
    maps = make_maps(name, batch=1)
    logits, _ = make_head(name).train().forward_train(maps)
    assert logits.shape == (1, 4) and logits.isfinite().all()


@pytest.mark.parametrize('name', NAMES)
def test_forward_train_and_cells_agree_with_forward_in_evaluation_mode(name):
    head, maps = make_head(name).eval(), make_maps(name)
    expected = head(maps)
    for weights in (None, head.class_weights()):
        torch.testing.assert_close(head.forward_train(maps, weights)[0], expected)
        if head.supports_cells:
            assert head.cells_reason == ''
            torch.testing.assert_close(head.forward_cells(maps, weights), expected)
        else:
            assert head.cells_reason


@pytest.mark.parametrize('name', [name for name in NAMES if head_class(name).supports_cells])
def test_cells_change_no_statistics(name):
    head = make_head(name).train()
    before = {key: value.clone() for key, value in head.named_buffers()}
    head.forward_cells(make_maps(name) + 3).sum().backward()
    assert all(torch.equal(before[key], value) for key, value in head.named_buffers())


@pytest.mark.parametrize('name', NAMES)
def test_bfloat16_autocast_and_float64(name):
    head = make_head(name).train()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        logits, _ = head.forward_train(make_maps(name), head.class_weights())
    logits.float().sum().backward()
    assert logits.isfinite().all()
    assert all(value.grad is None or value.grad.isfinite().all() for value in head.parameters())
    assert head.double().eval()(make_maps(name, dtype=torch.float64)).dtype == torch.float64
    assert head.bfloat16()(make_maps(name, dtype=torch.bfloat16)).dtype == torch.bfloat16


def _image_independent(name):
    head = make_head(name)
    return head.class_weights() is not None


def test_class_weights_are_the_only_part_that_is_folded():
    for name in NAMES:
        head, maps = make_head(name).eval(), make_maps(name)
        expected, keys = head(maps), set(head.state_dict())
        head.fold_class_weights()
        torch.testing.assert_close(head(maps), expected)
        assert set(head.state_dict()) == keys
        assert (head.folded_weights is not None) == _image_independent(name)


@pytest.mark.parametrize('name', NAMES)
def test_exported_programs_and_traces_give_the_same_logits_for_any_batch(name):
    head, two, three = make_head(name).eval(), make_maps(name, batch=2), make_maps(name, batch=3)
    head.fold_class_weights()
    rows = {0: torch.export.Dim('batch', min=1)}
    dynamic = ((rows, rows),) if isinstance(two, tuple) else (rows,)
    program = torch.export.export(head, (two,), dynamic_shapes=dynamic)
    torch.testing.assert_close(program.module()(three), head(three))
    traced = torch.jit.trace(head, (two,), check_trace=False)
    torch.testing.assert_close(traced(three), head(three))


@pytest.mark.parametrize('name', NAMES)
def test_a_step_never_waits_for_the_device(name):
    head = make_head(name).train()
    with no_sync():
        move_to_fake_cuda(head)
        shapes = [m.shape for m in make_maps(name)] if head.num_maps > 1 else [make_maps(name).shape]
        maps = tuple(torch.empty(shape, device=CUDA) for shape in shapes)
        maps = maps if head.num_maps > 1 else maps[0]
        weights = head.class_weights()
        logits, aux = head.forward_train(maps, weights)
        loss, _ = head.losses(logits.sum(), aux, torch.sum)
        assert loss.device.type == 'cuda'
        if head.supports_cells:
            assert head.forward_cells(maps, weights).device.type == 'cuda'


def test_batch_norm_uses_running_statistics_for_cells_and_single_images():
    layer = nn.BatchNorm1d(4)
    layer.running_mean += 1
    x = torch.randn(5, 4)
    evaluated = nn.BatchNorm1d(4).eval()
    evaluated.load_state_dict(layer.state_dict())
    before = layer.running_mean.clone()
    torch.testing.assert_close(batch_norm(layer, x, update_stats=False), evaluated(x))
    torch.testing.assert_close(batch_norm(layer, x[:1]), evaluated(x[:1]))
    assert torch.equal(layer.running_mean, before)
    torch.testing.assert_close(batch_norm(layer, x).mean(dim=0), torch.zeros(4), atol=1e-5, rtol=0)
    assert not torch.equal(layer.running_mean, before)


def test_a_head_without_auxiliary_losses_adds_none():
    loss = torch.tensor(2.)
    assert Head(8, 4).losses(loss, {}, lambda logits: loss) == (loss, {})


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_onnx_files_give_the_same_logits_for_any_batch(name, tmp_path):
    onnxruntime = pytest.importorskip('onnxruntime')
    pytest.importorskip('onnxscript')
    head, two, three = make_head(name).eval(), make_maps(name, batch=2), make_maps(name, batch=3)
    head.fold_class_weights()
    rows = {0: torch.export.Dim('batch', min=1)}
    names = ['middle', 'last'] if isinstance(two, tuple) else ['last']
    torch.onnx.export(
        head, (two,), str(tmp_path / 'head.onnx'), input_names=names, dynamo=True, external_data=False,
        dynamic_shapes=((rows, rows),) if isinstance(two, tuple) else (rows,))
    session = onnxruntime.InferenceSession(str(tmp_path / 'head.onnx'), providers=['CPUExecutionProvider'])
    maps = three if isinstance(three, tuple) else (three,)
    found = session.run(None, {name: value.numpy() for name, value in zip(names, maps)})[0]
    torch.testing.assert_close(torch.from_numpy(found), head(three), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_a_training_step_compiles_without_graph_breaks(name):
    torch._dynamo.reset()
    head, maps = make_head(name).train(), make_maps(name)
    compiled = torch.compile(head.forward_train, backend='aot_eager', fullgraph=True)
    results = []
    for function in (compiled, head.forward_train):
        head.zero_grad()
        torch.manual_seed(0)
        logits, aux = function(maps)
        sum(value.sum() for value in (logits, *aux.values())).backward()
        results.append((logits, {key: value.grad.clone() for key, value in head.named_parameters()}))
    if head.supports_cells:
        torch.compile(head.forward_cells, backend='aot_eager', fullgraph=True)(maps)
    if name not in ('ml-decoder', 'q2l'):  # compiled dropout draws other numbers
        torch.testing.assert_close(results[0][0], results[1][0])
        torch.testing.assert_close(results[0][1], results[1][1])
