"""The aggregator that a training loop asks for: by name with its options, or as an object."""

from __future__ import annotations

from typing import Any

from ..compress import COMPRESSORS, Aggregator
from ..compress.base import as_table
from ..methods import suggest
from ..options import made as made_of


def made(who: str, aggregator: str | Aggregator, options: dict[str, Any]) -> Aggregator:
    """Return the aggregator of a name with its options, or the very one without any.

    who: for errors. Raises ValueError or TypeError for an unknown name, unknown or wrong options.
    """
    if isinstance(aggregator, Aggregator):
        if options:
            raise TypeError(f"{who}: options={options}: the aggregator has its own")
        return aggregator
    if not isinstance(aggregator, str):
        raise TypeError(f"{who}: aggregator={aggregator!r}: must be a name or an Aggregator")
    if aggregator not in COMPRESSORS:
        raise ValueError(f"{who}: aggregator={aggregator!r}: {suggest(aggregator, COMPRESSORS)}")
    return made_of(COMPRESSORS[aggregator], as_table(options), f"{who}: {aggregator}")
