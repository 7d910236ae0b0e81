""" SSGRL """
import pytest
import torch

from timm_splicemix.heads import create_head

from . import golden
from .helpers import raises_error
from .test_heads import side_inputs

CASES = golden.read_cases('ssgrl')
NAMES = {
    'word_semantic.fc_1.weight': 'fc1.weight', 'word_semantic.fc_2.weight': 'fc2.weight',
    'graph_net.fc_eq4_u.weight': None, 'graph_net.fc_eq4_u.bias': None,  # never used
    **{f'{theirs}.{kind}': f'{ours}.{kind}' for kind in ('weight', 'bias') for theirs, ours in {
        'word_semantic.fc_3': 'fc3', 'word_semantic.fc_a': 'fc_a', 'graph_net.fc_eq3_w': 'update_w',
        'graph_net.fc_eq3_u': 'gates_u', 'graph_net.fc_eq4_w': 'reset_w', 'graph_net.fc_eq5_w': 'state_w',
        'graph_net.fc_eq5_u': 'state_u', 'fc_output': 'output', 'classifiers': 'classifier'}.items()}}


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
    golden.fill(head, case, NAMES)
    x = inputs['x'].requires_grad_()
    logits = head(x)
    golden.same_values(logits, case['outputs']['logits'])
    features = head.class_features(x)
    golden.same_values(features, case['outputs']['class_features'])
    golden.same_values(head.propagate(features), case['outputs']['graph_output'])
    assert case['grads']['logits']['inputs'].get('words') is None and not head.class_vectors.requires_grad
    golden.same_gradients(head, case, 'logits', logits, NAMES, {'x': x})


def test_pooling_is_skipped_for_maps_below_2x2():
    torch.manual_seed(0)
    head = create_head('ssgrl', 8, 4, side_inputs=side_inputs(4))
    unpooled = create_head('ssgrl', 8, 4, side_inputs=side_inputs(4), pool=False)
    unpooled.load_state_dict(head.state_dict())
    for size, same in (((1, 1), True), ((1, 5), True), ((3, 1), True), ((2, 2), False), ((3, 5), False)):
        x = torch.randn(2, 8, *size)
        assert torch.equal(head(x), unpooled(x)) == same


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
