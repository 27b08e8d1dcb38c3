"""Training: a job file whose keys are the factors, as plain data for login nodes."""

from __future__ import annotations

from ..factors import ABSENT, Factor, Factors, Kind, Value, at_least

_ROWS: dict[str, tuple[type, str]] = {  # key of a job: its type and what it is
    "data.name": (str, "data set"),
    "data.dir": (str, "directory of the data set"),
    "data.test_share": (float, "share of the test samples"),
    "data.split_seed": (int, "seed of the split into training and test samples"),
    "model.name": (str, "model"),
    "model.hidden": (int, "values of the hidden layer of lenet"),
    "optimizer.momentum": (float, "momentum"),
    "optimizer.weight_decay": (float, "weight decay"),
    "optimizer.nesterov": (bool, "whether momentum is Nesterov's"),
    "schedule.warmup_epochs": (float, "epochs of the warm-up"),
    "schedule.decay": (str, "decay of the learning rate"),
    "schedule.gamma": (float, "factor on the learning rate at each milestone"),
    "gradient.aggregator": (str, "how gradients are averaged"),
    "gradient.algorithm": (str, "algorithm of the all-reduce"),
    "gradient.wire": (str, "format of the gradients on the wire"),
    "gradient.scaling": (str, "scaling of gradients before encoding"),
    "gradient.accumulate": (str, "how partial sums are kept"),
    "gradient.rounding": (str, "rounding of gradients"),
    "gradient.overflow": (str, "what gradients too large for the format become"),
    "gradient.headroom": (str, "headroom of the shared scaling"),
    "train.epochs": (int, "epochs"),
    "train.batch": (int, "samples of a step, of all ranks together"),
    "train.learning_rate": (float, "learning rate"),
    "train.virtual_ranks": (int, "ranks that a process plays"),
    "train.threads": (int, "threads of torch of a rank; 0: the cores it owns"),
    "train.bucket_mib": (float, "MiB of gradients that are reduced together"),
    "train.overlap": (bool, "whether gradients are reduced while backward goes on"),
}


def _used(given: Factors) -> dict[str, Value]:
    """Return the factors that have a value; the job's are used for the others. See Kind.used."""
    used = {name: value for name, value in given.items() if value != ABSENT}
    if used.get("train.overlap") and int(used.get("train.virtual_ranks", 1)) > 1:
        raise ValueError("train.overlap=true needs train.virtual_ranks=1")
    return used


def _fits(used: Factors, ranks: int) -> None:
    """Any number of ranks can train; those without a sample in a batch idle."""


def _time_s(used: Factors, ranks: int, repeats: int) -> float:
    return 0.0  # only the data and the model would tell: run.case_time_s says


TRAIN = Kind(
    factors={
        **{name: Factor(text, kind) for name, (kind, text) in _ROWS.items()},
        "seed": Factor("seed of weights and order", int, default=0, check=at_least(0)),
    },
    work="train.batch",
    used=_used,
    fits=_fits,
    time_s=_time_s,
    sample="one step: the sum over its phases of the slowest rank's time in each",
    measuring="cpdhpc.measure.train",
    needs_job=True,
    groups=("training", "telemetry"),
)
