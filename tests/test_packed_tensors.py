"""The collectives beside the all-reduce take torch tensors, of its own dtypes, too."""

import numpy as np
import pytest
from refusing import refused

import cpdhpc
from cpdhpc import Loopback

torch = pytest.importorskip("torch")
DTYPES = ["float32", "bfloat16", "float16", "int64", "bool", "uint8", "complex64", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_move_as_they_are(dtype):
    xs = [(torch.arange(6) % 2 + i).reshape(2, 3).to(getattr(torch, dtype)) for i in range(2)]
    as_bytes = [x.view(torch.uint8) if x.dtype.is_floating_point else x for x in xs]
    got = cpdhpc.all_gather(Loopback(2), xs)
    assert got.dtype == xs[0].dtype and got.shape == (4, 3)
    shown = got.view(torch.uint8) if got.dtype.is_floating_point else got
    assert torch.equal(shown, torch.cat(as_bytes))
    for name in ("all_to_all", "broadcast", "gather"):
        found = getattr(cpdhpc, name)(Loopback(2), xs)
        found = found[0] if isinstance(found, list) else found
        assert found.dtype == xs[0].dtype
    got = cpdhpc.scatter(Loopback(2), [xs[0], None])
    assert [each.shape for each in got] == [(1, 3)] * 2 and got[1].dtype == xs[0].dtype
    out = torch.empty(4, 3, dtype=xs[0].dtype)
    assert cpdhpc.all_gather(Loopback(2), xs, out=out) is out


def test_tensors_are_summed_with_a_wire():
    xs = [torch.randn(2048, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    got = cpdhpc.reduce_scatter(Loopback(2), xs, "e4m3")
    right = cpdhpc.reduce_scatter(Loopback(2), [x.numpy() for x in xs], "e4m3")
    for a, b in zip(got, right, strict=True):
        assert isinstance(a, torch.Tensor)
        np.testing.assert_array_equal(a.numpy(), b)
    total = cpdhpc.reduce(Loopback(2), xs)
    assert torch.equal(total, xs[0] + xs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_gradient_would_be_lost(dtype):
    x = torch.ones(4, requires_grad=True).to(dtype)
    with refused("all_gather", "x", "without gradient: .detach()"):
        cpdhpc.all_gather(Loopback(), x)
    with torch.no_grad():
        assert cpdhpc.all_gather(Loopback(), x).dtype == dtype


def test_what_is_no_plain_tensor_is_an_error():
    x = torch.ones(4, requires_grad=True)
    with refused("all_gather", "x of rank 0", "without gradient: .detach()"):
        cpdhpc.all_gather(Loopback(2), [x, x])
    with refused("reduce_scatter", "x of rank 0", "must be integers, floats"):
        cpdhpc.reduce_scatter(Loopback(2), [torch.ones(4, dtype=torch.bfloat16)] * 2)
