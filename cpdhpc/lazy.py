"""Names of a package that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module

EXTRAS = {  # package -> extra of setup.cfg that brings it
    **dict.fromkeys(("torch", "pydantic", "tomli_w"), "torch"),
    **dict.fromkeys(
        ("h5py", "jinja2", "matplotlib", "rich", "scipy", "simpleeval", "sklearn"), "lab"
    ),
    "cupy": "gpu12",
}
REQUIRED = ("mpi4py", "numpy")  # what setup.cfg always installs


def to_install(error: ImportError, extra: str | None = None) -> str | None:
    """Return what to say of a package that is not installed; None for errors of another cause.

    extra: what brings all that a command needs, but for GPUs
    """
    missing = str(error.name or "").partition(".")[0]
    if missing == "cpdhpc" and "_cpu" in str(error):
        return "cpdhpc._cpu is not compiled: pip install -e . in the folder of the clone"
    if not isinstance(error, ModuleNotFoundError) or missing == "cpdhpc":
        return None
    if missing not in EXTRAS:
        return f"{missing} is not installed: pip install {missing}"
    brings = EXTRAS[missing] if extra is None or missing == "cupy" else extra
    return f"{missing} is not installed: pip install 'cpdhpc[{brings}]'"


def lazily(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return __getattr__ and __dir__ of a package.

    modules: public name -> the module of the package that has it, "" for one that is a module
    A name that needs a package which is not installed raises ModuleNotFoundError, of one line.
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            found = import_module(f"{package}.{modules[name] or name}")
        except ModuleNotFoundError as error:
            said = to_install(error)
            if said is None:
                raise
            raise ModuleNotFoundError(f"{package}.{name}: {said}", name=error.name) from None
        value = getattr(found, name) if modules[name] else found
        setattr(sys.modules[package], name, value)  # not asked for again
        return value

    def names() -> list[str]:
        special = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*special, *sys.modules[package].__all__})

    return get, names


def formerly(former: str, module: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return __getattr__ and __dir__ of a module that has another name now.

    Each use of a name is a DeprecationWarning that says where it is.
    """

    def get(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {former!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
        said = f"{former}.{name} is {module}.{name} since 0.3, and will be gone in 0.4"
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        return value

    return get, lambda: dir(import_module(module))
