"""Study files of invented measurements, written by h5py alone, as docs/reference/hdf5.md says."""

import json
from collections.abc import Mapping, Sequence
from math import ceil, comb
from pathlib import Path
from typing import Any

import h5py
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


WARMUPS = 2
LEVEL = 0.95
UNITS = {
    "size_bytes": "byte",
    "wire_bytes": "byte",
    "payload_bytes": "byte",
    "accuracy": "%",
    "loss": "nat",
    "test_accuracy": "%",
    "underflow": "%",
    "saturated": "%",
}
FACTORS = (
    "nodes",
    "ppn",
    "ranks",
    "size_bytes",
    "algorithm",
    "wire",
    "value_scaling",
    "accumulate",
)
FACTORS += ("gradient.aggregator", "gradient.wire", "gradient.scaling", "seed", "train.batch")
PLACES = {"nodes", "ppn", "ranks"}
ENVIRONMENT = {
    "hosts": "node[01-02]",
    "processor": "AMD EPYC 9654",
    "cores": 96,
    "mpi_library": "Open MPI v5.0.11",
    "versions": json.dumps({"cpdhpc": "0.1", "numpy": "2.1.0"}),
    "kernels": "v4",
    "git_commit": "0123abcd",
    "slurm": json.dumps({"SLURM_JOB_ID": "1234", "SLURM_JOB_PARTITION": "batch"}),
}


