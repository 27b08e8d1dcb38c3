"""Trainings: a job file whose keys are the factors; accuracy against bits and time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import ordinary, store
from ...config import IMPORT, Raw, UserError, merge
from ...lazy import Late
from ...whole_files import sealed_json, unsealed_json
from ..report import figures, units
from ..report.figures import Map
from ..report.fits import (
    PADDED,
    Score,
    Trained,
    critical,
    critical_batch,
    finding,
    learning_charts,
    score_charts,
)
from ..report.points import Facets, SeedGroup, but_for_gradient, label, of_factors, timing
from ..report.tables import Column, Section, tabulate
from ..report.trainings import LAYER_SHARES, bits_by_batch, layer_charts
from ..study_data import (
    ABSENT,
    Array,
    Case,
    Factor,
    Factors,
    Outcomes,
    Result,
    Series,
    Value,
    at_least,
)
from ..study_data.study_file import StudyFile
from .base import Kind, MeasuredStudy, Measuring

if TYPE_CHECKING:
    from ..signals import Caught
    from ..train import job as jobs
    from ..train import setup
    from ..train.job import Job
    from ..train.record import Record
    from ..train.training import Training
    from .place import JobRanks
else:
    jobs, setup = map(Late, ("cpdhpc.lab.train.job", "cpdhpc.lab.train.setup"))

_ROWS: dict[str, tuple[type, str]] = {  # key of a job: its type and long name
    "data.name": (str, "data set"),
    "data.dir": (str, "directory of the data set"),
    "data.test_share": (float, "share of the test samples"),
    "data.split_seed": (int, "seed of the split into training and test samples"),
    "model.name": (str, "model"),
    "model.hidden": (int, "values of the hidden layer of lenet"),
    "loss.name": (str, "loss"),
    "loss.label_smoothing": (float, "share of targets that is spread over all classes"),
    "metric.name": (str, "score of the test samples besides the loss"),
    "augment.crop": (int, "zeros around images, of which their size is cut out"),
    "augment.flip": (bool, "whether half of the images are mirrored"),
    "augment.cutout": (int, "side of the square that is cut out of images"),
    "loader.workers": (int, "workers of a rank that read samples ahead"),
    "loader.prefetch": (int, "batches that each worker reads ahead"),
    "optimizer.name": (str, "optimizer"),
    "optimizer.momentum": (float, "momentum"),
    "optimizer.weight_decay": (float, "weight decay"),
    "optimizer.nesterov": (bool, "whether momentum is Nesterov's"),
    "schedule.warmup_epochs": (float, "epochs of the warm-up"),
    "schedule.decay": (str, "decay of the learning rate"),
    "schedule.gamma": (float, "factor on the learning rate at each milestone or epoch"),
    "schedule.power": (float, "power of the polynomial decay"),
    "schedule.base_batch": (int, "batch that rate and warm-up are given for"),
    "schedule.batch_scaling": (str, "what a larger batch changes"),
    "controller.name": (str, "what sets the learning rate"),
    "gradient.aggregator": (str, "how gradients are averaged"),
    "gradient.algorithm": (str, "algorithm of the all-reduce"),
    "gradient.wire": (str, "format of the gradients on the wire"),
    "gradient.scaling": (str, "scaling of gradients before encoding"),
    "gradient.accumulate": (str, "how partial sums are kept"),
    "gradient.rounding": (str, "rounding of gradients"),
    "gradient.overflow": (str, "what gradients too large for the format become"),
    "gradient.random_bits": (int, "random bits of stochastic rounding, 0 for all"),
    "gradient.headroom": (str, "headroom of the shared scaling"),
    "update.name": (str, "rule by which ranks update weights"),
    "stages.count": (int, "stages that the network is cut into"),
    "stages.method": (str, "coupling of stages"),
    "stages.beta": (float, "factor of half the squared residual between stages"),
    "stages.z_rate": (float, "step of the input of a stage, in 1 / beta"),
    "stages.correction": (float, "share of iterations that go through all stages in turn"),
    "stages.refresh_every": (int, "iterations between refreshes of the inputs of stages"),
    "stages.local_steps": (int, "steps of all stages on a batch"),
    "stages.filter": (int, "number of values whose mean travels between stages"),
    "stages.wire": (str, "format of values between stages"),
    "train.epochs": (int, "epochs"),
    "train.batch": (int, "samples of a step, of all ranks together"),
    "train.learning_rate": (float, "learning rate"),
    "train.loss_scale": (float, "factor on the loss, at first"),
    "train.loss_scaling": (str, "whether the loss scale follows overflow"),
    "train.virtual_ranks": (int, "ranks that a process simulates"),
    "train.threads": (int, "threads of torch of a rank; 0: the cores it owns"),
    "train.bucket_mib": (float, "MiB of gradients that are reduced together"),
    "train.overlap": (bool, "whether gradients are reduced while backward goes on"),
    "train.device": (str, "where models compute: cpu, gpu"),
    "train.gpu_direct": (str, "whether MPI is given GPU memory"),
    "train.oversubscribe_gpus": (bool, "whether processes of a node share GPUs"),
    "train.autocast": (str, "dtype of torch.autocast in forward"),
}


def _used(given: Factors) -> dict[str, Value]:
    """Return the factors that have a value; the others are as in the job. See Kind.used."""
    used = {name: value for name, value in given.items() if value != ABSENT}
    if used.get("train.overlap") and int(used.get("train.virtual_ranks", 1)) > 1:
        raise ValueError("train.overlap=true needs train.virtual_ranks=1")
    return used


def _fits(job: Raw, used: Factors, ranks: int) -> str | None:
    """Return why the job cannot run; ranks without a sample in a batch are no error."""
    try:
        given = _job(job, used, "case")
        given.check_ranks(ranks * given.train.virtual_ranks)
        given.stages.layout(ranks)
    except ValueError as error:  # a UserError is one
        return str(error)
    rows, columns = given.train.image_grid
    if ranks % (rows * columns):
        return f"train.image_grid={[rows, columns]}: {ranks} ranks are no multiple of its ranks"
    return None


def _device(job: Raw, used: Factors) -> str:
    return str(used.get("train.device", job.get("train", {}).get("device", "cpu")))


def _further(name: str, value: Value, job: Raw) -> Factor | None:
    """Return the factor of a key of a table of the job, or of an argument of a user's function.

    The arguments of an imported function are not checked here: only ranks import it.
    """
    table, _, key = name.partition(".")
    known = key in jobs.keys_of(table) or IMPORT in job.get(table, {})
    return Factor(f"{key} of {table}", type(value)) if known else None


class _Training(Measuring):
    """A case of the kind "train": one visit trains to the end."""

    def __init__(self, study: MeasuredStudy, case: Case, directory: Path) -> None:
        super().__init__(study, case, directory)
        self.job = _job(study.job, case.factors, case.id)
        self.virtual_ranks, self.timeout_s = self.job.train.virtual_ranks, self.job.train.timeout_s
        self.training: Training | None = None
        self.starts: list[int] = []
        self.used: Outcomes = {}

    def visit(self, place: JobRanks, caught: Caught) -> None:
        """Train from the last checkpoint to the end. Collective; see Measuring.visit."""
        from ..train.checkpoint import Files
        from ..train.loop import run
        from ..train.progress import Display

        world = place.world
        place.cores = "as the launcher has bound the ranks"
        files = Files(self.directory / "record.h5", self.directory / "checkpoint.h5")
        data = setup.agreed(world, self.job.data.load)
        training = setup.prepare(self.job, world, data, files)
        training.resume()
        self.starts = world.on_first(lambda: self._note(training.iteration))
        before_j = place.read_energy()
        run(training, caught, Display(world.process == 0, 1))
        training.close()
        self.used = place.energy_j(before_j)
        self.training, self.done = training, True

    def _note(self, iteration: int) -> list[int]:
        """Record that a process begins at an iteration; return the first iterations of all.

        Raises UserError if the steps before it are of another library, commit or processor.
        """
        from ..provenance import difference, identity

        path = self.directory / "starts.json"
        before: dict[str, Any] = {"iterations": [0] if iteration else [], **identity()}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if iteration and path.exists():
                before = unsealed_json(ordinary.text(path))
            if wrong := difference(before):
                raise UserError(
                    f"{self.directory}: was trained so far with {wrong}: go on there, or delete it"
                )
            before["iterations"].append(iteration)
            store.put(path, sealed_json(before))
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None
        except UserError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError):
            raise UserError(f"{path}: is damaged: delete {self.directory} to train anew") from None
        return list(before["iterations"])

    def result(self, place: JobRanks) -> Result:
        """Return the times of all steps, and the course of training."""
        from ...world.timeline import PHASES

        assert self.training is not None, "visit has come to its end"
        training = self.training
        columns = training.record.arrays()
        steps, epochs = columns["steps"], columns["epochs"]
        times_s = np.full((len(steps["iteration"]), 3), np.nan)
        times_s[:, 0] = steps["time_s"].sum(axis=1)
        is_warmup = np.zeros(len(times_s), np.uint8)
        for first in self.starts:  # each process has warm-up steps
            is_warmup[first : first + self.study.measure.warmup] = 1
        series = _series(training.record, training.samples)
        waited_s = steps["time_s"][:, PHASES.index("data")].sum()
        scores = series["training"].keys() & SCORES.keys()
        further = [metric.column for metric in training.job.told[1:]]
        outcomes: Outcomes = {
            **{name: float(epochs[name][-1]) for name in further},
            "wire_bytes": float(steps["wire_bytes"].max(axis=1).mean()),
            "payload_bytes": 4 * sum(p.numel() for p in training.reducer.parameters),
            "loss": float(epochs["test_loss"][-1]),
            "data_share": 100 * float(waited_s / steps["time_s"].sum()),
            **{SCORES[name]: float(series["training"][name][-1]) for name in scores},
        }
        done = len(times_s) - self.starts[-1]  # steps of this process, whose energy is known
        outcomes |= {name: float(value) / done for name, value in self.used.items() if done}
        environment = place.environment() | {
            "torch_threads": str(training.provenance["torch_threads"])
        }
        return Result(times_s, is_warmup, outcomes, environment, series)


def _job(tables: Raw, factors: Factors, name: str) -> Job:
    """Return a study's job with a case's factors laid over it. Raises ConfigError."""
    changes: Raw = {}
    for key, value in factors.items():
        change: Any = value
        for part in reversed(("train.seed" if key == "seed" else key).split(".")):
            change = {part: change}
        changes = merge(changes, change)
    return jobs.read(jobs.laid_over(tables, changes) | {"name": name}, "job")


SCORES = {"test_accuracy": "accuracy", "test_score": "score"}  # by epoch: and at the end


def _series(record: Record, samples: int) -> Series:
    columns = record.arrays()
    steps, epochs, layers = columns["steps"], columns["epochs"], columns["layers"]
    unknown = np.full(layers["nonzero"].shape, np.nan)  # for methods that do not count them
    seen = np.cumsum(steps["samples"])
    ends = 1 + np.searchsorted(seen, samples * epochs["epoch"])  # batches may grow
    losses = [each.mean() for each in np.split(steps["loss"], ends[:-1])]
    noise = steps.get("noise_scale", np.full(len(seen), np.nan))
    score = next((epochs[name] for name in record.scores), None)
    scores = {} if score is None else {"test_score": score}
    if "test_accuracy" in epochs:
        scores = {"test_accuracy": 100 * epochs["test_accuracy"]}
    return {
        "training": {
            "epoch": epochs["epoch"],
            **scores,
            "test_loss": epochs["test_loss"],
            "train_loss": np.array(losses),
            "epoch_time_s": epochs["time_s"],
            "steps_done": ends,
            "samples_seen": seen[ends - 1],
            "critical_batch": critical_batch(steps["samples"], noise)[ends - 1],
        },
        "telemetry": {
            "iteration": layers["iteration"],
            "layer": np.array(record.layers, dtype=object),
            "underflow": 100 * layers.get("underflow_share", unknown),
            "saturated": 100 * layers.get("saturated_share", unknown),
        },
    }


CAPTION = (
    "Accuracy, or other score: of test samples at the end, mean ± sample standard deviation over "
    "seeds. Step: median over the steps of all seeds. Training: mean over seeds of the time of all "
    "epochs. Data: share of the time of all steps that a rank waits for samples. Bits per value: "
    "bytes sent by the least number of values that must leave a rank, 2 (p - 1) / p of all. "
    "Underflow: mean over layers and steps observed."
)


def _sections(file: StudyFile, groups: Sequence[SeedGroup], layout: Facets) -> list[Section]:
    """Return a table, the score against bits and time, underflow by layer."""
    measure = _measure(file, groups)
    trained = [_trained(file, group, layout, measure) for group in groups]
    charts = [
        *score_charts(file.name, trained, measure),
        *learning_charts(file.name, trained, measure),
    ]
    table = tabulate("Training", _columns(file, groups, layout, measure), groups, CAPTION + PADDED)
    pairs = zip(trained, groups, strict=True)
    float32 = {one.name for one, group in pairs if group.factors.get(AGGREGATOR) == "none"}
    sentence = finding(trained, float32, measure)
    maps = [
        chart
        for name in LAYER_SHARES
        if name in file.telemetry
        for chart in layer_charts(
            file.name, name, [_observations(file, group, layout, name) for group in groups]
        )
    ]
    training = Section("Training", tables=[table], charts=charts, found=sentence)
    found = [training, *critical(file, groups)]
    found += bits_by_batch(file, groups, measure)
    return found + ([Section("Rounding by layer", charts=maps)] if maps else [])


def _measure(file: StudyFile, groups: Sequence[SeedGroup]) -> Score:
    """Return the score of the trainings: their loss if metrics or losses vary."""
    found = set()
    for group in groups:
        swept = {k: v for k, v in group.factors.items() if "." in k}  # a job may need any of them
        found.add(Score.of(_job(file.toml.get("job", {}), swept, "case").toml()))
    return found.pop() if len(found) == 1 else Score("loss", "", lower=True, loss_unit="")


def _outcome(measure: Score) -> str:
    """Return the name of the outcome with the score; the series has it after "test_"."""
    return measure.label if measure.label in ("accuracy", "loss") else "score"


def _shown(measure: Score, found: Array) -> Array:
    """Return outcomes or series in the score's unit: an accuracy is in percent already."""
    return found if measure.label == "accuracy" else measure.factor * found


