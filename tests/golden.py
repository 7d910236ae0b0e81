""" Expected outputs and gradients of heads, computed with the published code of each method

Parameters and inputs are computed from their names by a formula, so only results are stored, in tests/data/heads.
"""
import json
import math
import re
import zlib
from pathlib import Path

import numpy as np
import torch

from .conftest import REPOSITORY

FOLDER = Path(__file__).parent / 'data' / 'heads'
U = np.uint64


def formula(key, shape):
    """Values in [-1, 1) that depend on the key alone."""
    with np.errstate(over='ignore'):
        x = np.arange(1, math.prod(shape) + 1, dtype=U) + (U(zlib.crc32(key.encode())) << U(32))
        x = x * U(0x9E3779B97F4A7C15)
        x = (x ^ (x >> U(30))) * U(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> U(27))) * U(0x94D049BB133111EB)
        x ^= x >> U(31)
    return torch.from_numpy(((x >> U(11)).astype(np.float64) / 2.0**52 - 1).reshape(shape))


def read_cases(name):
    return json.loads((FOLDER / f'{name}.json').read_text())


def names_of(head, case):
    """ Names in our head of the published names in a case, None for those that the head lacks.

    Args:
        head: Name of the head; the documentation has a table of its names.
        case: A case of `read_cases`.
    """
    table = (REPOSITORY / 'docs' / 'heads.md').read_text().split('## Names of parameters')[1]
    row = re.search(rf'^\| `{head}` \| (.*) \|$', table, re.MULTILINE).group(1)
    pairs = [re.fullmatch('`(.+)` → `(.+)`', pair).groups() for pair in row.split(', ')]
    pairs.sort(key=lambda pair: len(pair[0]), reverse=True)
    return {name: next(filter(None, (_rename(name, *pair) for pair in pairs)), None) for name in case['params']}


def _rename(name, theirs, ours):
    pattern = re.sub('[NM]', r'(\\d+)', theirs.replace('.', r'\.'))
    found = re.match(rf'{pattern}(?=\.|$)', name)
    if found is None:
        return None
    numbers = iter(found.groups())
    return re.sub('[NM]', lambda _: next(numbers), ours) + name[found.end():]


def inputs_of(case):
    inputs = {}
    for name, spec in case['inputs'].items():
        value = spec['scale'] * formula(f'{case["salt"]}/input.{name}', spec['shape'])
        inputs[name] = value.clamp(min=0) if spec['relu'] else value
    return inputs


def parameter(case, name):
    shape = case['params'][name]
    value = formula(f'{case["salt"]}/{name}', shape)
    if name.endswith('running_var'):
        return 1 + 0.5 * value
    if name.endswith('num_batches_tracked'):
        return torch.zeros(shape)
    if len(shape) < 2:
        return 1 + 0.2 * value if name.endswith('.weight') else 0.2 * value
    return value * math.sqrt(3 / math.prod(shape[1:]))


@torch.no_grad()
def fill(head, case, names):
    """ Give a head the parameters of a case.

    Args:
        head: The head; becomes float64.
        case: A case of `read_cases`.
        names: Name in the head of each name in the case, None for those that the head lacks.
    """
    head.double()
    tensors = {**dict(head.named_parameters()), **dict(head.named_buffers())}
    for name in case['params']:
        if names[name] is not None:
            tensor = tensors.pop(names[name])
            tensor.copy_(parameter(case, name).reshape(tensor.shape))
    assert not [name for name, tensor in tensors.items() if tensor.requires_grad], 'parameters that were not filled'


def same_number(found, expected, scale=1.):
    found = found.item()
    assert abs(found - expected) < 1e-9 * max(1., abs(expected), scale), (found, expected)


def same_values(found, expected):
    found, expected = found.detach(), torch.tensor(expected, dtype=torch.float64)
    assert found.shape == expected.shape and found.dtype == torch.float64
    assert ((found - expected).abs() < 1e-9 * expected.abs().clamp(min=1)).all()


def same_gradients(head, case, output, value, names, inputs):
    """ Check the gradients of an output with respect to the inputs and parameters.

    Args:
        head: The head.
        case: A case of `read_cases`.
        output: Name of the output.
        value: Its value.
        names: As for `fill`.
        inputs: Inputs that need gradients, by name.
    """
    expected = case['grads'][output]
    loss = (value * formula(f'{case["salt"]}/probe.{output}', value.shape)).sum()
    same_number(loss, expected['loss'])
    parameters = dict(head.named_parameters())
    tensors = [*inputs.values(), *parameters.values()]
    grads = torch.autograd.grad(loss, tensors, retain_graph=True, allow_unused=True)
    grads = dict(zip((*(f'input {name}' for name in inputs), *parameters), grads))
    for name in inputs:
        _same_input_gradient(case, name, grads[f'input {name}'], expected['inputs'][name])
    for name, norm in expected.get('param_grad_l2', {}).items():
        if names.get(name) is None:
            assert norm is None, name
            continue
        grad = grads.get(names[name])  # buffers have no gradient
        if norm is None:
            assert grad is None, name
        else:
            same_number(grad.norm(), norm)


def _same_input_gradient(case, name, grad, expected):
    if expected is None:
        assert grad is None, name
        return
    probe = formula(f'{case["salt"]}/gradprobe.{name}', grad.shape)
    found = {'sum': grad.sum(), 'abs_sum': grad.abs().sum(), 'l2': grad.norm(), 'dot_probe': (grad * probe).sum()}
    for key, value in found.items():
        same_number(value, expected[key], expected['l2'])
    for found, value in zip(grad.flatten(), expected['first']):
        same_number(found, value)
