"""The import rules of docs/design.md, read from the source, and that importing has no effects."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import cpdhpc

PACKAGE = Path(cpdhpc.__file__).parent
ORDER = (  # parts of the package: each may import itself and those before it
    # the library: numbers, ranks, all-reduces, methods, arrays; NumPy and mpi4py only
    *("_cpu", "kernels", "_version", "lazy", "methods", "errors", "shipped", "table_formats"),
    *("formats", "randomness", "partition", "ordinary", "whole_files", "options", "store"),
    *("ops", "arrays", "world", "collectives", "compress", "darray"),
    # its side for torch
    *("config", "torch", "torch/quantized", "torch/controllers", "torch/precision"),
    *("torch/split_images", "torch/__init__", "__init__"),
    *("train", "precision", "quantized", "split_images"),  # former names
    # the laboratory
    *("lab/__init__", "lab/signals", "lab/settings", "lab/claim", "lab/outputs"),
    *("lab/provenance", "lab/darray_show", "lab/train", "lab/influence", "lab/autoencoder"),
    *("lab/study_data", "lab/report", "lab/precision", "lab/kinds", "lab/bench", "lab/study"),
    *("lab/commands", "lab/cli", "__main__"),
)
ONLY_HERE = {  # outside package -> where it may be imported
    "mpi4py": ("world/mpi.py",),
    "cupy": ("ops/gpu.py", "ops/gpu_runtime.py", "ops/gpu_sums.py"),
    "cupyx": ("ops/gpu_runtime.py",),
    "torch": ("compress/lgc.py", "ops/tensors.py", "torch/", "lab/"),
    "h5py": ("store.py",),
    "simpleeval": ("lab/study/spec.py",),
}
BODIES = "body", "orelse", "finalbody", "handlers", "cases"  # where statements hold others
NEVER_LOADED = ("mpi4py.MPI", "cupy", "matplotlib")


@cache
def sources() -> dict[str, ast.Module]:
    """Path inside the package -> syntax tree, of every module."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports(tree: ast.AST, path: str, functions: bool = True) -> Iterator[str]:
    """Full dotted names that a module imports, for type checkers too; functions: and in them."""
    package = ["cpdhpc", *path.split("/")[:-1]]
    for node in nodes(tree, functions):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = base + ([node.module] if node.module else [])
            yield from (".".join([*base, alias.name]) for alias in node.names)


@cache
def all_imports() -> dict[str, tuple[str, ...]]:
    """Path inside the package -> what the module imports, anywhere in it."""
    return {path: tuple(imports(tree, path)) for path, tree in sources().items()}


def nodes(tree: ast.AST, functions: bool) -> Iterator[ast.AST]:
    """All statements; or those that run on import: none in functions or for type checkers alone."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = (n for field in BODIES for n in getattr(node, field, ()))
            waiting += [n for n in inner if functions or not _for_type_checkers(n)]


def _for_type_checkers(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


def part(path: str) -> str:
    """The part of the package that a path belongs to; torch and lab have parts of their own."""
    first, *rest = path.removesuffix(".py").split("/")
    inner = f"{first}/{rest[0]}" if first in ("torch", "lab") and rest else first
    return inner if inner in ORDER else first


def wrong_direction(imported: Iterable[str], path: str) -> list[str]:
    """Those of a module's imports that the order of parts forbids."""
    assert part(path) in ORDER, f"{path}: give it a place in ORDER"
    allowed = ORDER[: ORDER.index(part(path)) + 1]
    found = (name.removeprefix("cpdhpc.") for name in imported if name.startswith("cpdhpc."))
    return [name for name in found if part(name.replace(".", "/")) not in (*allowed, "__version__")]


def out_of_place(imported: Iterable[str], path: str) -> list[str]:
    """Those of outside packages that belong elsewhere."""
    found = (name.split(".")[0] for name in imported)
    return [n for n in found if n in ONLY_HERE and not path.startswith(ONLY_HERE[n])]


def test_imports_point_one_way() -> None:
    wrong = {path: wrong_direction(names, path) for path, names in all_imports().items()}
    assert not {path: names for path, names in wrong.items() if names}


