"""The sparse autoencoder of locally connected filters, its pixels and filters split over ranks."""

from __future__ import annotations