def binomial_interval(sorted_s: Array) -> tuple[float, float]:
    """The median's interval by order statistics, with the sum of binomials written out."""
    n = len(sorted_s)
    for low in range(n // 2, 0, -1):  # 1-based ranks low and n + 1 - low
        if sum(comb(n, k) for k in range(low, n - low + 1)) / 2**n >= LEVEL:
            return float(sorted_s[low - 1]), float(sorted_s[n - low])
    return np.nan, np.nan


def samples(
    columns: Columns, times_s: Array, repeats: int, noise: float, seed: int
) -> dict[str, tuple[tuple[str, ...], Any]]:
    """The group /samples: dimensions and data of each variable."""
    random = np.random.default_rng(seed)
    n = len(times_s)
    raw = times_s[:, None] * random.lognormal(0, noise, (n, repeats)) * 1.02
    raw[:, :WARMUPS] *= 1.5
    raw[::3, repeats - 2 :] = np.nan  # stopped early
    warm = np.zeros((n, repeats), np.uint8)
    warm[:, :WARMUPS] = 1
    by, both = ("point",), ("point", "repeat")
    named = ["_".join(str(columns[k][i]) for k in columns if k in FACTORS) for i in range(n)]
    return {
        "point": (by, np.arange(n)),
        "repeat": (("repeat",), np.arange(repeats)),
        "case_id": (by, named),
        **{name: (by, values) for name, values in columns.items()},
        "time_s": (both, raw),
        "min_rank_time_s": (both, raw * 0.9),
        "mean_rank_time_s": (both, raw * 0.95),
        "is_warmup": (both, warm),
        "job_id": (by, ["1234"] * n),
        "restarts": (by, [0] * n),
        "environment": (by, [0] * n),
    }


def bases(columns: Columns, varying: set[str]) -> list[int]:
    """For each point the one of fewest ranks whose other factors are the same."""
    same = [k for k in FACTORS if k in columns and k not in PLACES | varying]
    keys = [tuple(columns[k][i] for k in same) for i in range(len(columns["ranks"]))]
    order = sorted(range(len(keys)), key=lambda i: columns["ranks"][i])
    first: dict[Any, int] = {}
    for i in order:
        first.setdefault(keys[i], i)
    return [first[key] for key in keys]


def summary(
    group: Mapping[str, Any], base: list[int], scaling: str
) -> dict[str, tuple[tuple[str, ...], Any]]:
    """The group /summary, by the definitions."""
    raw, warm = np.array(group["time_s"][1]), np.array(group["is_warmup"][1])
    kept = [np.sort(t[(w == 0) & np.isfinite(t)]) for t, w in zip(raw, warm, strict=True)]
    ends = np.array([binomial_interval(t) for t in kept])
    median = np.array([np.median(t) for t in kept])
    ranks = np.array(group["ranks"][1])
    gain = ranks / ranks[base] if scaling == "weak" else np.ones(len(ranks))
    speed = gain * median[base] / median
    columns = {
        "n": [len(t) for t in kept],
        "median_s": median,
        "ci_low_s": ends[:, 0],
        "ci_high_s": ends[:, 1],
        "mean_s": [t.mean() for t in kept],
        "std_s": [t.std(ddof=1) if len(t) > 1 else np.nan for t in kept],
        "min_s": [t.min() for t in kept],
        "max_s": [t.max() for t in kept],
        "p95_s": [np.quantile(t, 0.95) for t in kept],
        "p99_s": [np.quantile(t, 0.99) for t in kept],
        "speedup": speed,
        "speedup_low": gain * ends[base, 0] / ends[:, 1],
        "speedup_high": gain * ends[base, 1] / ends[:, 0],
        "efficiency": speed / (ranks / ranks[base]),
        "base_point": base,
    }
    points = {"point": (("point",), np.arange(len(kept)))}
    return points | {name: (("point",), values) for name, values in columns.items()}


def attributes(name: str, kind: str, scaling: str, missing: int, toml: str) -> dict[str, Any]:
    """What the file says of itself."""
    return {
        "Conventions": "CF-1.11",
        "cpdhpc_schema": 1,
        "title": f"{name}: {scaling} scaling, {kind}",
        "name": name,
        "work": WORK[kind],
        "sample": "one call, the slowest rank",
        "missing": missing,
        "software": "cpdhpc",
        "software_version": "0.1",
        "date": "2026-05-04T12:00:00.000+00:00",
        "kind": kind,
        "scaling": scaling,
        "study": toml,
        "study_hash": "0" * 64,
        "status": "partial" if missing else "complete",
    }


def write_study(
    path: Path,
    kind: str = "allreduce",
    scaling: str = "strong",
    factor: Mapping[int, float] | None = None,
    drop: int = 0,
    repeats: int = 18,
    noise: float = 0.03,
    seed: int = 0,
    toml: str | None = None,
    environment: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Write a study; factor: point -> by what its times are multiplied; drop: points left out."""
    make = {"allreduce": allreduce_columns, "train": train_columns}[kind]
    columns, times_s = make(weak=scaling == "weak", **options)
    if drop:
        columns = {name: values[:-drop] for name, values in columns.items()}
        times_s = times_s[:-drop]
    group = samples(columns, times_s, repeats, noise, seed)
    for index, slower in (factor or {}).items():
        group["time_s"][1][index] *= slower
    varying = {"size_bytes", "train.batch"} if scaling == "weak" else set()
    groups = {
        "samples": group,
        "summary": summary(group, bases(columns, varying), scaling),
        "environment": {
            "environment": (("environment",), [0]),
            **{k: (("environment",), [v]) for k, v in (environment or ENVIRONMENT).items()},
        },
    }
    groups |= training(columns, times_s) if kind == "train" else {}
    with h5py.File(path, "w") as file:
        file.attrs.update(
            attributes(
                path.stem, kind, scaling, drop, toml or asked(path.stem, kind, scaling, options)
            )
        )
        for name, variables in groups.items():
            _write_group(file.create_group(name), variables)
        file["summary"].attrs["ci_level"] = LEVEL
        file["summary"].attrs["base"] = (
            f"fewest ranks, then least {WORK[kind]}, of the points alike"
        )
    return path


def many(path: Path) -> Path:
    """Write 5,000 cases: ten methods, 25 sizes, 20 numbers of ranks."""
    ranks = [*(2**i for i in range(1, 11)), *(3 * 2**i for i in range(10))]
    return write_study(path, ranks=ranks, sizes=[2**i for i in range(6, 31)])


def _write_group(target: Any, variables: Mapping[str, tuple[tuple[str, ...], Any]]) -> None:
    for name, (dims, values) in sorted(variables.items(), key=lambda v: v[1][0] != (v[0],)):
        data = np.asarray(values)
        data = data.astype(object) if data.dtype.kind == "U" else data
        kind = h5py.string_dtype() if data.dtype == object else None
        dataset = target.create_dataset(name, data=data, dtype=kind)
        dataset.attrs["long_name"] = name.replace("_", " ")
        dataset.attrs["units"] = "s" if name.endswith("_s") else UNITS.get(name, "1")
        if dims == (name,):
            dataset.make_scale(name)
            continue
        for axis, dim in enumerate(dims):
            dataset.dims[axis].attach_scale(target[dim])
