"""What every kind of measurement offers to the batch that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from ..signals import Caught
from ..study.case import Case
from ..study.result import Result
from ..study.spec import Measure
from .place import Place


class Measuring(ABC):
    """A case on its way. Its module has start(study, case, directory) -> Measuring.

    done: whether it has all that it needs; virtual_ranks, timeout_s: of the world that it needs
    """

    done = False
    virtual_ranks = 1
    timeout_s = 600.0

    def __init__(self, case: Case, measure: Measure, directory: Path) -> None:
        self.case, self.measure, self.directory = case, measure, directory

    @abstractmethod
    def visit(self, place: Place, caught: Caught) -> None:
        """Measure for a while. Collective over the ranks of the place.

        Raises UserError, ArithmeticError or NonFiniteGradient, on all of them alike, where the
        case cannot be measured; Interrupted where it stopped at a signal and can go on later.
        """

    @abstractmethod
    def result(self, place: Place) -> Result:
        """Return what was measured, once it is done. Collective."""
