"""The tests of torch.distributed that torch ships, for the backend "cpdhpc" in place of gloo.

They are read from the installed torch, and each mention of gloo becomes the backend's name, so that
all that torch runs for gloo runs for it.
"""

import os
import re
import sys
import types
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SHIPPED = "torch.testing._internal.distributed.distributed_test"
RENAMED = {
    '"gloo"': '"cpdhpc"',
    "dist.Backend.GLOO": '"cpdhpc"',
    "dist.is_gloo_available()": "True",
}
OTHERS = re.compile("cuda|nccl|gpu", re.IGNORECASE)  # in the names of tests that need them
NOT_OURS = {  # test -> why it says nothing of this backend; gloo fails those marked *
    "test_monitored_barrier_gloo": "torch refuses monitored_barrier but for gloo",
    "test_monitored_barrier_gloo_subgroup": "torch refuses monitored_barrier but for gloo",
    "test_monitored_barrier_gloo_rank_0_timeout": "torch refuses monitored_barrier but for gloo",
    "test_ddp_logging_data_cpu": "asks for settings that DDP logs for gloo alone",
    "test_SyncBatchNorm_process_group": "* needs torchvision",
    "test_batch_isend_irecv_op_err": "* needs GPUs",
    "test_batch_isend_irecv_mixed_backend_err": "* needs NCCL",
    "test_barrier_timeout_global": "* ranks that are through end while rank 0 waits",
    "test_barrier_timeout_group": "* ranks that are through end while rank 0 waits",
}


@cache
def names() -> list[str]:
    """The names of the tests, in torch's order."""
    found = re.findall(r"^        def (test_\w+)\(", shipped().read_text(), re.MULTILINE)
    return [name for name in dict.fromkeys(found) if not OTHERS.search(name)]


def shipped() -> Path:
    """The file with the tests."""
    spec = find_spec(SHIPPED)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


@cache
def case(rank: int, size: int, folder: str) -> type[Any]:
    """The class of the tests, for this rank of a job; folder: that all ranks see, and theirs."""
    os.environ.update(BACKEND="cpdhpc", WORLD_SIZE=str(size), INIT_METHOD="mpi://", TEMP_DIR=folder)
    for part in ("barrier", "test_dir", "init_dir"):
        (Path(folder) / part).mkdir(exist_ok=True)
    from torch.testing._internal import common_distributed, common_utils

    for backends in common_distributed.DistTestCases.backend_feature.values():
        if "gloo" in backends:
            backends.add("cpdhpc")
    source = shipped().read_text()
    for name, ours in RENAMED.items():
        assert name in source, f"torch's tests have no {name} any more"
        source = source.replace(name, ours)
    module = types.ModuleType("torch_suite_of_cpdhpc")
    module.__file__ = str(shipped())
    sys.modules[module.__name__] = module
    exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)
    tests = module.DistributedTest._DistTestBase  # type: ignore[attr-defined]
    attributes = {"world_size": size, "rank": rank, "barriers": module.Barrier}
    return type("Suite", (tests, common_utils.TestCase), attributes)
