""" Shared memory of batches that workers fill again and again

A worker that takes new memory for each batch spends a fifth of its time on that if it reads images from a cache: the
system has to clear, map and free every page.
"""
import os
from typing import Optional

import torch
from torch.utils.data import get_worker_info

_SLOTS = 3  # of a worker: it fills one, another waits in the queue, and the main process copies the third

Place = tuple[int, int]  # worker and the number of its batch


def can_share() -> bool:
    """Whether torch can send memory without a name, which needs no room in /dev/shm."""
    # _new_shared_fd_cpu is private, but the only way to a storage on a file descriptor; torch.multiprocessing uses it.
    return hasattr(os, 'memfd_create') and hasattr(torch.UntypedStorage, '_new_shared_fd_cpu')


def shared_bytes(file: int, number: int) -> torch.Tensor:
    """The first bytes of a file of `os.memfd_create`."""
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared_fd_cpu(file, number))


def _new_bytes(number: int) -> torch.Tensor:
    file = os.memfd_create('images')
    try:
        os.truncate(file, number)
        return shared_bytes(file, number)
    finally:
        os.close(file)


class BatchMemory:
    """ The memory of the batches of a loader, for the lifetime of its workers.

    The main process gets the batches of a worker in their order, and drops those of an epoch that ended early. So when
    it releases a batch, all earlier ones of the worker are free, too.

    Args:
        num_workers: Number of workers.
    """

    def __init__(self, num_workers: int):
        self._released = _new_bytes(8 * num_workers).view(torch.int64)  # last released batch of each worker
        self._number = 0  # batches of this worker
        self._slots: list[tuple[int, torch.Tensor]] = [(0, torch.empty(0))] * _SLOTS  # last batch in it, and its bytes

    def take(self, number: int) -> tuple[Place, Optional[torch.Tensor]]:
        """Count a batch in a worker, and take this many bytes for it; None if all slots are in use."""
        worker = get_worker_info().id
        self._number += 1
        released = int(self._released[worker])
        pixels = None
        slot = next((slot for slot, (batch, _) in enumerate(self._slots) if batch <= released), None)
        if slot is not None:
            pixels = self._slots[slot][1]
            pixels = pixels if len(pixels) == number else _new_bytes(number)
            self._slots[slot] = self._number, pixels
        return (worker, self._number), pixels

    def release(self, place: Place) -> None:
        """Free the memory of a batch, and of earlier ones of its worker, that will not be read any more."""
        worker, number = place
        self._released[worker] = number
