""" Random draws of a sample that depend on (seed, epoch, index) alone """
import contextlib
import hashlib
import random
from typing import Iterator

import numpy as np
import torch
import torch.utils.data


def mix_seeds(*counters: int) -> int:
    """Hash counters to a 32-bit seed, so that neighbouring counters give unrelated seeds."""
    text = ' '.join(str(int(counter)) for counter in counters)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), 'little')


@contextlib.contextmanager
def seeded(*counters: int) -> Iterator[None]:
    """ Seed the generators of python, numpy and torch (CPU) with `mix_seeds`.

    Their states are restored afterwards, except in data-loading workers, where each sample is seeded anew anyway.
    """
    in_worker = torch.utils.data.get_worker_info() is not None
    states = None if in_worker else (random.getstate(), np.random.get_state(), torch.get_rng_state())
    seed = mix_seeds(*counters)
    random.seed(seed)
    np.random.seed(seed)
    torch.random.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU too
    try:
        yield
    finally:
        if states is not None:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