def test_outside_packages_stay_in_their_place() -> None:
    wrong = {path: out_of_place(names, path) for path, names in all_imports().items()}
    assert not {path: names for path, names in wrong.items() if names}
    for path in sources():
        found = imports(sources()[path], path, functions=False)
        early = [name for name in found if name.startswith(("mpi4py.MPI", "matplotlib"))]
        assert not early, path


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle, in functions and for types too."""
    left = {name: set(others) for name, others in graph.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


@cache
def graph() -> dict[str, set[str]]:
    """Module, as "train/loop" -> those of the package that it imports, anywhere in it."""
    names = {path: path.removesuffix(".py").removesuffix("/__init__") for path in sources()}
    found = {}
    for path, imported in all_imports().items():
        ours = (name for name in imported if name.startswith("cpdhpc."))
        others = {name.removeprefix("cpdhpc.").replace(".", "/") for name in ours}
        others |= {name.rpartition("/")[0] for name in others if name not in names.values()}
        found[names[path]] = (others & set(names.values())) - {names[path]}
    return found


def test_no_module_imports_itself_through_others() -> None:
    assert circles(graph()) == []
    assert circles({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == ["a", "b"]


def test_parts_are_there() -> None:
    assert {part(path) for path in sources()} | {"_cpu", "kernels"} == set(ORDER)


LONGEST = 500  # lines of two modules that may as well be one
ALONE = {  # module that only one of its room imports -> why it is one
    "lab/bench/accuracy": "errors on one process; throughput has its random gradients, too",
    "lab/train/norms": "what is observed of a step, not how it goes",
}


def test_a_module_with_one_importer_has_a_reason() -> None:
    """It is of another room, a row of its package's table, too long together, or in ALONE."""
    lines = {
        path.removesuffix(".py").removesuffix("/__init__"): len((PACKAGE / path).open().readlines())
        for path in sources()
    }
    few = set()
    for module in graph():
        importers = [name for name, others in graph().items() if module in others]
        if len(importers) == 1 and part(importers[0]) == part(module):
            together = lines[module] + lines[importers[0]]
            if importers[0] != module.rpartition("/")[0] and together <= LONGEST:
                few.add(module)
    assert few - set(ALONE) == set(), "move it into its importer, or say in ALONE why not"
    assert set(ALONE) <= set(lines)


def test_the_rules_can_fail() -> None:
    text = "def f():\n    from ..comm import world\n    import torch, h5py.h5f\n"

    def wrong(text: str, path: str) -> tuple[list[str], list[str]]:
        imported = [*imports(ast.parse(text), path)]
        return wrong_direction(imported, path), out_of_place(imported, path)

    assert wrong(text, "ops/x.py") == (["comm.world"], ["torch", "h5py"])
    assert wrong(text, "lab/train/models/x.py")[1] == ["h5py"]
    assert wrong("from cpdhpc.lab.train import run", "torch/x.py")[0] == ["lab.train.run"]
    assert wrong("from .torch import ddp", "arrays.py")[0] == ["torch.ddp"]


def module_names() -> list[str]:
    """Every module of the package, as imported; those outside it (kernels) are not searched."""
    names = (path.removesuffix(".py").replace("/", ".") for path in sources())
    dotted = [f"cpdhpc.{name}".removesuffix(".__init__") for name in names]
    return [n for n in dotted if n != "cpdhpc.__main__" and not n.startswith("cpdhpc.ops.gpu")]


