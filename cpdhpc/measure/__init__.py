"""What a job of a study does: proves its world, measures its cases, writes a file for each."""

from __future__ import annotations
