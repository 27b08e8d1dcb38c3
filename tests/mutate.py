"""Mutation testing: plant small faults in files, one at a time, and list those no test notices.

python tests/mutate.py [FILE ...] [--sample 25] [--seed 0] [--limit-s 120] [--minutes 60]

A mutant runs in a process forked from one that has imported the libraries, on a scratch copy of
the source. Of a file's possible mutants a sample is drawn, the same for the same seed. One that
exceeds its time, as in a loop without an end, counts as killed.
"""

import argparse
import ast
import copy
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRAIN = ["training_oracle", "checkpoint", "update_rules", "train", "data"]
STUDY = ["study_spec", "study_kinds", "render", "study_folder", "imports", "bits_by_batch"]
COMPRESS = ["compress", "training_oracle", "new_compressor"]
METHODS = ["methods", "compress", "ddp", "reducer", "gpu_methods"]
SPARSE = ["sparse_methods", "reducer", "layer_wires", "gpu_methods"]
FORMATS = [
    *("formats", "tables", "ops", "oracles", "roundings", "packing", "integers", "arrays"),
    *("tensor_formats",),
]
TESTS = {  # file of cpdhpc: the files of tests that cover it, the fastest first
    "store.py": ["store", "studyfile", "tensor_formats", "recording", "checkpoint", "study_folder"],
    "config.py": ["config", "tables", "output", "job_page", "study_spec", "presets"],
    "formats.py": FORMATS,
    "table_formats.py": [*FORMATS, "shifts", "methods", "measures", "exact", "replay", "search"],
    "partition.py": ["schedule", "store", "darray"],
    "arrays.py": ["arrays", "blocks", "integers", "threads", "products", "precision_layers"],
    "lab/train/job.py": [
        *("config", "recording", "job_page", "train", "training_oracle", "stages", "inputs"),
    ],
    "lab/train/losses.py": [
        *("losses", "config", "adversarial", "compare", "report", "training_oracle"),
    ],
    **dict.fromkeys(
        (f"compress/{name}.py" for name in ("powersgd", "qsgd", "terngrad", "gradientflow")),
        METHODS,
    ),
    "compress/base.py": [*METHODS, "config", "parts", "bucket", "training_oracle", "train"],
    "compress/memory.py": [*SPARSE, *METHODS, "checkpoint"],
    "compress/onebit.py": [*METHODS, "checkpoint", "train"],
    "compress/sparse.py": [*SPARSE, "checkpoint"],
    "compress/scalecom.py": ["scalecom", *SPARSE, "config"],
    "compress/oktopk.py": ["oktopk", *SPARSE],
    "compress/adacomp.py": ["adacomp", *SPARSE],
    **dict.fromkeys(
        (f"lab/train/{name}.py" for name in ("loop", "setup", "training", "step", "update")), TRAIN
    ),
    "torch/controllers/base.py": ["training_oracle", "train", "update_rules"],
    "torch/controllers/adaptive.py": ["controllers"],
    "torch/controllers/autowu.py": ["controllers"],
    "lab/report/fits.py": ["critical", "laws", "losses", "report"],
    "lab/train/optimizers.py": [
        *("optimizers", "controllers", "config", "updates", "training_oracle"),
    ],
    "lab/train/data.py": ["datasets", "augment", "data", "train"],
    "lab/train/samples.py": ["data", "datasets", "loader", "training_oracle"],
    "lab/train/gossip.py": ["decentralised"],
    "lab/train/blocks.py": ["models"],
    "lab/train/models.py": ["models", "train"],
    "lab/train/record.py": [*TRAIN, "report"],
    "lab/train/checkpoint.py": [*TRAIN, "new_compressor"],
    "torch/reducer.py": ["reducer", *TRAIN, "overlap", "overlap_errors", "parts"],
    "compress/payload.py": ["payload"],
    "errors.py": ["errors"],
    "ops/payloads.py": ["blocks", "exact", "range", "tables"],
    "ops/products.py": ["products"],
    "ops/steps.py": ["steps", "optimizers"],
    "torch/optimizers.py": ["optimizers", "updates"],
    "ops/common.py": ["threads", "selection", "shifts"],
    "ops/cpu.py": ["selection", "ops"],
    "compress/lowbit.py": [*COMPRESS, "config", "methods", "layer_wires", "loss_scaling"],
    "compress/bucket.py": ["bucket", "methods", *COMPRESS, "checkpoint"],
    "compress/none.py": COMPRESS,
    "ops/reference.py": [
        *("selection", "trits", "packing", "shifts", "integers", "ops", "stochastic", "oracles"),
    ],
    "collectives/schedules.py": ["schedule", "allreduce"],
    "collectives/rank_program.py": ["allreduce", "exact"],
    "collectives/recorded.py": ["known"],
    "collectives/predict.py": ["cost"],
    "lab/study_data/statistics.py": ["statistics"],
    "lab/study/cases.py": STUDY,
    "lab/study/spec.py": STUDY,
    "lab/study/folder.py": ["study_folder", "submit", "study_spec", "slurm_commands"],
    "lab/study_data/study_file.py": ["report_page", "studyfile", "study_report", "study_folder"],
    "lab/study/collect.py": ["study_folder", "study_report", "studyfile"],
    "lab/schedulers/slurm.py": ["submit", "slurm_commands"],
    "lab/study/status.py": ["study_folder", "submit", "slurm_commands"],
    "lab/study/submit.py": ["study_folder", "submit", "slurm_commands"],
    "lab/study/batch.py": ["study_repeats", "inputs", "study_run"],
    "lab/study/run_here.py": ["study_folder", "study_run"],
}
LIBRARIES = ("h5py", "numpy", "pydantic", "pytest", "scipy.stats", "torch", "xarray", "hypothesis")
OTHER: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip
ANNOTATIONS = ("annotation", "returns", "type_params")
SYMMETRIC = ("max", "min", "maximum", "minimum")  # functions whose arguments may change places


