"""Data sets that job files name: what they hold, by files made here; damaged ones are named."""

import pickle
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from every import every
from training import prepared, run_job, small_job

from cpdhpc import store
from cpdhpc.config import ConfigError, UserError, validate
from cpdhpc.lab.train.data import Cifar10, Hdf5, Synthetic, Text, read_digits
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.samples import Dataset, StreamedData
from cpdhpc.lab.train.training import Training
from cpdhpc.world.ranks import Loopback


def trained(directory: Path, ranks: int, **tables: Any) -> Training:
    """A run of a small job over the data that its tables say."""
    directory.mkdir(exist_ok=True)
    job = small_job(**tables)
    return run_job(job, Loopback(ranks), directory, job.data.load())


def curve(training: Training) -> list[tuple[float, ...]]:
    return [tuple(row.values())[1:-1] for row in training.record.rows["epochs"]]


def write_cifar(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """Five batches of four images, and a test batch of three; all the records."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 200, (23, 3, 32, 32), np.uint8), np.arange(23) % 10
    names = [f"data_batch_{i}.bin" for i in range(1, 6) for _ in range(4)] + 3 * ["test_batch.bin"]
    for name in dict.fromkeys(names):
        rows = [i for i in range(23) if names[i] == name]
        content = b"".join(bytes([labels[i]]) + images[i].tobytes() for i in rows)
        (directory / name).write_bytes(content)
    return images, labels


def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits  # a second, which collecting need not take

    images, labels = read_digits()
    whole = load_digits()
    assert images.dtype == whole.images.dtype and np.array_equal(images, whole.images)
    assert labels.dtype == np.int64 and np.array_equal(labels, whole.target)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ModuleNotFoundError) as missing:
        read_digits.__wrapped__()
    assert missing.value.name == "sklearn"


def test_cifar_records_are_label_then_channels(tmp_path: Path) -> None:
    images, labels = write_cifar(tmp_path)
    data = Cifar10(dir=str(tmp_path), train_samples=18).load()
    assert data.classes == 10 and data.image_shape == (3, 32, 32)
    assert np.array_equal(data.train_x, images[:18]) and np.array_equal(data.test_x, images[20:])
    assert np.array_equal(np.r_[data.train_y, data.test_y], np.r_[labels[:18], labels[20:]])
    plain = small_job(data={"name": "cifar10", "dir": str(tmp_path)})
    normal = small_job(data={"name": "cifar10", "dir": str(tmp_path), "normalise": True})
    taken = []
    for job in (plain, normal):
        training = prepared(job, Loopback(1), tmp_path, job.data.load())
        taken.append(training.train.take(np.arange(20), 0)[0].numpy())
    whole = images[:20].astype(np.float64) / 255
    assert taken[0] == pytest.approx(whole, abs=2**-24)  # half a unit in the last place below 1
    by = {"axis": (0, 2, 3), "keepdims": True}
    expected = (whole - whole.mean(**by)) / whole.std(**by)
    assert taken[1] == pytest.approx(expected, abs=2**-20)  # of values below 4: some roundings


def test_synthetic_samples_are_exact_and_can_be_learned(tmp_path: Path) -> None:
    """The teacher is linear: labels follow from inputs, so a linear model finds them."""
    x = Synthetic(shape=(2, 3), train_samples=5, test_samples=2).load()
    assert x.train_x.shape == (5, 2, 3) and x.train_x.dtype == np.float32
    first = [1.25, -0.796875, -0.875, 0.453125, 1.78125, 1.34375]
    assert x.train_x[0].ravel().tolist() == first  # for ever, on every machine
    tables: dict[str, Any] = {
        "data": {"name": "synthetic", "classes": 3, "train_samples": 400},
        "model": {"name": "mlp", "hidden": []},
        "train": {"epochs": 8, "batch": 40, "learning_rate": 0.3, "telemetry_every": 1000},
    }
    one, three = (trained(tmp_path / str(ranks), ranks, **tables) for ranks in (1, 3))
    assert curve(one)[-1][0] > 0.9  # a third is chance
    # not the same bits, as the mean over ranks has other sums; the same learning
    assert curve(three)[-1][0] == pytest.approx(curve(one)[-1][0], abs=0.03)
    tables["data"] |= {"task": "regression", "noise": 0.05}
    values = trained(tmp_path / "mse", 2, **tables, loss={"name": "mse"})
    (start, *_, end) = (loss for (loss,) in curve(values))
    assert 0.05**2 * 4 / 3 * 0.75 < end < start / 10  # not below the noise on 200 x 3 values
    with pytest.raises(ConfigError, match=r"cross_entropy: outputs float32\[2, 3\], targets float"):
        trained(tmp_path / "wrong", 2, **tables)


def test_noise_is_the_share_of_labels_drawn_anew() -> None:
    clean, noisy = (Synthetic(train_samples=4000, noise=noise).load() for noise in (0.0, 0.5))
    assert np.array_equal(clean.train_x, noisy.train_x)
    changed = (clean.train_y != noisy.train_y).mean()
    # of half of them nine tenths are others; six standard deviations of 4,000 draws
    assert changed == pytest.approx(0.45, abs=6 * (0.45 * 0.55 / 4000) ** 0.5)


def test_text_is_pieces_and_the_next_characters(tmp_path: Path) -> None:
    for name, text in (("a", "abcabcé"), ("b", "abcabcabcab")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = [str(tmp_path / name) for name in ("a", "b")]
    data = Text(files=files, length=4, test_share=0.5).load()
    assert data.classes == 4 and data.image_shape == (4,)
    assert len(data.train) == len(data.test) == 2
    x, y = data.train.take(np.array([1, 0]), 0)
    assert x.tolist() == [[1, 2, 3, 0], [0, 1, 2, 0]]  # bcéa, abca
    assert y.tolist() == [[2, 3, 0, 1], [1, 2, 0, 1]]
    assert x.dtype == y.dtype == torch.int64
    with pytest.raises(UserError, match="test part of 2 characters: must be above length=4"):
        Text(files=files, length=4, test_share=0.1).load()
    (tmp_path / "a").write_bytes(b"ab\xff")
    with pytest.raises(UserError, match=r"a: is not text in UTF-8: invalid start byte at byte 2"):
        Text(files=files, length=4).load()


def write_tables(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=x, chunks=(2, *x.shape[1:]), compression="gzip")
        file.create_dataset("deep/y", data=y)
        file.create_dataset("one", data=y[:1])
        file.create_dataset("below", data=-1 - y)


def hdf5_data(directory: Path, **keys: Any) -> StreamedData:
    rng = np.random.default_rng(3)
    for name, n in (("train", 21), ("test", 6)):
        x = rng.integers(0, 256, (n, 5, 4, 3), np.uint8)
        write_tables(directory / f"{name}.h5", x, (np.arange(n) % 3).astype(np.int16))
    job = {"train": str(directory / "train.h5"), "test": str(directory / "test.h5"), "y": "deep/y"}
    return validate(Hdf5, job | keys, "data").load()


def test_rows_of_hdf5_files(tmp_path: Path) -> None:
    data = hdf5_data(tmp_path, channels_last=True, mean=[0.5, 0.25, 0.0], deviation=[0.5, 1, 2])
    assert data.image_shape == (3, 5, 4) and data.classes == 3 and len(data.test) == 6
    images = np.random.default_rng(3).integers(0, 256, (21, 5, 4, 3), np.uint8)
    again = pickle.loads(pickle.dumps(data.train))  # as workers get it
    for samples in (data.train, again):
        x, y = samples.take(np.array([20, 0, 7]), 0)
        wanted = images[[20, 0, 7]].astype(np.float64) / 255
        wanted = np.moveaxis((wanted - [0.5, 0.25, 0]) / [0.5, 1, 2], -1, 1)
        assert x.numpy() == pytest.approx(wanted, abs=2**-22) and y.tolist() == [2, 0, 1]
        assert x.dtype == torch.float32 and y.dtype == torch.int64
    assert samples.take(np.array([], np.int64), 0)[0].shape == (0, 3, 5, 4)


@every(
    ("keys", "says"),
    [
        ({"x": "z"}, "train.h5: has no dataset 'z'"),
        ({"y": "deep"}, "train.h5: has no dataset 'deep'"),
        ({"x": "deep/y"}, "have dtypes int16, int16: inputs must be uint8 or floats"),
        ({"y": "one"}, r"have shapes \(21, 5, 4, 3\) and \(1,\): must be \[n, ...\]"),
        ({"y": "below"}, "train.h5: below: -3: must be 0 or more"),
        ({"mean": [0.5], "deviation": [0.5]}, "mean has 1 channels"),
        ({"mean": [0.5]}, "mean and deviation: must have a value for each channel"),
        ({"train": "nowhere.h5"}, "nowhere.h5: there is no such file"),
    ],
)
def test_what_is_wrong_with_hdf5_is_named(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        hdf5_data(tmp_path, **keys)


def test_damage_inside_of_a_file_is_named_with_its_item(tmp_path: Path) -> None:
    hdf5_data(tmp_path)
    path = tmp_path / "train.h5"
    content = bytearray(path.read_bytes())
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info_by_coord((8, 0, 0, 0))
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    path.write_bytes(content)
    data = Hdf5(train=str(path), test=str(tmp_path / "test.h5"), y="deep/y").load()
    data.train.take(np.array([2, 7]), 0)
    with pytest.raises(store.StoreError, match=r"train.h5: x: item 9: cannot be read"):
        data.train.take(np.array([2, 9]), 0)
    short = tmp_path / "short.h5"
    short.write_bytes(content[:3000])
    with pytest.raises(store.StoreError, match=r"short.h5: cannot be read: .*truncated"):
        Hdf5(train=str(short), test=str(tmp_path / "test.h5"), y="deep/y").load()


@every(
    ("change", "says"),
    [
        (lambda c: c[:-1], "12291 bytes, must be records of 3073"),
        (lambda c: b"", "0 bytes, must be records of 3073"),
        (lambda c: bytes([10]) + c[1:], "has label 10, must be 0 to 9"),
    ],
)
def test_damaged_cifar_files_are_named(tmp_path: Path, change: Any, says: str) -> None:
    write_cifar(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=f"data_batch_3.bin: {says}"):
        Cifar10(dir=str(tmp_path)).load()
    path.unlink()
    with pytest.raises(UserError, match=r"data_batch_3.bin: there is no such file"):
        Cifar10(dir=str(tmp_path)).load()


def test_bytes_in_memory_are_a_dataset_too() -> None:
    job = validate(Job, {"name": "j", "data": {"name": "synthetic"}}, "j")
    assert isinstance(job.data.load(), Dataset)
