"""The command verify with a fault planted: verifying.py FAULT RANK CHECKS ARGUMENTS of verify.

FAULT is a name of FAULTS, or "none"; RANK a number, or "all"; CHECKS are those that are carried
out, with commas, or "all". With --device gpu the GPU is the simulated one.
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import pbkdf2_hmac
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import patch

from mpi4py import MPI
from simulated_cupy import simulated

from cpdhpc.collectives import schedules
from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.lab import cli
from cpdhpc.lab.verify import run as verify_run
from cpdhpc.lab.verify.base import CheckPlace, CheckResult
from cpdhpc.ops import cpu
from cpdhpc.world import gpu_messages


def changed(name: str, change: Callable[[Any], Any]) -> Any:
    """Return a patch of an operation of ops.cpu, whose result is changed."""
    before = getattr(cpu, name)
    return patch.object(cpu, name, lambda *args, **more: change(before(*args, **more)))


def wrong_code() -> Any:
    """Encode gives another code for one value."""

    def change(codes: Any) -> Any:
        codes[codes.size // 2] ^= 1
        return codes

    return changed("encode", change)


def wrong_result() -> Any:
    """All-reduces return another bit in the first value."""
    before = Allreduce.run

    def run(*args: Any, **more: Any) -> Any:
        reduced = before(*args, **more)
        reduced.arrays[0].view("u4")[:1] ^= 1
        return reduced

    return patch.object(Allreduce, "run", run)


@contextmanager
def wrong_schedule() -> Iterator[None]:
    """The ring keeps what it should add, here and in what is simulated here."""
    before = schedules.SCHEDULES["ring"]

    def steps(rank: int, layout: Any) -> Iterator[Any]:
        return (step._replace(kind="copy") for step in before.steps(rank, layout))

    with patch.dict(schedules.SCHEDULES, ring=replace(before, steps=steps)):
        yield


def in_check(name: str, fault: Callable[[], object]) -> Any:
    """Return a patch of a check, which begins with a fault."""
    row = verify_run.CHECKS[name]

    def run(place: CheckPlace) -> CheckResult:
        fault()
        return row.run(place)

    return patch.dict(verify_run.CHECKS, {name: replace(row, run=run)})  # type: ignore[arg-type]


def blocked() -> None:
    """Wait in MPI, which no signal ends, for a message that nobody sends."""
    MPI.COMM_SELF.recv(source=0)


def raised() -> None:
    raise ZeroDivisionError("planted")


@contextmanager
def failing_gpu() -> Iterator[None]:
    """The GPU fails in the third check of it, and from then on."""
    gpu = sys.modules["cupy"].cuda.Stream(non_blocking=True).gpu
    with in_check("sums of integers", lambda: setattr(gpu, "fault", 700)):
        yield


class BrokenTorch(MetaPathFinder, Loader):
    """Finds torch, whose import fails, for example for want of a library."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "torch" else None

    def exec_module(self, module: object) -> None:
        raise ImportError("planted")


def broken_torch() -> Any:
    """Torch is installed and cannot be imported."""
    assert "torch" not in sys.modules
    return patch.object(sys, "meta_path", [BrokenTorch(), *sys.meta_path])


def full_disk() -> Any:
    """No file can be written, as on a full disk."""

    def put(descriptor: int, *given: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return patch.object(os, "fsync", put)


FAULTS: dict[str, Callable[[], Any]] = {
    "wrong code": wrong_code,
    "wrong count": lambda: changed("decode_tiles", lambda lost: lost + 1),
    "wrong result": wrong_result,
    "wrong schedule": wrong_schedule,
    "error": lambda: in_check("windows", raised),
    "sleeps": lambda: in_check("windows", lambda: time.sleep(1000)),
    "blocked": lambda: in_check("windows", blocked),
    "held": lambda: in_check("windows", lambda: pbkdf2_hmac("sha512", b"", b"", 8_000_000)),
    "dies": lambda: in_check("windows", lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "failing gpu": failing_gpu,
    "full disk": full_disk,
    "broken torch": broken_torch,
}


def main() -> int:
    fault, rank, names, *given = sys.argv[1:]
    with ExitStack() as stack:
        if names != "all":
            some = {each: verify_run.CHECKS[each] for each in names.split(",")}
            stack.enter_context(patch.dict(verify_run.CHECKS, some, clear=True))  # type: ignore[arg-type]
        if "gpu" in given and fault != "no gpu":
            stack.enter_context(simulated(MPI.COMM_WORLD.Get_rank()))
            answer = gpu_messages.Answer(False, "simulated")
            stack.enter_context(patch.object(gpu_messages, "query", lambda: answer))
        if fault in FAULTS and rank in ("all", str(MPI.COMM_WORLD.Get_rank())):
            stack.enter_context(FAULTS[fault]())
        return cli.main(["verify", *given])


if __name__ == "__main__":
    sys.exit(main())
