"""The autoencoder without MPI: images, files, pictures and errors."""

import ctypes
import multiprocessing
import platform
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from autoencoders import GEOMETRY
from every import every
from torch.utils._python_dispatch import TorchDispatchMode
from training import ROOT, write_idx

from cpdhpc import store
from cpdhpc.config import ConfigError
from cpdhpc.darray.layout import Layout as Cells
from cpdhpc.lab.autoencoder import blocks, passes, probe
from cpdhpc.lab.autoencoder.blocks import Filters, respond
from cpdhpc.lab.autoencoder.command import mosaic
from cpdhpc.lab.autoencoder.descent import Descent
from cpdhpc.lab.autoencoder.job import Geometry, Images, Layer, Source, load, stack
from cpdhpc.lab.autoencoder.layer import MacroLayer
from cpdhpc.lab.autoencoder.training import MMAP_MAX, TRIM_THRESHOLD, keep_freed_memory
from cpdhpc.lab.cli import main
from cpdhpc.lab.train.samples import DataError
from cpdhpc.world.ranks import Loopback

INPUTS = sorted((ROOT / "inputs").glob("cots_*.toml"))


def run(path: Path, out: Path, *settings: str, options: tuple[str, ...] = ()) -> int:
    words = [word for setting in settings for word in ("--set", setting)]
    return main(["autoencoder", str(path), "--out", str(out), *options, *words])


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.stem)
def test_inputs_run(path: Path, tmp_path: Path) -> None:
    write_idx(tmp_path)
    settings = ["train.iterations=2", "train.threads=1", "train.batch=2"]
    if path.stem == "cots_mnist":
        (images,) = tmp_path.glob("train-images*")
        settings += [f"data.path={images}", "data.tile=7", "data.size=28"]  # of 5 x 4 pixels each
    if path.stem == "cots_throughput":
        settings += ["data.size=34"]
    png = tmp_path / "filters.png"
    assert run(path, tmp_path / "out", *settings, options=("--png", str(png))) == 0
    assert png.stat().st_size > 1000
    groups, attributes = store.read(tmp_path / "out" / f"{path.stem}.h5")
    layers = len(load(path).layer)
    assert attributes["status"] == "complete" and len(groups["steps"]["loss"]) == 2 * layers


def test_error_falls_and_resuming_gives_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("data.size=16", "data.tile=2", "train.threads=1", "train.batch=8")
    whole = ("train.iterations=30", "train.checkpoint_every=7")
    path = ROOT / "inputs" / "cots_digits.toml"
    one = tmp_path / "one.toml"
    one.write_text(path.read_text().partition("[[layer]]                 # on")[0] + FINISH)
    assert run(one, tmp_path / "a", *small, *whole) == 0
    steps = store.read(tmp_path / "a" / "one.h5")[0]["steps"]
    relative = steps["error"] / steps["energy"]
    assert relative[-5:].mean() < 0.8 * relative[:2].mean()
    weights = store.read(tmp_path / "a" / "one.checkpoint.h5")[0]["layer0"]["weight"]
    lengths = np.linalg.norm(weights, axis=-1)
    np.testing.assert_allclose(lengths, 1, rtol=64 * 2.0**-24)  # sums of 64 squares in float32
    checkpoint_after(tmp_path / "b", one, small + whole)
    early = (tmp_path / "b" / "one.h5").read_bytes()
    (tmp_path / "early.h5").write_bytes(early)
    said = capsys.readouterr().out
    assert "layer 0 on 1 rank: error" in said and "stopped at layer 0, iteration 11: --r" in said
    assert run(one, tmp_path / "b", *small, *whole, options=("--resume",)) == 0
    again = store.read(tmp_path / "b" / "one.checkpoint.h5")[0]["layer0"]
    np.testing.assert_array_equal(again["weight"], weights)
    losses = store.read(tmp_path / "b" / "one.h5")[0]["steps"]["loss"]
    np.testing.assert_array_equal(losses, steps["loss"])
    assert run(one, tmp_path / "b", *small, *whole) == 2  # there already, and no --resume
    with h5py.File(tmp_path / "b" / "one.checkpoint.h5") as file:
        np.testing.assert_array_equal(file["layer0/weight"], weights)  # an ordinary file
    (tmp_path / "b" / "one.h5").write_bytes((tmp_path / "early.h5").read_bytes())
    assert run(one, tmp_path / "b", *small, *whole, options=("--resume",)) == 2
    assert "has 11 iterations before the end" in capsys.readouterr().err


