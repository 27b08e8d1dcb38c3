"""Arithmetic in small formats: products of matrices whose every rounding is chosen."""

from .products import matmul

__all__ = ["matmul"]
