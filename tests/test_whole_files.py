"""Files take the place of others whole, in folders where anybody may write."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every import every
from matplotlib.figure import Figure
from PIL import Image
from test_store import WRITERS, save_together
from training import ran

from cpdhpc import store, whole_files
from cpdhpc.collectives.method import DEFAULT, read_machine
from cpdhpc.config import UserError
from cpdhpc.darray import DistArray, Layout
from cpdhpc.lab.autoencoder import job as autoencoder_job
from cpdhpc.lab.autoencoder.job import Source
from cpdhpc.lab.bench.machine import write as write_machine
from cpdhpc.lab.claim import Claim, ClaimError, alone, read_claim
from cpdhpc.lab.report import other_files
from cpdhpc.lab.study.cases import load_study
from cpdhpc.lab.study.folder import Folder, SubmittedJob, record, recorded
from cpdhpc.lab.study.site import Site, load_site
from cpdhpc.lab.study.status import tail
from cpdhpc.store import StoreError
from cpdhpc.world import files
from cpdhpc.world.ranks import Loopback

ROOT = Path(__file__).parents[1]


def append(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    if not path.exists():
        store.write(path, {}, {"kind": "x"})
    store.append(path, {"g/a": (np.zeros(3), {})}, ())


ALL: dict[str, Callable[[Path], Any]] = {
    **WRITERS,
    "append": append,
    "figure": lambda path: store.put_figure(path.with_suffix(".png"), Figure(), 10),
}


@every("writer", ALL)
def test_no_link_in_the_place_of_the_temporary_file_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    """Under the name that was everybody's once, and under the very one, were it known."""
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("mine")
    for name in ("x.h5", "x.png"):
        (folder / f".{name}.tmp").symlink_to(victim)
    ALL[writer](folder / "x.h5")
    assert victim.read_text() == "mine"
    assert not any(each.is_symlink() for each in folder.iterdir() if each.suffix != ".tmp")
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)
    for name in ("x.h5", "x.png"):
        path = folder / name
        known = f"{whole_files._beginning(path)}{whole_files._place()}-{os.getpid()}-{'0' * 16}.tmp"
        (folder / known).symlink_to(victim)
    with pytest.raises(StoreError, match="cannot be written: File exists"):
        ALL[writer](folder / "x.h5")
    assert victim.read_text() == "mine"


def swapped(temporary: Path, victim: Path) -> None:
    temporary.unlink()
    temporary.symlink_to(victim)


