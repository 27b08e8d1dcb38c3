"""Trains on handwritten digits by Hugging Face's Accelerate, over MPI and in few bits.

    mpirun -n 2 python inputs/accelerated.py
    mpirun -n 2 python inputs/accelerated.py --wire e4m3
    mpirun -n 2 python inputs/accelerated.py --backend gloo

Needs `pip install accelerate "cpdhpc[lab]"`. A program for Accelerate has two lines more over MPI:
the import of cpdhpc.torch, and init_process_group, whose process group Accelerate then takes.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

import cpdhpc.torch


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,500 digits for training and 297 for the test: float32[64] of 0 to 1, labels."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    first, last = (TensorDataset(x[some], y[some]) for some in order.split([1500, len(x) - 1500]))
    return first, last


def train(epochs: int = 5) -> tuple[list[torch.Tensor], float]:
    """Return the parameters after a training, and the accuracy on the test digits. Collective."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == distributed.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training, test = digits()
    batch = 60 // accelerator.num_processes
    loader = DataLoader(training, batch, shuffle=True, generator=torch.Generator().manual_seed(1))
    model, optimizer, loader, tests = accelerator.prepare(
        model, optimizer, loader, DataLoader(test, batch)
    )
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
    with torch.no_grad():
        right = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in tests]
    parameters = [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]
    return parameters, torch.cat(right).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["cpdhpc", "gloo"], default="cpdhpc")
    parser.add_argument("--wire", help="format of gradients, for example e4m3")
    given = parser.parse_args()
    distributed.init_process_group(given.backend, init_method="mpi://")
    if given.wire:
        cpdhpc.torch.set_wires(all_reduce=given.wire, from_bytes=1024)
    _, accuracy = train()
    if distributed.get_rank() == 0:
        print(f"{given.backend} {given.wire or 'float32'}: {accuracy:.2%} of the test digits")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
