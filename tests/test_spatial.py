"""Networks on parts of images, on one rank: geometry, what can be split, what cannot and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training import small_data, small_job

from cpdhpc.config import ConfigError
from cpdhpc.split_images import partition
from cpdhpc.split_images.grid import ImageGrid
from cpdhpc.split_images.layers import Sliding
from cpdhpc.train.setup import Files, prepare
from cpdhpc.world.ranks import Loopback


def alone() -> ImageGrid:
    return ImageGrid(Loopback(), (1, 1))


def random_sliding(rng: np.random.Generator) -> Sliding:
    size = tuple(rng.integers(1, 6, 2).tolist())
    step, dilation = (tuple(rng.integers(1, top, 2).tolist()) for top in (5, 4))
    before = tuple(int(rng.integers(0, k // 2 + 1)) for k in size)
    return Sliding(size, step, before, before, dilation, bool(rng.random() < 0.5))


def test_output_sizes_are_those_of_torch() -> None:
    """300 filters over random images; pooling has ceil_mode, and torch refuses empty outputs."""
    rng, refused, rounded_up = np.random.default_rng(0), 0, 0
    for _ in range(300):
        shape, sliding = tuple(rng.integers(1, 20, 2).tolist()), random_sliding(rng)
        size, step, before, _, dilation, ceil = sliding
        pool = nn.MaxPool2d(size, step, before, dilation, ceil_mode=ceil)
        try:
            expected = tuple(pool(torch.zeros(1, 1, *shape)).shape[2:])
        except RuntimeError:
            refused += 1
            with pytest.raises(ValueError, match="its output is"):
                sliding.outputs(shape)
            continue
        assert sliding.outputs(shape) == expected
        room = (shape[0] + 2 * before[0] - dilation[0] * (size[0] - 1) - 1) // step[0] + 1
        rounded_up += room != expected[0]
    assert refused > 10 and rounded_up > 10


def test_the_networks_share_parameters_buffers_names_and_modes() -> None:
    body = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU())
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))
    body[1].eval()
    net = partition(model, (5, 5), alone())
    assert list(net.state_dict()) == list(model.state_dict())
    for mine, its in zip(net.parameters(), model.parameters(), strict=True):
        assert mine is its
    modes = {name: module.training for name, module in net.named_modules()}
    assert not modes["0.1"] and modes["0.0"] and modes[""]
    net.train()
    net(torch.randn(2, 1, 5, 5))
    assert int(body[1].num_batches_tracked) == 1
    net.load_state_dict(model.state_dict())
    assert net.shape is None and partition(body, (5, 5), alone()).shape == (3, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}],
    ids=str,
)
def test_batch_norm_is_that_of_torch(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Within 8 units of roundoff of the largest value, after three batches and in evaluation.

    A value is (x - mean) * scale + shift: each of the three operations and the roundings of mean,
    variance, root and scale count once or twice, with statistics of float64 in both.
    """
    torch.manual_seed(0)
    serial = nn.BatchNorm2d(3, **options).to(dtype)
    twin = nn.BatchNorm2d(3, **options).to(dtype)
    net = partition(nn.Sequential(nn.Conv2d(3, 3, 1), twin), (4, 5), alone())[1]
    bound = 8 * torch.finfo(dtype).eps
    for training in (True, True, True, False):
        serial.train(training)
        net.train(training)
        x = torch.randn(6, 3, 4, 5, dtype=dtype) + 3
        expected = serial(x)
        assert (net(x) - expected).abs().max() <= bound * expected.abs().max()
    for mine, its in zip(net.buffers(), serial.buffers(), strict=True):
        assert mine.dtype == its.dtype and torch.allclose(mine, its, bound, 0)


def conv(**options: Any) -> nn.Module:
    return nn.Conv2d(1, 2, 3, **options)


class Own(nn.Conv2d):
    """A layer that may do anything."""


def hooked() -> nn.Module:
    layer = conv()
    layer.register_forward_hook(lambda *_: None)
    return layer


REFUSED = {  # the layers of a network -> what is said
    "unknown": (
        [conv(), nn.Softmax2d()],
        TypeError,
        r"layer 1, Softmax2d\(\).*known are Ada",
    ),
    "subclass": ([Own(1, 1, 3)], TypeError, "layer 0, Own.*cannot be split: known are"),
    "dropout": ([conv(), nn.Dropout2d()], TypeError, "each rank would draw another mask"),
    "linear": ([conv(), nn.Linear(6, 2)], TypeError, "before the maps are gathered by Flatten"),
    "late": ([conv(), nn.Flatten(), conv()], TypeError, "layer 2.*comes after the gather"),
    "norm": (
        [conv(), nn.Flatten(), nn.BatchNorm1d(72)],
        TypeError,
        "statistics of its own images alone",
    ),
    "nested": ([nn.Sequential(conv(), nn.Fold(2, 2))], TypeError, r"layer 0\.1, Fold"),
    "hooks": ([hooked()], ValueError, "layer 0.*has hooks"),
    "flatten": ([conv(), nn.Flatten(2)], ValueError, r"layer 1.*Flatten\(1, -1\)"),
    "unflatten": ([nn.Unflatten(1, (2, 4)), conv()], ValueError, r"only Unflatten\(1, \(1, 8\)\)"),
    "indices": ([nn.MaxPool2d(2, return_indices=True)], ValueError, "layer 0.*return_indices"),
    "padding": ([nn.MaxPool2d(2, padding=2)], ValueError, "layer 0.*at most half of kernel_size"),
    "small": ([nn.AvgPool2d(3), conv()], ValueError, r"layer 1.*output is 0 x 0 for an .*\(2, 2\)"),
    "nothing": ([nn.Flatten(), nn.Linear(64, 2)], ValueError, "no convolution or pooling"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_named(name: str) -> None:
    layers, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        partition(nn.Sequential(*layers), (8, 8), alone())


def test_models_other_than_sequential_are_refused() -> None:
    with pytest.raises(TypeError, match=r"model is Conv2d: known are .*Sequential"):
        partition(conv(), (8, 8), alone())


def test_inputs_of_another_shape_are_refused() -> None:
    net = partition(nn.Sequential(conv()), (8, 8), alone())
    with pytest.raises(ValueError, match=r"layer 0 \(Conv2d\): .*\[batch, channels, 8, 8\]"):
        net(torch.zeros(1, 1, 8, 7))


@pytest.mark.parametrize("procs", [(0, 1), (1,), (1, 1.0), (2, 1)])
def test_grids_that_do_not_fit_are_refused(procs: Any) -> None:
    with pytest.raises(ValueError, match="ImageGrid: procs="):
        ImageGrid(Loopback(), procs)
    with pytest.raises(ValueError, match="virtual ranks"):
        ImageGrid(Loopback(2), (2, 1))


@pytest.mark.parametrize("change", [{"virtual_ranks": 2}, {"overlap": True}])
def test_jobs_refuse_what_does_not_go_with_split_images(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"image_grid other than \[1, 1\] needs"):
        small_job(train={"image_grid": [2, 1], **change})


def test_jobs_say_which_grid_does_not_fit(tmp_path: Any) -> None:
    job = small_job(train={"image_grid": [1, 2]})
    with pytest.raises(ConfigError, match="multiple of 2"):
        prepare(job, Loopback(), small_data(), Files.of(tmp_path, job))
