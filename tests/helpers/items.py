"""A dataset of the user's, for workers: what reads it imports this file, and little else."""

import multiprocessing
import os
import signal
import time

import torch


class Items:
    """Items with the process that read them; what comes of item 7 where a worker does."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i == 7 and self.wrong == "raise":
            raise OSError("image 7\nis damaged")
        if i == 7 and self.wrong and multiprocessing.parent_process():
            if self.wrong == "hang":
                time.sleep(1000)
            os.kill(os.getpid(), signal.SIGKILL)
        return i + torch.rand(2), os.getpid()
