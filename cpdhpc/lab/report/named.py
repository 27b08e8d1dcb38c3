"""What a file or folder is that report draws nothing of, and which command shows it."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

from ... import ordinary, store
from ..schedulers import SCHEDULERS
from . import units

KINDS = {  # attribute "kind" of HDF5 files: what it is; what to do with it
    "run": ("the record of a training run", "`report` shows it"),
    "checkpoint": (
        "the checkpoint of a training run",
        "`train --resume` goes on from it, `report` takes the record beside it",
    ),
    "state": ("what ranks remember for a checkpoint", "`train --resume` reads it"),
    "weights": ("the weights of a run behind an epoch", "`influence` takes the run"),
    "gradients": (
        "the gradients of all ranks in an iteration",
        "`bench compress`, `bench rounding` and `precision replay` take it",
    ),
    "recording": (
        "tensors of layers, of `precision record`",
        "`precision replay` makes of it what `report` shows",
    ),
    "integer network": (
        "a network of integers, of `export`",
        "`cpdhpc.torch.quantized.load` reads it",
    ),
    "case": ("a case of a study", "`report` takes the study's folder, which has study.toml"),
    "autoencoder checkpoint": (
        "the checkpoint of an autoencoder",
        "`autoencoder --resume` goes on from it, `autoencoder probe` shows what it has learned",
    ),
    "autoencoder features": (
        "responses of an autoencoder to images, of `autoencoder probe`",
        "h5py reads them",
    ),
}
ARRAYS = "arrays without a kind, as those that `darray` saves", "h5py reads them"
TABLES = {  # a key that a TOML file of ours has: what it is; what to do with it; the first counts
    "kind": ("a study as it is asked for", "`study run` measures it, `report` takes its folder"),
    "machine": ("the speeds of a machine, of `bench fit`", "`bench predict` takes it"),
    "study": ("a reference for a study", "`report STUDY --compare` takes it"),
    "layer": ("the job of an autoencoder", "`autoencoder` trains it, `report` takes its folder"),
    **dict.fromkeys(
        ("model", "train", "compare", "data"),
        ("a job", "`train` runs it, `report` takes the folder of its runs"),
    ),
    "precision": ("rules of [precision]", "a job takes them, `report` takes search.h5 beside it"),
    **dict.fromkeys(
        ("partition", "launcher", "cores_per_node", "nodes", "modules", "setup"),
        ("the profile of a site", "`study plan --site` takes it"),
    ),
}
ENDINGS = {
    ".html": "a page: a browser shows it",
    ".png": "a picture",
    ".svg": "a picture",
    ".csv": "a table of `report --csv`",
    ".tex": "a table of `report --latex`",
    ".json": "what a job of a study has noted: `study status` shows it",
    **{s.SUFFIX: f"a job script: `{s.SUFFIX[1:]}` takes it" for s in SCHEDULERS.values()},
    ".lock": "the claim of who is at work on files",
}
FOLDERS = {
    "cases": "the cases of a study",
    "logs": "what jobs of a study have printed",
    "scripts": "the job scripts of a study",
}


def is_hdf5(path: Path) -> bool:
    """Return whether a file begins as HDF5 of cpdhpc or of others does."""
    with open(path, "rb", opener=ordinary.open_ordinary) as file:
        return file.read(len(store.MAGIC)).startswith((store.MAGIC, store.SIGNATURE))


def of_file(path: Path) -> str:
    """Return in a few words what a file is and what takes it. Raises StoreError: not known."""
    if is_hdf5(path) or path.suffix == ".h5":
        what, how = KINDS.get(str(store.read_attributes(path).get("kind")), ARRAYS)
        return f"{what}: {how}"
    if path.suffix in ENDINGS:
        return ENDINGS[path.suffix]
    try:
        text = ordinary.content(path)[: 1 << 20].decode()
        keys = tomllib.loads(text) if path.suffix == ".toml" else {}
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        raise store.StoreError(f"{path}: is no file that cpdhpc writes") from None
    if path.suffix != ".toml":
        return "text, maybe the log of a job: `report` takes HDF5 files, and folders of them"
    if found := next((told for key, told in TABLES.items() if key in keys), None):
        return f"{found[0]}: {found[1]}"
    raise store.StoreError(f"{path}: is no TOML file that cpdhpc takes")


def of_folder(path: Path) -> str:
    """Return in a few words what is in a folder that has neither studies nor runs."""
    if path.name in FOLDERS and (path.parent / "study.toml").exists():
        return f"{FOLDERS[path.name]}: `report {path.parent}` shows the study"
    there = [each for each in sorted(path.iterdir()) if not each.name.startswith(".")]
    folders = [each.name for each in there if each.is_dir()]
    found: Counter[str] = Counter()
    for each in there:
        if each.is_file():
            try:
                found[of_file(each).partition(":")[0]] += 1
            except (store.StoreError, OSError):
                found["not known"] += 1
    parts = [f"{units.count(n, 'file')}: {what}" for what, n in found.most_common(MOST)]
    parts += [f"folders {', '.join(folders[:MOST])}"] if folders else []
    return "; ".join(parts) or "it is empty"


MOST = 5  # kinds of files, and folders, that are named