def _trained(file: StudyFile, group: SeedGroup, layout: Facets, measure: Score) -> Trained:
    line = layout.line([group])
    bit_bytes = 2 * (group.ranks - 1) / group.ranks * group.mean("payload_bytes") / 32
    return Trained(
        label(group.factors, ["ranks", *layout.panels]),
        line.name,
        line.style,
        _shown(measure, group.outcome(_outcome(measure))),
        group.mean("wire_bytes") if group.ranks > 1 else 0.0,
        bit_bytes or nan,
        _times_s(file, group),
        *_curves(file, group, measure),
    )


def _rows(group: SeedGroup) -> list[int]:
    return [point.index for point in group.points]


def _times_s(file: StudyFile, group: SeedGroup) -> Array:
    """Return float64[seeds], the time of all epochs."""
    if "epoch" not in file.training:
        return np.full(len(group.points), nan)
    return np.nansum(file.training["epoch_time_s"][_rows(group)], axis=1)


def _curves(file: StudyFile, group: SeedGroup, measure: Score) -> tuple[Array, Array, Array]:
    """Return epochs, and means over seeds of score and loss by epoch."""
    if "epoch" not in file.training:
        return np.empty(0), np.empty(0), np.empty(0)
    names = f"test_{_outcome(measure)}", "test_loss"
    score, loss = (file.training[name][_rows(group)] for name in names)
    score = _shown(measure, score)
    ran = ~np.isnan(score).all(axis=0)
    means = score[:, ran].mean(axis=0), loss[:, ran].mean(axis=0)
    return file.training["epoch"][ran], *means


