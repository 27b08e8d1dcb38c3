"""All-reduce over MPI with packed small floats, and its simulation in one process."""

from .allreduce import Allreduce, Reduced
from .bucket import Bucket
from .call import allreduce
from .failure import RankFailure
from .nonfinite import NonFiniteGradient
from .prepared import Prepared
from .program import ScheduleError
from .ranks import Loopback, Ranks
from .scaling import Segment
from .schedule import SCHEDULES, Schedule
from .simulate import simulate
from .step import Layout, Step
from .world import World, as_world

__all__ = [
    "SCHEDULES",
    "Allreduce",
    "Bucket",
    "Layout",
    "Loopback",
    "NonFiniteGradient",
    "Prepared",
    "RankFailure",
    "Ranks",
    "Reduced",
    "Schedule",
    "ScheduleError",
    "Segment",
    "Step",
    "World",
    "allreduce",
    "as_world",
    "simulate",
]
