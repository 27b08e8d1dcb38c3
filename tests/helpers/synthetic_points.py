"""Invented measurements: factors, outcomes and times of points, and the TOML that asks for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Columns = dict[str, list[Any]]
LAYERS = [f"layers.{i}.{what}" for i in range(6) for what in ("weight", "bias")]
BITS = {"raw": 32, "e5m2": 8, "e4m3": 8, "e3m0": 4}
GRADIENTS = [  # aggregator, wire, scaling, accuracy in %, underflow in %
    ("none", "", "", 93.7, 0.0),
    ("lowbit", "e4m3", "none", 75.0, 65.0),
    ("lowbit", "e4m3", "aps", 93.8, 4.4),
    ("lowbit", "e4m3", "tile", 93.7, 1.6),
    ("lowbit", "e5m2", "none", 93.8, 10.9),
    ("lowbit", "e5m2", "aps", 93.7, 0.1),
    ("lowbit", "e5m2", "tile", 93.6, 0.1),
    ("lowbit", "e3m0", "aps", 93.4, 70.0),
    ("lowbit", "e3m0", "tile", 93.5, 41.0),
]
WIRES = (("raw", ""), ("e4m3", "tile"), ("e3m0", "tile"))
OWN_WAY = {"direct": "float32"}
METHOD = ("algorithm", "wire", "value_scaling", "accumulate")
GRADIENT = ("gradient.aggregator", "gradient.wire", "gradient.scaling")
WORK = {"allreduce": "size_bytes", "train": "train.batch"}


def allreduce_columns(
    ranks: Sequence[int] = (2, 4, 8),
    sizes: Sequence[int] = (2**12, 2**15, 2**18, 2**21, 2**24),
    algorithms: Sequence[str] = ("ring", "rhd", "direct"),
    weak: bool = False,
) -> tuple[Columns, Array]:
    """Factors, and the model's time: latency, bytes, codec. MPI's own beside ours."""
    methods = methods_of(algorithms)
    rows, times, bounds = [], [], []
    for p in ranks:
        for given in sizes:
            size = given * p if weak else given
            for algorithm, wire, scaling, accumulate in methods:
                share = 2 * (p - 1) / p * size * BITS[wire] / 32
                rows.append((p // min(p, 4), min(p, 4), p, size, algorithm, wire, scaling))
                rows[-1] += (accumulate, share if algorithm != "mpi" else np.nan)
                steps = {"ring": 2 * (p - 1), "direct": p, "mpi": 2.5 * np.log2(p)}
                alpha = 9e-6 * steps.get(algorithm, 2 * np.log2(p))
                codec = 0 if wire == "raw" else size / 8e9
                extra = 1.4 if algorithm == "mpi" else 1.15
                times.append(alpha + extra * share / 2.5e9 + codec)
                bounds.append(share / 2.5e9 if p > 4 else size / 1e11)  # one node: of a copy
    names = ("nodes", "ppn", "ranks", "size_bytes", "algorithm", "wire", "value_scaling")
    names += ("accumulate", "wire_bytes")
    columns = {
        name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }
    errors = {"raw": 3e-8, "e4m3": 2.4e-2, "e3m0": 0.17}
    columns["error"] = [errors[wire] for wire in columns["wire"]]
    columns["bound_s"] = bounds
    columns["payload_bytes"] = [float(size) for size in columns["size_bytes"]]
    return columns, np.array(times)


def methods_of(algorithms: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """MPI's own, and each algorithm with each wire."""
    sums = {a: OWN_WAY.get(a, "requantise") for a in algorithms}
    own = [(a, w, s, sums[a] if s else "") for a in algorithms for w, s in WIRES]
    return [("mpi", "raw", "", ""), *own]


