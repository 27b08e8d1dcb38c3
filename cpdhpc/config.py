"""Configuration: TOML in, overrides from the command line, errors of one line, TOML out."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from .errors import ConfigError as ConfigError
from .errors import UserError as UserError
from .errors import told as told
from .methods import nearest, reason
from .methods import suggest as suggest
from .options import WHOSE, of_key
from .whole_files import read_toml as read_toml

Raw = dict[str, Any]
Positive = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]  # 30 years
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$")]  # part of a file name
T = TypeVar("T")


def among(known: Collection[str]) -> Callable[[str], str]:
    """Return a check that returns one of these names, and raises ValueError for any other."""

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(suggest(name, known))
        return name

    return check


def one_of(known: Collection[str]) -> AfterValidator:
    """Return a validator that accepts only these names for a key."""
    return AfterValidator(among(known))


class Section(BaseModel):
    """A table of a file: frozen, strict about types, finite; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, /, **raw: Any) -> None:
        """Read the keys of a table. Raises ConfigError, as validate does."""
        try:
            super().__init__(**raw)
        except ValidationError as error:
            key, text = _explain(type(self), raw, _first(error))
            raise ConfigError(f"{type(self).__name__}: {text}", key=key) from None

    # So that pydantic does not call it for nested tables: their errors need the whole key.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


IMPORT, IMPORT_FROM = "import", "import_from"  # keys of tables that name a function


def located(raw: Raw, directory: Path) -> Raw:
    """Return tables with a directory for imports, for those that have none."""
    here = {IMPORT_FROM: str(directory.resolve())}

    def placed(table: Any) -> Any:
        if isinstance(table, list):
            return [placed(row) for row in table]
        return here | table if isinstance(table, dict) and IMPORT in table else table

    return {key: placed(table) for key, table in raw.items()}


class OneOf:
    """The type of a table that is one of several types, selected by one of its keys.

    known: name -> Section or dataclass; read when a file is read, so rows may be added
    key: that selects the row; default: the name if the key is missing, None: it is required
    imported: Section of a table with a key "import" instead of a name; None: not allowed
    To be used as Annotated[Base, OneOf(TABLE, "name")].
    """

    def __init__(
        self,
        known: Mapping[str, type[Any]],
        key: str,
        default: str | None = None,
        imported: type[Any] | None = None,
    ) -> None:
        self.known, self.key, self.default, self.imported = known, key, default, imported

    @property
    def rows(self) -> tuple[type[Any], ...]:
        """All types that a table may have."""
        return (*self.known.values(), *([self.imported] if self.imported else []))

    def row(self, raw: Raw) -> type[Any] | None:
        """Return the type of a table, None if its name is missing or unknown."""
        if IMPORT in raw and self.imported is not None:
            return self.imported
        return self.known.get(str(raw.get(self.key, self.default)))

    def stays(self, former: Raw, change: Raw) -> Raw:
        """Return the keys of a table that stay valid if change, which overrides it, selects a row.

        Keys that only the former row has are dropped, and those of another type in the new row.
        Keys that neither has stay, and cause an error later.
        """
        before, now = self.row(former), self.row(change)
        if not {self.key, IMPORT} & change.keys() or before is now or None in (before, now):
            return former
        if before is self.imported:  # any key may be an argument
            return {}
        known, new = _types(before), _types(now)
        gone = {key for key, kind in known.items() if new.get(key, not kind) != kind}
        return {key: value for key, value in former.items() if key not in gone | {self.key}}

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Return a schema with which pydantic reads and writes such a table."""
        return core_schema.no_info_plain_validator_function(
            self._read, serialization=core_schema.plain_serializer_function_ser_schema(_plain)
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Raw:
        """Return an empty schema: keys are those of the row."""
        return {}

    def _read(self, raw: Any) -> Any:
        if isinstance(raw, self.rows):
            return raw
        if not isinstance(raw, dict):
            raise PydanticCustomError("not_a_table", "Input should be a table")
        if IMPORT in raw and self.imported is not None:
            if self.key in raw:
                raise PydanticCustomError("value_error", f"has {self.key} and {IMPORT}: give one")
            return self._validated(self.imported, raw)
        name = raw.get(self.key, self.default)
        if name is None:
            fit = [n for n, row in self.known.items() if raw and raw.keys() <= {*keys(row)}]
            having = f" with {_listed([*map(str, raw)], 'and')}" if fit else ""
            words = f"is missing: known{having} are {', '.join(sorted(fit or self.known))}"
            raise PydanticCustomError(
                "no_name", "is missing", {"key": self.key, "said": f": {words}"}
            )
        if not isinstance(name, str) or name not in self.known:
            problem = f"={name!r}: {suggest(str(name), self.known)}"
            raise PydanticCustomError("unknown_name", "unknown", {"key": self.key, "said": problem})
        return self._validated(self.known[name], raw)

    def _validated(self, row: type[Any], raw: Raw) -> Any:
        try:
            return _adapter(row).validate_python(raw)
        except ValidationError as error:
            inner = {"row": row, "raw": raw, "problem": _first(error), "choice": self}
            raise PydanticCustomError("within", "within", inner) from None


def _plain(value: Any) -> Any:
    return _adapter(type(value)).dump_python(value, by_alias=True)


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)  # making one takes 1 ms, maybe
# 10 ms, and a study needs one for each factor, in each row of a table
_schema: Callable[[Any], Raw] = cache(lambda model: _adapter(model).json_schema())


def _types(row: Any) -> dict[str, Any]:
    """Return the JSON types of the keys of a row, None for keys with several types."""
    return {key: each.get("type") for key, each in _schema(row).get("properties", {}).items()}


def of_rows(makes: Sequence[tuple[str, Callable[[str], T]]], source: str) -> list[T]:
    """Return the results for the rows of [[compare]].

    makes: for each row a prefix for errors, and a function that is called with it
    source: the prefix if all rows have the same error
    Raises the first row's ConfigError.
    """
    made, errors = list[T](), list[ConfigError]()
    for where, make in makes:
        try:
            made.append(make(where))
        except ConfigError as error:
            errors.append(error)
    if errors and len(errors) == len(makes) > 1:
        texts = {str(_error_of(make, source)) for _, make in makes}
        raise errors[0] if len(texts) > 1 else ConfigError(*texts, key=errors[0].key)
    if errors:
        raise errors[0]
    return made


def _error_of(make: Callable[[str], object], where: str) -> ConfigError | None:
    try:
        make(where)
    except ConfigError as error:
        return error
    return None


def value_at(table: Any, path: Sequence[str]) -> Any:
    """Return the value at the end of a path of keys in a table, None if there is none."""
    for key in path:
        table = table.get(key) if isinstance(table, dict) else None
    return table


UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as "8", "16KiB" or "1MiB". Raises ConfigError."""
    match = re.fullmatch(r"(\d+) *(\w*)", text.strip())
    if match is None or match[2] not in UNITS:
        units = ", ".join(filter(None, UNITS))
        raise ConfigError(f"{text or repr(text)}: must be a number, with one of {units} or nothing")
    return int(match[1]) * UNITS[match[2]]


