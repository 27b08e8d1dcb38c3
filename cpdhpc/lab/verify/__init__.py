"""Proof on the user's own machine: checks by the table, under time limits, into one file."""

from __future__ import annotations