def _columns(
    file: StudyFile, groups: Sequence[SeedGroup], layout: Facets, measure: Score
) -> list[Column[SeedGroup]]:
    def told(more: Score, group: SeedGroup) -> units.Cell:
        return more.told(more.factor * group.outcome(more.column))

    job = _job(file.toml.get("job", {}), {}, "case").toml()
    further = [each for each in Score.further(job) if _known(groups, each.column)]

    def scores(group: SeedGroup) -> Array:
        return _shown(measure, group.outcome(_outcome(measure)))

    none = [g for g in reversed(layout.every or groups) if g.factors.get(AGGREGATOR) == "none"]
    float32 = {but_for_gradient(group.factors): group for group in none}

    def beside(group: SeedGroup) -> str:
        base = float32.get(but_for_gradient(group.factors))
        if base is None or base is group:
            return units.NONE
        return measure.difference(float(scores(group).mean() - scores(base).mean()))

    def bits(group: SeedGroup) -> str:
        least = 2 * (group.ranks - 1) / group.ranks * group.mean("payload_bytes")
        return units.digits(32 * group.mean("wire_bytes") / least) if least else units.NONE

    swept = any(name.startswith("gradient.") for g in groups for name in g.factors)
    lines = "gradients" if swept else "trainings"
    known = any("data_share" in point.outcomes for point in file.points)
    _, *step = timing(file, "step")
    return [
        Column("ranks", lambda g: str(g.ranks)),
        *of_factors([*file.weak, *layout.panels], groups),
        Column(lines, lambda g: layout.line([g]).name, numbers=False),
        Column("seeds", lambda g: str(len(g.points))),
        Column(measure.heading, lambda g: measure.told(scores(g))),
        *(Column(each.heading, partial(told, each)) for each in further),
        Column(f"to float32\n{measure.points}".strip(), beside),
        *step,
        *([Column("data\n%", lambda g: units.fixed(g.mean("data_share")))] if known else []),
        Column("training\ns", lambda g: units.digits(float(_times_s(file, g).mean()))),
        Column("sent per\nstep, rank", lambda g: units.bytes_of(g.mean("wire_bytes"))),
        Column("bits per\nvalue", bits),
        Column("under-\nflow %", partial(_underflow, file)),
    ]


