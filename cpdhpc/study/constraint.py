"""Constraints: expressions over a case's factors that must be true."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ..config import ConfigError, Raw, merge, suggest
from .kind import Value


class Constraint:
    """An expression, as "ranks <= 8" or "not (algorithm == 'tree' and size_bytes > 2**24)".

    Comparisons, and, or, not, arithmetic, in, and the names of factors; nothing else.
    Raises ConfigError where it is none.
    """

    def __init__(self, text: str) -> None:
        from simpleeval import EvalWithCompoundTypes, InvalidExpression

        self.text = text
        self._evaluator: Any = EvalWithCompoundTypes(functions={})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # an assignment is only warned of
                self._tree = self._evaluator.parse(text)
                if type(self._tree).__name__ == "Assign":
                    raise ConfigError(f"constraints: {text}: compare with ==")
        except (InvalidExpression, SyntaxError) as error:
            raise ConfigError(f"constraints: {text}: {error}") from None

    def holds(self, factors: Mapping[str, Value]) -> bool:
        """Return whether it is true of a case. Raises ConfigError where it cannot be said."""
        from simpleeval import InvalidExpression, NameNotDefined

        self._evaluator.names = _nested(factors)
        try:
            result = self._evaluator.eval(self.text, previously_parsed=self._tree)
        except NameNotDefined as error:
            name = str(getattr(error, "name", ""))
            raise ConfigError(
                f"constraints: {self.text}: unknown factor {name}: {suggest(name, factors)}"
            ) from None
        except (InvalidExpression, TypeError, ValueError, ArithmeticError, KeyError) as error:
            raise ConfigError(f"constraints: {self.text}: {error}") from None
        if not isinstance(result, bool):
            raise ConfigError(f"constraints: {self.text}: is {result!r}: should be true or false")
        return result


def _nested(factors: Mapping[str, Value]) -> Raw:
    """Return "gradient.wire" as a table, so that an expression can name it."""
    result: Raw = {}
    for name, value in factors.items():
        change: Any = value
        for part in reversed(name.split(".")):
            change = {part: change}
        result = merge(result, change)
    return result
