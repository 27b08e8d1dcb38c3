"""Distributed deep learning over MPI with gradients of few bits."""

__version__ = "0.1.0"
