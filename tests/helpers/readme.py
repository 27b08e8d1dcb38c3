"""What the README says to type: its blocks, and its commands made quick."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

from training import ROOT, write_idx

README = (ROOT / "README.md").read_text()
BATCHES = """
import torch
torch.manual_seed(0)
batches = [(torch.rand(8, 64), torch.arange(8)) for _ in range(2)]
"""
ONE_RUN = 'compare=[{name="tile",gradient={aggregator="lowbit"}}]'
DIGITS = 'name = "digits"\ntest_share = 0.3333'  # with scikit-learn, which is slow to import
SYNTHETIC = "data.name=synthetic"
QUICKER = {  # what is added to the commands that measure or train
    "train inputs/train_digits.toml": ["--set", "train.batch=10", "--set", ONE_RUN]
    + ["--set", "train.epochs=2"],
    "bench codec": ["--mib", "1", "--repeats", "1"],
    "bench allreduce": ["--repeats", "2", "--warmup", "1", "--sizes", "64KiB"],
    "autoencoder inputs/cots_digits.toml": ["--set", "train.iterations=2", "--set", SYNTHETIC],
    "bench halo": ["--repeats", "2"],
    "study run": ["--set", "measure.max_repeats=6", "--set", "sweep={ranks=[2],size_bytes=[64]}"],
}
ON_TWO_RANKS = ["mpirun", "-n", "2"]


def block(language: str) -> str:
    """The README's one code block in a language."""
    found = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def commands() -> list[tuple[list[str], bool]]:
    """The README's commands without what starts them, made quick, and whether on two ranks."""
    found = []
    for line in block("sh").splitlines():
        words = shlex.split(line)
        parallel = words[:3] == ON_TWO_RANKS
        words = words[3:] if parallel else words
        assert words[:3] == ["python", "-m", "cpdhpc"], line
        words = words[3:]
        found.append((words + QUICKER.get(" ".join(words[:2]), []), parallel))
    return found


def diff() -> list[str]:
    """The lines of what is changed in a torch loop."""
    return block("diff").splitlines()


def lay_out(directory: Path) -> None:
    """Write the inputs that the commands read, with other images than the digits."""
    shutil.copytree(ROOT / "inputs", directory / "inputs")
    job = directory / "inputs" / "train_digits.toml"
    assert DIGITS in job.read_text()
    job.write_text(job.read_text().replace(DIGITS, 'name = "idx"\ndir = "images"'))
    (directory / "images").mkdir()
    write_idx(directory / "images")
