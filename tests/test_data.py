"""Data sets: the same everywhere; damaged files are named."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from every import every
from training import IDX, idx_bytes, write_idx

from cpdhpc.lab.train.data import Digits, Idx, read_idx
from cpdhpc.lab.train.samples import DataError, epoch_order, shard


def test_digits_are_split_without_overlap_and_lie_in_0_to_1() -> None:
    data = Digits(test_share=1 / 3).load()
    assert len(data.train_y) + len(data.test_y) == 1797
    assert len(data.test_y) == 599
    assert data.image_shape == (8, 8)
    assert data.train_x.min() == 0
    assert data.train_x.max() == 1
    again, other = Digits().load(), Digits(split_seed=1).load()
    assert np.array_equal(data.train_x, again.train_x)
    assert not np.array_equal(data.test_y, other.test_y)
    whole = Digits(test_share=0.5).load()
    assert np.sort(np.r_[data.train_y, data.test_y]).tolist() == (
        np.sort(np.r_[whole.train_y, whole.test_y]).tolist()
    )


def test_orders_are_permutations_that_hold_for_ever() -> None:
    order = epoch_order(1000, seed=3, epoch=2)
    assert np.array_equal(np.sort(order), np.arange(1000))
    assert not np.array_equal(order, epoch_order(1000, seed=3, epoch=1))
    assert not np.array_equal(order, epoch_order(1000, seed=4, epoch=2))
    assert epoch_order(8, seed=0, epoch=0).tolist() == [4, 3, 7, 6, 5, 2, 0, 1]


@every("batch", [0, 1, 7, 64])
@every("ranks", [1, 2, 3, 8])
def test_the_shards_of_any_number_of_ranks_are_the_batch(batch: int, ranks: int) -> None:
    samples = epoch_order(100, 0, 0)[:batch]
    shards = [shard(samples, ranks, rank) for rank in range(ranks)]
    assert np.array_equal(np.concatenate(shards), samples)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    write_idx(tmp_path, suffix)
    data = Idx(dir=str(tmp_path)).load()
    assert data.train_x.shape == (20, 5, 4)
    assert data.train_x.dtype == np.float32
    assert data.classes == 3
    expected = np.random.default_rng(0).integers(0, 256, (20, 5, 4)) / np.float32(255)
    assert np.array_equal(data.train_x, expected.astype(np.float32))
    assert data.test_y.tolist() == (np.arange(10) % 3).tolist()
    assert len(Idx(dir=str(tmp_path), train_samples=7).load().train_y) == 7


GOOD = idx_bytes(np.zeros((2, 3, 4), np.uint8))


@every(
    ("content", "says"),
    [
        (GOOD[:-1], "39 bytes, 2 x 3 x 4 values need 40"),
        (GOOD + b"\0", "41 bytes, 2 x 3 x 4 values need 40"),
        (GOOD[:7], "7 bytes, the header alone has 16"),
        (b"", "0 bytes, the header alone has 16"),
        (b"\0\0\x08\x01" + GOOD[4:], "magic number 0x00000801, should be 0x00000803"),
        (gzip.compress(GOOD, mtime=0)[:-9], "bytes, the gzip stream is damaged"),
        (b"\x1f\x8b" + bytes(30), "cannot be read"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_idx(path, dims=3)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_and_unequal_files_are_named(tmp_path: Path) -> None:
    write_idx(tmp_path)
    (tmp_path / IDX.test_labels).unlink()
    with pytest.raises(DataError, match=f"{IDX.test_labels}: there is no such file"):
        Idx(dir=str(tmp_path)).load()
    (tmp_path / IDX.test_labels).write_bytes(idx_bytes(np.zeros(9, np.uint8)))
    with pytest.raises(DataError, match="10 images, but 9 labels"):
        Idx(dir=str(tmp_path)).load()
