"""The file of a case: what was measured, and where; written when it is whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .. import __version__, store
from ..kinds.factors import Case, Result
from ..store import StoreError, Variable

SCHEMA = 1  # of files of cases and of studies
OVER_RANKS = ("max", "min", "mean")  # the columns of Result.times_s
ALIKE = {  # of environments: what cases must agree in to be compared, see provenance.identity
    "mpi_library": "MPI library",
    "git_commit": "commit of cpdhpc",
    "processor": "processor",
}
OUTCOMES: dict[str, tuple[type, str, str]] = {  # name: type, long name, units
    "error": (float, "relative error in the Euclidean norm; NaN: not known", "1"),
    "wire_bytes": (
        float,
        "left the rank that sent most in a repeat; codec: codes; NaN: only the library knows",
        "byte",
    ),
    "payload_bytes": (float, "float32 data that a rank sums or codes in a repeat", "byte"),
    "bound_s": (
        float,
        "least time for the bytes that a rank must send, 2 (p - 1) / p of the payload on the "
        "wire, at the rate of a ping-pong in the same job; NaN: not known",
        "s",
    ),
    "plan_bytes": (
        float,
        "leave the rank that sends most in a repeat, as the plans of its exchanges say; NaN: none",
        "byte",
    ),
    "exchange_s": (
        float,
        "median time in exchanges of cells, waits included, on the rank with most; NaN: none",
        "s",
    ),
    "flop": (float, "floating-point operations of a repeat in matrix products; NaN: none", "1"),
    "predicted_s": (float, "predicted time of a repeat; NaN: none", "s"),
    "energy_j": (
        float,
        "energy of the nodes in a repeat, mean over all, warm-ups and what is idle included",
        "J",
    ),
    "accuracy": (float, "test samples that are right at the end; NaN: no training", "%"),
    "loss": (float, "test loss at the end; NaN: no training", "nat"),
    "score": (float, "test score at the end by the job's metric; NaN: accuracy or loss", "1"),
    "data_share": (float, "share of the time of all steps that a rank waits for samples", "%"),
    "job_id": (str, "job of Slurm; empty: none", "1"),
    "restarts": (int, "starts of the batch before this one", "1"),
    "date": (str, "end of the case, ISO 8601, UTC", "1"),
}
FURTHER = "test_"  # begins the names of outcomes by further metrics, as jobs call them
# without a column where no case has them
WHERE_KNOWN = ("predicted_s", "energy_j", "score", "data_share", "test_score")
SERIES: dict[str, dict[str, tuple[str, str]]] = {  # group: column: long name, units
    "training": {
        "test_accuracy": ("test samples that are right", "%"),
        "test_score": ("score of the test samples by the job's metric", "1"),
        "test_loss": ("mean loss of test samples", "nat"),
        "train_loss": ("mean loss of the epoch's batches", "nat"),
        "epoch_time_s": ("time of training and evaluation, the slowest rank", "s"),
        "steps_done": ("steps up to the end of the epoch", "1"),
        "samples_seen": ("samples up to the end of the epoch, repeats included", "1"),
        "critical_batch": (
            "critical batch that the noise scale up to there predicts; NaN: it was not measured",
            "1",
        ),
    },
    "telemetry": {
        "underflow": ("non-zero gradient values that become zero on the wire", "%"),
        "saturated": ("non-zero gradient values that saturate on the wire", "%"),
    },
}


def write_result(path: Path, case: Case, result: Result) -> None:
    """Write the file of a finished case. Raises StoreError where it cannot be written."""
    repeats = len(result.times_s)
    samples = {
        "repeat": Variable(("repeat",), np.arange(repeats), "repeat, warm-ups included"),
        "over_ranks": Variable(("over_ranks",), np.array(OVER_RANKS), "of all ranks' times"),
        "time_s": Variable(("repeat", "over_ranks"), result.times_s, "time of a repeat", "s"),
        "is_warmup": Variable(("repeat",), result.is_warmup, "1: a warm-up"),
    }
    record = {
        "cpdhpc_schema": SCHEMA,
        "software": f"cpdhpc {__version__}",
        "factors": case.all_factors,
        "outcomes": dict(result.outcomes),
        "environment": dict(result.environment),
    }
    attributes = {  # few: each costs time to read where there are thousands of cases
        "kind": "case",
        "case_id": case.id,
        "record": json.dumps(record),
        "status": "complete",
    }
    series = {group: dict(columns) for group, columns in result.series.items()}
    store.write(path, {"samples": samples, **series}, attributes)


def read_environment(path: Path) -> Mapping[str, str]:
    """Return where a case was measured, by its file. Raises StoreError where that is not whole."""
    attributes = store.read_attributes(path)
    try:
        environment = json.loads(attributes["record"])["environment"]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: is damaged: {error}") from None
    return dict(environment)


def read_result(path: Path, case: Case) -> Result:
    """Return what a case's file holds.

    Raises StoreError where the file is missing, damaged, not complete or another case's.
    """
    wanted = {"time_s", "is_warmup", "epoch", "iteration", "layer"}
    wanted |= {name for columns in SERIES.values() for name in columns}
    groups, attributes = store.read(path, wanted)
    if attributes.get("kind") != "case":
        raise StoreError(f"{path}: is no file of a case")
    if attributes.get("status") != "complete":
        raise StoreError(f"{path}: is not complete")
    if attributes.get("case_id") != case.id:
        raise StoreError(f"{path}: is of case {attributes.get('case_id')}")
    try:
        record = json.loads(attributes["record"])
        if record["cpdhpc_schema"] != SCHEMA:
            raise StoreError(f"{path}: has schema {record['cpdhpc_schema']}, known is {SCHEMA}")
        samples = groups.pop("samples")
        outcomes, environment = record["outcomes"], record["environment"]
        times_s, is_warmup = samples["time_s"], samples["is_warmup"]
    except StoreError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: is damaged: {error}") from None
    return Result(times_s, is_warmup, outcomes, environment, groups)
