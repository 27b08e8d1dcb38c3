"""Benchmarks: one file each; their rows are in cpdhpc.lab.commands."""
