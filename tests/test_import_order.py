"""The import rules of docs/design.md, read from the source, and that importing has no effects."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from training import ran

import cpdhpc

PACKAGE = Path(cpdhpc.__file__).parent
ORDER = (  # parts of the package: each may import itself and those before it
    # the library: numbers, ranks, all-reduces, methods, arrays; NumPy and mpi4py only
    *("_cpu", "kernels", "_version", "lazy", "errors", "methods", "shipped", "table_formats"),
    *("formats", "randomness", "partition", "ordinary", "whole_files", "options", "store"),
    *("ops", "arrays", "world", "collectives", "compress", "darray"),
    # its side for torch
    *("config", "torch", "torch/quantized", "torch/controllers", "torch/precision"),
    *("torch/split_images", "torch/__init__", "__init__"),
    *("train", "precision", "quantized", "split_images"),  # former names
    # the laboratory
    *("lab/__init__", "lab/signals", "lab/settings"),
    *("lab/binding", "lab/schedulers", "lab/claim"),
    *("lab/provenance", "lab/darray_show", "lab/train", "lab/influence", "lab/autoencoder"),
    *("lab/study_data", "lab/report", "lab/precision", "lab/kinds", "lab/bench", "lab/study"),
    *("lab/verify", "lab/commands", "lab/cli", "__main__"),
)
ONLY_HERE = {  # outside package -> where it may be imported
    "mpi4py": ("world/mpi.py",),
    "cupy": ("ops/gpu.py", "ops/gpu_runtime.py"),
    "cupyx": ("ops/gpu_runtime.py",),
    "torch": ("compress/lgc.py", "ops/tensors.py", "torch/", "lab/"),
    "h5py": ("store.py",),
    "simpleeval": ("lab/study/spec.py",),
    "bokeh": ("lab/report/interactive.py",),
    "scipy": ("lab/",),  # of the extra that brings it
}
NEVER_LOADED = ("mpi4py.MPI", "cupy", "matplotlib", "bokeh")
LONGEST = 500  # lines of two modules that may as well be one
ALONE = {  # module that only one of its room imports -> why it is one
    "lab/autoencoder/pools": "what pools need, compiled or by torch, without messages",
    "torch/backend/registration": "torch calls it as it is imported: it loads nothing else",
    "torch/backend/start": "how groups are made, not what they do; a login node registers it alone",
    "torch/backend/wires": "it loads all-reduces, which a program without wires does not need",
    "lab/verify/speed": "a section of checks, with its table",
    "lab/verify/there": "a section of checks, with its table",
    "lab/bench/stencil": "a benchmark of its own, selected by an option of bench halo",
    "lab/bench/accuracy": "a command of its own, whose random gradients traffic takes, too",
}


@cache
def sources() -> dict[str, ast.Module]:
    """Path inside the package -> syntax tree, of every module."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def name_of(path: str) -> str:
    """ops/__init__.py -> ops; ops/cpu.py -> ops/cpu."""
    return path.removesuffix(".py").removesuffix("/__init__")


def statements(node: ast.AST, all_of_them: bool) -> Iterator[ast.AST]:
    """A node and those in it; or those that run on import, not in functions or for types alone."""
    if not all_of_them:
        test = ast.unparse(node.test) if isinstance(node, ast.If) else ""
        if isinstance(node, ast.FunctionDef) or test.endswith("TYPE_CHECKING"):
            return
    yield node
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.stmt | ast.excepthandler | ast.match_case):
            yield from statements(each, all_of_them)


def imports(tree: ast.AST, path: str, all_of_them: bool = True) -> Iterator[str]:
    """The full dotted names that a module imports: anywhere, or when it is imported."""
    package = ["cpdhpc", *path.split("/")[:-1]]
    for node in statements(tree, all_of_them):
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


def part(path: str) -> str:
    """The part of the package that a path belongs to; torch and lab have parts of their own."""
    first, *rest = path.removesuffix(".py").split("/")
    inner = f"{first}/{rest[0]}" if first in ("torch", "lab") and rest else first
    return inner if inner in ORDER else first


def wrong(imported: Iterable[str], path: str) -> list[str]:
    """Those of a module's imports that the order of parts forbids, and those out of place."""
    assert part(path) in ORDER, f"{path}: give it a place in ORDER"
    allowed = (*ORDER[: ORDER.index(part(path)) + 1], "__version__")
    names = [name.removeprefix("cpdhpc.").replace(".", "/") for name in imported]
    ours = [name.startswith("cpdhpc.") for name in imported]
    forbidden = [n for n, own in zip(names, ours, strict=True) if own and part(n) not in allowed]
    others = [n.partition("/")[0] for n, own in zip(names, ours, strict=True) if not own]
    return forbidden + [n for n in others if n in ONLY_HERE and not path.startswith(ONLY_HERE[n])]


