"""Data-parallel training in a plain PyTorch loop.

torchrun --nproc-per-node 2 examples/plain_loop.py
mpirun -n 2 python examples/plain_loop.py
python examples/plain_loop.py                   # alone: the same code, nothing to reduce
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvd_strategy

EPOCHS = 5
BATCH_SIZE = 32  # per process


def main() -> None:
    # Finds the other processes, whoever started them.
    session = hvd_strategy.open_session()

    torch.manual_seed(0)
    inputs = torch.randn(2048, 16)
    targets = inputs.sin().sum(dim=1, keepdim=True)
    data = TensorDataset(inputs, targets)
    sampler = DistributedSampler(data, num_replicas=session.size, rank=session.rank)
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler)

    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Gives everybody the parameters of rank 0. From here on backward() leaves the mean over all
    # processes in p.grad.
    reducer = hvd_strategy.GradientReducer(model.named_parameters(), optimizer=optimizer)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for batch_inputs, batch_targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch_inputs), batch_targets)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = session.allreduce(total / len(loader), "mean")
        if session.rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f} on {session.size} processes")

    # The same model everywhere, to the last bit.
    weights = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    others = session.allgather(weights)
    assert all(torch.equal(weights, other) for other in others)
    if session.rank == 0:
        print(f"the same {weights.numel()} weights on {session.size} processes")
    reducer.close()
    session.close()


if __name__ == "__main__":
    main()
