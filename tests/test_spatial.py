"""Networks on parts of images, on one rank: geometry, what can be split, what cannot and why."""

from typing import Any

import pytest
import torch
from every import every
from refusing import refused
from torch import nn
from training import ROOT, prepared, small_job

from cpdhpc.config import ConfigError
from cpdhpc.torch.split_images import partition
from cpdhpc.torch.split_images.layers import INSTEAD, LAYERS, page
from cpdhpc.torch.split_images.windowed import ImageGrid
from cpdhpc.world.ranks import Loopback


def alone() -> ImageGrid:
    return ImageGrid(Loopback(), (1, 1))


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
    assert net.split_shape is None and partition(body, (5, 5), alone()).split_shape == (3, 3)


@every("dtype", [torch.float32, torch.float64])
@every("options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
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


class Forward(nn.Module):
    """A convolution, and a function of what it gives."""

    def __init__(self, function: Any, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.function, self.layer = nn.Conv2d(1, 2, 3), function, layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.conv(x), self.layer)


REFUSED = {  # the layers of a network -> what is said
    "unknown": ([conv(), nn.Fold(2, 2)], TypeError, r"layer 1, Fold\(.*known are Ada"),
    "subclass": ([Own(1, 1, 3)], TypeError, "layer 0, Own.*cannot be split: known are"),
    "linear": ([conv(), nn.Linear(6, 2)], TypeError, r"layer 1, .*nn.Flatten\(1\)"),
    "late": ([conv(), nn.Flatten(), conv()], ValueError, r"layer 2: forward fails on images"),
    "nested": ([nn.Sequential(conv(), nn.Fold(2, 2))], TypeError, r"layer 0\.1, Fold"),
    "hooks": ([hooked()], ValueError, "layer 0.*has hooks"),
    "flatten": ([conv(), nn.Flatten(2)], ValueError, r"layer 1.*Flatten\(1, -1\)"),
    "unflatten": ([nn.Unflatten(1, (2, 4)), conv()], ValueError, r"only Unflatten\(1, \(1, 8\)\)"),
    "indices": ([nn.MaxPool2d(2, return_indices=True)], ValueError, "layer 0.*return_indices"),
    "padding": ([nn.MaxPool2d(2, padding=2)], ValueError, "layer 0.*at most half"),
    "reflection": ([nn.ReflectionPad2d(8)], ValueError, r"layer 0.*on \(8, 8\): "),
    "small": ([nn.AvgPool2d(3), conv()], ValueError, r"layer 1.*on \(2, 2\): "),
    "nothing": ([nn.Flatten(), nn.Linear(64, 2)], ValueError, "no convolution or pooling"),
    "rows": ([conv(), nn.LayerNorm(6)], ValueError, r"layer 1.*use LayerNorm\(\[channels"),
    "running": (
        [conv(), nn.InstanceNorm2d(2, track_running_stats=True)],
        ValueError,
        "layer 1.*use False, or BatchNorm2d",
    ),
    "softmax": ([conv(), nn.Softmax(-1)], ValueError, r"layer 1.*dim=-1: must be 1"),
    "slopes": ([conv(), nn.RReLU()], TypeError, "layer 1, RReLU.*use nn.LeakyReLU"),
    "values": ([Forward(lambda y, _: y / y.max().item())], TypeError, "layer 0: .*calls max on"),
    "stride": ([Forward(lambda y, _: y[:, :, ::2])], TypeError, r"layer 0: .*nn.MaxPool2d\(1, 2\)"),
    "view": ([Forward(lambda y, _: y.view(len(y), -1))], TypeError, "layer 0: .*calls view on"),
    "pad": ([Forward(lambda y, _: nn.functional.pad(y, (1, 1)))], TypeError, "nn.ZeroPad2d"),
    "pool": ([Forward(lambda y, _: nn.functional.max_pool2d(y, 2))], TypeError, "use nn.MaxPool2d"),
    "interpolate": (
        [Forward(lambda y, _: nn.functional.interpolate(y, scale_factor=2))],
        TypeError,
        "layer 0: .*calls interpolate on .*use nn.Upsample",
    ),
    "mean": ([Forward(lambda y, _: y.mean((2, 3)))], TypeError, r"nn.AdaptiveAvgPool2d\(1\)"),
    "turn": ([Forward(lambda y, _: y + y.mT)], TypeError, "layer 0: .*calls __get__ on"),
    "join": ([Forward(lambda y, _: torch.cat([y, y], 2))], TypeError, "layer 0: .*calls cat on"),
    "position": (
        [Forward(lambda y, _: y + torch.ones(6, 6, device=y.device))],
        TypeError,
        r"calls (__add__|add) on \(2, 2, 6, 6\), \(6, 6\)",
    ),
    "sizes": (
        [Forward(lambda y, layer: layer(layer(y)), nn.Conv2d(2, 2, 3))],
        ValueError,
        r"layer 0.layer.*is used on \(6, 6\) and on \(4, 4\).*a separate layer for each",
    ),
}


@every("name", REFUSED)
def test_what_cannot_be_split_is_named(name: str) -> None:
    layers, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        partition(nn.Sequential(*layers), (8, 8), alone())


def test_layers_that_forward_does_not_use_are_refused_later() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = conv(), nn.BatchNorm2d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x) if self.training else self.norm(self.conv(x))

    net = partition(Sometimes(), (8, 8), alone()).eval()
    with pytest.raises(RuntimeError, match="layer norm: was not used when"):
        net(torch.zeros(1, 1, 8, 8))


def test_every_activation_of_torch_is_known() -> None:
    """But for those that INSTEAD names, and attention."""
    names = set(nn.modules.activation.__all__) - {"MultiheadAttention"}
    known = {each.__name__ for each in (*LAYERS, *(e for e in INSTEAD if isinstance(e, type)))}
    assert names <= known


def test_the_page_for_users_lists_the_table() -> None:
    assert page() in (ROOT / "docs" / "reference" / "spatial.md").read_text()


def test_inputs_of_another_shape_are_refused() -> None:
    net = partition(nn.Sequential(conv()), (8, 8), alone())
    with pytest.raises(ValueError, match=r"layer 0 \(Conv2d\): .*\[batch, channels, 8, 8\]"):
        net(torch.zeros(1, 1, 8, 7))


@every("procs", [(0, 1), (1,), (1, 1.0), (2, 1)])
def test_grids_that_do_not_fit_are_refused(procs: Any) -> None:
    with refused("ImageGrid", "procs"):
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
        prepared(job, Loopback(), tmp_path)