def test_importing_starts_nothing() -> None:
    """In a fresh interpreter the public names, then all modules, those that need torch last."""
    with_torch = tuple(
        f"cpdhpc.{place}"
        for place in (
            *("lab.autoencoder", "lab.bench.overlap", "lab.influence.rows", "lab.influence.scores"),
            *("lab.precision.search", "lab.train", "ops.tensors", "torch.autograd"),
            *("torch.averaging", "torch.buffers", "torch.ddp", "torch.fsdp", "torch.layerwise"),
            *("torch.loss_scaling", "torch.overlap", "torch.precision.arithmetic"),
            *("torch.precision.conversion", "torch.precision.layers"),
            *("torch.precision.operations", "torch.precision.recorder"),
            *("torch.precision.updates", "torch.quantized.layers", "torch.reducer"),
            "torch.split_images",
        )
    )
    names = sorted(module_names(), key=lambda name: name.startswith(with_torch))
    first = next(i for i, name in enumerate(names) if name.startswith(with_torch))
    program = (
        "import importlib, sys, threading, cpdhpc\n"
        "before = [name for name in sys.modules if name.startswith('cpdhpc.')]\n"
        "assert before == ['cpdhpc._version', 'cpdhpc.lazy'], before\n"
        "assert {'quantize', 'allreduce', '__version__'} <= set(dir(cpdhpc))\n"
        "for name in cpdhpc.__all__: getattr(cpdhpc, name)\n"
        "import numpy; cpdhpc.simulate([numpy.ones(9, 'f4')] * 3, 'e4m3', 'direct', 'aps')\n"
        "assert 'mpi4py' not in sys.modules\n"
        f"for name in {names[:first]!r}: importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules\n"
        f"for name in {names[first:]!r}: importlib.import_module(name)\n"
        f"assert not {{*sys.modules}} & {{*{NEVER_LOADED!r}}}\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=1800)


def test_an_unknown_public_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = cpdhpc.quantise  # type: ignore[attr-defined]


@cache
def names_of(module: str) -> set[str]:
    """What a module of the package defines or imports, and the modules in it."""
    path = PACKAGE.parent / module.replace(".", "/")
    names = {part.stem for part in path.glob("*")} if path.is_dir() else set()
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = sources().get(source.relative_to(PACKAGE).as_posix())
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names | {"__version__"}


# With what follows in brackets; also in programs that tests start, which are strings there.
IMPORTED = re.compile(r"^ *(from cpdhpc[\w.]* import (?:\([^)]*\)|[^(\n;\\]*))", re.MULTILINE)


def missing(text: str) -> list[str]:
    """Names that a text imports from the package and that are not there."""
    found = (ast.parse(statement).body[0] for statement in IMPORTED.findall(text))
    return [
        f"{node.module}.{alias.name}"
        for node in found
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "cpdhpc._cpu"
        for alias in node.names
        if alias.name not in names_of(node.module)
    ]


def test_what_tests_import_exists() -> None:
    """The MPI tests are not collected in the serial run: a name lost there shows here."""
    wrong = {
        path.name: names
        for path in Path(__file__).parent.rglob("*.py")
        if (names := missing(path.read_text()))
    }
    assert not wrong
    text = "    from cpdhpc.store import (\n        read as here,  # of it\n        gone,\n    )\n"
    assert missing(text + "from cpdhpc import lost") == ["cpdhpc.store.gone", "cpdhpc.lost"]


ROW = re.compile(r"^\| (?:a|an) .*\| \d+ \|$", re.MULTILINE)  # of the table of changes
TABLE = re.compile(r"`([A-Z][A-Z_]+)`")


def lost(row: str) -> list[str]:
    """Paths that a row of the page names and that are not there, and tables in none of them."""
    root, files, wrong = PACKAGE.parent, list[Path](), list[str]()
    place = root
    for name in re.findall(r"`([\w/]+(?:\.py)?)`", row):
        if "/" not in name and not name.endswith(".py"):
            continue
        path = root / name if "/" in name else place / name
        place = path if path.is_dir() else path.parent
        files += path.rglob("*.py") if path.is_dir() else [path] * path.exists()
        wrong += [] if path.exists() else [name]
    texts = [path.read_text() for path in files]
    tables = TABLE.findall(row)
    there = [any(re.search(rf"^{n}\b.* = ", text, re.MULTILINE) for text in texts) for n in tables]
    return wrong + [name for name, is_there in zip(tables, there, strict=True) if not is_there]


def test_the_page_of_changes_names_what_is_there() -> None:
    rows = ROW.findall((PACKAGE.parent / "CONTRIBUTING.md").read_text())
    assert len(rows) > 10
    assert {row: names for row in rows if (names := lost(row))} == {}
    row = "| a thing | a row of `ROWS` in `cpdhpc/methods.py` or `gone.py` | 1 |"
    assert lost(row) == ["gone.py", "ROWS"]
