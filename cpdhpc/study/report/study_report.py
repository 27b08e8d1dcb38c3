"""What is shown of a study: the sections of its kind, what is missing, how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import allreduce, codec, text, train
from .deal import Layout
from .pool import Pool, pools
from .scaling import scaling
from .study_file import PLACES, StudyFile
from .table import Column, Report, Section, Table

Sections = Callable[[StudyFile, Sequence[Pool], Layout], list[Section]]
KINDS: dict[str, tuple[Sections, Sequence[str]]] = {  # kind: its sections, factors with panels
    "allreduce": (allreduce.sections, allreduce.PANELS),
    "codec": (codec.sections, codec.PANELS),
    "train": (train.sections, train.PANELS),
}


def study_report(file: StudyFile) -> Report:
    """Return the report of a study."""
    found = pools(file)
    own, apart = KINDS[file.kind]
    layout = Layout.of(file, found, apart)
    sections = [*scaling(file, found, layout), *own(file, found, layout)]
    return Report(file.name, [], sections)
