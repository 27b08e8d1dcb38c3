"""Studies and what happens to results: needs neither torch nor MPI, so it runs on login nodes."""

from __future__ import annotations
