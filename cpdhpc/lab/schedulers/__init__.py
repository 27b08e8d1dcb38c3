"""Schedulers of clusters, a file each: no other part of cpdhpc depends on which one it is."""

from __future__ import annotations

import json
import os

from . import flux, lsf, pbs, slurm
from .base import Scheduler

SCHEDULERS: dict[str, Scheduler] = {"slurm": slurm, "pbs": pbs, "lsf": lsf, "flux": flux}
DEFAULT = "slurm"


def current() -> Scheduler:
    """Return the scheduler of the job that this process is in, or the default one."""
    return next((each for each in SCHEDULERS.values() if each.own_job()), SCHEDULERS[DEFAULT])


def recorded() -> dict[str, Scheduler]:
    """Return the schedulers in records: the default one, and that of this job."""
    return {k: each for k, each in SCHEDULERS.items() if k == DEFAULT or each.own_job()}


def facts() -> dict[str, str]:
    """Return the FACTS of this job's environment, as JSON, for each scheduler in records."""
    return {
        k: json.dumps({name: os.environ[name] for name in each.FACTS if name in os.environ})
        for k, each in recorded().items()
    }
