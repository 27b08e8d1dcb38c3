"""The simulated GPU finds who lets go of memory too early, and nobody else.

The rules are those of pools of CuPy and torch: memory that is freed goes to whoever takes some in
the stream that it was taken in, with nothing between but the order of that stream.
"""

import gc
import sys
from typing import Any

import numpy as np
import pytest
from gpus import card
from simulated_cupy import simulated

X = np.arange(100, dtype=np.float32)
SEEDS = range(20)  # one order of two pieces of work in two: less than 1e-6 that none differs


def read_late(seed: int, *, taken: bool = True, waits: bool = False, other: bool = True) -> bool:
    """Free an array while another stream has still to read it; return whether it read the array.

    taken: somebody takes memory in its stream; waits: for the reader; other: whether streams differ
    """
    with simulated(seed) as (_, cupy):
        owner, reader = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        with owner:
            x = cupy.asarray(X)
            owner.synchronize()
        with reader if other else owner as stream:
            y = x + np.float32(1)
            del x
            event = cupy.cuda.Event(disable_timing=True)
            event.record(stream)
        with owner:
            if waits:
                owner.wait_event(event)
            if taken:
                cupy.empty(1, np.float32)
            owner.synchronize()
        reader.synchronize()
        return y.get().tolist() == (X + 1).tolist()


def test_memory_of_another_stream_is_read_before_it_is_freed() -> None:
    assert not all(read_late(seed) for seed in SEEDS)


@pytest.mark.parametrize("given", [{"taken": False}, {"waits": True}, {"other": False}])
def test_what_pools_promise_is_no_fault(given: dict[str, bool]) -> None:
    assert all(read_late(seed, **given) for seed in SEEDS)


def test_a_later_stream_may_have_the_address_and_the_memory_of_one_that_is_destroyed() -> None:
    def read(seed: int, destroyed: bool) -> bool:
        with simulated(seed) as (_, cupy):
            first = cupy.cuda.Stream(non_blocking=True)
            with first:
                x = cupy.asarray(X)
                first.synchronize()
            address, kept = first.ptr, None if destroyed else first
            del first
            y = x + np.float32(1)
            del x
            with cupy.cuda.Stream(non_blocking=True) as second:
                assert (second.ptr == address) == (kept is None)
                cupy.empty(1, np.float32)
                second.synchronize()
            return y.get().tolist() == (X + 1).tolist()

    assert not all(read(seed, True) for seed in SEEDS)
    assert all(read(seed, False) for seed in SEEDS)


@pytest.mark.gpu
def test_tensors_are_freed_as_arrays_are() -> None:
    if "emulated_torch" not in sys.modules:
        pytest.skip("of the emulated GPU, not of a real one")
    import torch

    device = torch.device("cuda", 0)

    def read(seed: int, waits: bool) -> bool:
        with card(place=seed) as gpu:
            import cupy

            assert gpu is not None
            x: Any = torch.arange(100.0, device=device)
            array = cupy.from_dlpack(x)
            torch.cuda.current_stream(device).synchronize()  # x is written
            with cupy.cuda.Stream(non_blocking=True) as stream:
                y = array + np.float32(1)
                event = cupy.cuda.Event(disable_timing=True)
                event.record(stream)
                del x, array
                gc.collect()
                if waits:
                    torch.cuda.current_stream(device).wait_event(event)
                z = torch.ones(1, device=device) + 1  # takes memory; the second waits for the first
                assert float(z.cpu()) == 2
                stream.synchronize()
                return y.get().tolist() == (X + 1).tolist()

    assert not all(read(seed, False) for seed in SEEDS)
    assert all(read(seed, True) for seed in SEEDS)
