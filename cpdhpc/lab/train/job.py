"""A training job, as in its TOML file: every key, its type and its default."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from ...collectives.method import read_machine
from ...compress import COMPRESSORS, Aggregator, NoCompression
from ...compress.momentum import loses, rate_with, told
from ...config import (
    IMPORT,
    Above0,
    ConfigError,
    Name,
    OneOf,
    Positive,
    Raw,
    Section,
    Whole,
    dump_toml,
    flatten,
    keys_inside,
    located,
    merge,
    of_rows,
    validate,
    value_at,
)
from ...formats import with_own_formats
from ...torch import controllers
from ...torch.loss_scaling import check_scale
from ...torch.precision.policy import PRESETS, Policy
from ...torch.precision.recording import Recording
from ...whole_files import read_file_of
from ...world.ranks import Loopback, Ranks
from ..settings import blaming, override
from .data import DATA, Augment, Data, Digits
from .gossip import DecentLaM, DmSgd, DSgd
from .imports import ImportedAggregator, ImportedData, ImportedLoss, ImportedMetric, ImportedModel
from .losses import LOSSES, METRICS, Accuracy, Adversarial, CrossEntropy, Loss, Metric
from .models import MODELS, Mlp, Model
from .optimizers import OPTIMIZERS, Optimizer, Sgd
from .samples import Loader
from .stages import Stages
from .update import ByAllreduce, DiLoCo, LocalSgd, UpdateRule

Seed = Annotated[int, Field(ge=0, lt=2**63)]


class TrainSettings(Section):
    """[train]: the run itself.

    epochs: passes over all training samples; learning_rate: rate before the schedule's factor
    settings: "recommended": if [gradient] holds values back, momentum is limited to the value that
        suits this, 0.7, 0.5 or 0; if momentum adds up, another learning_rate keeps steps as long
    seeds: seeds of weights, order and all random numbers, one run each; seed = S is seeds = [S]
    virtual_ranks: ranks that each process runs; the bits are those of as many processes
    batch: samples of all ranks together; threads: threads of torch, and of kernels without overlap;
        0: OMP_NUM_THREADS if it is set, else the cores that the rank owns
    loss_scaling: "dynamic" halves the scale if a gradient overflows on any rank, skips the step
        on all, and doubles it after 2,000 steps without overflow
    loss_scale: factor on the loss, divided out of means; a power of two. Default: 1, and initially
        65,536 if it is dynamic
    bucket_mib, overlap: gradients are reduced in buckets of at most bucket_mib MiB, the last
        layers first, and with overlap during backward; overlap changes no bit, bucket_mib may
    image_grid: rows and columns of ranks that share each image; [1, 1]: images are not split
    telemetry_every: iterations between records of telemetry; checkpoint_every: epochs between
        checkpoints; timeout_s: longest wait for other processes
    keep_every: epochs between copies of the weights that are kept (influence), each in its own
        file, besides the checkpoint, which is overwritten; 0: never
    record_gradients: iterations, from 0, in which the gradients of every rank are written to files,
        4 bytes per value and rank each (bench compress)
    device: device of models and gradients; "gpu": each process has its own
    oversubscribe_gpus: let processes of a node share GPUs if there are too few
    gpu_direct: whether MPI gets GPU memory: "auto" if MPI takes it, otherwise through the
        host; "required": an error if MPI does not take it; "never"
    autocast: the dtype of torch.autocast in forward; "float16" should have dynamic scaling
    """

    epochs: Positive = 10
    batch: Positive = 64
    learning_rate: Above0 = controllers.DEFAULT_RATE
    settings: Literal["given", "recommended"] = "given"
    seeds: Annotated[tuple[Seed, ...], Field(strict=False, min_length=1)] = (0,)
    virtual_ranks: Positive = 1
    image_grid: Annotated[tuple[Positive, Positive], Field(strict=False)] = (1, 1)
    threads: Annotated[Whole, Field(le=4096)] = 0
    loss_scaling: Literal["static", "dynamic"] = "static"
    loss_scale: Annotated[float | None, AfterValidator(check_scale)] = None
    bucket_mib: Above0 = 25.0
    overlap: bool = False
    telemetry_every: Positive = 10
    checkpoint_every: Positive = 1
    keep_every: Whole = 0
    timeout_s: Above0 = 600.0
    record_gradients: Annotated[tuple[Whole, ...], Field(strict=False, max_length=100)] = ()
    device: Literal["cpu", "gpu"] = "cpu"
    gpu_direct: Literal["auto", "required", "never"] = "auto"
    oversubscribe_gpus: bool = False
    autocast: Literal["none", "bfloat16", "float16"] = "none"

    @property
    def kept_epochs(self) -> range:
        """The epochs, from 1, after which weights are kept."""
        every = self.keep_every or self.epochs + 1
        return range(every, self.epochs + 1, every)

    @model_validator(mode="after")
    def _weights_are_kept(self) -> TrainSettings:
        if self.keep_every > self.epochs:
            raise ValueError(f"keep_every={self.keep_every}: should be up to epochs={self.epochs}")
        return self

    @field_validator("seeds")
    @classmethod
    def _each_seed_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        for seed in seeds:
            if seeds.count(seed) > 1:
                raise ValueError(f"{seed} is there twice: both runs would write the same files")
        return seeds

    @model_validator(mode="after")
    def _what_is_needed_is_given(self) -> TrainSettings:
        if self.gpu_direct == "required" and self.device != "gpu":
            raise ValueError("gpu_direct='required' needs device='gpu'")
        if self.overlap and self.virtual_ranks > 1:
            raise ValueError("overlap=true needs virtual_ranks=1")
        if self.image_grid != (1, 1) and (self.overlap or self.virtual_ranks > 1):
            raise ValueError("image_grid other than [1, 1] needs virtual_ranks=1, overlap=false")
        return self

    @model_validator(mode="before")
    @classmethod
    def _one_seed(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "seed" not in raw:
            return raw
        if "seeds" in raw:
            raise ValueError("seed and seeds: give one of them")
        seed = raw["seed"]
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise ValueError(f"seed={seed!r}: should be an integer, 0 or more and below 2**63")
        return {key: value for key, value in raw.items() if key != "seed"} | {"seeds": [seed]}


EPOCHS = "train.epochs"  # may be larger when a run is resumed
RATE = "train.learning_rate"
OWN_MOMENTUM = "optimizer.momentum"  # in needs of update rules that have one of their own
WITHOUT_MOMENTUM = "write momentum = 0.0 below [optimizer], or leave optimizer.momentum out"
MAY_DIFFER = (  # when a run is resumed; virtual_ranks and device change bits
    "train.virtual_ranks",
    "train.checkpoint_every",
    "train.telemetry_every",
    "train.timeout_s",
    "train.settings",  # its effect is in other keys
    "train.overlap",
    "train.device",
    "train.gpu_direct",
    "train.oversubscribe_gpus",
    "model.import_from",
    "data.import_from",
    "gradient.import_from",
    "loader.workers",
    "loader.prefetch",
    "loss.import_from",
    "metric.import_from",
    "train.record_gradients",
    "train.keep_every",
    *(f"record.{key}" for key in Recording.model_fields),
)


UPDATES: dict[str, type[UpdateRule]] = {
    "allreduce": ByAllreduce,
    "decentlam": DecentLaM,
    "dmsgd": DmSgd,
    "dsgd": DSgd,
    "localsgd": LocalSgd,
    "diloco": DiLoCo,
}

Further = Annotated[Metric, OneOf(METRICS, "name", None, ImportedMetric)]


class Job(Section):
    """One row of a job file: a configuration that is run once per seed.

    name: part of file names; default: the name of the job file
    metrics: further metrics, tables [[metrics]]; reports and studies use metric
    """

    name: Name
    data: Annotated[Data, OneOf(DATA, "name", None, ImportedData)] = Digits()
    model: Annotated[Model, OneOf(MODELS, "name", None, ImportedModel)] = Mlp()
    loss: Annotated[Loss, OneOf(LOSSES, "name", "cross_entropy", ImportedLoss)] = CrossEntropy()
    metric: Annotated[Metric, OneOf(METRICS, "name", None, ImportedMetric)] = Accuracy()
    metrics: Annotated[tuple[Further, ...], Field(strict=False)] = ()
    augment: Augment = Augment()
    loader: Loader = Loader()
    optimizer: Annotated[Optimizer, OneOf(OPTIMIZERS, "name", "sgd")] = Sgd()
    schedule: controllers.Schedule = controllers.Schedule()
    controller: Annotated[
        controllers.Control, OneOf(controllers.CONTROLLERS, "name", "schedule")
    ] = controllers.BySchedule()
    gradient: Annotated[
        Aggregator | ImportedAggregator, OneOf(COMPRESSORS, "aggregator", None, ImportedAggregator)
    ] = NoCompression()
    update: Annotated[UpdateRule, OneOf(UPDATES, "name", "allreduce")] = ByAllreduce()
    precision: Policy = Policy()
    adversarial: Adversarial = Adversarial()
    stages: Stages = Stages()
    train: TrainSettings = TrainSettings()
    record: Recording = Recording()

    @model_validator(mode="before")
    @classmethod
    def _train_of_the_preset(cls, raw: Any) -> Any:
        train = raw.get("train", {}) if isinstance(raw, dict) else None
        section = raw.get("precision") if isinstance(raw, dict) else None
        name = section.get("preset") if isinstance(section, dict) else None
        preset = PRESETS.get(name) if isinstance(name, str) else None
        if preset is None or not isinstance(train, dict):
            return raw
        return raw | {"train": preset.train | train}

    @model_validator(mode="before")
    @classmethod
    def _own_formats(cls, raw: Any) -> Any:
        return with_own_formats(raw)

    @model_validator(mode="before")
    @classmethod
    def _metric_of_the_loss(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "metric" in raw or not isinstance(raw.get("loss"), dict):
            return raw
        usual = Loss if IMPORT in raw["loss"] else CrossEntropy
        row = LOSSES.get(str(raw["loss"].get("name")), usual)
        return raw | {"metric": {"name": row.metric}}

    @model_validator(mode="after")
    def _metrics_differ(self) -> Job:
        labels = [metric.label for metric in (self.metric, *self.metrics)]
        twice = [label for label in labels[1:] if label == "loss" or labels.count(label) > 1]
        if twice:
            raise ValueError(f"metrics: {twice[0]!r}: is there twice")
        return self

    @model_validator(mode="after")
    def _goes_together(self) -> Job:
        train, gradient = self.train, self.gradient
        clip = getattr(self.optimizer, "clip_global_norm", 0)
        usual = {  # key -> whether it has the value that suits all others, and that value
            "stages.count": (self.stages.count == 1, "1"),
            "train.image_grid": (train.image_grid == (1, 1), "[1, 1]"),
            "adversarial.epsilon": (not self.adversarial.epsilon, "0"),
            "update": (isinstance(self.update, ByAllreduce), '"allreduce"'),
            "precision": (self.precision.empty, "left out"),
            "train.overlap": (not train.overlap, "false"),
            "train.loss_scaling": (train.loss_scaling == "static", '"static"'),
            "train.loss_scale": (train.loss_scale in (None, 1.0), "1"),
            "train.record_gradients": (not train.record_gradients, "empty"),
            "loader.workers": (not self.loader.workers, "0"),
            "controller": (isinstance(self.controller, controllers.BySchedule), '"schedule"'),
            "optimizer.clip_global_norm": (not clip, "0"),
            "gradient.aggregator": (
                gradient.stateless,
                "one that keeps nothing, for example none or lowbit",
            ),
            "gradient.error_feedback": (not getattr(gradient, "error_feedback", False), "false"),
            "gradient.layers": (not getattr(gradient, "layers", {}), "empty"),  # of other stages
        }
        by_ranks = "stages.count", "train.image_grid", "adversarial.epsilon", "update"
        others = [key for key in usual if key != "stages.count"]
        # a setting, whether it is in use, and keys that then need their usual values
        alone: list[tuple[str, Any, Iterable[str]]] = [
            ("adversarial", self.adversarial.epsilon, ("update", "train.image_grid")),
            ("precision", not self.precision.empty, ("train.image_grid",)),
            ("record", self.record.number, by_ranks),
            ("train.device='gpu'", train.device == "gpu", ("stages.count", "update", "precision")),
            (f"stages.count={self.stages.count}", self.stages.count > 1, others),
        ]
        for what, is_asked, given in alone:
            for key in given if is_asked else ():
                is_usual, value = usual[key]
                if not is_usual:
                    raise ValueError(f"{what}: does not allow this {key}: must be {value}")
        return self

    @model_validator(mode="after")
    def _warmup_ends(self) -> Job:
        given, scaled = self.schedule.warmup_epochs, self.schedule.scaled(self.train.batch)[1]
        if scaled.warmup_epochs >= self.train.epochs:
            grown = "" if scaled == self.schedule else f", scaled to {scaled.warmup_epochs:g}"
            raise ValueError(
                f"schedule.warmup_epochs={given}{grown}: "
                f"should be below train.epochs={self.train.epochs}"
            )
        return self

    @model_validator(mode="after")
    def _momentum_that_goes_with_the_rest(self) -> Job:
        """Set no momentum if the job names none and gradient or update have their own."""
        of, keys = self.optimizer, {"momentum", "nesterov"}
        has_own = self.gradient.has_momentum or OWN_MOMENTUM in self.update.needs
        if has_own and isinstance(of, Sgd) and not of.model_fields_set & keys:
            object.__setattr__(self, "optimizer", of.model_copy(update={"momentum": 0.0}))
        return self

    @model_validator(mode="after")
    def _recommended(self) -> Job:
        """Apply train.settings="recommended"; applying it again changes nothing."""
        is_asked = self.train.settings == "recommended"
        if not (is_asked and self._has_too_much(self.gradient)):
            return self
        for table, changes in self._with_less_momentum(self.gradient).items():
            of = getattr(self, table)
            is_method = isinstance(of, Aggregator)
            changed = replace(of, **changes) if is_method else of.model_copy(update=changes)
            object.__setattr__(self, table, changed)
        return self

    def _waits(self, gradient: Aggregator | ImportedAggregator) -> bool:
        """Return whether gradients are held back on their way to an optimiser.

        A momentum in the optimiser beside one in the means is an error, see _check_gradient.
        """
        is_error = gradient.has_momentum and self.optimizer.has_momentum
        return isinstance(self.update, ByAllreduce) and gradient.holds_back and not is_error

    def _kept_share(self, gradient: Aggregator | ImportedAggregator) -> float:
        """Return the momentum of a gradient's method, or else that of the optimiser."""
        own: float = getattr(gradient, "momentum", 0.0) if gradient.has_momentum else 0.0
        return own or self.optimizer.kept_share

    def _has_too_much(self, gradient: Aggregator | ImportedAggregator) -> bool:
        """Return whether gradients are held back, and momentum is too large for that."""
        return self._waits(gradient) and self._kept_share(gradient) > gradient.most_momentum

    def _with_less_momentum(self, gradient: Aggregator | ImportedAggregator) -> dict[str, Raw]:
        """Return keys by table: momentum of at most most_momentum, the rate that suits it."""
        share = self._kept_share(gradient)
        most, changes = min(share, gradient.most_momentum), dict[str, Raw]()
        if gradient.has_momentum:
            changes["gradient"] = {"momentum": most}
        else:
            changes["optimizer"] = self.optimizer.with_share(most)
        if self.has_rate:
            rate = rate_with(self.train.learning_rate, share, most)
            changes["train"] = {"learning_rate": rate}
        return changes

    @property
    def has_rate(self) -> bool:
        """Whether the job sets a rate, and momentum makes its steps longer."""
        return self.optimizer.adds_up and RATE not in self.controller.decides

    def advice(self, gradient: Aggregator) -> str:
        """Return the advice about momentum with a gradient's method; "" if there is none."""
        if not self._waits(gradient):
            return ""
        changes = self._with_less_momentum(gradient)
        rate = changes.pop("train", {}).get("learning_rate")
        tables = [(table, dump_toml(keys).splitlines()) for table, keys in changes.items()]
        lines = [f"{table}.{line}" for table, found in tables for line in found]
        lines += [] if rate is None else [f"{RATE} = {rate:g}"]
        write = " and ".join(lines)
        if self._has_too_much(gradient):
            return told(gradient, loses(self._kept_share(gradient), f"write {write}"))
        is_asked = self.train.settings == "recommended"
        return told(gradient, f'train.settings = "recommended": {write}') if is_asked else ""

    @model_validator(mode="after")
    def _gradient_fits(self) -> Job:
        self._check_gradient(self.gradient)
        return self

    def _check_gradient(self, gradient: Aggregator | ImportedAggregator) -> None:
        if gradient.has_momentum and self.optimizer.has_momentum:
            so_has = "and so have the means of this gradient.aggregator"
            raise ValueError(f"optimizer: has momentum, {so_has}: {WITHOUT_MOMENTUM}")
        for key, wanted in self.update.needs.items():
            table, _, name = key.partition(".")
            given = getattr(gradient if table == "gradient" else getattr(self, table), name)
            if given != wanted:
                must = f"must be {wanted!r}" if wanted is not None else "must not be given"
                write = f": {WITHOUT_MOMENTUM}" if key == OWN_MOMENTUM else ""
                with_rule = f"with update.name={self.update.name!r}"
                raise ValueError(f"{key}={given!r}: {must} {with_rule}{write}")

    @model_validator(mode="after")
    def _controlled(self) -> Job:
        name = f"controller.name={self.controller.name!r}"
        try:
            self.controller.check(self.settings(0))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if self.controller.measures_norms:
            if not isinstance(self.update, ByAllreduce):
                raise ValueError(f'{name}: needs the mean gradient: update.name="allreduce"')
            if self.train.image_grid != (1, 1):
                raise ValueError(f"{name}: needs samples of each rank: train.image_grid=[1, 1]")
            if not self.optimizer.has_noise_scale:
                raise ValueError(
                    f"{name}: this optimizer takes the length of a layer's gradient out of its "
                    "step, so the noise scale does not apply to it"
                )
            if self.train.batch < 2:
                raise ValueError(f"{name}: train.batch=1: should be 2 or more")
        return self

    @property
    def told(self) -> list[Metric]:
        """The metrics of test samples beside the loss: first the one that reports use."""
        return [metric for metric in (self.metric, *self.metrics) if metric.label != "loss"]

    def aggregator(self) -> Aggregator:
        """Return the aggregator of gradients; an import of [gradient] happens here.

        Raises ConfigError if that fails, or does not suit the job.
        """
        if not isinstance(self.gradient, ImportedAggregator):
            return self.gradient
        found = self.gradient.build()
        try:
            self._check_gradient(found)
        except ValueError as error:
            raise ConfigError(f"{self.name}: {error}") from None
        return found

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError if the job does not suit this number of ranks, with virtual ones."""
        for key, given, check in (
            ("controller.name", self.controller.name, self.controller.check_ranks),
            ("update.name", self.update.name, self.update.check_ranks),
            ("adversarial.alternate", self.adversarial.alternate, self.adversarial.check_ranks),
        ):
            try:
                check(ranks)
            except ValueError as error:
                raise ConfigError(f"{self.name}: {key}={given!r}: {error}") from None

    def plain(self) -> Raw:
        return self.model_dump(mode="python")

    def seeds(self) -> list[Job]:
        """Return the job once per seed."""
        return [
            self.model_copy(update={"train": self.train.model_copy(update={"seeds": (seed,)})})
            for seed in self.train.seeds
        ]

    @property
    def seed(self) -> int:
        (seed,) = self.train.seeds
        return seed

    @property
    def id(self) -> str:
        return f"{self.name}-s{self.seed}"

    def settings(self, samples: int, world: Ranks | None = None) -> controllers.Settings:
        """Return the initial data of the controller of a run on so many training samples."""
        train = self.train
        told = self.schedule, train.learning_rate, train.batch, train.epochs, samples
        return controllers.Settings(*told, world or Loopback())

    def toml(self) -> str:
        """Return the job as TOML text, every default filled in."""
        return dump_toml(self.plain())


def choices() -> dict[str, list[str]]:
    """Return the allowed names of each table of a job file, by the key that selects them."""
    rows = ((name, each) for name, f in Job.model_fields.items() for each in f.metadata)
    found = {f"{n}.{one.key}": sorted(one.known) for n, one in rows if isinstance(one, OneOf)}
    schedule: Raw = {"decay": controllers.DECAYS, "batch_scaling": controllers.BATCH_SCALINGS}
    return found | {f"schedule.{key}": sorted(known) for key, known in schedule.items()}


def laid_over(base: Raw, change: Raw, source: str = "job") -> Raw:
    """Return a job's tables overridden by change; source: of both, for errors.

    If change selects another row of a table, keys that only the former row has are dropped: the
    width of an mlp is not a key of a lenet. See OneOf.stays. Keys that a controller in change
    decides are dropped too. Raises ConfigError if change has a table for what base has as a value.
    """
    kept = _without(base, _decided(change))
    for name, field in Job.model_fields.items():
        former, new = base.get(name), change.get(name)
        tables = former is None or isinstance(former, dict) or name == "metrics"  # an array
        if isinstance(new, dict) and not tables:
            raise ConfigError(f"{source}: {name}={former!r}: should be a table")
        for one in field.metadata:
            if isinstance(one, OneOf) and isinstance(former, dict) and isinstance(new, dict):
                kept[name] = one.stays(former, new)
    return merge(kept, change)


def _decided(change: Raw) -> tuple[str, ...]:
    """Return the keys, or their prefixes, that a controller named in change decides."""
    name = value_at(change, ("controller", "name"))
    row = controllers.CONTROLLERS.get(name) if isinstance(name, str) else None
    return row.decides if row is not None else ()


def _without(raw: Raw, keys: tuple[str, ...], table: str = "") -> Raw:
    """Return tables without the keys that have these prefixes, as table.key."""
    return {
        key: _without(value, keys, f"{table}{key}.") if isinstance(value, dict) else value
        for key, value in raw.items()
        if isinstance(value, dict) or not f"{table}{key}".startswith(keys)
    }


def read(raw: Raw, where: str) -> Job:
    """Return the job in a user's tables, which may not set keys that its controller decides.

    Raises ConfigError, which begins with where.
    """
    job = validate(Job, raw, where)
    for key in flatten(raw):
        if key.startswith(job.controller.decides):
            raise ConfigError(
                f"{where}: {key}: should be left out: controller.name={job.controller.name!r} "
                "has a rate and a schedule of its own"
            )
    return job


def keys_of(table: str) -> set[str]:
    """Return the keys of a table, except [train]; if jobs choose from rows, those of any row."""
    return set() if table == "train" else keys_inside(Job, table)


def load(path: Path | str, settings: Iterable[str] = ()) -> list[Job]:
    """Return the runs of a job file: every row of [[compare]], or the file itself, per seed.

    settings: "table.key=value", which override the file before the rows override it
    gradient.machine, a file of bench fit for algorithm "auto", is relative to the job file.
    Raises ConfigError for any error in the file or in a setting.
    """
    file = Path(path)
    return blaming(lambda some: _load(file, some), settings, file)


def _load(path: Path, settings: Iterable[str]) -> list[Job]:
    raw = override(read_file_of(path, "model"), settings, laid_over)
    is_one = "compare" not in raw
    rows = raw.pop("compare", [{}])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not rows:
        raise ConfigError(f"{path}: compare: should be one or more [[compare]] tables")
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if all(value_at(row, key.split(".")) is not None for row in rows):
            raise ConfigError(f"--set {setting}: has no effect: each row of compare sets its {key}")
    for index, row in enumerate(rows):
        if not is_one and "name" not in row:
            raise ConfigError(f"{path}: compare row {index}: name: is missing")
    makes = list[tuple[str, Callable[[str], Job]]]()
    for index, row in enumerate(rows):
        where = f"{path}: compare row {row.get('name', index)}" if row else str(path)
        makes.append((where, partial(_row, raw, row, path)))
    jobs = of_rows(makes, str(path))
    for name in (names := [job.name for job in jobs]):
        if names.count(name) > 1:
            raise ConfigError(f"{path}: compare: {names.count(name)} rows are called {name!r}")
    if not any(table.keys() - {"name"} for table in (raw, *rows)):
        raise ConfigError(f"{path}: model and data are missing: the file has no keys of a job")
    runs = [run for job in jobs for run in job.seeds()]
    files = [run.record.file for run in runs if run.record.number and run.record.file]
    for f in files:
        if files.count(f) > 1:
            raise ConfigError(f"{path}: record.file={f!r}: {files.count(f)} runs would write it")
    return runs


def _row(raw: Raw, row: Raw, path: Path, where: str) -> Job:
    merged = laid_over({"name": path.stem} | raw, row, str(path))
    return read(located(_with_machine(merged, path.parent, where), path.parent), where)


def _with_machine(raw: Raw, directory: Path, where: str) -> Raw:
    """Return raw with the times of a machine instead of the name of its file.

    Then the run's record holds the input of "auto", and resuming detects other times.
    """
    gradient = raw.get("gradient")
    if not isinstance(gradient, dict) or not isinstance(gradient.get("machine"), str):
        return raw
    try:
        machine = read_machine(directory / gradient["machine"]).machine
    except ConfigError as error:
        raise ConfigError(f"{where}: gradient.machine: {error}") from None
    return merge(raw, {"gradient": {"machine": asdict(machine)}})