@pytest.mark.parametrize("chunks", [None, (2,)])
def test_a_link_that_takes_the_place_of_a_file_of_all_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: tuple[int, ...] | None
) -> None:
    """While it is written: the other processes know it by its name alone."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    create = store.create

    def swap(file: Any, *arguments: Any) -> Any:
        offsets = create(file, *arguments)
        swapped(Path(file.name), victim)
        return offsets

    monkeypatch.setattr(store, "create", swap)
    array = DistArray(Loopback(), Layout.grid((4,), (1,)), np.arange(4.0))
    with pytest.raises(UserError, match="cannot be written"):
        array.save(tmp_path / "x.h5", chunks=chunks)
    assert victim.read_text() == "mine" and not (tmp_path / "x.h5").exists()


def test_a_temporary_file_that_another_program_replaces_does_not_become_the_file(
    tmp_path: Path,
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "x.h5"
    victim.write_text("mine")
    path.write_text("old")
    with (
        pytest.raises(StoreError, match="another program has replaced its temporary file"),
        store.replacing(path) as file,
    ):
        file.write(b"new")
        swapped(Path(file.name), victim)
    assert (victim.read_text(), path.read_text()) == ("mine", "old")
    assert {each.name for each in tmp_path.iterdir()} == {"victim", "x.h5"}


def test_a_link_of_the_targets_name_is_replaced_itself(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "x.h5"
    victim.write_text("mine")
    path.symlink_to(victim)
    store.put(path, "new")
    assert victim.read_text() == "mine" and path.read_text() == "new" and not path.is_symlink()


OTHERS: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, victim: path.symlink_to(victim),
    "dangling": lambda path, victim: path.symlink_to(victim.with_name("none")),
    "second name": lambda path, victim: path.hardlink_to(victim),
    "pipe": lambda path, victim: os.mkfifo(path),
}


@every("kind", OTHERS)
def test_locks_and_logs_are_files_of_that_name_alone(tmp_path: Path, kind: str) -> None:
    """What a link leads to is neither emptied nor lengthened, and no pipe is waited for."""
    folder = tmp_path / kind
    folder.mkdir()
    victim = folder / "victim"
    victim.write_text("mine")
    OTHERS[kind](folder / "own", victim)
    with (
        pytest.raises(ClaimError, match="own: cannot be written: is a link, has a second name"),
        alone(folder / "own", "study submit", print),
    ):
        pass
    for mode in ("ab", "r+b", "wb"):
        with (
            pytest.raises(OSError),
            open(folder / "own", mode, opener=whole_files.open_own) as file,
        ):
            file.write(b"theirs")
    assert victim.read_text() == "mine" and not (folder / "none").exists()


# Batches 9 and 10, whose order differs as numbers and as the keys of JSON.
JOBS = [SubmittedJob(10, "demo-1x2", {9: 0, 10: 1}), SubmittedJob(12, "demo-collect", {})]
CLAIM = Claim("here", 12, "7", "today", 3, "stopped")


def jobs(path: Path) -> Callable[[], Any]:
    folder = Folder(path)
    for job in JOBS:
        record(folder, job)
    return lambda: recorded(folder)


def site(path: Path) -> Callable[[], Any]:
    whole = Site(name="there", partition="small", account="a12")
    store.put(path / "site.toml", whole_files.sealed(whole.toml()))
    return lambda: load_site(path / "site.toml")


def machine(path: Path) -> Callable[[], Any]:
    write_machine(path / "machine.toml", DEFAULT, {"ranks": 2})
    return lambda: read_machine(path / "machine.toml")


def claim(path: Path) -> Callable[[], Any]:
    CLAIM._write(path / "claim.json")
    return lambda: read_claim(path / "claim.json")


def starts(path: Path) -> Callable[[], Any]:
    values = {"iterations": [0, 20], "commit": "abc"}
    store.put(path / "starts.json", whole_files.sealed_json(values))
    return lambda: whole_files.unsealed_json((path / "starts.json").read_text()).get("iterations")


SEALED = {"jobs": jobs, "site": site, "machine": machine, "claim": claim, "starts": starts}


@every("kind", SEALED)
def test_a_flipped_bit_of_a_small_file_is_an_error_or_says_nothing_else(
    tmp_path: Path, kind: str
) -> None:
    """All bits of a file; one in a remark, or in the name of what nobody asks for, does no harm."""
    (tmp_path / kind).mkdir()
    read = SEALED[kind](tmp_path / kind)
    [path] = (tmp_path / kind).iterdir()
    good, whole, errors = read(), path.read_bytes(), 0
    assert good
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            found = read()
        except (UserError, UnicodeDecodeError, ValueError):
            found = None
        errors += found is None
        assert found in (None, good), (bit, bytes(flipped))
    assert errors > 6 * len(whole)


def test_files_without_a_digest_are_taken_as_they_are(tmp_path: Path) -> None:
    """Of older versions, and written by hand; and a sealed one that was changed says what to do."""
    row = {"number": 10, "name": "a", "batches": {"3": 0}}
    (tmp_path / "jobs.json").write_text(json.dumps({"schema": 1, "jobs": [row]}))
    assert recorded(Folder(tmp_path)) == [SubmittedJob(10, "a", {3: 0})]
    path = tmp_path / "site.toml"
    path.write_text('partition = "small"\n')
    assert load_site(path).partition == "small"
    path.write_text(whole_files.sealed(path.read_text()).replace("small", "large"))
    with pytest.raises(StoreError, match=r"site\.toml: is damaged.*remove its first line"):
        load_site(path)
    path.write_text(path.read_text().partition("\n")[2])
    assert load_site(path).partition == "large"


def test_writers_at_the_same_time_each_write_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with store.replacing(path) as first:
        with store.replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
        first.write(b"first")
    assert path.read_bytes() == b"first"
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


KILLED = """
import os, signal, sys
from cpdhpc import store
with store.replacing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_killed_writers_left_goes_with_the_next_file_and_nothing_else(tmp_path: Path) -> None:
    path, other = tmp_path / "x.h5", tmp_path / "y.h5"
    for target in (path, path, other):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(target)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
    dead = {each.name for each in tmp_path.iterdir()}
    assert len(dead) == 2  # the second took the first away
    begin, number = whole_files._beginning(path), "0123456789abcdef"
    lives = f"{begin}{whole_files._place()}-{os.getppid()}-{number}.tmp"
    elsewhere, long_ago = f"{begin}01234567-1-{number}.tmp", f"{begin}76543210-1-{number}.tmp"
    own = f"{begin}tmp"
    for name in (lives, elsewhere, long_ago, own):
        (tmp_path / name).touch()
    link = f"{begin}76543210-2-{number}.tmp"
    (tmp_path / link).symlink_to(other)
    old_s = time.time() - whole_files.ABANDONED_S - 10
    os.utime(tmp_path / long_ago, (old_s, old_s))
    store.put(path, "new")
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {
        "x.h5", lives, elsewhere, own, link, *(each for each in dead if each.startswith(".y.h5."))
    }  # fmt: skip
    store.put(other, "new")
    assert not any(each.name.startswith(".y") for each in tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "."])
