""" ML-GCN and the matrices of co-occurrence """
import math

import pytest
import torch

from timm_splicemix.heads import create_head
from timm_splicemix.heads.graph import (
    binary_edges,
    conditional_probabilities,
    normalized_adjacency,
    reweighted_matrix,
)

from . import golden
from .helpers import raises_error

ALL = golden.read_cases('mlgcn')
CASES = [case for case in ALL if 'kind' not in case]


def counts(adjacency):
    return torch.tensor(adjacency['nums']), torch.tensor(adjacency['count_matrix'])


@pytest.mark.parametrize('case', CASES, ids=[case['id'] for case in CASES])
def test_outputs_and_gradients_are_those_of_the_published_code(case):
    settings, inputs = case['settings'], golden.inputs_of(case)
    head = create_head(
        'ml-gcn', settings['channels'], settings['num_classes'], hidden=settings['hidden'], threshold=settings['t'],
        side_inputs={'class_vectors': inputs['words'], 'cooccurrence': counts(case['adjacency'])})
    names = golden.names_of('ml-gcn', case)
    golden.fill(head, case, names)
    x, words = (inputs[name].requires_grad_() for name in ('x', 'words'))
    assert not head.class_vectors.requires_grad
    head.class_vectors = words  # the published code computes their gradient, but does not train them
    logits = head(x)
    golden.same_values(logits, case['outputs']['logits'])
    golden.same_gradients(head, case, 'logits', logits, names, {'x': x, 'words': words})


@pytest.mark.parametrize('case', [case for case in ALL if 'checks' not in case], ids=lambda case: case['id'])
def test_matrices_are_those_of_the_published_code(case):
    edges = binary_edges(*counts(case['adjacency']), case['settings']['t']).double()
    matrix = reweighted_matrix(edges, 0.25)
    golden.same_values(matrix, case['adjacency']['reweighted_A'])
    golden.same_values(normalized_adjacency(matrix), case['adjacency']['A_hat'])


def test_the_matrix_of_voc_2007_is_that_of_the_published_code():
    case = next(case for case in ALL if 'checks' in case)
    checks = case['checks']
    edges = binary_edges(*counts(case['adjacency']), case['settings']['t']).double()
    assert edges.sum() == checks['ones_before_reweight'] == 6
    matrix = normalized_adjacency(reweighted_matrix(edges, 0.25))
    golden.same_values(matrix[checks['person_index']], checks['A_hat_row_of_person'])
    golden.same_number(matrix.sum(), checks['A_hat_sum'])
    golden.same_number((matrix * golden.formula(checks['probe_key'], matrix.shape)).sum(), checks['A_hat_dot_probe'])
    golden.same_number((matrix - matrix.T).abs().max(), checks['max_asymmetry'])


def test_the_diagonal_and_classes_without_images_have_no_edges():
    joint = torch.tensor([[9, 4, 0], [4, 8, 0], [0, 0, 0]])
    found = conditional_probabilities(torch.tensor([9, 8, 0]), joint)
    assert found.tolist() == [[0, 4 / 9, 0], [0.5, 0, 0], [0, 0, 0]]
    assert binary_edges(torch.tensor([9, 8, 0]), joint, 0.5).tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize('threshold, neighbor_weight', [(0.4, 0.25), (0.3, 0.25), (0.5, 1.5)])
def test_threshold_and_weight_of_neighbors_are_those_of_the_equations(threshold, neighbor_weight):
    torch.manual_seed(0)
    labels = (torch.rand(40, 5) < torch.tensor([0.2, 0.4, 0.5, 0.5, 0.7])).int().tolist()
    counts = [sum(row[i] for row in labels) for i in range(5)]
    joint = [[sum(row[i] * row[j] for row in labels) for j in range(5)] for i in range(5)]
    edges = [[int(i != j and joint[i][j] / counts[i] >= threshold) for j in range(5)] for i in range(5)]
    matrix = [[
        neighbor_weight * edges[i][j] / (sum(row[j] for row in edges) + 1e-6) + (i == j) for j in range(5)]
        for i in range(5)]
    sums = [sum(row) for row in matrix]
    adjacency = torch.tensor(
        [[matrix[j][i] * sums[i] ** -0.5 * sums[j] ** -0.5 for j in range(5)] for i in range(5)], dtype=torch.float64)
    head = create_head(
        'ml-gcn', 8, 5, hidden=6, threshold=threshold, neighbor_weight=neighbor_weight,
        side_inputs={'class_vectors': torch.randn(5, 7), 'cooccurrence': (counts, joint)}).double()
    assert 0 < sum(map(sum, edges)) < 20
    hidden = torch.nn.functional.leaky_relu(adjacency @ head.class_vectors @ head.weight1, 0.2)
    torch.testing.assert_close(head.class_weights(), adjacency @ hidden @ head.weight2, rtol=1e-9, atol=1e-9)


def test_class_weights_are_computed_once_and_need_no_image():
    torch.manual_seed(0)
    labels = (torch.rand(50, 5) < 0.5).float()
    head = create_head(
        'ml-gcn', 8, 5, side_inputs={
            'class_vectors': torch.randn(5, 7), 'cooccurrence': (labels.sum(dim=0), labels.T @ labels)})
    weights = head.class_weights()
    assert weights.shape == (5, 8)
    x = torch.randn(2, 8, 3, 4)
    torch.testing.assert_close(head.forward_cells(x, 2 * weights), 2 * head(x))


def test_first_values_and_options():
    vectors, side = torch.ones(3, 7), (torch.ones(3), torch.ones(3, 3))
    head = create_head('ml-gcn', 16, 3, side_inputs={'class_vectors': vectors, 'cooccurrence': side}, threshold=0.4)
    assert head.weight1.shape == (7, 1024) and head.weight2.shape == (1024, 16)
    for weight, bound in ((head.weight1, 1 / 32), (head.weight2, 1 / 4)):
        assert weight.abs().max() <= bound
        assert math.isclose(weight.std().item(), bound / math.sqrt(3), rel_tol=0.05)
    assert {key for key, _ in head.named_parameters()} == {'weight1', 'weight2'}
    assert not torch.equal(vectors.add_(1), head.class_vectors)  # a copy
    for options in ({'hidden': 0}, {'hidden': 1.5}, {'threshold': 2.}, {'neighbor_weight': -1.}, {'threshold': 'x'}):
        with raises_error(f"for option '{next(iter(options))}' of head 'ml-gcn', but got"):
            create_head('ml-gcn', 16, 3, side_inputs={'class_vectors': vectors, 'cooccurrence': side}, **options)
