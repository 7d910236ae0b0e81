""" SSGRL """
import pytest
import torch

from timm_splicemix.heads import create_head

from . import golden
from .helpers import raises_error
from .test_heads import side_inputs

CASES = golden.read_cases('ssgrl')


@pytest.mark.parametrize('case', CASES, ids=[case['id'] for case in CASES])
@pytest.mark.parametrize('chunk', [2, 100])
def test_outputs_and_gradients_are_those_of_the_published_code(case, chunk):
    settings, inputs = case['settings'], golden.inputs_of(case)
    matrix = torch.tensor(case['adjacency']['A'], dtype=torch.float64)
    head = create_head(
        'ssgrl', settings['image_feature_dim'], settings['num_classes'], hidden=settings['intermediary_dim'],
        steps=settings['time_step'], output_dim=settings['output_dim'], pool=settings['avg_pool_2x2_stride_2_first'],
        chunk=chunk, side_inputs={
            'class_vectors': inputs['words'], 'cooccurrence': (torch.ones(len(matrix)), matrix)})
    names = golden.names_of('ssgrl', case)
    golden.fill(head, case, names)
    x = inputs['x'].requires_grad_()
    logits = head(x)
    golden.same_values(logits, case['outputs']['logits'])
    features = head.class_features(x)
    golden.same_values(features, case['outputs']['class_features'])
    golden.same_values(head.propagate(features), case['outputs']['graph_output'])
    assert case['grads']['logits']['inputs'].get('words') is None and not head.class_vectors.requires_grad
    golden.same_gradients(head, case, 'logits', logits, names, {'x': x})


def test_pooling_is_skipped_for_maps_below_2x2():
    torch.manual_seed(0)
    head = create_head('ssgrl', 8, 4, side_inputs=side_inputs(4))
    unpooled = create_head('ssgrl', 8, 4, side_inputs=side_inputs(4), pool=False)
    unpooled.load_state_dict(head.state_dict())
    for size, same in (((1, 1), True), ((1, 5), True), ((3, 1), True), ((2, 2), False), ((3, 5), False)):
        x = torch.randn(2, 8, *size)
        assert torch.equal(head(x), unpooled(x)) == same


@pytest.mark.parametrize('steps', [1, 2, 5])
@torch.no_grad()
def test_each_step_of_the_graph_network_is_that_of_the_equations(steps):
    torch.manual_seed(0)
    head = create_head('ssgrl', 8, 4, side_inputs=side_inputs(4), steps=steps, hidden=16).double()
    state = torch.randn(1, 4, 8, dtype=torch.float64)
    rows = list(state[0])
    for _ in range(steps):
        messages = [torch.cat([
            sum(head.adjacency[i, j] * rows[j] for j in range(4)),
            sum(head.adjacency[j, i] * rows[j] for j in range(4))]) for i in range(4)]
        for i, (message, row) in enumerate(zip(messages, list(rows))):
            update = (head.update_w(message) + head.gates_u(row)).sigmoid()
            reset = (head.reset_w(message) + head.gates_u(row)).sigmoid()
            candidate = (head.state_w(message) + head.state_u(reset * row)).tanh()
            rows[i] = (1 - update) * row + update * candidate
    torch.testing.assert_close(head.propagate(state)[0], torch.stack(rows), rtol=1e-9, atol=1e-9)


def test_the_matrix_has_conditional_probabilities_and_sizes_follow_the_map():
    counts, joint = torch.tensor([4., 8.]), torch.tensor([[4., 2.], [2., 8.]])
    head = create_head(
        'ssgrl', 24, 2, side_inputs={'class_vectors': torch.randn(2, 5), 'cooccurrence': (counts, joint)})
    assert head.adjacency.tolist() == [[0, 0.5], [0.25, 0]]
    assert head.output.weight.shape == (24, 48) and head.fc1.weight.shape == (1024, 24)
    assert head.classifier.weight.abs().max() <= 24 ** -0.5


def test_wrong_options_get_a_sentence():
    for options in ({'hidden': 0}, {'steps': 0}, {'output_dim': 1.5}, {'pool': 'x'}, {'chunk': 0}):
        with raises_error(f"for option '{next(iter(options))}' of head 'ssgrl', but got"):
            create_head('ssgrl', 8, 4, side_inputs=side_inputs(4), **options)
