""" Small batches and assertions for several test files """
import pytest
import torch


def make_batch(size=8, channels=3, height=12, width=12, classes=5, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.uint8:
        images = torch.randint(0, 256, (size, channels, height, width), dtype=dtype, generator=generator)
    else:
        images = torch.randn(size, channels, height, width, generator=generator).to(dtype)
    targets = (torch.rand(size, classes, generator=generator) < 0.4).float()
    return images, targets


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def visible_sources(record):
    return record.sources[~record.dropped].tolist()


def raises_error(message):
    """Expect a `UsageError`, or another `ValueError`, whose message matches a regular expression."""
    return pytest.raises(ValueError, match=message)
