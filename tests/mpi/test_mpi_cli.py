"""The command line on several ranks: what the user can mend is one line, and a status on all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import write_idx, write_job

from cpdhpc.lab.cli import main
from cpdhpc.lab.train import step as steps
from cpdhpc.world.mpi import World

pytestmark = pytest.mark.two_ranks


@pytest.fixture
def poison(world: World, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the third backward of rank 1 from now on give a NaN."""
    backward, calls = steps.backward, []

    def poisoned(model: Any, *rest: Any) -> float:
        loss = backward(model, *rest)
        calls.append(loss)
        if len(calls) == 3 and world.process == 1:
            list(model.parameters())[2].grad[0, 0] = np.nan
        return loss

    return lambda: monkeypatch.setattr(steps, "backward", poisoned)


def test_what_the_user_can_mend_is_one_line_and_a_status_on_all_ranks(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], poison: Any
) -> None:
    """What the line says, and the command, the last with a NaN on rank 1."""
    tmp_path = Path(world.gather(str(tmp_path))[0])
    images, cut, out = tmp_path / "images", tmp_path / "cut", str(tmp_path / "out")
    good, bad = str(tmp_path / "good.toml"), str(tmp_path / "cut.toml")
    if world.process == 0:
        images.mkdir()
        cut.mkdir()
        write_idx(images)
        (cut / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03 cut off")
        assert write_job(tmp_path, "good", images) == good
        assert write_job(tmp_path, "cut", cut) == bad
        (tmp_path / "wall").write_bytes(b"")
    world.barrier()
    cases = {
        "gone.toml: cannot be read": ["train", str(tmp_path / "gone.toml")],
        "unknown key train.epoch: did you mean epochs?": ["train", good, "--set", "train.epoch=3"],
        "train.batch='x': should be a valid integer": ["train", good, "--set", "train.batch=x"],
        "--set x: the form is": ["train", good, "--set", "x"],
        "gradient.wire='e4': known are eXmY": [
            *("train", good, "--set", "gradient.aggregator=lowbit", "--set", "gradient.wire=e4")
        ],
        "--repeats x: must be an integer": [*("bench", "allreduce", "--repeats", "x")],
        "train-images-idx3-ubyte: 12 bytes, the header alone has 16": [
            *("train", bad, "--out", out)
        ],
        "nothing/train-images-idx3-ubyte: there is no such file": [
            *("train", good, "--set", "data.dir=nothing", "--out", out)
        ],
        "wall: cannot be made": ["train", good, "--out", str(tmp_path / "wall")],
        "": ["train", good, "--out", out],
        "is there already: --resume goes on": ["train", good, "--out", out],
        "model.hidden is [64] there and [8] here": [
            *("train", good, "--out", out, "--resume"),
            *("--set", "model.name=mlp", "--set", "model.hidden=[8]"),
        ],
        "--repeats: 3 on process 0, 4 on process 1: must be the same on all": [
            *("bench", "overlap", good, "--repeats", str(3 + world.process))
        ],
        "--set: ['seed=1'] on process 0, ['seed=2'] on process 1: must be": [
            *("train", good, "--out", out, "--set", f"seed={1 + world.process}")
        ],
        f"--out: {out}a on process 0, {out}b on process 1: must be the same": [
            *("train", good, "--out", out + "ab"[world.process])
        ],
        "FOLDER: a on process 0, b on process 1: must be the same": [
            *("batch", "ab"[world.process], "0")
        ],
        "FILE: a.toml on process 0, b.toml on process 1: must be the same": [
            *("train", f"{'ab'[world.process]}.toml")
        ],
        "--trace: x.gz on process 0, None on process 1: must be the same": [
            *("info", *["--trace", "x.gz"] * (world.process == 0))
        ],
        "good-s0: iteration 2: allreduce: NaN or infinity in '3.weight' on rank 1": [
            *("train", good, "--out", str(tmp_path / "poison"))
        ],
    }
    wrong = []
    for says, words in cases.items():
        if "poison" in words[-1]:
            poison()
        status = main(words)
        lines = capsys.readouterr().err.splitlines()
        found = world.gather((status, lines))
        said = [line for _, lines in found for line in lines]
        good_line = not says or (
            len(said) == 1 and said[0].startswith("cpdhpc: error: ") and says in said[0]
        )
        if not good_line or {status for status, _ in found} != {2 if says else 0}:
            wrong.append((says, found))
    assert not wrong  # the same on all ranks
