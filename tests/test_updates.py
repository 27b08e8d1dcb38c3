"""Weights and states of few bits: each optimiser beside itself, rounded by hand with ml_dtypes."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from every import every
from torch.nn import Parameter

from cpdhpc.config import ConfigError, validate
from cpdhpc.lab.train.optimizers import OPTIMIZERS
from cpdhpc.torch.precision.tensors import TensorFormat, UpdateFormat
from cpdhpc.torch.precision.updates import RoundedUpdates

Array = np.ndarray[Any, np.dtype[Any]]
SHAPES = [(4, 3), (5,), (2, 3, 2, 1)]
BF16 = {"format": "bf16", "master": False}


class Row(NamedTuple):
    update: UpdateFormat | None = None
    states: TensorFormat | None = None


def row_of(**tables: Any) -> Row:
    rows = {"update": UpdateFormat, "states": TensorFormat}
    return Row(**{key: rows[key].model_validate(table) for key, table in tables.items()})


def layers() -> list[Parameter]:
    rng = np.random.default_rng(1)
    return [Parameter(torch.from_numpy(rng.standard_normal(s).astype("f4"))) for s in SHAPES]


def set_gradients(parameters: list[Parameter], step: int) -> None:
    rng = np.random.default_rng(step)
    for p in parameters:
        p.grad = torch.from_numpy(rng.standard_normal(tuple(p.shape)).astype("f4"))


def rounded(parameters: list[Parameter], name: str = "sgd", **row: Any) -> torch.optim.Optimizer:
    optimizer = validate(OPTIMIZERS[name], {}, name).build(parameters, 0.01)
    RoundedUpdates(optimizer, dict.fromkeys(parameters, row_of(**row)), seed=3)
    return optimizer


def steps(optimizer: Any, parameters: list[Parameter], which: range) -> list[torch.Tensor]:
    for step in which:
        set_gradients(parameters, step)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


def bf16(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy().astype(ml_dtypes.bfloat16).astype("f4"))


@every("name", OPTIMIZERS)
def test_each_optimiser_steps_from_what_was_rounded(name: str) -> None:
    parameters, ours = layers(), layers()
    plain = validate(OPTIMIZERS[name], {}, name).build(parameters, 0.01)
    optimizer = rounded(ours, name, update=BF16, states="bf16")
    with torch.no_grad():
        for p in parameters:
            p.copy_(bf16(p))
        for step in range(4):
            set_gradients(parameters, step)
            plain.step()
            for p in parameters:
                p.copy_(bf16(p))
                for kept in plain.state[p].values():
                    if kept.shape == p.shape:
                        kept.copy_(bf16(kept))
            steps(optimizer, ours, range(step, step + 1))
            assert all(torch.equal(a, b) for a, b in zip(ours, parameters, strict=True))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_master_copy_goes_where_float32_goes(name: str) -> None:
    """The gradients being given, it is the float32 run, and the weights are its rounded values."""
    ours, parameters = layers(), layers()
    optimizer = rounded(ours, name, update="bf16")
    plain = validate(OPTIMIZERS[name], {}, name).build(parameters, 0.01)
    for step in range(4):
        steps(optimizer, ours, range(step, step + 1))
        steps(plain, parameters, range(step, step + 1))
        for p, expected in zip(ours, parameters, strict=True):
            assert torch.equal(p, bf16(expected))


def test_small_steps_are_lost_kept_by_kahan_and_taken_by_chance() -> None:
    """512 steps of 2^-10 from 1 to 1.5, where bf16's numbers are 2^-7 apart."""
    found = {}
    for way in ({}, {"kahan": True}, {"rounding": "stochastic"}):
        p = Parameter(torch.ones(100 if "rounding" in way else 1))
        optimizer = torch.optim.SGD([p], 2.0**-10)
        row = row_of(update=BF16 | way)
        RoundedUpdates(optimizer, {p: row}, seed=1)
        p.grad = -torch.ones_like(p)
        for _ in range(512):
            optimizer.step()
        found[str(way)] = p.detach().numpy().copy()
        assert torch.equal(p, bf16(p))
    lost, kept, chance = found.values()
    assert lost == [1]
    assert abs(kept[0] - 1.5) <= 2.0**-7  # what is missing is less than one spacing of bf16
    # A walk of 512 steps of 0 or 2^-7 with a chance of 2^-3: its deviation is below
    # 2^-7 sqrt(512 * 2^-3) = 0.0625; six of the mean of 100 are 0.0375.
    assert abs(chance.mean() - 1.5) < 0.0375 and len(set(chance.tolist())) > 10


KEEPING: list[dict[str, Any]] = [
    {"update": BF16 | {"rounding": "stochastic"}, "states": "e4m3"},
    {"update": BF16 | {"kahan": True}, "states": {"format": "int8", "scaling": "block16"}},
    {"update": {"format": "e4m3", "scaling": "delayed", "history": 3}},
    {"states": {"format": "e5m2", "scaling": "delayed", "history": 2, "rounding": "stochastic"}},
    {"update": {"format": "int16", "scaling": "flexpoint", "master": False}},
]


@every("row", KEEPING)
def test_a_state_dict_goes_on_with_the_same_bits(row: dict[str, Any]) -> None:
    whole = layers()
    expected = steps(rounded(whole, "adam", **row), whole, range(6))
    first = layers()
    former = rounded(first, "adam", **row)
    steps(former, first, range(3))
    again = [Parameter(torch.zeros_like(p)) for p in first]
    latter = rounded(again, "adam", **row)
    with torch.no_grad():
        for p, there in zip(again, first, strict=True):
            p.copy_(there)
    latter.load_state_dict(former.state_dict())
    found = steps(latter, again, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    other = layers()
    plain = steps(validate(OPTIMIZERS["adam"], {}, "a").build(other, 0.01), other, range(6))
    assert not any(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_what_has_no_gradient_or_no_row_stays_and_a_failed_step_loses_nothing() -> None:
    parameters = layers()
    optimizer = torch.optim.SGD(parameters, 0.5)
    row = row_of(update="e4m3")
    RoundedUpdates(optimizer, {parameters[0]: row, parameters[1]: row})
    before = [p.detach().clone() for p in parameters]
    parameters[0].grad = torch.ones_like(parameters[0])
    parameters[2].grad = torch.full_like(parameters[2], 1e-3)

    def failing() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(failing)
    optimizer.step()
    assert torch.equal(parameters[1], before[1])
    exact = layers()[0] - 0.5
    assert torch.equal(optimizer.state[parameters[0]]["precision_master"], exact)
    assert torch.equal(parameters[2], before[2] - 0.5 * 1e-3)


def test_bad_updates_are_told() -> None:
    for table in ({"kahan": True}, {"kahan": True, "master": False, "scaling": "aps"}):
        with pytest.raises(ConfigError, match=r"kahan=true: needs master=false and scaling"):
            validate(UpdateFormat, {"format": "bf16"} | table, "row")
    p = Parameter(torch.ones(2, dtype=torch.float64))
    row = row_of(update="bf16")
    with pytest.raises(TypeError, match=r"RoundedUpdates: a parameter is torch.float64 on cpu"):
        RoundedUpdates(torch.optim.SGD([p], 1.0), {p: row})
