"""Options of methods: dataclasses whose annotations define the allowed values of fields.

The same annotations are used here, for NumPy programs, and by pydantic for job files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from .errors import ArgumentError, ConfigError
from .methods import suggest

T = TypeVar("T")
LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "gt": ("greater than", lambda value, limit: value > limit),
    "ge": ("greater than or equal to", lambda value, limit: value >= limit),
    "lt": ("less than", lambda value, limit: value < limit),
    "le": ("less than or equal to", lambda value, limit: value <= limit),
}
KINDS: dict[
    type, tuple[type | tuple[type, ...], str]
] = {  # accepted types, and the text of the error
    bool: (bool, "be a valid boolean"),
    int: (int, "be a valid integer"),
    float: ((int, float), "be a valid number"),
    str: (str, "be a valid string"),
}


@dataclass(frozen=True)
class Allowed:
    """The limits of an option, beside its type: Annotated[int, Allowed(ge=1)].

    gt, ge, lt, le: of a number
    is_array: an array of a job file, which is a list, is accepted for a tuple
    before: converts the input, for example a name, to a value
    """

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    is_array: bool = False
    before: Callable[[Any], Any] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return the schema with which pydantic reads such an option."""
        limits = {key: getattr(self, key) for key in LIMITS if getattr(self, key) is not None}
        schema = {**handler(source), **limits, **({"strict": False} if self.is_array else {})}
        if schema["type"] == "float":
            schema["allow_inf_nan"] = False
        if self.before is None:
            return schema
        function = {"type": "no-info", "function": self.before}
        return {"type": "function-before", "function": function, "schema": schema}


class Agreed:
    """Settings of a layer that must be the same on all ranks; reducers compare them."""


class _Wrong(Exception):
    """An error of an option. The text names it; key: the whole key."""

    def __init__(self, text: str, key: str = "") -> None:
        self.key = key
        super().__init__(text)


def _wrong(path: tuple[str, ...], value: object, should: str) -> _Wrong:
    """Return the error of a value, shown as in a job file, except for quotes."""
    key, text = ".".join(path), str(value).lower() if isinstance(value, bool) else repr(value)
    return _Wrong(f"{key}{'' if isinstance(value, dict) else f'={text}'}: should {should}", key)


def made(model: type[T], table: Mapping[str, Any], source: str) -> T:
    """Return an object of a dataclass with the options of a table.

    Raises ConfigError, in one line that begins with source, for unknown, missing and wrong options.
    """
    try:
        return _made(model, table, ())
    except _Wrong as wrong:
        raise ConfigError(f"{source}: {wrong}", key=wrong.key) from None


def _made(model: type[T], table: Mapping[str, Any], path: tuple[str, ...]) -> T:
    known = {each.name: each for each in fields(model) if each.init}  # type: ignore[arg-type]
    above = "".join(f"{key}." for key in path)
    for key in table:
        if key not in known:
            raise _Wrong(f"unknown key {above}{key}: {suggest(key, known)}", above + key)
    for key, each in known.items():
        if key not in table and each.default is MISSING and each.default_factory is MISSING:
            raise _Wrong(f"{above}{key}: is missing", above + key)
    values = _read_all(model, table, path)
    try:
        return type.__call__(model, **values)
    except ConfigError:
        raise
    except ValueError as error:
        key, text = of_key(error, known, above) or ("", str(error))
        raise _Wrong(text, key) from None


