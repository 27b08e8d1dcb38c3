"""Splits the images of any network over ranks, by replacing its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .splitting import partition as partition
    from .windowed import ImageGrid as ImageGrid
else:
    from ...lazy import lazily as _lazily

    __getattr__, __dir__ = _lazily(__name__, {"ImageGrid": "windowed", "partition": "splitting"})

__all__ = ["ImageGrid", "partition"]