def places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where each node below one is, annotations left out: its parent, field and index there."""
    for field, value in ast.iter_fields(node):
        if field in ANNOTATIONS:
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                yield node, field, index
                yield from places(child)


def faults(node: ast.AST, field: str) -> Iterator[ast.AST]:
    """What may stand in place of a node."""
    other = copy.deepcopy(node)
    if isinstance(other, ast.Compare) and type(other.ops[0]) in OTHER:
        other.ops[0] = OTHER[type(other.ops[0])]()
        yield other
    elif isinstance(other, ast.BoolOp | ast.BinOp) and type(other.op) in OTHER:
        other.op = OTHER[type(other.op)]()
        yield other
    elif isinstance(other, ast.UnaryOp) and isinstance(other.op, ast.Not):
        yield other.operand
    elif isinstance(other, ast.Constant) and isinstance(other.value, bool):
        yield ast.Constant(not other.value)
    elif isinstance(other, ast.Constant) and isinstance(other.value, int | float):
        yield from (ast.Constant(other.value + 1), ast.Constant(other.value - 1))
    elif (
        isinstance(other, ast.Call)
        and len(other.args) > 1
        and ast.unparse(other.func).rpartition(".")[2] not in SYMMETRIC
    ):
        other.args[:2] = reversed(other.args[:2])
        yield other
    elif isinstance(other, ast.AugAssign | ast.Raise | ast.Delete) or (
        isinstance(other, ast.Expr) and not isinstance(other.value, ast.Constant | ast.Yield)
    ):
        yield ast.Pass()
    if field == "test" and not isinstance(node, ast.Compare | ast.UnaryOp):
        yield ast.UnaryOp(ast.Not(), copy.deepcopy(node))  # type: ignore[arg-type]


def at(parent: ast.AST, field: str, index: int | None) -> ast.AST:
    value = getattr(parent, field)
    found: ast.AST = value if index is None else value[index]
    return found


def mutants(source: str) -> list[tuple[str, str]]:
    """Every mutant of a source: where and what, and the whole text."""
    tree, found = ast.parse(source), []
    for parent, field, index in list(places(tree)):
        node = at(parent, field, index)
        for fault in faults(node, field):
            put(parent, field, index, fault)
            ast.fix_missing_locations(tree)
            what = f"{getattr(node, 'lineno', 0)}: {ast.unparse(node)}  ->  {ast.unparse(fault)}"
            found.append((what, ast.unparse(tree)))
        put(parent, field, index, node)
    return found


def put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def exit_code(scratch: Path, tests: list[str], limit_s: float) -> int | None:
    """What pytest says of the scratch copy, 0 where all tests pass; None where it takes longer."""
    child = os.fork()
    if child == 0:
        in_child(scratch, tests)
    deadline = time.monotonic() + limit_s
    done, status = os.waitpid(child, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.05)
        done, status = os.waitpid(child, os.WNOHANG)
    if not done:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(status)


def in_child(scratch: Path, tests: list[str]) -> None:
    """Run the tests on the scratch copy, and end the process with their status."""
    status: int = 3
    try:
        os.setsid()
        os.chdir(scratch)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        os.environ["PYTHONPATH"] = str(scratch)  # of processes that tests start
        sys.path[:] = [*(str(scratch / each) for each in ("", "tests", "tests/helpers")), *sys.path]
        sys.dont_write_bytecode = True
        for name in [each for each in sys.modules if each.partition(".")[0] == "cpdhpc"]:
            del sys.modules[name]  # torch has loaded the backend, and so ROOT's package
        paths = [f"tests/test_{name}.py" for name in tests]
        run: Callable[[list[str]], int] = importlib.import_module("pytest").main
        chosen = ["-m", "not gpu and not slow and not slurm", "-k", "not killed_run and not learns"]
        status = int(run(["-x", "-q", "-p", "no:cacheprovider", *chosen, *paths]))
    finally:
        os._exit(status)


def tried(
    path: str, scratch: Path, options: argparse.Namespace
) -> Iterator[tuple[str, int | None]]:
    """Each mutant of a file's sample, and what pytest says of it."""
    copied = scratch / "cpdhpc" / path  # not ROOT's, which may have changed since
    source = copied.read_text()
    found = mutants(source)
    random.Random(f"{options.seed} {path}").shuffle(found)
    for what, text in found[: options.sample]:
        copied.write_text(text)
        yield what, exit_code(scratch, TESTS[path], options.limit_s)
    copied.write_text(source)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", default=list(TESTS), help="files of cpdhpc: " + " ".join(TESTS)
    )
    parser.add_argument("--sample", type=int, default=25, help="mutants of a file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=120.0, help="for the tests of one mutant")
    parser.add_argument("--minutes", type=float, default=60.0, help="no file begins after that")
    options = parser.parse_args()
    paths = [name.removeprefix("cpdhpc/") for name in options.files]
    if unknown := [path for path in paths if path not in TESTS]:
        parser.error(f"{unknown}: known are {', '.join(TESTS)}")
    for library in LIBRARIES:
        importlib.import_module(library)
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        for part in ("cpdhpc", "tests", "inputs", "docs", "kernels", "slurm"):
            shutil.copytree(
                ROOT / part, scratch / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pyproject.toml", scratch)
        for path in paths:
            if time.monotonic() > end:
                print(f"{path}: not run: {options.minutes:g} minutes are over")
                continue
            if exit_code(scratch, TESTS[path], 600) != 0:
                print(f"{path}: not run: its tests fail as it is: {' '.join(TESTS[path])}")
                continue
            results = list(tried(path, scratch, options))
            alive = [what for what, code in results if code == 0]
            late = [what for what, code in results if code is None]
            print(f"{path}: {len(results) - len(alive)} of {len(results)} killed", flush=True)
            for said, mutants_ in (("survived", alive), ("killed by time", late)):
                for what in mutants_:
                    print(f"    {said}: {what}", flush=True)


if __name__ == "__main__":
    main()
