"""Ranks that are threads of this process: call lists in memory that all of them really share.

    python tests/helpers/rank_threads.py MODULE.so

runs all-reduces with that build of the compiled module in place of the package's own: of a
sanitiser, which sees what two threads do to the same memory but nothing of two processes.
"""

import importlib.machinery
import importlib.util
import queue
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar
from unittest.mock import patch

if __name__ == "__main__":
    _loader = importlib.machinery.ExtensionFileLoader("cpdhpc._cpu", sys.argv[1])
    _spec = importlib.util.spec_from_loader("cpdhpc._cpu", _loader)
    sys.modules["cpdhpc._cpu"] = importlib.util.module_from_spec(_spec)

import numpy as np

from cpdhpc.collectives import recorded
from cpdhpc.collectives.allreduce import Allreduce, simulate
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.world import node_memory
from cpdhpc.world.ranks import Loopback, Ranks

WAIT_S = 120  # of a thread for the others, before all raise


class OneMapping(node_memory.Shared):
    """The memory of other threads at the addresses that it has for them, as sanitisers need."""

    blocks: ClassVar = {}

    def _new_block(self, size_bytes):
        super()._new_block(size_bytes)
        block = self._blocks[-1]
        self.blocks[block.pid, block.descriptor] = block

    def _block(self, pid, descriptor):
        return self._met.setdefault((pid, descriptor), self.blocks[pid, descriptor])


class Sent:
    """A request whose message is there, or was taken out of the queue."""

    def __init__(self, box=None, buffer=None):
        self._box, self._buffer = box, buffer

    def Test(self):
        if self._box is not None and not self._box.empty():
            self._buffer[:] = self._box.get()
            self._box = None
        return self._box is None


class Thread(Loopback):
    """The world of one thread; common: a barrier, a list and the queues of all."""

    def __init__(self, process, common):
        Ranks.__init__(self, process, common.barrier.parties, 1)
        self._common, self._shared = common, None

    def shared(self):
        if self._shared is None:
            self._shared = node_memory.share(self, True)[0]
        return self._shared

    def gather(self, value, what="gather"):
        self._common.values[self.process] = value
        self._common.barrier.wait(WAIT_S)
        found = list(self._common.values)
        self._common.barrier.wait(WAIT_S)
        return found

    def max(self, values, what="max"):
        return np.max(self.gather(values.copy(), what), axis=0)

    def isend(self, rank, to, payload, stream=0):
        self._common.boxes[rank, to].put(payload.copy())
        return [Sent()]

    def irecv(self, source, rank, buffer, stream=0):
        return [Sent(self._common.boxes[source, rank], buffer)]

    def done(self, wait):
        return all([request.Test() for request in wait.requests])

    def wait_any(self, waits):
        end_s = time.monotonic() + WAIT_S
        while not any(map(self.done, waits)):
            if time.monotonic() > end_s:
                raise TimeoutError(waits[0].line(WAIT_S))
            time.sleep(0)


class Common:
    """What the worlds of threads share."""

    def __init__(self, ranks):
        self.barrier = threading.Barrier(ranks)
        self.values = [None] * ranks
        self.boxes = defaultdict(queue.SimpleQueue)


def run_threads(ranks, work):
    """Return what work(world) returns on each of so many ranks; raise what one raises."""
    common = Common(ranks)

    def one(process):
        try:
            return work(Thread(process, common))
        except BaseException:
            common.barrier.abort()
            raise

    with patch.object(node_memory, "Shared", OneMapping), ThreadPoolExecutor(ranks) as pool:
        jobs = [pool.submit(one, process) for process in range(ranks)]
        errors = [job.exception() for job in jobs]
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [job.result() for job in jobs]


def all_reduces(world, wires, calls=6):
    """Return what was wrong in all-reduces of a few parts, prepared, plain and of shared arrays."""
    wrong, n = [], 6 * 1024 * world.ranks + 5
    rng = np.random.default_rng(world.process)
    for wire in wires:
        for algorithm in SCHEDULES:
            xs = np.random.default_rng(7).integers(-9, 9, (world.ranks, n)).astype(np.float32)
            wanted = simulate(list(xs), wire, algorithm)
            method, plain = Allreduce(wire, algorithm), np.empty(n, np.float32)
            x, out = (recorded.empty_shared(world, n) for _ in range(2))
            with method.prepare(world, [x], [out]) as prepared:
                for call in range(calls):
                    x[:] = xs[world.process] * 2.0**call
                    if rng.random() < 0.5:
                        time.sleep(0)
                    prepared.run()
                    method.run(world, [x], [plain])
                    for each in (out, plain):
                        if not np.array_equal(each, wanted * np.float32(2.0**call)):
                            wrong.append((wire, algorithm, call))
                    out[:] = np.nan
    return wrong


def main():
    small = {"PART_VALUES": 1024, "STREAMED_BYTES": 1}
    with patch.multiple(recorded, **small):
        for ranks in (2, 3):
            assert run_threads(ranks, lambda world: all_reduces(world, ["raw"])) == [[]] * ranks
    print("all sums are right")


if __name__ == "__main__":
    main()
