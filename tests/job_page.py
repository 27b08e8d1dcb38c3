"""docs/reference/jobs*.md from the models of job files: `python tests/job_page.py` writes them."""

import inspect
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter

from cpdhpc.collectives.allreduce import allreduce
from cpdhpc.collectives.method import AUTO, HEADROOMS, MPI_ALLREDUCE
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.config import OneOf, Section
from cpdhpc.lab.autoencoder.job import Autoencoder, Layer
from cpdhpc.lab.kinds import KINDS
from cpdhpc.lab.kinds.command_job import ProgramCommand, RunMetric
from cpdhpc.lab.study.spec import Study
from cpdhpc.lab.study_data import ABSENT, SEATS, SHAPE, Factor
from cpdhpc.lab.train.job import Job
from cpdhpc.methods import ACCUMULATES, EXACT, SCALINGS
from cpdhpc.torch.controllers import BATCH_SCALINGS, DECAYS
from cpdhpc.torch.precision.tensors import SCALINGS as TENSOR_SCALINGS

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
INDEX = """# Keys of job files

A job file is TOML. These pages list all keys. `python tests/job_page.py` makes them from the
classes that read the files, and a test compares them.

A key without a default must be set, except `name`: its default is the name of the file. An unknown
key is an error of one line, and so is a value of another type. `--set table.key=VALUE` replaces a
value of the file.
"""
TRAIN = """# Keys of trainings

Files for `python -m cpdhpc train FILE.toml`. Each of these tables may be left out.
`docs/tutorials/first_study.md` has an example.

A row of `[[compare]]` has the same tables and a `name`; its keys replace those of the file. Each
row is run once for each seed. If a row, or `--set`, names another model or data set, the keys that
only the former one has are dropped. If it names a controller, the keys that the controller decides
are dropped (`learning_rate` for `autowu`). `seed = 3` in `[train]` means `seeds = [3]`.
"""
STUDIES = """# Keys of studies

Files for `python -m cpdhpc study ACTION FILE.toml`. `docs/reference/studies.md` explains the
sections and has examples.
"""
FACTORS = """
## Factors

Keys of `[sweep]`, `[[zip]]`, `[[exclude]]`, `[weak]` and `[base]`. `seed` is another one. With kind
`train` so is any key of a job, such as `gradient.wire`; with kind `command`, any name. A factor
without a default must be swept.
"""
AUTOENCODER = """# Keys of autoencoders

Files for `python -m cpdhpc autoencoder FILE.toml`. `docs/reference/autoencoder.md` explains the
method. There is one `[[layer]]` for each layer.
"""
BOUNDS = {
    "minimum": ">= {}",
    "exclusiveMinimum": "> {}",
    "maximum": "<= {}",
    "exclusiveMaximum": "< {}",
    "minItems": "{} or more items",
    "pattern": "matches `{}`",
}


NAMES = {  # of keys that a table of the package checks
    "algorithm": (*SCHEDULES, MPI_ALLREDUCE, AUTO),
    "accumulate": (*ACCUMULATES, EXACT),
    "scaling": SCALINGS,
    "headroom": HEADROOMS,
    "decay": DECAYS,
    "batch_scaling": BATCH_SCALINGS,
    "kind": KINDS,
}


def known_names(model: type[Any], name: str) -> Iterable[str]:
    """The names that a key of a model takes; those of tensors and of sums are others."""
    own = {"scaling": TENSOR_SCALINGS}
    return (own if model.__module__.startswith("cpdhpc.torch.precision") else NAMES).get(name, ())


def entries(text: str | None, names: Iterable[str]) -> dict[str, str]:
    """What a docstring says of names: as "one: words" or "one, other: words; third: words"."""
    name = "|".join(map(re.escape, names))
    start = rf"(?:^|(?<=; ))((?:{name})(?:, (?:{name}))*): "
    found: dict[str, str] = {}
    open_keys: list[str] = []
    for line in inspect.cleandoc(text or "").splitlines():
        pieces = re.split(start, line.strip() if open_keys else line)
        before, starts = pieces[0], pieces[1:]
        if before and not line.startswith("    ") and not starts:
            open_keys = []
        for key in open_keys if before else ():
            found[key] += " " + before.strip()
        for keys, words in zip(starts[::2], starts[1::2], strict=True):
            open_keys = keys.split(", ")
            found |= dict.fromkeys(open_keys, words)
    return {key: words.strip().removesuffix(";") for key, words in found.items()}


