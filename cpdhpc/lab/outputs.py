"""Files that a command is to write: looked at before the work, which may take hours."""

from __future__ import annotations

import os
from pathlib import Path

from ..config import UserError


def check_file(path: Path, option: str) -> None:
    """Raise UserError where no file can be written at a path; option: as --out, for the message."""
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"{option} {path}: {path.parent} is no directory that can be written to")
    if path.is_dir():
        raise UserError(f"{option} {path}: is a directory: must be a file in one")


def check_picture(path: Path, option: str) -> None:
    """Raise UserError where no picture can be written at a path: as check_file, and its ending."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    check_file(path, option)
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise UserError(f"{option} {path}: must end in one of .{', .'.join(known)}")
