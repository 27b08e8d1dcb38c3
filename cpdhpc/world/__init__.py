"""Worlds of ranks: the processes that take part, their messages, and memory shared in a node."""
