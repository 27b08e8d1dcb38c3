"""The place of a job: its processes and nodes, ping-pong, energy."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import nan
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...collectives.method import Machine
from ...world.gpu_messages import use_gpu
from ...world.mpi import World
from ..provenance import cpu_clone, gpu, hosts, identity, versions
from ..schedulers import facts
from ..study_data import Case, Factors, Outcomes

T = TypeVar("T")
KEPT = 2  # data of cases that stay in memory between visits
POWERCAP = Path("/sys/class/powercap")
LOOK_S = 60.0  # a counter of RAPL starts again after about 2**18 J, 9 minutes at 500 W


class Meter:
    """The energy counters of this node that this process may read; often only root may read RAPL.

    They count the energy of all processes on the node, and of the idle node. Zones within a
    package, and psys, which contains the packages, are left out.
    Source: Linux, Documentation/power/powercap; NVML, nvmlDeviceGetTotalEnergyConsumption.
    """

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._zones = _zones(powercap)
        self._gpus = _gpus()
        self._lock, self._sum_uj = threading.Lock(), 0
        self._last = self._read()
        if self._zones:
            threading.Thread(target=self._look, name="energy", daemon=True).start()

    @property
    def sources(self) -> str:
        """The counters as text, "" for none."""
        found = {"RAPL zones": self._zones, "GPUs by NVML": self._gpus}
        return ", ".join(f"{len(each)} {name}" for name, each in found.items() if each)

    def joules(self) -> float:
        """Return the energy since a fixed time, NaN if there is no counter."""
        if not self.sources:
            return nan
        with self._lock:
            now = self._read()
            for (_, wraps_uj), before, after in zip(self._zones, self._last, now, strict=True):
                self._sum_uj += after - before + (wraps_uj if after < before else 0)
            self._last = now
            return self._sum_uj / 1e6 + sum(map(_gpu_mj, self._gpus)) / 1e3

    def _read(self) -> list[int]:
        return [_number(path / "energy_uj") for path, _ in self._zones]

    def _look(self) -> None:
        """Read the counters more often than they start again, until the process ends."""
        never = threading.Event()
        while not never.wait(LOOK_S):
            self.joules()


node_meter = cache(Meter)  # one for a process


def _number(path: Path) -> int:
    return int(path.read_text())


def _zones(powercap: Path) -> list[tuple[Path, int]]:
    """Return the readable zones of packages and memory: directory, and largest count in uJ."""
    found = []
    for path in sorted(powercap.glob("intel-rapl:*")):  # AMD's have that name too
        try:
            name = (path / "name").read_text().strip()
            _number(path / "energy_uj")
            wraps_uj = _number(path / "max_energy_range_uj")
        except (OSError, ValueError):
            continue
        if name.startswith("package") or name == "dram":
            found.append((path, wraps_uj))
    return found


def _gpus() -> Sequence[Any]:
    """Return NVML's handles of the GPUs that count energy, if nvidia-ml-py is installed."""
    if find_spec("pynvml") is None:
        return []
    nvml: Any = import_module("pynvml")
    try:
        nvml.nvmlInit()
        found = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        for each in found:
            _gpu_mj(each)
    except nvml.NVMLError:  # no driver, or GPUs older than Volta
        return []
    return found


def _gpu_mj(handle: Any) -> int:
    nvml: Any = import_module("pynvml")
    return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))


@dataclass(frozen=True)
class Launch:
    """The way to start programs on ranks.

    command: (case) -> the words before a program that runs on the case's ranks, and the
        environment; program: the launcher; kept: results that all cases of a batch share
    """

    command: Callable[[Case], tuple[list[str], Mapping[str, str]]]
    program: str
    kept: dict[Hashable, Any] = field(default_factory=dict)


class JobRanks:
    """Some of the ranks of a job. Its methods are collective over them.

    cores: what own_cores said of them; launch: what starts programs, of kinds that start ranks
    share_gpus: whether processes of a node may share a GPU
    machine: times for predictions, which the algorithm auto uses; None: nothing is predicted
    """

    def __init__(
        self,
        world: World,
        launch: Launch | None = None,
        share_gpus: bool = False,
        machine: Machine | None = None,
    ) -> None:
        self.world, self.launch, self.share_gpus = world, launch, share_gpus
        self.machine = machine
        self.link_s: float | None = None  # timing.link_s finds it
        self.cores = self._gpu = ""
        self._hosts = hosts(world)
        own = world.hosted.start
        first = world.nodes.index(world.nodes[own]) == own  # of the processes of this node
        self._meter = node_meter() if first else None
        self._kept: dict[Hashable, Any] = {}

    def take_device(self, factors: Factors) -> str:
        """Return the device of a case's arrays; for "gpu" each process takes its own. Collective.

        Raises UserError on all processes if one finds no GPU, or shares it.
        """
        device = str(factors.get("device", "cpu"))
        if device == "gpu":
            use_gpu(self.world, oversubscribe=self.share_gpus)
            self._gpu = gpu()
        return device

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of make for a key; the results of the last KEPT keys are kept."""
        found: T = self._kept.pop(key) if key in self._kept else make()
        self._kept[key] = found
        for old in list(self._kept)[:-KEPT]:
            del self._kept[old]
        return found

    def read_energy(self) -> float:
        """Return the counters of the node in J on its first process of these, 0 on the others."""
        return 0.0 if self._meter is None else self._meter.joules()

    def energy_j(self, before: float) -> Outcomes:
        """Return the energy of all nodes since read_energy, if all can count it. Collective."""
        used = self.read_energy() - before
        energy_j = float(np.sum(self.world.gather(used)))
        return {} if np.isnan(energy_j) else {"energy_j": energy_j}

    def environment(self) -> dict[str, str]:
        """Return the environment of all cases of a job that use these ranks.

        It is {} on processes other than 0, which writes the files.
        """
        if self.world.process > 0:
            return {}
        found = environment(self._hosts, self.cores)
        further = {"energy": self._meter.sources if self._meter else "", "gpu": self._gpu}
        return found | {name: text for name, text in further.items() if text}


def environment(names: list[str], placement: str) -> dict[str, str]:
    """Return the environment of a measurement; names: hosts of all processes."""
    return {
        "hosts": " ".join(dict.fromkeys(names)),
        **identity(),
        "cores": str(os.cpu_count()),
        "placement": placement,
        "versions": json.dumps(versions()),
        "kernels": cpu_clone(),
        **facts(),
    }