def _known(groups: Sequence[SeedGroup], outcome: str) -> bool:
    return all(outcome in point.outcomes for group in groups for point in group.points)


AGGREGATOR = "gradient.aggregator"


def _observed(file: StudyFile, group: SeedGroup, name: str) -> Array:
    """Return float64[samples, layers], the mean over seeds, without samples that none has."""
    if name not in file.telemetry:
        return np.empty((0, 0))
    ran = (file.telemetry["iteration"][_rows(group)] >= 0).all(axis=0)
    mean: Array = file.telemetry[name][_rows(group)][:, ran].mean(axis=0)
    return mean


def _underflow(file: StudyFile, group: SeedGroup) -> str:
    shares = _observed(file, group, "underflow")
    shares = shares[np.isfinite(shares)]
    if group.factors.get(AGGREGATOR) == "none" or not shares.size:
        return units.NONE
    return units.fixed(float(np.mean(shares)), 2)


def _observations(file: StudyFile, group: SeedGroup, layout: Facets, name: str) -> tuple[str, Map]:
    at = file.telemetry["iteration"][group.points[0].index]
    values = _observed(file, group, name).T
    layers = [str(layer) for layer in file.telemetry["layer"]]
    panel = label(group.factors, ["ranks", *layout.panels])
    line = layout.line([group]).name
    at = at[at >= 0][: values.shape[1]]
    axes = figures.Axis("iteration"), figures.Axis("")
    return panel, figures.Map(line, *axes, at, layers, values)


TRAIN = Kind(
    factors={
        **{name: Factor(text, kind) for name, (kind, text) in _ROWS.items()},
        "seed": Factor("seed of weights and order", int, default=0, check=at_least(0)),
    },
    work="train.batch",
    used=_used,
    fits=_fits,
    device=_device,
    sample="one step: the sum over its phases of the slowest rank's time in each",
    measure=_Training,
    sections=_sections,
    panels=("data.name", "model.name"),
    needs_job=True,
    groups=("training", "telemetry"),
    further=_further,
    laid_over=lambda tables, changes: jobs.laid_over(tables, changes),
)
