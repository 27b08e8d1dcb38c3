"""bench optimizer: its layers, a line of each optimiser, wrong options."""

import pytest

from cpdhpc.lab.bench.optimizers import layers
from cpdhpc.lab.cli import main
from cpdhpc.lab.train.optimizers import OPTIMIZERS


def test_layers_are_those_of_resnet_18() -> None:
    """11,689,512 is its number of parameters with the usual widths."""
    shapes = layers([64, 128, 256, 512])
    assert len(shapes) == 62
    total = 0
    for shape in shapes:
        size = 1
        for side in shape:
            size *= side
        total += size
    assert total == 11_689_512


def test_each_optimiser_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """298 values before the stages, 160 and 333 in them, 4,000 after them."""
    assert main(["bench", "optimizer", "--widths", "2,3", "--repeats", "3", "--warmup", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line[:18].strip(): line[18:].split() for line in lines if line[0] != "#"}
    assert set(OPTIMIZERS) < set(cells) and "4,791 float32 values in 32 layers" in lines[1]
    for median, fastest, slowest, _, ratio in cells.values():
        assert 0 < float(fastest) <= float(median) <= float(slowest) and float(ratio) > 0
    assert cells["adam"][-1] == "1.00"