def train_columns(
    ranks: Sequence[int] = (1, 2, 4), seeds: Sequence[int] = (0, 1, 2), weak: bool = False
) -> tuple[Columns, Array]:
    """Factors and outcomes of nine formats, and the time of a step."""
    random = np.random.default_rng(5)
    names = ("nodes", "ppn", "ranks", "gradient.aggregator", "gradient.wire", "gradient.scaling")
    names += ("seed", "train.batch", "accuracy", "loss", "payload_bytes", "wire_bytes")
    rows, times = [], []
    for p in ranks:
        for aggregator, wire, scaling, accuracy, _ in GRADIENTS:
            bits = BITS[wire or "raw"]
            for seed in seeds:
                spread = 25 if accuracy < 80 else 0.3
                right = min(accuracy + spread * random.standard_normal(), 96.0)
                sent = int(2 * (p - 1) / p * 75_000 * bits / 8) + 16 * (scaling == "aps")
                row = (1, p, p, aggregator, wire, scaling, seed, 32 * (p if weak else 1))
                rows.append((*row, right, (100 - right) / 20, 300_000.0, float(sent)))
                work = 2e-3 * (1 if weak else 1 / p)
                times.append(work + sent / 1e9 + 1e-4 * (p > 1) + 2e-4 * (scaling == "aps"))
    columns = {
        name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }
    return columns, np.array(times)


def training(columns: Columns, times_s: Array, epochs: int = 12) -> dict[str, Any]:
    """The groups /training and /telemetry."""
    n, count = len(times_s), 10
    ends = {(a, w, s): under for a, w, s, _, under in GRADIENTS}
    keys = zip(*(columns[f"gradient.{k}"] for k in ("aggregator", "wire", "scaling")), strict=True)
    depth = np.linspace(1.0, 0.02, len(LAYERS))
    under = np.array([ends[key] for key in keys])[:, None, None]
    t = np.linspace(0, 1, count)[None, :, None]
    share = np.minimum(under * depth[None, None, :] * (0.7 + t), 100.0)
    share[[a == "none" for a in columns["gradient.aggregator"]]] = np.nan
    e = np.arange(1, epochs + 1)
    curve = 1 - np.exp(-3.0 * e / ceil(epochs / 3))
    accuracy = 10 + (np.array(columns["accuracy"])[:, None] - 10) * curve / curve[-1]
    by = ("point", "sample", "layer")
    points = {"point": (("point",), np.arange(n))}
    return {
        "training": points
        | {
            "epoch": (("epoch",), e),
            "test_accuracy": (("point", "epoch"), accuracy),
            "test_loss": (("point", "epoch"), (100 - accuracy) / 20),
            "train_loss": (("point", "epoch"), (100 - accuracy) / 25),
            "epoch_time_s": (("point", "epoch"), times_s[:, None] * 38 + 0 * accuracy),
        },
        "telemetry": points
        | {
            "sample": (("sample",), np.arange(count)),
            "layer": (("layer",), LAYERS),
            "iteration": (("point", "sample"), np.tile(np.arange(count) * 40, (n, 1))),
            "underflow": (by, share),
            "saturated": (by, 0 * share),
        },
    }


def asked(name: str, kind: str, scaling: str, options: Mapping[str, Any]) -> str:
    """The TOML of a study with these points."""
    ranks = list(options.get("ranks", {"allreduce": (2, 4, 8), "train": (1, 2, 4)}[kind]))
    lines = [f'name = "{name}"', f'kind = "{kind}"', f'scaling = "{scaling}"', "[sweep]"]
    lines += [f"ranks = {ranks}", "ppn = 4"]
    if kind == "train":
        lines += [f"seed = {list(options.get('seeds', (0, 1, 2)))}"]
        rows = {name: [g[i] for g in GRADIENTS] for i, name in enumerate(GRADIENT)}
    else:
        sizes = list(options.get("sizes", (2**12, 2**15, 2**18, 2**21, 2**24)))
        lines += [f"size_bytes = {sizes}"] if scaling == "strong" else []
        methods = methods_of(options.get("algorithms", ("ring", "rhd", "direct")))
        rows = {name: [m[i] for m in methods] for i, name in enumerate(METHOD)}
    lines += ["[[zip]]", *(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in rows.items())]
    if scaling == "weak":
        value = 32 if kind == "train" else options["sizes"][0]
        lines += ["[weak]", f"{json.dumps(WORK[kind])} = {value}"]
    elif kind == "train":
        lines.insert(6, '"train.batch" = [32]')
    lines += ["[job.data]", 'name = "digits"'] if kind == "train" else []
    return "\n".join(lines)
