"""Reports of other files: replayed tensors, autoencoders; for the rest, a description."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ... import ordinary, store
from ..schedulers import SCHEDULERS
from ..study_data import Array
from ..study_data.study_file import check_arrays
from . import units
from .figures import Axis, Chart, Map, Panel, Range, Series, Style, spread, styles, thinned
from .tables import Column, Listed, Report, Section, tabulate

KIND = "replay"  # attribute of its files
Group = Mapping[str, Array]
NEEDED = {
    "exponents": ("tensor", "iteration", "exponent", "count", "zeros", "subnormals", "nans"),
    "formats": ("format", "bits", "lowest", "normal", "highest"),
    "rounding": ("tensor", "format", "scaling", "underflowed", "saturated", "relative_error"),
}
SHADES = ("#9cc3e6", "#3d83bd", "#0b3c6f")  # of iterations, from the first to the last
MAPPED = {  # share -> title of its heat map
    "underflowed": "values that are not zero and become it",
    "saturated": "values beyond the largest number",
}
PERCENTILES = {"1 %\nbelow 2^": 0.01, "median\n2^": 0.5, "1 %\nabove 2^": 0.99}
SEEN = 1e-3  # share of a tensor's values that sets how far the axis of exponents reaches
ENDS = ("lowest", "normal", "highest")  # of the range of a format
FAR = 40  # exponents beyond it are not drawn for the sake of a format
MOST_ROWS, MOST_PRODUCTS = 30, 12  # of a map; of the figure of products
APART = "zeros", "subnormals", "infinities", "nans"  # values without an exponent
Place = tuple[int, ...]  # of a cell, by axis
LEAST = 5e-3  # share from which on a map is drawn
RULES = (
    "Exponent: floor of the binary logarithm. Zeros, subnormals of float32, infinities and NaN are "
    "counted apart.",
    "Errors: of float64 values, ||found - exact|| / ||exact||. Shares: of finite values that are "
    "not zero.",
    "aps: a power of two for a tensor, by its largest exponent. tile, block32, block16: one for "
    "1,024, 32, 16 values, the largest that fits.",
    "Sums over ranks: the messages and roundings of training, with the gradients that each rank "
    "had. Products: some rows and columns, each sum in full length.",
)


def replay_report(path: Path) -> Report:
    """Return the report of a file. Raises ReportError if it lacks an array that replay has."""
    groups, attributes = store.read(path)
    check_arrays(path, groups, NEEDED, "is not of precision replay")
    seen = groups["exponents"]["iteration"]
    facts = [
        ("found", _finding(groups["rounding"])),
        ("recording", str(attributes.get("recording", ""))),
        ("iterations", ", ".join(map(str, thinned(seen.tolist(), 12)))),
    ]
    sections = [_exponents(groups), _rounding(groups["rounding"])]
    sections += [_sums(groups["sums"])] if "sums" in groups else []
    sections += [_products(groups["products"])] if "products" in groups else []
    left_out = str(attributes.get("left_out", "")).splitlines()
    listed = [Listed("left out", left_out)] if left_out else []
    return Report("Precision of recorded tensors", facts, sections, listed, RULES)


def _finding(of: Group) -> str:
    """Return in a sentence with which format and scaling the fewest and most values become zero."""
    cells = [
        (float(np.nanmean(each)), f"{of['format'][i]}, {of['scaling'][j]}")
        for i, j in _places(of, "format", "scaling")
        if np.isfinite(each := of["underflowed"][:, :, i, j]).any()
    ]
    if not cells:
        return ""
    (least, one), (most, other) = min(cells), max(cells)
    return (
        f"Of the values that are not zero {units.digits(100 * least)} % become zero in {one} and "
        f"{units.digits(100 * most)} % in {other}: means over tensors, the least and the most of "
        f"{units.count(len(cells), 'setting')}."
    )


def _exponents(groups: Mapping[str, Group]) -> Section:
    of, formats = groups["exponents"], groups["formats"]
    tensors = [_split(name) for name in of["tensor"].tolist()]
    charts = [
        _histograms(of, formats, kind, [i for i, each in enumerate(tensors) if each[0] == kind])
        for kind in dict.fromkeys(kind for kind, _ in tensors)
    ]
    every = [_totals(of[name]) for name in ("count", *APART)]
    columns = [
        Column[int]("tensor", lambda i: str(of["tensor"][i]), numbers=False),
        *(
            Column[int](heading, partial(_percentile, of, share))
            for heading, share in PERCENTILES.items()
        ),
        *(Column[int](name, _shown(_totals(of[name]), units.fixed)) for name in APART),
        Column[int]("values", _shown(np.sum(every, axis=0), units.fixed)),
    ]
    table = tabulate("Exponents", columns, range(len(tensors)), "Of all iterations together.")
    return Section("Where the values are", tables=[table], charts=charts)


def _split(tensor: str) -> tuple[str, str]:
    kind, _, name = tensor.partition(" ")
    return kind, name or "(model)"


def _totals(counts: Array) -> Array:
    """Return the sum of the counts of each tensor; -1 was not recorded."""
    return np.maximum(counts, 0).reshape(len(counts), -1).sum(1)


def _percentile(of: Group, share: float, tensor: int) -> str:
    counts = np.maximum(of["count"][tensor], 0).sum(0)
    if not counts.any():
        return units.NONE
    return str(int(of["exponent"][np.searchsorted(np.cumsum(counts), share * counts.sum())]))


def _histograms(of: Group, formats: Group, kind: str, rows: list[int]) -> Chart:
    """Return the histograms of the tensors of a kind, from the first to the last iteration."""
    counts = np.maximum(of["count"][rows], 0).sum(1)
    there = of["exponent"][(counts > SEEN * counts.sum(1, keepdims=True)).any(0)]
    used = there if there.size else np.array([0])
    named = zip(*(formats[name].tolist() for name in ("format", *ENDS)), strict=True)
    ranges = [(name, low, normal, high + 1) for name, low, normal, high in named]
    reach = [end for _, low, _, high in ranges for end in (low, high) if abs(end) < FAR]
    start, stop = min(used.min(), *reach) - 1, max(used.max() + 1, *reach) + 1
    panels = [
        Panel(
            _split(str(of["tensor"][row]))[1],
            Axis("exponent", "whole", (start, stop)),
            Axis("values / %"),
            list(_lines(of, row)),
            None,
            [Range(name, *np.clip(ends, start, stop).tolist()) for name, *ends in ranges],
        )
        for row in rows
    ]
    return Chart(
        f"exponents_{kind}",
        f"{kind.capitalize()}: exponents, and the range of each format",
        ["Bars: normal numbers dark, subnormal ones light; left of a bar: too small."],
        f"Values by exponent in {kind}, without scaling. A scaling moves the values as one.",
        panels,
        shared=False,
    )


def _lines(of: Group, row: int) -> Iterator[Series]:
    recorded = [i for i in range(len(of["iteration"])) if of["count"][row, i].sum() >= 0]
    seen = thinned(recorded, len(SHADES))
    shades = thinned(SHADES, len(seen)) if len(seen) > 1 else SHADES[-1:]
    for shade, i in zip(shades, seen, strict=False):
        counts = np.maximum(of["count"][row, i], 0)
        share = 100 * counts / max(counts.sum(), 1)
        label = f"iteration {of['iteration'][i]}"
        yield Series(label, Style(shade, ""), of["exponent"], share, join="steps")


def _rounding(of: Group) -> Section:
    charts = [chart for name in MAPPED if (chart := _maps(of, name)) is not None]
    places = _places(of, "tensor", "format", "scaling")

    columns = [
        *_labels(of, "tensor", "format", "scaling"),
        Column[Place]("underflow\n%", _shown(_means(100 * of["underflowed"], 1))),
        Column[Place]("saturated\n%", _shown(_means(100 * of["saturated"], 1))),
        Column[Place]("subnormal\n%", _shown(_means(100 * of["subnormal"], 1))),
        Column[Place]("error", _shown(_means(of["relative_error"], 1))),
        Column[Place]("SNR\ndB", _shown(_means(of["snr_db"], 1))),
    ]
    caption = "Means over iterations; to nearest, ties to even; what is too large saturates."
    table = tabulate("Rounding", columns, places, caption)
    return Section("Rounding once", tables=[table], charts=charts)


def _labels(of: Group, *names: str) -> list[Column[Place]]:
    """Return columns with the labels of axes."""

    def label(values: Array, axis: int, at: Place) -> str:
        return str(values[at[axis]])

    return [Column(name, partial(label, of[name], i), False) for i, name in enumerate(names)]


def _shown(values: Array, text: Callable[[float], str] = units.digits) -> Callable[[Any], str]:
    """Return the function from a place to its value as text."""
    return lambda at: text(float(values[at]))


def _means(values: Array, axis: int) -> Array:
    """Return the means of finite values over an axis, NaN if there are none."""
    found: Array = np.ma.masked_invalid(values).mean(axis).filled(np.nan)
    return found


def _places(of: Group, *names: str) -> list[Place]:
    """Return the indices of all cells of axes, the last one running fastest."""
    return list(product(*(range(len(of[name])) for name in names)))


def _maps(of: Group, name: str) -> Chart | None:
    """Return maps of a share by tensor and iteration, of formats and scalings that have any."""
    found = []
    for i, j in _places(of, "format", "scaling"):
        values = 100 * of[name][:, :, i, j]
        if np.nan_to_num(values).max(initial=0) >= 100 * LEAST:
            title = f"{of['format'][i]}, {of['scaling'][j]}"
            rows = thinned(range(len(of["tensor"])), MOST_ROWS)
            names = [str(of["tensor"][row]) for row in rows]
            at = of["iteration"]
            found.append(Map(title, Axis("iteration"), Axis(""), at, names, values[rows]))
    if not found:
        return None
    height, count = max(1.0, 0.045 * len(found[0].rows)), len(of["tensor"])
    shown = [f"{MOST_ROWS} of {count} tensors, evenly spread."] if count > MOST_ROWS else []
    if any(np.isnan(each.values).any() for each in found):
        shown.append("Grey: not recorded, or all values are zero or not finite.")
    return Chart(
        f"map_{name}",
        f"Rounding once: {MAPPED[name]}",
        ["By tensor and iteration. Formats and scalings without any are left out.", *shown],
        f"{MAPPED[name].capitalize()}, by tensor and iteration, in percent.",
        found,
        colours="share / %",
        scale=(1.15, height),
    )


def _sums(of: Group) -> Section:
    """Errors of sums over ranks: the mean over iterations, and the least and the largest."""
    ways = of["way"].tolist()
    drawn = styles(ways)
    panels, wrong = [], of["relative_error"]
    y = _error_axis(wrong)
    for i, j in _places(of, "format", "scaling"):
        series = [
            _interval(way, drawn[way], of["ranks"], wrong[:, i, j, at])
            for at, way in enumerate(ways)
            if np.isfinite(wrong[:, i, j, at]).any()
        ]
        ranks = Axis("ranks", "log2", ticks=of["ranks"].tolist())
        title = f"{of['format'][i]}, {of['scaling'][j]}"
        panels.append(Panel(title, ranks, y, series))
    chart = Chart(
        "sums",
        "Sums of gradients over ranks",
        ["All layers together; mean over iterations, bars from the least to the largest."],
        "Error of the sum of the gradients by number of ranks, algorithm and accumulation.",
        panels,
        columns=len(of["scaling"]),
    )
    means = _means(wrong, 0)
    columns = _labels(of, "format", "scaling", "way")
    columns += [
        Column(f"{count}\nranks", _shown(means[..., i]))
        for i, count in enumerate(of["ranks"].tolist())
    ]
    places = _places(of, "format", "scaling", "way")
    known = np.asarray(np.isfinite(wrong).any((0, -1)))
    places = [at for at in places if known[at]]
    table = tabulate("Sums", columns, places, "Relative error, mean over iterations.")
    return Section("Sums over ranks", tables=[table], charts=[chart])


def _error_axis(wrong: Array) -> Axis:
    """Return an axis with room for the errors that are finite and not zero, bars included."""
    finite = wrong[np.isfinite(wrong) & (wrong > 0)]
    limits = (float(finite.min()) / 1.5, float(finite.max()) * 1.5) if finite.size else (None, None)
    return Axis("relative error", "log", limits)


def _interval(name: str, style: Style, x: Any, values: Array) -> Series:
    """Return the mean over the first axis, with the least and the largest."""
    known = np.ma.masked_invalid(values)
    ends = (each.filled(np.nan) for each in (known.mean(0), known.min(0), known.max(0)))
    return Series(name, style, x, *ends)


def _products(of: Group) -> Section:
    """Errors of the products of layers by accumulator and order of the sums."""
    wrong, orders = of["relative_error"], of["order"].tolist()
    drawn, y = styles(orders), _error_axis(wrong)
    names = Axis("format of partial sums", names=of["accumulate"].tolist())
    longest = np.argsort(-of["terms"].max(1), kind="stable")
    drawn_rows = sorted(longest[:MOST_PRODUCTS].tolist())
    panels = [
        Panel(
            f"{of['product'][row]}: {int(of['terms'][row].max()):,} terms",
            names,
            y,
            [
                _interval(order, drawn[order], range(len(of["accumulate"])), wrong[row][:, :, i])
                for i, order in enumerate(orders)
            ],
        )
        for row in drawn_rows
    ]
    some = f"The {len(drawn_rows)} of {len(wrong)} products with the longest sums; mean"
    shown = "Mean" if len(drawn_rows) == len(wrong) else some
    chart = Chart(
        "products",
        "Products of layers by the format of partial sums",
        [f"{shown} over iterations, bars to the extremes."],
        "Error of the products of layers by accumulator and order of the sums.",
        panels,
    )
    places, means = _places(of, "product", "accumulate"), _means(wrong, 1)
    columns = [
        Column[Place]("product", lambda at: str(of["product"][at[0]]), numbers=False),
        Column[Place]("terms", lambda at: units.fixed(int(of["terms"][at[0]].max()))),
        Column[Place]("sums in", lambda at: str(of["accumulate"][at[1]]), numbers=False),
        *(Column[Place](order, _shown(means[..., i])) for i, order in enumerate(orders)),
    ]
    table = tabulate("Products", columns, places, "Relative error, mean over iterations.")
    return Section("Products of layers", tables=[table], charts=[chart])


OF_AUTOENCODER = {
    "steps": ("layer", "iteration", "loss", "error", "energy", "time_s", "exchange_s", "sent_bytes")
}
JUDGED = {"selectivity": ("layer", "concept", "accuracy", "random", "pixel")}
LAYERS_CAPTION = (
    "Error: of the reconstruction, of the energy of the layer's input, first and last iteration. "
    "Times: the slowest rank, median over iterations. Sent: in an iteration, by the rank that "
    "sends most."
)


def autoencoder_report(path: Path) -> Report:
    """Return the report of a record. Raises ReportError if it lacks an array."""
    groups, attributes = store.read(path)
    check_arrays(path, groups, OF_AUTOENCODER, "is not the record of an autoencoder")
    steps = groups["steps"]
    rows = [np.flatnonzero(steps["layer"] == layer) for layer in np.unique(steps["layer"])]

    def error(row: Array, at: int) -> float:
        i = row[at]
        return float(steps["error"][i] / steps["energy"][i]) if steps["energy"][i] else np.nan

    def median(name: str, row: Array) -> float:
        return float(np.median(steps[name][row]))

    columns = [
        Column[Array]("layer", lambda r: str(steps["layer"][r[0]])),
        Column[Array]("itera-\ntions", lambda r: units.fixed(len(r))),
        Column[Array]("objective\nfirst", lambda r: units.digits(steps["loss"][r[0]], 4)),
        Column[Array]("last", lambda r: units.digits(steps["loss"][r[-1]], 4)),
        Column[Array]("error %\nfirst", lambda r: units.digits(100 * error(r, 0))),
        Column[Array]("last", lambda r: units.digits(100 * error(r, -1))),
        Column[Array]("time", lambda r: units.time(median("time_s", r))),
        Column[Array]("in ex-\nchanges", lambda r: units.time(median("exchange_s", r))),
        Column[Array]("sent", lambda r: units.size(median("sent_bytes", r))),
    ]
    style = styles([f"layer {steps['layer'][r[0]]}" for r in rows])
    series = [
        Series(name, style[name], steps["iteration"][r], steps["loss"][r])
        for name, r in zip(style, rows, strict=True)
    ]
    losses = [value for each in series for value in each.y]
    chart = Chart(
        "objective_by_iteration",
        f"{attributes.get('name', path.stem)}: objective",
        ["Mean over the images of a batch."],
        "Objective of the layer that is trained, by iteration.",
        [Panel("", Axis("iteration"), spread("objective", losses, "log", 10, start=None), series)],
    )
    facts: list[tuple[str, str]] = [
        (name, str(attributes[name]))
        for name in ("status", "parameters", "ranks", "date")
        if name in attributes
    ]
    if rows:
        first, last = (units.digits(steps["loss"][rows[-1][at]], 4) for at in (0, -1))
        told = f"The objective of layer {steps['layer'][rows[-1][0]]} goes from {first} to {last}"
        facts.insert(0, ("found", f"{told} in {units.count(len(rows[-1]), 'iteration')}."))
    table = tabulate("Layers", columns, rows, LAYERS_CAPTION)
    title = f"Autoencoder: {attributes.get('name', path.stem)}"
    charts = [chart] if rows else []
    return Report(title, facts, [Section("Layers", tables=[table], charts=charts)])


def probe_report(path: Path) -> Report:
    """Return the report of a file of autoencoder probe. Raises ReportError as the other."""
    groups, _ = store.read(path)
    check_arrays(path, groups, JUDGED, "is not of autoencoder probe")
    of = groups["selectivity"]

    percent = partial(units.fixed, places=1)
    columns = [
        Column[int]("concept", lambda i: str(of["concept"][i])),
        Column[int]("pixel", _shown(100 * of["pixel"], percent)),
    ]
    for layer in range(len(of["layer"])):
        columns += [
            Column(f"layer {layer}", _shown(100 * of["accuracy"][layer], percent)),
            Column("random", _shown(100 * of["random"][layer], percent)),
        ]
    caption = (
        "Accuracy of the best neuron in %, judged on images that did not choose it; a guess: 50. "
        "Random: of filters that were not trained."
    )
    table = tabulate("Concepts", columns, range(len(of["concept"])), caption)
    held = of.get("held_out_error", np.empty(0))
    notes = [f"Layer {i}: error of held-out images {error:.4f} of the energy."
             for i, error in enumerate(held)]  # fmt: skip
    means = [100 * float(np.nanmean(of[name])) for name in ("accuracy", "random")]
    found = (
        f"The best neurons have a mean accuracy of {means[0]:.1f} %, those of filters that were "
        f"not trained {means[1]:.1f} %, over {units.count(len(of['concept']), 'concept')} and "
        f"{units.count(len(of['layer']), 'layer')}."
    )
    return Report(f"Probe: {path.name}", [("found", found)], [Section("Concepts", notes, [table])])


KINDS = {  # attribute "kind" of HDF5 files: description; use
    "run": ("the record of a training run", "`report` shows it"),
    "checkpoint": (
        "the checkpoint of a training run",
        "`train --resume` goes on from it, `report` takes the record beside it",
    ),
    "state": ("what ranks remember for a checkpoint", "`train --resume` reads it"),
    "weights": ("the weights of a run after an epoch", "`influence` takes the run"),
    "gradients": (
        "the gradients of all ranks in an iteration",
        "`bench compress`, `bench rounding` and `precision replay` take it",
    ),
    "recording": (
        "tensors of layers, of `precision record`",
        "`precision replay` makes of it what `report` shows",
    ),
    "integer network": (
        "a network of integers, of `export`",
        "`cpdhpc.torch.quantized.load` reads it",
    ),
    "case": ("a case of a study", "`report` takes the study's folder, which has study.toml"),
    "autoencoder checkpoint": (
        "the checkpoint of an autoencoder",
        "`autoencoder --resume` goes on from it, `autoencoder probe` shows what it has learned",
    ),
    "autoencoder features": (
        "responses of an autoencoder to images, of `autoencoder probe`",
        "h5py reads them",
    ),
}
ARRAYS = "arrays without a kind, as those that `darray` saves", "h5py reads them"
TABLES = {  # a key of our TOML files: description; use; the first counts
    "kind": ("a study as it is asked for", "`study run` measures it, `report` takes its folder"),
    "machine": ("the speeds of a machine, of `bench fit`", "`bench predict` takes it"),
    "study": ("a reference for a study", "`report STUDY --compare` takes it"),
    "layer": ("the job of an autoencoder", "`autoencoder` trains it, `report` takes its folder"),
    **dict.fromkeys(
        ("model", "train", "compare", "data"),
        ("a job", "`train` runs it, `report` takes the folder of its runs"),
    ),
    "precision": ("rules of [precision]", "a job takes them, `report` takes search.h5 beside it"),
    **dict.fromkeys(
        ("partition", "launcher", "cores_per_node", "nodes", "modules", "setup"),
        ("the profile of a site", "`study plan --site` takes it"),
    ),
}
ENDINGS = {
    ".html": "a page: a browser shows it",
    ".png": "a picture",
    ".svg": "a picture",
    ".csv": "a table of `report --csv`",
    ".tex": "a table of `report --latex`",
    ".json": "what a job of a study has noted: `study status` shows it",
    **{s.SUFFIX: f"a job script: `{s.SUFFIX[1:]}` takes it" for s in SCHEDULERS.values()},
    ".lock": "the claim of who is at work on files",
}
FOLDERS = {
    "cases": "the cases of a study",
    "logs": "what jobs of a study have printed",
    "scripts": "the job scripts of a study",
}


def is_hdf5(path: Path) -> bool:
    """Return whether a file begins as HDF5 of cpdhpc or of others does."""
    with open(path, "rb", opener=ordinary.open_ordinary) as file:
        return file.read(len(store.MAGIC)).startswith((store.MAGIC, store.SIGNATURE))


def of_file(path: Path) -> str:
    """Return the description and use of a file. Raises StoreError: not known."""
    if is_hdf5(path) or path.suffix == ".h5":
        what, how = KINDS.get(str(store.read_attributes(path).get("kind")), ARRAYS)
        return f"{what}: {how}"
    if path.suffix in ENDINGS:
        return ENDINGS[path.suffix]
    try:
        text = ordinary.content(path)[: 1 << 20].decode()
        keys = tomllib.loads(text) if path.suffix == ".toml" else {}
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        raise store.StoreError(f"{path}: is no file that cpdhpc writes") from None
    if path.suffix != ".toml":
        return "text, maybe the log of a job: `report` takes HDF5 files, and folders of them"
    if found := next((told for key, told in TABLES.items() if key in keys), None):
        return f"{found[0]}: {found[1]}"
    raise store.StoreError(f"{path}: is no TOML file that cpdhpc takes")


def of_folder(path: Path) -> str:
    """Return the content of a folder that has neither studies nor runs, in a few words."""
    if path.name in FOLDERS and (path.parent / "study.toml").exists():
        return f"{FOLDERS[path.name]}: `report {path.parent}` shows the study"
    there = [each for each in sorted(path.iterdir()) if not each.name.startswith(".")]
    folders = [each.name for each in there if each.is_dir()]
    found: Counter[str] = Counter()
    for each in there:
        if each.is_file():
            try:
                found[of_file(each).partition(":")[0]] += 1
            except (store.StoreError, OSError):
                found["not known"] += 1
    parts = [f"{units.count(n, 'file')}: {what}" for what, n in found.most_common(MOST)]
    parts += [f"folders {', '.join(folders[:MOST])}"] if folders else []
    return "; ".join(parts) or "it is empty"


MOST = 5  # kinds of files, and folders, that are named
