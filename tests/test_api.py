"""The names that the package offers: for import, for dir and help, for editors."""

import ast
import inspect
import pydoc
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from every import every
from training import ran

import cpdhpc

PACKAGES = [
    "cpdhpc",
    *(
        f"cpdhpc.{n}"
        for n in cpdhpc.__all__
        if n.islower() and isinstance(getattr(cpdhpc, n), ModuleType)
    ),
]
OPEN = {  # public name -> why it takes what no signature lists
    "cpdhpc.torch.GradientReducer": "options of the compressor that is named",
    "cpdhpc.torch.ddp_hook": "options of the compressor that is named",
    "cpdhpc.torch.fsdp_hook": "options of the compressor that is named",
}


def offered(package: str) -> dict[str, Any]:
    """The public names of a package, and what they are; of a module what it defines itself."""
    module = import_module(package)
    names = getattr(module, "__all__", None)
    if names is None:
        found = {n: v for n, v in vars(module).items() if not n.startswith("_")}
        return {n: v for n, v in found.items() if getattr(v, "__module__", "") == package}
    return {name: getattr(module, name) for name in names}


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public class and function, the public methods of these classes, by dotted name."""
    for package in PACKAGES:
        for name, value in offered(package).items():
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{package}.{name}", value
            if inspect.isclass(value):
                for key, method in vars(value).items():
                    bare = getattr(method, "__func__", method)
                    if inspect.isfunction(bare) and not key.startswith("_"):
                        yield f"{package}.{name}.{key}", bare


def hidden(function: Callable[..., Any]) -> list[str]:
    """What a signature does not say of a function: parameters without names or annotations."""
    found = list(inspect.signature(function).parameters.values())
    named = [p for p in found if p.name not in ("self", "cls")]
    return [
        p.name
        for p in named
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.annotation is p.empty
    ]


def test_every_signature_says_what_is_taken() -> None:
    found = dict(public())
    assert len(found) > 150 and {"cpdhpc.simulate", "cpdhpc.compress.LowBit"} <= found.keys()
    wrong = {}
    for name, value in found.items():
        try:
            wrong[name] = hidden(value)
        except ValueError as error:  # of an exception class, say: Python's own constructor
            assert issubclass(value, Exception), error
    assert {name for name, said in wrong.items() if said} == OPEN.keys()
    assert hidden(lambda *given, **options: None) == ["given", "options"]


def test_a_compressor_shows_its_fields_and_defaults() -> None:
    shown = inspect.signature(cpdhpc.compress.PowerSgd).parameters
    assert shown["rank"].default == 2 and "int" in shown["rank"].annotation
    assert "given" not in shown and next(iter(shown)) == "wire"
    assert cpdhpc.compress.PowerSgd(rank=3).rank == 3
    with pytest.raises(TypeError):
        inspect.signature(cpdhpc.compress.PowerSgd).bind(ranks=3)


def test_simulate_takes_what_allreduce_takes() -> None:
    ours, its = (inspect.signature(f).parameters for f in (cpdhpc.simulate, cpdhpc.allreduce))
    same = [name for name in its if name not in ("world", "x")]
    assert [n for n in ours if n not in ("xs", "nodes")] == same
    assert all(ours[name] == its[name] for name in same)


def test_a_recorder_takes_the_keys_of_its_table() -> None:
    from cpdhpc.torch.precision import Recorder
    from cpdhpc.torch.precision.recording import Recording

    shown = inspect.signature(Recorder).parameters
    fields = {n: f.default for n, f in Recording.model_fields.items() if n != "file"}
    assert {name: shown[name].default for name in fields} == fields


@every("package", PACKAGES)
def test_what_is_offered_is_listed_and_explained(package: str) -> None:
    """In dir, in help, for type checkers: the same names, and nothing that is only imported."""
    module = import_module(package)
    names = offered(package)
    listed = {name for name in dir(module) if not name.startswith("_")}
    assert names.keys() <= listed
    assert not {"Any", "TYPE_CHECKING", "import_module", "lazily"} & listed or package == FORMATS
    text = pydoc.plain(pydoc.render_doc(module))
    for name, value in names.items():
        if inspect.isclass(value) or inspect.isfunction(value):
            assert f"class {name}(" in text or f"class {name}\n" in text or f"{name}(" in text, name
    assert (module.__doc__ or "").strip()


FORMATS = "cpdhpc.formats"  # a module, not a package


def static(package: str) -> set[str]:
    """The names that a package imports for whom reads it without running it, and defines."""
    path = import_module(package).__file__
    assert path is not None
    tree = ast.parse(Path(path).read_text())
    names = {
        a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names
    }
    return names | {
        t.id
        for n in tree.body
        if isinstance(n, ast.Assign | ast.AnnAssign)
        for t in (n.targets if isinstance(n, ast.Assign) else [n.target])
        if isinstance(t, ast.Name)
    }


@every("package", [each for each in PACKAGES if each != FORMATS])
def test_type_checkers_see_all_names(package: str) -> None:
    """And each name of the package is in __all__, a list that they can read."""
    module = import_module(package)
    assert set(module.__all__) <= static(package)
    source = Path(str(module.__file__)).read_text()
    (listed,) = (
        n.value
        for n in ast.parse(source).body
        if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__"
    )
    assert ast.literal_eval(listed) == module.__all__
    lazy = {name for name in static(package) if name not in vars(module)} - {"TYPE_CHECKING"}
    assert lazy <= set(module.__all__)


def run(program: str) -> subprocess.CompletedProcess[str]:
    return ran([sys.executable, "-c", program])


def test_star_import_and_modules_by_attribute() -> None:
    """In a fresh interpreter, as others may have imported the modules here. Without torch."""
    done = run(
        "import sys, cpdhpc\n"
        "assert cpdhpc.darray.WindowPlan and cpdhpc.compress.LowBit\n"
        "assert cpdhpc.torch.precision.Policy\n"
        "from cpdhpc import *\n"
        "assert World and simulate and darray and not {'Any', 'import_module'} & set(globals())\n"
        "names = {n for n in globals() if not n.startswith('_')} - {'sys', 'cpdhpc'}\n"
        "assert names == set(cpdhpc.__all__), names\n"
        "assert not {'torch', 'mpi4py.MPI', 'cupy'} & set(sys.modules)\n"
        "from cpdhpc.formats import *\n"
        "assert FloatFormat and not {'Any', 'Literal', 're', 'struct'} & set(globals())\n"
    )
    assert not done.stderr, done.stderr


@every(
    "use",
    [
        "cpdhpc.torch.GradientReducer",
        "cpdhpc.torch.precision.Linear",
        "cpdhpc.torch.split_images.ImageGrid",
    ],
)
def test_what_needs_torch_says_how_to_install_it(use: str) -> None:
    done = run(
        "import sys; sys.modules['torch'] = None\n"
        "import cpdhpc, pydoc\n"
        "assert 'GradientReducer' in pydoc.render_doc(cpdhpc)\n"
        f"try: {use}\n"
        "except ImportError as error: print(error)\n"
    )
    said = f"{use}: torch is not installed: pip install 'cpdhpc[torch]'\n"
    assert (done.stdout, done.stderr) == (said, "")
