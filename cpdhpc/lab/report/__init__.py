"""From files of results to tables, figures and one page."""

from __future__ import annotations