def merge(base: Raw, change: Raw) -> Raw:
    """Return base overridden by change, table by table."""
    result = dict(base)
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merge(result[key], value)
        else:
            result[key] = value
    return result


def validate(model: type[T], raw: Raw, source: str) -> T:
    """Return raw as a model, or as a dataclass.

    Raises ConfigError, in one line, for the first error: source, key, the value, what is allowed.
    """
    for key, value in flatten(raw).items() if isinstance(raw, dict) else ():
        if isinstance(value, int) and not -(2**63) <= value < 2**63:  # as in HDF5, and TOML
            raise ConfigError(f"{source}: {key}={value}: should be below 2**63", key=key)
    try:
        return cast(T, _adapter(model).validate_python(raw))
    except ValidationError as error:
        key, text = _explain(model, raw, _first(error))
        raise ConfigError(f"{source}: {text}", key=key) from None


TYPES = {  # pydantic's error type -> what the value should be, in the words of TOML
    **dict.fromkeys(("tuple_type", "list_type"), "be an array"),
    **dict.fromkeys(("dict_type", "model_type", "dataclass_type", "not_a_table"), "be a table"),
    "int_parsing": "be a valid integer",
    "float_parsing": "be a valid number",
    "string_pattern_mismatch": (  # of Name
        "begin with a letter or digit, then have these, dots, underscores, plus and minus, "
        "100 in all at most"
    ),
}


UNKNOWN_KEY = "extra_forbidden", "unexpected_keyword_argument"
MISSING_KEY = "missing", "missing_argument"


def _first(error: ValidationError) -> Any:
    """Return the first error; an unknown key that may be misspelt precedes a missing one."""
    first, *others = error.errors()
    if first["type"] in MISSING_KEY:
        for each in others:
            if each["type"] in UNKNOWN_KEY and each["loc"][:-1] == first["loc"][:-1]:
                return each
    return first