FINISH = "\n[train]\nlearning_rate = 0.01\n"


def checkpoint_after(out: Path, path: Path, settings: tuple[str, ...]) -> None:
    """Train until the first checkpoint, then stop as SIGTERM does."""
    import signal

    from cpdhpc.lab.autoencoder.training import Stack

    real, count = Stack.step, 0

    def step(self: Stack, x: torch.Tensor) -> object:
        nonlocal count
        count += 1
        if count == 11:
            signal.raise_signal(signal.SIGTERM)
        return real(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stack, "step", step)
        assert run(path, out, *settings) == 128 + signal.SIGTERM


@pytest.mark.parametrize("few_bytes", [1, 2**21])
def test_overlay_is_the_transpose_of_respond(
    few_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block and all at once; in integers, exactly."""
    monkeypatch.setattr(blocks, "CPU_BYTES", few_bytes)
    geometry = Geometry(Layer(field=3, step=2, maps=4), (9, 7), 2)
    draw = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(-9, 9, shape, generator=draw).double().requires_grad_()

    window, weight = some(9, 7, 2, 3), some(12, 4, 18).detach()
    probe = some(4, 3, 4, 3).detach()
    filters = Filters(geometry, (4, 3), weight)
    got = respond(window, filters)
    field = window[2:5, 4:7].reshape(18, 3)
    assert torch.equal(got[1, 2], weight[5] @ field)
    assert (got * probe).sum() == (window * filters.overlay(probe, window.shape)).sum()
    torch.autograd.gradcheck(lambda w: respond(w, filters), window)
    none = Filters(geometry, (0, 3), weight[:0])
    empty = respond(window[:0, :0], none)
    assert empty.shape == (0, 3, 4, 3)
    assert none.overlay(empty, (0, 0, 2, 3)).shape == (0, 0, 2, 3)


class Operations(TorchDispatchMode):
    """Counts what is asked of torch, but for views: on a GPU each is a launch, or little more."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, function, types, args=(), kwargs=None
    ):
        aliases = [each.alias_info for each in function._schema.returns]
        self.count += not any(alias and not alias.is_write for alias in aliases)
        return function(*args, **kwargs or {})


def test_an_iteration_on_a_gpu_has_as_many_launches_for_any_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "CPU_BYTES", blocks.GPU_BYTES)
    monkeypatch.setattr(passes, "compiled", lambda like: False)
    counts = []
    for side in (12, 60):
        of = Geometry(Layer(field=4, step=2, maps=3, pool=2), (side, side), 2)
        layer = MacroLayer(Loopback(), of, Cells.grid(of.image, (1, 1)), (1, 1), seed=0)
        descent = Descent(layer, 20)
        with Operations() as asked:
            descent.step(torch.ones(side, side, 2, 20), 0.1, 0.9)
        counts.append(asked.count)
    assert counts[0] == counts[1] < 70


def test_pictures_have_each_filter_once() -> None:
    geometry = Geometry(Layer(field=4, step=2, maps=3), (8, 6), 1)
    weight = np.random.default_rng(0).standard_normal((*geometry.blocks, 3, 16))
    shown = mosaic(weight, geometry)
    side = 2 * (4 + 1) + 1
    assert shown.shape == (3 * side, 2 * side)
    part = shown[side : side + 4, side + 5 : side + 9]  # block (1, 1), filter 1
    values = weight[1, 1, 1].reshape(4, 4)
    np.testing.assert_allclose(part, 0.5 + values / (2 * np.abs(values).max()), rtol=1e-12)