def test_long_names_are_written(tmp_path: Path, name: str) -> None:
    if name == ".":
        with pytest.raises(StoreError):
            store.put(tmp_path, "x")
        return
    path = tmp_path / name
    save_together(path)
    store.put(path, "x")
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_the_users_mask_decides_who_may_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        store.put(tmp_path / "x", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def frozen(path: Path) -> Callable[[], Any]:
    study = load_study(ROOT / "inputs/study_smoke.toml")
    Folder(path).freeze(study)
    return lambda: Folder(path).study().name


def images(path: Path) -> Callable[[], Any]:
    Image.new("L", (4, 4)).save(path / "x.png")
    source = Source(name="folder", path=str(path), size=4)
    return lambda: len(autoencoder_job.LOADERS["folder"](source)[0])


def text_file(read: Callable[[Path], Any]) -> Callable[[Path], Callable[[], Any]]:
    def make(path: Path) -> Callable[[], Any]:
        (path / "x.txt").write_text("text")
        return lambda: read(path / "x.txt")

    return make


def hdf5(read: Callable[[Path], Any]) -> Callable[[Path], Callable[[], Any]]:
    def make(path: Path) -> Callable[[], Any]:
        store.write(path / "x.h5", {}, {"kind": "x"})
        return lambda: read(path / "x.h5")

    return make


def of_all(path: Path) -> str:
    with files.opened(Loopback(), path) as (_, checksum):
        return checksum


READERS: dict[str, Callable[[Path], Callable[[], Any]]] = {
    **{kind: make for kind, make in SEALED.items() if kind != "starts"},
    "frozen study": frozen,
    "images": images,
    "log": text_file(tail),
    "named": text_file(other_files.of_file),
    "hdf5": hdf5(store.read),
    "hdf5 of all processes": hdf5(of_all),
    "is hdf5": hdf5(other_files.is_hdf5),
}


def asleep(*_: Any) -> None:
    raise AssertionError("waits")


@every("kind", READERS)
def test_a_pipe_or_a_device_of_a_files_name_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    """Nor is /dev/zero read to its end: it is an error, or what a missing file is."""
    (tmp_path / kind).mkdir()
    read = READERS[kind](tmp_path / kind)
    [path] = (tmp_path / kind).iterdir()
    good = read()
    assert good
    before = signal.signal(signal.SIGALRM, asleep)
    try:
        for plant in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
            path.unlink()
            plant(path)
            signal.alarm(20)
            try:
                found = read()
            except (UserError, OSError) as error:
                assert "not an ordinary file" in str(error)
            else:
                assert found is None or "not an ordinary file" in str(found)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_pipe_of_the_shell_is_read() -> None:
    code = "from cpdhpc.config import read_toml; print(read_toml('/dev/stdin'))"
    command = [sys.executable, "-c", code]
    done = ran(command, cwd=ROOT, input="a = 1")
    assert done.stdout == "{'a': 1}\n", done.stderr
