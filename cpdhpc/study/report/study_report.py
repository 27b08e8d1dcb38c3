"""What is shown of a study: the sections of its kind, what is missing, how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import allreduce, text
from .pool import Pool, label, pools, varying
from .scaling import scaling
from .study_file import PLACES, StudyFile
from .table import Column, Report, Section, Table

Sections = Callable[[StudyFile, Sequence[Pool]], list[Section]]
KINDS: dict[str, tuple[Sections, Sequence[str]]] = {  # kind: its sections, factors with panels
    "allreduce": (allreduce.sections, allreduce.PANELS),
}


def study_report(file: StudyFile) -> Report:
    """Return the report of a study."""
    found = pools(file)
    own, apart = KINDS[file.kind]
    sections = [*scaling(file, found, apart), *own(file, found)]
    return Report(file.name, [], sections)
