"""Names of a package that are imported on first use (PEP 562)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType

EXTRAS = {  # package -> extra of setup.cfg that installs it
    **dict.fromkeys(("torch", "pydantic", "tomli_w"), "torch"),
    **dict.fromkeys(
        ("h5py", "jinja2", "matplotlib", "rich", "scipy", "shtab", "simpleeval", "sklearn"), "lab"
    ),
    "cupy": "gpu12",
}
REQUIRED = ("mpi4py", "numpy")  # what setup.cfg always installs


def to_install(error: ImportError, extra: str | None = None) -> str | None:
    """Return the advice for a package that is not installed; None for errors of another cause.

    extra: the one that installs everything a command needs, except for GPUs
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

    modules: public name -> the module of the package that has it, "" for a module itself
    A name that needs a package which is not installed raises ModuleNotFoundError, with one line.
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(f"{package}.{modules[name] or name}")
            value = getattr(module, name) if modules[name] else module
        except ModuleNotFoundError as error:
            advice = to_install(error)
            if advice is None:
                raise
            raise ModuleNotFoundError(f"{package}.{name}: {advice}", name=error.name) from None
        setattr(sys.modules[package], name, value)  # not looked up again
        return value

    def names() -> list[str]:
        special = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*special, *sys.modules[package].__all__})

    return get, names


class Late(ModuleType):
    """A module that is imported once a name of it is used, not where it is named."""

    def __getattr__(self, name: str) -> object:
        return getattr(import_module(self.__name__), name)


def formerly(former: str, module: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return __getattr__ and __dir__ of a module that was renamed.

    Each use of a name issues a DeprecationWarning with the new place.
    """

    def get(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {former!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
        message = f"{former}.{name} is {module}.{name} since 0.3, and will be gone in 0.4"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return value

    return get, lambda: dir(import_module(module))
