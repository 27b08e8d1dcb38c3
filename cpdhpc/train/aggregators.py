"""The aggregator that a training loop asks for: by name with its options, or as an object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from ..compress import COMPRESSORS, Aggregator
from ..config import check_fields, validate
from ..formats import FloatFormat, TableFormat
from ..methods import suggest
from ..table_formats import spelled


def made(who: str, aggregator: str | Aggregator, options: dict[str, Any]) -> Aggregator:
    """Return the aggregator of a name with its options, or the very one without any.

    who: for errors. Raises ValueError or TypeError for an unknown name, unknown or wrong options,
    also of an aggregator that was made with them.
    """
    if isinstance(aggregator, Aggregator):
        if options:
            raise TypeError(f"{who}: options={options}: the aggregator has its own")
        kind = type(aggregator)
        given = {each.name: getattr(aggregator, each.name) for each in fields(kind) if each.init}
        check_fields(kind, _spelled(given), f"{who}: {kind.__name__}")
        return aggregator
    if not isinstance(aggregator, str):
        raise TypeError(f"{who}: aggregator={aggregator!r}: must be a name or an Aggregator")
    if aggregator not in COMPRESSORS:
        raise ValueError(f"{who}: aggregator={aggregator!r}: {suggest(aggregator, COMPRESSORS)}")
    return validate(COMPRESSORS[aggregator], _spelled(options), f"{who}: {aggregator}")


def _spelled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as a job file has them: formats by name, Python's numbers."""
    return {
        key: value.name
        if isinstance(value, FloatFormat)
        else spelled(value)
        if isinstance(value, TableFormat)
        else value.item()
        if isinstance(value, np.generic)
        else value
        for key, value in options.items()
    }