@pytest.mark.parametrize("name", ["none/x.png", "x.nosuch"])
def test_pictures_that_cannot_be_are_refused_before_training(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "inputs" / "cots_digits.toml"
    assert run(path, tmp_path / "out", options=("--png", str(tmp_path / name))) == 2
    assert f"--png {tmp_path / name}: " in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.h5"))


@pytest.mark.parametrize("prepare", ["contrast", "whiten"])
def test_prepared_squares_have_mean_zero_and_variance_one(prepare: str) -> None:
    source = Source(name="digits", tile=3, size=16, prepare=prepare)
    batch = source.load().batch(4, seed=1, number=7)
    assert batch.shape == (16, 16, 1, 4) and batch.dtype == np.float32
    # float32 keeps 2**-24 of each of 256 values below 8
    np.testing.assert_allclose(batch.mean(axis=(0, 1, 2)), 0, atol=8 * 2.0**-24)
    np.testing.assert_allclose(batch.var(axis=(0, 1, 2)), 1, rtol=8 * 2.0**-22)
    np.testing.assert_array_equal(batch, source.load().batch(4, seed=1, number=7))
    assert (batch != source.load().batch(4, seed=1, number=8)).any()


def test_images_come_from_arrays_and_folders(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 6, 6, 3), np.uint8)
    np.save(tmp_path / "x.npy", pixels)
    from PIL import Image

    (tmp_path / "deep").mkdir()
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "deep" / f"{i}.png")
    of_array = Source(name="array", path=str(tmp_path / "x.npy"), prepare="none").load()
    folder = {"path": str(tmp_path), "size": 6, "channels": 3, "prepare": "none"}
    of_folder = Source(name="folder", **folder).load()
    np.testing.assert_array_equal(of_array.batch(3, 0, 0), of_folder.batch(3, 0, 0))
    assert of_array.batch(1, 0, 0).max() <= 1


