"""What a prediction knows of a machine: eleven times, and the TOML file that holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from ..config import Section, read_toml, validate

UNITS = {
    "alpha_s": "s per message",
    "beta_s": "s per byte on the wire",
    "host_s": "s of a rank's processor per byte that it sends or receives",
    "gamma_s": "s per byte of float32 added",
    "copy_s": "s per byte of float32 copied",
    "encode_s": "s per byte of float32 encoded and packed",
    "decode_s": "s per byte of float32 unpacked and decoded",
    "decode_add_s": "s per byte of float32 decoded and added",
    "hop_s": "s per byte of float32 decoded, added and encoded in one pass",
    "step_s": "s of a rank's processor per step and piece of an all-reduce that is not small",
    "call_s": "s per all-reduce",
}


@dataclass(frozen=True)
class Machine:
    """The times of a machine whose links and ranks are all alike; UNITS says per what.

    The time on a link is alpha_s + bytes * beta_s, after Hockney: The communication challenge for
    MPP, Parallel Computing 20(3), 1994; a rank sends one message and receives one at a time.
    host_s is nothing where the network card moves the bytes, and much where ranks share a node.
    The codec's times are of one format: they hardly depend on its width.
    Raises ValueError for a time that is negative or not finite.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    alpha_s: float
    beta_s: float
    host_s: float
    gamma_s: float
    copy_s: float
    encode_s: float
    decode_s: float
    decode_add_s: float
    hop_s: float
    step_s: float
    call_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Machine: {field.name}={value}: must be 0 or more, and finite")


DEFAULT = Machine(  # round figures for a cluster with links of 10 GB/s; measured nowhere
    alpha_s=2e-6,
    beta_s=1e-10,
    host_s=0.0,
    gamma_s=1e-10,
    copy_s=5e-11,
    encode_s=6e-11,
    decode_s=4e-11,
    decode_add_s=4e-11,
    hop_s=7e-11,
    step_s=2e-5,
    call_s=1e-4,
)


class MachineFile(Section):
    """A file of bench fit: the times, their units, and where they come from."""

    machine: Machine
    units: dict[str, str] = Field(default_factory=dict)
    fit: dict[str, str | int | float] = Field(default_factory=dict)


def read_machine(path: Path) -> MachineFile:
    """Return what bench fit has written. Raises ConfigError, a ValueError, for anything else."""
    return validate(MachineFile, read_toml(path), str(path))


def as_machine(machine: Machine | str | Path | None) -> Machine:
    """Return a machine as it is, read from a TOML file, or for None DEFAULT.

    Raises ConfigError, a ValueError, for a file that cannot be used, TypeError for other types.
    """
    if machine is None or isinstance(machine, Machine):
        return machine or DEFAULT
    if not isinstance(machine, str | Path):
        raise TypeError(f"allreduce: machine={machine!r}: must be a Machine, a path or None")
    return read_machine(Path(machine)).machine