def check_fields(model: type[Any], table: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError, in one line, unless the fields of a dataclass may have these values.

    Fields of other types than those known here must be checked by their author.
    """
    try:
        _read_all(model, table, ())
    except _Wrong as wrong:
        raise ConfigError(f"{source}: {wrong}", key=wrong.key) from None


def _read_all(model: type[Any], table: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    hints = _hints(cast(Any, model))
    return {key: _read(hints.get(key), value, (*path, key)) for key, value in table.items()}


@cache
def _hints(model: Any) -> dict[str, Any]:
    try:
        return get_type_hints(model, include_extras=True)
    except (NameError, TypeError):  # a class from elsewhere, whose names are not available here
        return {}


def _read(kind: Any, value: Any, path: tuple[str, ...]) -> Any:
    """Return a value converted to the type of an option. Raises _Wrong for others."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _within(inner[0], inner[1:], value, path)
    if origin is Literal and not any(type(value) is type(each) and value == each for each in inner):
        *most, last = map(repr, inner)
        raise _wrong(path, value, f"be {', '.join(most)}{' or ' if most else ''}{last}")
    if origin in (Union, UnionType):
        return _one_of(inner, value, path)
    if origin is tuple:
        return tuple(_each(inner, value, path))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(path, value, "be a table")
        return {key: _read(inner[1], each, (*path, str(key))) for key, each in value.items()}
    if kind in KINDS:
        taken, should = KINDS[kind]
        if not isinstance(value, taken) or (isinstance(value, bool) and kind is not bool):
            raise _wrong(path, value, should)
        if kind is float and not math.isfinite(cast(float, value)):
            raise _wrong(path, value, "be a finite number")
    elif is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        return _made(kind, value, path)
    return value


def _within(kind: Any, allowed: Iterable[Any], value: Any, path: tuple[str, ...]) -> Any:
    limits = [*_flat(allowed)]
    for each in limits:
        before = getattr(each, "before", None)
        value = value if before is None else before(value)
    value = _read(kind, value, path)
    for each in limits:
        for key, (words, holds) in LIMITS.items():
            limit = getattr(each, key, None)
            if limit is not None and not holds(value, limit):
                text = repr(limit).removesuffix(".0")
                raise _wrong(path, value, f"be {words} {text}")
    return value


def _flat(allowed: Iterable[Any]) -> Iterator[Any]:
    """Yield limits, including those in an object such as pydantic's Field."""
    for each in allowed:
        yield each
        yield from getattr(each, "metadata", ())


def _one_of(kinds: tuple[Any, ...], value: Any, path: tuple[str, ...]) -> Any:
    first = None
    for kind in kinds:
        if kind is NoneType:
            if value is None:
                return None
            continue
        try:
            return _read(kind, value, path)
        except _Wrong as wrong:
            first = first or wrong
    raise first or _wrong(path, value, "be absent")


def _each(kinds: tuple[Any, ...], value: Any, path: tuple[str, ...]) -> Iterator[Any]:
    if not isinstance(value, list | tuple):
        raise _wrong(path, value, "be an array")
    many = len(kinds) == 2 and kinds[1] is Ellipsis
    for i, each in enumerate(value):
        yield _read(kinds[0] if many else kinds[min(i, len(kinds) - 1)], each, (*path, str(i)))


WHOSE = re.compile(r"^[A-Za-z_]\w*: (?=\w)")  # the function or class at the start of a message


def of_key(error: Exception, known: Collection[str], table: str) -> tuple[str, str] | None:
    """Return the whole key that an error is about, and the error's text beginning with it.

    error: an ArgumentError of a key; or another whose text is "KEY=value: ...", "KEY: ..." or
        "KEY['inner']: ...", maybe after the name of a function or class
    known: keys of the table; table: its own key and a dot. None: the error is about none of them.
    """
    if isinstance(error, ArgumentError) and error.argument in known:
        key = table + error.argument
        text = f"{error.argument}={error.shown}: {error.allowed}"
        if WHOSE.sub("", str(error)) == text:  # otherwise the text has its own name for it
            return key, f"{table}{text}"
    for text in (str(error), WHOSE.sub("", str(error))):
        match = re.match(r"(\w+)(?:\['([^']*)'\])?([=:] ?)(.*)", text)
        if match is not None and match[1] in known:
            inner = f".{match[2]}" if match[2] is not None else ""
            rest = WHOSE.sub("", match[4]) if inner else match[4]
            key = f"{table}{match[1]}{inner}"
            return key, f"{key}{match[3]}{rest}"
    return None
