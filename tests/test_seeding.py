import random

import numpy as np
import torch

from timm_splicemix.data.seeding import mix_seeds, seeded


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_draws_depend_on_the_counters_alone():
    with seeded(1, 2, 3):
        first = draw()
    draw()
    with seeded(1, 2, 3):
        assert draw() == first
    for counters in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        with seeded(*counters):
            assert not set(draw()) & set(first)


def test_the_generators_are_left_as_they_were():
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    try:
        with seeded(7):
            draw()
            raise KeyError
    except KeyError:
        pass
    assert draw() == expected


def test_seeds_of_neighbours_differ():
    seeds = {mix_seeds(0, epoch, index) for epoch in range(20) for index in range(1000)}
    assert len(seeds) > 20_000 - 5  # 32 bits make a clash rare, not impossible
    assert mix_seeds(1, 23) != mix_seeds(12, 3)