def summary(model: type[Any]) -> str:
    """The first sentence of a model's docstring, without the name of its table."""
    first = inspect.cleandoc(model.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    told = re.sub(r"^\[+[\w.]+\]+( name = \"\w+\")?: ", "", re.split(r"(?<=\.) ", first)[0])
    return told[0].upper() + told[1:]


def shown_type(schema: dict[str, Any]) -> str:
    """A JSON schema's type as TOML names it."""
    if "anyOf" in schema:
        kinds = [shown_type(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(kinds)
    if "$ref" in schema:
        return "table"
    if schema.get("type") == "array":
        items = schema.get("items") or next(iter(schema.get("prefixItems", [])), {})
        return f"array of {shown_type(items)}s"
    names = {"number": "float", "object": "table"}
    return names.get(schema.get("type", "table"), schema.get("type", "table"))


def allowed(schema: dict[str, Any]) -> str:
    """What a JSON schema says of values."""
    for each in schema.get("anyOf", ()):
        if each.get("type") != "null" and allowed(each):
            return allowed(each)
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    told = [text.format(schema[key]) for key, text in BOUNDS.items() if key in schema]
    inner = schema.get("items") or next(iter(schema.get("prefixItems", [])), {})
    if "prefixItems" in schema:
        told = [f"{len(schema['prefixItems'])} items"]
    if schema.get("type") == "array" and allowed(inner):
        told.append(f"each {allowed(inner)}")
    return ", ".join(told)


def default(schema: dict[str, Any], required: bool) -> str:
    """A default as TOML says it; nothing where the key must be given or is left out."""
    if required or schema.get("default") is None:
        return "" if required else "not given"
    value = schema["default"]
    if isinstance(value, str) and not value:
        return "not given"
    return f"`{value:.6g}`" if isinstance(value, float) else f"`{json.dumps(value)}`"


def takes(model: type[Any], name: str, value: str) -> bool:
    """Whether a model with otherwise usual keys takes a name; of algorithms, others are free."""
    if name != "algorithm":
        return True
    try:
        TypeAdapter(model).validate_python({name: value})
    except ValueError:
        return False
    return True


def keys_table(model: type[Any], leave_out: Iterable[str] = ()) -> Iterator[str]:
    """A Markdown table of a model's keys. Raises ValueError for one that no docstring explains."""
    schema = TypeAdapter(model).json_schema()
    properties = schema.get("properties", {})
    known = entries(allreduce.__doc__, properties) if model.__module__.startswith(
        "cpdhpc.compress"
    ) else {}  # fmt: skip
    for each in reversed(model.__mro__):
        known |= entries(each.__doc__, properties)
    rows = [name for name in properties if name not in leave_out]
    if not rows:
        return
    yield "\n| key | type | default | allowed | what it is |\n|---|---|---|---|---|"
    for name in rows:
        of = properties[name]
        if "$ref" in of:
            of = of | {"default": None}
        words = known.get(name)
        if not words:
            raise ValueError(f"{model.__name__}: no line of its docstring begins with {name}:")
        given = name in schema.get("required", ())
        names = ", ".join(
            f"`{json.dumps(each)}`" for each in known_names(model, name) if takes(model, name, each)
        )
        cells = shown_type(of), default(of, given), allowed(of) or names, words
        yield f"| `{name}` | " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"


def tables(model: type[Section], skip: Iterable[str] = ()) -> Iterator[str]:
    """The tables of a file: those of Sections, and those of which one of several rows is chosen."""
    for name, field in model.model_fields.items():
        if name in skip:
            continue
        choice = next((each for each in field.metadata if isinstance(each, OneOf)), None)
        for word, row in sorted(choice.known.items()) if choice else ():
            usual = ", the default without the table" if type(field.default) is row else ""
            yield f'\n## `[{name}]` with `{choice.key} = "{word}"`{usual}\n\n{summary(row)}'
            yield from keys_table(row, [choice.key])
        kinds = [field.annotation, *get_args(field.annotation)]
        for kind in kinds if choice is None else ():
            if isinstance(kind, type) and issubclass(kind, Section):
                several = "[" if kind is not field.annotation and kind is Layer else ""
                yield f"\n## `{several}[{name}]{several and ']'}`\n\n{summary(kind)}"
                yield from keys_table(kind)
                yield from nested(name, kind)


def sections(kind: Any) -> list[type[Section]]:
    """The tables that an annotation has within it, but for itself."""
    found = [each for each in get_args(kind) if isinstance(each, type)]
    inner = [each for other in get_args(kind) for each in sections(other)]
    return [each for each in found if issubclass(each, Section)] + inner


def nested(name: str, model: type[Section]) -> Iterator[str]:
    """The tables within one, and those that their keys take, each once."""
    for key, field in model.model_fields.items():
        for row in sections(field.annotation):
            yield f"\n## `[[{name}.{key}]]`\n\n{summary(row)}"
            yield from keys_table(row)
            kinds = {
                each: None for f in row.model_fields.values() for each in sections(f.annotation)
            }
            for table in kinds:
                yield f"\n## A table of `{name}.{key}`: {table.__name__}\n\n{summary(table)}"
                above = next((k for k in kinds if k is not table and issubclass(table, k)), None)
                if above is not None:
                    inherited = ", ".join(f"`{each}`" for each in above.model_fields)
                    yield f"It also has the keys of {above.__name__}: {inherited}."
                yield from keys_table(table, () if above is None else above.model_fields)


def factor_rows(factors: dict[str, Factor], kind: str) -> Iterator[str]:
    for name, factor in factors.items():
        value = "not given" if factor.default == ABSENT else f"`{json.dumps(factor.default)}`"
        value = "" if factor.default is None else value
        yield f"| {kind} | `{name}` | {factor.type.__name__} | {value} | {factor.long_name} |"


def joined(parts: Iterable[str]) -> str:
    """Return a page of these parts."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).strip() + "\n"


def train_page() -> str:
    """Return the page of trainings."""
    file = keys_table(Job, set(Job.model_fields) - {"name", "metrics"})
    return joined([TRAIN, "\n## The file\n", *file, *tables(Job, ["name"])])


def study_page() -> str:
    """Return the page of studies."""
    own = [name for name in Study.model_fields if name not in ("measure", "run", "train")]
    parts = [STUDIES, "\n## The file\n", *keys_table(Study, set(Study.model_fields) - set(own))]
    parts += tables(Study, own)
    for heading, table in (("command", ProgramCommand), ("metrics.NAME", RunMetric)):
        parts += [f"\n## `[{heading}]` of kind `command`\n\n{summary(table)}", *keys_table(table)]
    parts += [FACTORS, "\n| kind | factor | type | default | what it is |"]
    parts += ["|---|---|---|---|---|", *factor_rows(SHAPE | SEATS, "all")]
    for kind, row in sorted(KINDS.items()):
        parts += factor_rows(dict(row.factors), kind)
    return joined(parts)


def autoencoder_page() -> str:
    """Return the page of autoencoders."""
    file = keys_table(Autoencoder, ["data", "layer", "train"])
    return joined([AUTOENCODER, "\n## The file\n", *file, *tables(Autoencoder, ["name"])])


def contents(name: str, page: str) -> Iterator[str]:
    """The rows of a table of contents: links to a page's tables and the choices that each has."""
    links: dict[str, list[str]] = {}
    for heading in re.findall(r"^## (.*)$", page, re.MULTILINE):
        table, _, choice = heading.partition(" with ")
        shown = re.sub(r'`\w+ = "(\w+)"`.*', r"`\1`", choice) or table
        place = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")  # as MyST makes it
        default = " (default)" if "the default" in choice else ""
        links.setdefault(table, []).append(f"[{shown}]({name}.md#{place}){default}")
    for table, found in links.items():
        one = len(found) == 1
        yield f"| {found[0] if one else table} | {'' if one else ', '.join(found)} |"


def pages() -> dict[str, str]:
    """Return file name -> text of every page."""
    found = {
        "jobs_train": train_page(),
        "jobs_study": study_page(),
        "jobs_autoencoder": autoencoder_page(),
    }
    parts = [INDEX, "| files for | page |", "|---|---|"]
    parts += ["| `python -m cpdhpc train` | [Trainings](jobs_train.md) |"]
    parts += ["| `python -m cpdhpc study` | [Studies](jobs_study.md) |"]
    parts += ["| `python -m cpdhpc autoencoder` | [Autoencoders](jobs_autoencoder.md) |"]
    for name, page in found.items():
        title = page.partition("\n")[0].removeprefix("# Keys of ").capitalize()
        parts += [f"\n## {title}\n", "| table | one of |", "|---|---|", *contents(name, page)]
    parts += ["\n```{toctree}\n:hidden:\n", *found, "```"]
    return {f"{name}.md": text for name, text in ({"jobs": joined(parts)} | found).items()}


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
