""" Randomness of a sample that depends on (seed, epoch, index) alone """
import contextlib
import hashlib
import random
from typing import Iterator

import numpy as np
import torch


def mix_seeds(*counters: int) -> int:
    """One 32-bit seed from several counters, such that neighbouring ones have nothing in common."""
    text = ' '.join(str(int(counter)) for counter in counters)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), 'little')


@contextlib.contextmanager
def seeded(*counters: int) -> Iterator[None]:
    """ Draw from python's, numpy's and torch's generators as the counters say, and leave them as they were.

    Args:
        *counters: Such as seed, epoch and index of a sample.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = mix_seeds(*counters)
    random.seed(seed)
    np.random.seed(seed)
    torch.random.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU too
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
