"""Collectives over a world with packed small floats: schedules, wires, the engine."""
