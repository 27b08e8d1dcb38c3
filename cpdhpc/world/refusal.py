"""How processes meet where one refuses a call before it has sent what others wait for.

By messages, not by a collective: some may be inside another one.
"""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

from .ranks import portable

REFUSAL_S = 30.0  # for which a process that refuses a call waits for the others to hear of it


def meet(comm: Any, tag: int, mine: Exception | None, wait_s: float) -> tuple[Exception, bool]:
    """Exchange errors with all processes; return the first one, and whether all have one.

    mine: the error of this process, None where it only waited; tag: of these messages alone
    Collective. Raises TimeoutError, which names them, where some do not come in wait_s.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    others = [process for process in range(size) if process != rank]
    data = portable(mine)
    sends = [comm.isend(data, process, tag) for process in others]
    found, missing = {rank: data}, others
    end_s = time.monotonic() + wait_s
    while missing or not all([send.test()[0] for send in sends]):
        found |= {p: comm.recv(source=p, tag=tag) for p in missing if comm.Iprobe(p, tag)}
        missing = [process for process in others if process not in found]
        os.sched_yield()
        if time.monotonic() > end_s:
            who = ", ".join(map(str, missing)) or "unknown"
            raise TimeoutError(f"rank {who} did not hear of it in {wait_s:.0f} s")
    errors = [pickle.loads(each) for _, each in sorted(found.items()) if each is not None]
    return errors[0], len(errors) == size
