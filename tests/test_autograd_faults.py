"""Ranks whose graphs differ end with a message that names rank, plan and call, and never hang."""

import re

import pytest
from test_faults import LATE_S, MPIRUN, launch

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.mpi_skip,
    pytest.mark.skipif(MPIRUN is None, reason="needs mpirun, beside python or in PATH"),
]

GRAPH = """
import torch
from cpdhpc.darray import Box, Layout, WindowPlan
from cpdhpc.darray.autograd import exchange, join
layout = Layout.grid((8,), (2,))
start, stop = layout.owner(world.rank)
plan = WindowPlan(world, layout, Box((start[0] - 1,), (stop[0] + 1,)), "wrap", name="pixels")
leaf = torch.ones(4, requires_grad=True)
one, two = exchange(leaf, plan), exchange(2 * leaf, plan)
"""


def test_a_rank_whose_loss_leaves_out_an_exchange_is_named():
    status, output, taken_s = launch(
        GRAPH + "if world.rank == 0: one.sum().backward()\nworld.barrier('the end')\n"
    )
    assert status != 0 and taken_s < LATE_S
    assert re.search(
        r"rank 0 \| accumulate of plan 'pixels': waited [\d.]+ s for rank 1", output
    ), output
    assert re.search(r"rank 1 \| the end: waited", output), output


def test_a_backward_of_another_call_is_not_taken_for_this_one():
    status, output, _ = launch(GRAPH + "(one + two if world.rank == 0 else one).sum().backward()\n")
    assert status != 0
    # The call made last comes first in backward: 1,000,002 is of two, 1,000,001 of one.
    assert "accumulate of plan 'pixels': rank 1 is at number 1000001, " in output or (
        "accumulate of plan 'pixels': rank 0 is at number 1000002, " in output
    ), output


def test_the_cure_for_both():
    status, output, _ = launch(
        GRAPH + "loss = join(one.sum(), two) if world.rank else (one + two).sum()\n"
        "loss.backward()\nprint('gradient', int(leaf.grad.sum()))\n"
    )
    # A rank has 4 cells in its own window and 2 in the other's, and two, which is of doubled cells,
    # counts in rank 0's window only: 4 + 2 + 2 * 4 there, 4 + 2 + 2 * 2 on rank 1.
    assert status == 0, output
    assert "gradient 14" in output and "gradient 10" in output, output