@every(
    ("change", "message"),
    [
        ({"name": "array", "path": "missing.npy"}, "missing.npy: cannot be read"),
        ({"name": "folder", "path": ".git-none", "size": 8}, "holds no image files"),
        ({"name": "digits", "size": 9}, "data.size=9: an image has 8"),
        ({"name": "array", "path": "words.npy"}, "words.npy: is of <U1: must be uint8, or floats"),
        ({"name": "array", "path": "flat.npy"}, r"flat.npy: shape \(3,\): must be images"),
        ({"name": "array", "path": "nan.npy"}, "nan.npy: an image holds NaN or infinity"),
        ({"name": "folder", "path": "sizes", "size": 4, "tile": 2}, "sizes: images differ in size"),
        ({"name": "folder", "path": "torn", "size": 4}, "0.png: cannot be read"),
    ],
)
def test_data_that_cannot_be_used_is_named(
    change: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    np.save("words.npy", np.full((2, 4, 4), "x"))
    np.save("flat.npy", np.zeros(3))
    np.save("nan.npy", np.full((2, 4, 4), np.nan))
    for name in ("sizes", "torn"):
        (tmp_path / name).mkdir()
    for side in (4, 5):
        Image.new("L", (side, side)).save(tmp_path / "sizes" / f"{side}.png")
    (tmp_path / "torn" / "0.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=message):
        Source.model_validate(change).load().batch(2, 0, 0)


def test_arrays_are_read_as_they_are_needed(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).random((3, 6, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", pixels)
    images = Source(name="array", path=str(tmp_path / "x.npy"), prepare="none").load()
    assert isinstance(images.whole, np.memmap)
    batch = images.batch(5, 0, 0)
    assert all((batch[..., 0, i] == pixels).all(axis=(1, 2)).any() for i in range(5))


def test_layers_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="layer 1: field=9: more than the 3 cells"):
        stack((GEOMETRY.layer, Layer(field=9, maps=2)), GEOMETRY.image, 2)
    with pytest.raises(ConfigError, match=r"layer\.0\.contrast|contrast=2: should be odd"):
        load(ROOT / "inputs" / "cots_digits.toml", ["layer=[{field=2,maps=2,contrast=2}]"])


def faults_of_freeing(keep: bool) -> tuple[bool, int]:
    """Whether freed memory is kept, and the page faults of using and freeing 128 MiB again."""
    ctypes.CDLL(None).mallopt(MMAP_MAX, 65536)  # as at start, whatever tests before have set
    ctypes.CDLL(None).mallopt(TRIM_THRESHOLD, 2**17)
    kept, faults = keep and keep_freed_memory(), []
    for _ in range(4):
        arrays = [np.ones(2**24, np.float32) for _ in range(2)]
        del arrays
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return kept, faults[-1] - faults[-2]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
def test_kept_memory_is_not_cleared_again() -> None:
    """128 MiB are 32,768 pages of 4 KiB, or 64 of 2 MiB; kept they are none."""
    with multiprocessing.get_context("fork").Pool(1) as pool:  # malloc's settings stay there
        (freed, before), (kept, after) = pool.map(faults_of_freeing, [False, True])
    assert not freed and before >= 64
    assert kept and after < 32


def test_whitened_photographs_have_no_frame() -> None:
    """The two outer rings of squares of 26, 28 % of the cells, had 58 % of the energy."""
    from sklearn.datasets import load_sample_images

    source = Source(name="synthetic", size=26, prepare="whiten")
    photos = [image.mean(axis=2, keepdims=True) for image in load_sample_images().images]
    batch = Images(source, photos, 255).batch(60, 0, 0)
    energy = (batch**2).sum(axis=(2, 3))
    inner = energy[2:-2, 2:-2].sum() / energy.sum()
    assert 1 - inner < 0.36  # 0.32 on 300 squares; the mean of a square alone takes 0.04


def test_images_that_are_held_out_are_not_trained_on(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(10, dtype=np.float32)[:, None, None] * np.ones((4, 4)))
    source = Source(name="array", path=str(tmp_path / "x.npy"), prepare="none", held_out=0.3)
    trained, held = (set(source.load(out).batch(200, 0, 0)[0, 0, 0]) for out in (False, True))
    assert len(held) == 3 and not trained & held and trained | held == set(range(10))
    with pytest.raises(DataError, match=r"held_out=0.01: leaves none of 10"):
        source.model_copy(update={"held_out": 0.01}).load(True)


def test_accuracies_are_those_of_trying_every_threshold() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 6, (20, 15)).astype(float)  # with ties
    is_concept = np.arange(15) % 3 == 0
    accuracy, sign, threshold = probe.accuracies(values, is_concept)
    for i in range(20):
        tried = []
        for at in np.arange(-0.5, 6):
            above = values[i] > at
            right = (above[is_concept].mean() + (~above[~is_concept]).mean()) / 2
            tried += [right, 1 - right]
        assert accuracy[i] == pytest.approx(max(tried), abs=1e-12)
        if accuracy[i] > 0.5 + 1e-9:
            said = sign[i] * (values[i] - threshold[i]) > 0
            reached = (said[is_concept].mean() + (~said[~is_concept]).mean()) / 2
            assert reached == pytest.approx(accuracy[i], abs=1e-12)


def test_probe_finds_a_concept_that_is_planted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bright bars in half of the images: a pixel tells them, and pictures and files are written."""
    rng = np.random.default_rng(0)
    images, labels = rng.random((160, 16, 16)).astype(np.float32) / 10, np.arange(160) % 2
    images[labels == 1, 6:9] += 0.9
    np.save(tmp_path / "x.npy", images)
    np.save(tmp_path / "y.npy", labels)
    job = tmp_path / "bars.toml"
    data = f"[data]\nname = 'array'\npath = '{tmp_path / 'x.npy'}'\nheld_out = 0.2\n"
    layer = "[[layer]]\nfield = 4\nstep = 4\nmaps = 4\ncontrast = 3\n"
    job.write_text(data + layer + "[train]\niterations = 3\nbatch = 8\nthreads = 1\n")
    out, words = str(tmp_path), ["--images", str(tmp_path / "x.npy")]
    command = ["autoencoder", "probe", str(job), "--out", out, *words]
    labelled = [*command, "--labels", str(tmp_path / "y.npy")]
    assert main(labelled) == 2 and "bars.checkpoint.h5: is missing" in capsys.readouterr().err
    assert main(["autoencoder", str(job), "--out", out]) == 0
    assert main(command) == 2 and "x.npy: needs --labels" in capsys.readouterr().err
    picture, features = tmp_path / "p.png", tmp_path / "f.h5"
    assert main([*labelled, "--png", str(picture), "--features", str(features)]) == 0
    assert "layer 0: error of held-out images 0." in capsys.readouterr().out
    found = store.read(tmp_path / "bars.probe.h5")[0]["selectivity"]
    assert found["accuracy"].shape == (1, 2) and found["pixel"].min() == 1
    with h5py.File(features) as file:
        assert file["layer0/features"].shape == (4, 4, 4, 160)
        np.testing.assert_array_equal(file["labels"], labels)
    assert picture.stat().st_size > 1000
