"""Files that come with the code: sources of kernels, job files, job scripts, pages."""

from __future__ import annotations

from pathlib import Path


def folder(name: str) -> Path:
    """Return a folder of the project: inside the package in a wheel, beside it in a clone."""
    package = Path(__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name