def _explain(
    model: type[Any], raw: Raw, problem: Any, above: Sequence[str] = ()
) -> tuple[str, str]:
    """Return the whole key of an error, "" if it has none, and the text of the error."""
    path = [*above, *(str(part) or '""' for part in problem["loc"])]
    key, value, context = ".".join(path), problem["input"], problem.get("ctx", {})
    kind = problem["type"]
    if kind == "within":
        inner = context["problem"]
        if inner["type"] in UNKNOWN_KEY and len(inner["loc"]) == 1:
            name = str(inner["loc"][0])
            text = _not_of_row(context["choice"], context["row"], context["raw"], key, name)
            return f"{key}.{name}", text
        return _explain(context["row"], context["raw"], inner, path)
    if kind in ("no_name", "unknown_name"):
        of = f"{key}.{context['key']}"
        return of, f"{of}{context['said']}"
    if kind in UNKNOWN_KEY:
        here = keys(model, problem["loc"][:-1])
        tables = here if len(path) == 1 else []
        inside = [f"{t}.{key}" for t in tables if key in keys_inside(model, t)]
        text = f"did you mean {_listed(inside, 'or')}?" if inside else suggest(path[-1], here)
        return key, f"unknown key {key}: {text}"
    if kind in MISSING_KEY:
        return key, f"{key}: is missing"
    if kind == "value_error":
        return _explain_value(model, problem, path)
    _, _, should = problem["msg"].partition(" should ")
    text = TYPES.get(kind) or should.replace(" after validation", "")
    shown = "" if isinstance(value, dict) else f"={_as_toml(value)}"
    return key, f"{key}{shown}: should {text}" if key else f"should {text}"


def _explain_value(model: type[Any], problem: Any, path: list[str]) -> tuple[str, str]:
    """Return the same as _explain, for an error raised by a check of this package."""
    key, value = ".".join(path), problem["input"]
    error = problem.get("ctx", {}).get("error", problem["msg"])
    if isinstance(value, dict):
        known = {*keys(model, problem["loc"]), *value}
        found = of_key(error, known, f"{key}." if key else "")
        return found or (key, f"{key}: {error}" if key else str(error))
    text = WHOSE.sub("", str(error)).removeprefix(f"{path[-1]}=").removeprefix(f"{value!r}: ")
    return key, f"{key}={_as_toml(value)}: {reason(text, value)}"


def _as_toml(value: object) -> str:
    """Return a value as a user wrote it, except for quotes and spaces."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def keys(model: type[Any], loc: tuple[Any, ...] = ()) -> list[str]:
    """Return the keys a table of the model may have, from pydantic's JSON schema."""
    schema = _schema(model)
    here = schema
    for part in loc:
        named = here.get("properties", {}).get(part, here.get("additionalProperties"))
        inner = here.get("items") if isinstance(part, int) else named
        here = _table(inner or {}, schema.get("$defs", {}))
    return list(here.get("properties", {}))


def keys_inside(model: type[Any], table: str) -> set[str]:
    """Return the keys of a table of a model; for OneOf those of any row."""
    field = getattr(model, "model_fields", {}).get(table)
    choices = [one for one in field.metadata if isinstance(one, OneOf)] if field else []
    rows = {key for one in choices for row in one.rows for key in keys(row)}
    return rows or set(keys(model, (table,)))


def _not_of_row(choice: OneOf, row: type[Any], raw: Raw, table: str, key: str) -> str:
    """Return the error for a key that a row of a choice does not know, but others may."""
    known = keys(row)
    others = {name: keys(each) for name, each in choice.known.items() if each is not row}
    meant = nearest(key, {each for its in others.values() for each in its}, 0.75)
    text = f"unknown key {table}.{key}: {suggest(key, known)}"
    if nearest(key, known) or not meant:
        return text
    have = [name for name, its in others.items() if meant[0] in its]
    return f"{text}; {_listed(have, 'and')} {'have' if have[1:] else 'has'} {meant[0]}"


def _listed(names: Sequence[str], word: str) -> str:
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _table(schema: Raw, definitions: Raw) -> Raw:
    """Return the schema that a schema refers to; for one that may be null the other one."""
    one = next((each for each in schema.get("anyOf", ()) if "$ref" in each), schema)
    return definitions[one["$ref"].rpartition("/")[2]] if "$ref" in one else one


def dump_toml(raw: Raw) -> str:
    """Return tables as TOML text; keys that are None are left out."""
    return tomli_w.dumps(_without_none(raw))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value


def difference(one: str, other: str, ignored: Iterable[str] = ()) -> str | None:
    """Return the first key, as table.key, in which two TOML texts differ; None if none does."""
    left, right = _flat(one), _flat(other)
    keys = sorted((left.keys() | right.keys()) - set(ignored))
    return next((key for key in keys if left.get(key) != right.get(key)), None)


def value_of(text: str, key: str) -> Any:
    """Return the value of table.key in a TOML text; None if there is none."""
    return _flat(text).get(key)


def keys_of(text: str, table: str) -> list[str]:
    """Return the keys of a table in a TOML text, and of tables in it, as table.key."""
    return [key for key in _flat(text) if key.startswith(f"{table}.")]


@lru_cache(64)  # reports read many keys of the same jobs
def _flat(text: str) -> Raw:
    return flatten(tomllib.loads(text))


def flatten(raw: Raw, prefix: str = "") -> Raw:
    """Return nested tables as one table with keys such as "table.key", "tables.0.key"."""
    result: Raw = {}
    for key, value in raw.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            value = {str(i): row for i, row in enumerate(value)}
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {}
        result |= inner or {prefix + key: value}
    return result