def test_imports_point_one_way_and_outside_packages_stay_in_their_place() -> None:
    found = {path: wrong(names, path) for path, names in all_imports().items()}
    assert {path: names for path, names in found.items() if names} == {}
    assert {part(path) for path in sources()} | {"_cpu", "kernels"} == set(ORDER)


def test_the_rules_can_fail() -> None:
    text = "def f():\n    from ..comm import world\n    import torch, h5py.h5f\n"
    for source, path, found in (
        (text, "ops/x.py", ["comm/world", "torch", "h5py"]),
        ("import torch, h5py.h5f", "lab/train/models/x.py", ["h5py"]),
        ("from cpdhpc.lab.train import run", "torch/x.py", ["lab/train/run"]),
        ("from .torch import ddp", "arrays.py", ["torch/ddp"]),
    ):
        assert wrong([*imports(ast.parse(source), path)], path) == found


@cache
def graph() -> dict[str, set[str]]:
    """Module, such as "lab/train/loop" -> those of the package that it imports, anywhere in it."""
    modules, found = {name_of(path) for path in sources()}, {}
    for path, imported in all_imports().items():
        ours = (name.removeprefix("cpdhpc.") for name in imported if name.startswith("cpdhpc."))
        others = {name.replace(".", "/") for name in ours}
        others |= {name.rpartition("/")[0] for name in others - modules}
        found[name_of(path)] = (others & modules) - {name_of(path)}
    return found


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle, in functions and for types too."""
    left = dict(graph)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_module_imports_itself_through_others() -> None:
    assert circles(graph()) == []
    assert circles({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == ["a", "b"]


def test_a_module_with_one_importer_has_a_reason() -> None:
    """It is of another part, a row of its package's table, too long together, or in ALONE."""
    lines = {name_of(path): len((PACKAGE / path).open().readlines()) for path in sources()}
    few = set()
    for module in graph():
        importers = [name for name, others in graph().items() if module in others]
        if len(importers) == 1 and part(importers[0]) == part(module):
            together = lines[module] + lines[importers[0]]
            if importers[0] != module.rpartition("/")[0] and together <= LONGEST:
                few.add(module)
    assert few - set(ALONE) == set(), "move it into its importer, or say in ALONE why not"
    assert set(ALONE) <= set(lines)


def loading(library: str) -> set[str]:
    """The modules with which a library is loaded, by themselves or by what they import."""
    modules = {f"cpdhpc.{name_of(path)}".replace("/", "."): path for path in sources()}
    on_import = {
        module: (module, *imports(sources()[path], path, all_of_them=False))
        for module, path in modules.items()
    }
    found, more = set[str](), {library}
    while more:
        found |= more
        starts = tuple(f"{name}." for name in found)
        more = {
            m for m, names in on_import.items() if any(f"{n}.".startswith(starts) for n in names)
        }
        more -= found
    return found


def test_importing_starts_nothing() -> None:
    """In a fresh interpreter the public names, then all modules, those that load torch last."""
    names = [f"cpdhpc.{name_of(path)}".replace("/", ".") for path in sources()]
    names = [n for n in names if n != "cpdhpc.__main__" and not n.startswith("cpdhpc.ops.gpu")]
    with_torch = sorted(loading("torch") & set(names))
    program = (
        "import importlib, sys, threading, cpdhpc\n"
        "before = [name for name in sys.modules if name.startswith('cpdhpc.')]\n"
        "assert before == ['cpdhpc._version', 'cpdhpc.lazy'], before\n"
        "assert {'quantize', 'allreduce', '__version__'} <= set(dir(cpdhpc))\n"
        "for name in cpdhpc.__all__: getattr(cpdhpc, name)\n"
        "import numpy; cpdhpc.simulate([numpy.ones(9, 'f4')] * 3, 'e4m3', 'direct', 'aps')\n"
        "assert 'mpi4py' not in sys.modules\n"
        f"for name in {sorted({*names} - {*with_torch})}: importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules\n"
        f"for name in {with_torch}: importlib.import_module(name)\n"
        f"assert not {{*sys.modules}} & {{*{NEVER_LOADED!r}}}\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=1800)


MOST_LOADED = 29  # modules of the package; as many on 2 ranks


@pytest.mark.parametrize("wire", ["raw", "e4m3"])
def test_an_all_reduce_loads_no_more_than_it_needs(wire: str) -> None:
    """Nothing of GPUs, of predictions, of files that are read and written, of the specification."""
    program = (
        "import sys, numpy, cpdhpc\n"
        "cpdhpc.allreduce(cpdhpc.World(), numpy.ones(9, numpy.float32), wire=sys.argv[1])\n"
        "print(*(name for name in sys.modules if name.partition('.')[0] == 'cpdhpc'))\n"
    )
    command = [sys.executable, "-c", program, wire]
    done = ran(command, check=True)
    loaded = done.stdout.split()
    assert "cpdhpc.collectives.allreduce" in loaded
    assert len(loaded) <= MOST_LOADED, sorted(loaded)


def test_an_unknown_public_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = cpdhpc.quantise  # type: ignore[attr-defined]
