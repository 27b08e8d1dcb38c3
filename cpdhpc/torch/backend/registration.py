"""Registration of the backend with torch.

torch calls register when it is imported, by the entry point torch.backends. So does the import of
cpdhpc.torch, if torch is loaded. Other modules are loaded when a process group is created.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ...errors import UserError
from . import NAME

DEVICES = ["cpu", "cuda"]
OLDEST, NEWEST = (2, 13), (2, 15)  # versions of torch that the backend was tested with


def register() -> None:
    """Register the backend and mpi:// with torch.distributed, if they are not."""
    from torch import distributed

    if not distributed.is_available() or NAME in distributed.Backend.backend_list:
        return
    from torch.distributed.rendezvous import register_rendezvous_handler

    distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
    register_rendezvous_handler("mpi", _rendezvous)  # type: ignore[no-untyped-call]


def loaded(name: str = "start") -> Any:
    """Return a module of the backend. Raises UserError for a torch that lacks what it needs."""
    import torch

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    asks = f"{NAME}: torch is {torch.__version__}: must be {oldest} or newer"
    if version < OLDEST:
        raise UserError(asks)
    try:
        return import_module(f".{name}", __package__)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{asks}; {newest} is the newest that was tried: {error}") from error


def __getattr__(name: str) -> Any:
    """Return set_wires, for cpdhpc.torch. Raises UserError as loaded does."""
    if name == "set_wires":
        return loaded("wires").set_wires
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _create(options: Any, _: Any = None) -> Any:
    """Return a process group for torch. Collective over its members."""
    return loaded().create(options)


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield a store, the rank and the number of ranks, for torch. Collective."""
    yield loaded().rendezvous(url, **options)
