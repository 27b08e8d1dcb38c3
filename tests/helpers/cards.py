"""A GPU for tests of torch's CUDA tensors: the machine's, or the emulated one in its place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from simulated_cupy import simulated
from simulated_gpu import Gpu

from cpdhpc.world import gpu_messages

DEVICE = torch.device("cuda", 0)


@contextmanager
def card(direct: bool = False, place: int = 0) -> Iterator[Gpu | None]:
    """Let there be a GPU in the block; yield the simulated one, None for the machine's.

    direct: whether MPI takes the memory of the simulated one; place: of that on the bus
    """
    emulated = sys.modules.get("emulated_torch")
    if emulated is None:
        if not torch.cuda.is_available() or find_spec("cupy") is None:
            pytest.skip("no GPU that torch and CuPy see, and no -p emulated_gpu")
        yield None
        return
    with simulated(place) as (gpu, _), emulated.cuda(gpu):
        gpu.aware, gpu.first = direct, place
        answer = gpu_messages.Answer(direct, "simulated")
        with patch.object(gpu_messages, "query", lambda: answer):
            yield gpu
