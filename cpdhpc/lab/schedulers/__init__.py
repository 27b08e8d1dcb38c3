"""Schedulers of clusters, a file each: all that is one's own is here, and only here."""

from __future__ import annotations

import json
import os

from . import flux, lsf, pbs, slurm
from .base import Scheduler

SCHEDULERS: dict[str, Scheduler] = {"slurm": slurm, "pbs": pbs, "lsf": lsf, "flux": flux}
DEFAULT = "slurm"


def current() -> Scheduler:
    """Return the scheduler whose job this process is in, the default one outside of jobs."""
    return next((each for each in SCHEDULERS.values() if each.own_job()), SCHEDULERS[DEFAULT])


def recorded() -> dict[str, Scheduler]:
    """Return the schedulers that records name: the default one, and that of this job."""
    return {k: each for k, each in SCHEDULERS.items() if k == DEFAULT or each.own_job()}


def facts() -> dict[str, str]:
    """Return, by recorded scheduler, JSON of its FACTS that this job's environment has."""
    return {
        k: json.dumps({name: os.environ[name] for name in each.FACTS if name in os.environ})
        for k, each in recorded().items()
    }
