"""Export of a trained network as integers.

Reads the checkpoint of a run of a quantised model ([model] name = "quantized_cnn", or an imported
torch.nn.Sequential of layers of cpdhpc.torch.quantized.layers). Tests on all test samples that the
integers give the same classes as the model, then writes them. cpdhpc.torch.quantized.load reads
the file.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import store
from ...config import ConfigError, validate
from ..settings import add_settings, override
from .job import Job, laid_over

if TYPE_CHECKING:
    import torch

    from ...torch.quantized import IntegerNetwork
    from .samples import Samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="RUN.checkpoint.h5", help="checkpoint of train"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.h5", help="file of the integers"
    )
    add_settings(parser, "present place of the data, for example data.dir=DIR; may be repeated")


def run(arguments: argparse.Namespace) -> None:
    """Export a checkpoint's model. Raises UserError, in one line, if it has no integer form."""
    from ...torch.quantized.integers import KIND
    from ...torch.quantized.layers import to_integers

    store.check_target(arguments.out, KIND)
    job, model, test = trained(arguments.checkpoint, arguments.set)
    try:
        network = to_integers(model)
    except ValueError as error:
        raise ConfigError(f"{arguments.checkpoint}: {error}") from None
    samples, correct = compare(model, network, test)
    network.save(arguments.out, {"name": job.id, "toml": job.toml()})
    print(table(network))
    print(
        f"{samples} of {samples} test samples: the class of the trained model; "
        f"accuracy {correct / samples:.2%}\nintegers: {arguments.out}"
    )


def trained(path: Path, settings: list[str]) -> tuple[Job, torch.nn.Module, Samples]:
    """Return the job of a checkpoint, its model in evaluation mode, and the test samples.

    settings: override keys of data. Raises UserError if the file is not a checkpoint of train, or
    the data is not the run's.
    """
    from .checkpoint import FEW, CheckpointError, data_digest, load_model, read_checkpoint
    from .setup import build_model, samples_of

    for setting in settings:
        if not setting.startswith("data."):
            raise ConfigError(f"--set {setting}: only keys of data may be set")
    groups, attributes = read_checkpoint(path)
    raw = override(tomllib.loads(attributes["toml"]), settings, laid_over)
    job = validate(Job, raw, str(path))
    data = job.data.load()
    model = build_model(job, data)
    try:
        load_model(groups, model)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    model.eval()
    train, test = samples_of(data)
    known = attributes.get("data", "")  # older versions did not keep it
    if known and known != data_digest(train, test, FEW):
        raise ConfigError(f"{path}: the data set differs from the run's")
    if not known:
        print(f"{path}: has no digest of its data, so it is unknown whether this is the run's data")
    return job, model, test


def compare(model: torch.nn.Module, network: IntegerNetwork, test: Samples) -> tuple[int, int]:
    """Return the number of test samples, and the number of right classes.

    Raises ConfigError if model and network give different classes.
    """
    import torch

    from .step import samples_at_once

    correct = differing = 0
    at_once = samples_at_once(model, test)
    for first in range(0, len(test), at_once):
        index = np.arange(first, min(first + at_once, len(test)))
        inputs, targets = test.take(index, 0)
        with torch.no_grad():
            wanted = model(inputs).argmax(1).numpy()
        found = network.classes(inputs.numpy())
        differing += int((found != wanted).sum())
        correct += int((found == targets.numpy()).sum())
    if differing:
        raise ConfigError(
            f"export: {differing} of {len(test)} test samples get another class by integers: "
            "nothing was written"
        )
    return len(test), correct


def table(network: IntegerNetwork) -> str:
    """Return a line for each norm: range of sums, shifts, and how many bits its numbers take."""
    from ...torch.quantized import IntegerNorm

    lines = [f"{'norm':>5}{'channels':>10}{'sums':>20}{'shift':>12}{'A':>5}{'B':>5}{'A x + B':>9}"]
    norms = [layer for layer in network.layers if isinstance(layer, IntegerNorm)]
    for number, norm in enumerate(norms):
        bits = {name: int(each.max()) for name, each in norm.widths().items()}
        sums = f"{norm.low.min()}..{norm.high.max()}"
        shift = f"{norm.shift.mean():.1f}, {norm.shift.max()}"
        lines.append(
            f"{number:>5}{norm.shift.size:>10}{sums:>20}{shift:>12}"
            f"{bits['multiplier']:>5}{bits['offset']:>5}{bits['sum']:>9}"
        )
    lines.append("shift: mean, largest; A, B, A x + B: bits of the largest, with the sign")
    return "\n".join(lines)
