"""docs/examples.rst has an example of each public name for which one helps; each is run."""

import doctest
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from test_api import PACKAGES, offered
from training import ROOT

TEXT = (ROOT / "docs" / "examples.rst").read_text()
EXAMPLES = dict(
    re.findall(r"^(cpdhpc[\w.]+)\n-+\n\n(.*?)(?=\n^cpdhpc[\w.]+\n-|\Z)", TEXT, re.M | re.S)
)
INNER = ["controllers", "precision", "quantized", "split_images"]
NEEDS_A_START = "needs a start of torch.distributed: the guides of docs/howto have it"
MET = "is met, not made: by those who write a compressor or a controller"
WITHOUT = {  # public name -> why an example would not help
    "cpdhpc.RankFailure": "needs ranks that die",
    "cpdhpc.use_gpu": "needs a GPU",
    "cpdhpc.compress.Aggregator": "docs/howto/add_compressor.md has one",
    "cpdhpc.compress.Column": MET,
    "cpdhpc.darray.Description": "is what describe returns",
    "cpdhpc.torch.ddp_hook": NEEDS_A_START,
    "cpdhpc.torch.fsdp_hook": NEEDS_A_START,
    "cpdhpc.torch.set_wires": NEEDS_A_START,
    "cpdhpc.torch.controllers.BySchedule": "is in the example of Settings",
    "cpdhpc.torch.controllers.Control": MET,
    "cpdhpc.torch.controllers.Controller": MET,
    "cpdhpc.torch.controllers.Norms": MET,
    "cpdhpc.torch.controllers.Scheduled": "is in the example of Settings",
    "cpdhpc.torch.precision.Conv1d": "is as Conv2d",
    "cpdhpc.torch.precision.Conv3d": "is as Conv2d",
    "cpdhpc.torch.precision.Recorder": "writes a file: docs/reference/precision.md has it",
    "cpdhpc.torch.quantized.IntegerNetwork": "is what load returns",
    "cpdhpc.torch.quantized.IntegerNorm": "is what integer_norm returns",
    "cpdhpc.torch.quantized.load": "needs the file of a trained network",
}


def names() -> set[str]:
    """Every public class and function, once: at the shortest of its names."""
    found: dict[int, str] = {}
    for package in [*PACKAGES, *(f"cpdhpc.torch.{name}" for name in INNER)]:
        for name, value in offered(package).items():
            if inspect.isclass(value) or inspect.isfunction(value):
                found.setdefault(id(value), f"{package}.{name}")
    return set(found.values())


def value_of(name: str) -> Any:
    """What a dotted name stands for."""
    package, _, last = name.rpartition(".")
    return getattr(import_module(package), last)


def test_every_public_name_has_an_example_or_a_reason() -> None:
    assert len(names()) > 80
    assert not names() - EXAMPLES.keys() - WITHOUT.keys()
    assert not EXAMPLES.keys() & WITHOUT.keys()
    assert all(value_of(name) is not None for name in (*EXAMPLES, *WITHOUT))


@pytest.mark.filterwarnings("ignore:allreduce. algorithm='ring':UserWarning")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gives_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestParser().get_doctest(EXAMPLES[name], {}, name, "docs/examples.rst", 0)
    assert found.examples
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found, out=said.append)
    assert not said, "".join(said)
