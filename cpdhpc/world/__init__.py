"""Worlds of ranks: who takes part, how messages travel, what a node shares."""
