"""A job of CPU ranks loads neither CUDA nor NCCL nor MPI.

What torch and Lightning load by themselves does not count: a torch with CUDA maps its libraries at
import, and Lightning imports an installed mpi4py whenever it looks for the cluster environment.
"""

import subprocess
import sys

import pytest

JOB = """
import sys
import torch

if "trainer" in sys.argv:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    options = dict(accelerator="cpu", devices=1, max_steps=2, logger=False,
                   enable_checkpointing=False, enable_progress_bar=False,
                   enable_model_summary=False)
    Trainer(**options)
by_others = {line.split()[-1] for line in open("/proc/self/maps")}

from hvd_strategy import GradientReducer

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
reducer = GradientReducer(model.named_parameters(), optimizer=optimizer)
model(torch.ones(3, 4)).sum().backward()
optimizer.step()
reducer.close()

if "trainer" in sys.argv:
    trainer = Trainer(strategy="hvd", **options)
    trainer.fit(BoringModel())
    assert trainer.global_step == 2

for path in sorted({line.split()[-1] for line in open("/proc/self/maps")} - by_others):
    print("mapped:", path)
"""


@pytest.mark.parametrize("front", ["reducer", "trainer"])
def test_cpu_ranks_load_no_gpu_library_and_no_mpi(front: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", JOB, front], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    mapped = [line for line in done.stdout.splitlines() if line.startswith("mapped: /")]
    assert any("_core.abi3.so" in line for line in mapped), done.stdout  # the engine was at work
    for name in ("libcuda", "libcudart", "libnccl", "libnvrtc", "libmpi", "mpi4py/MPI"):
        assert not [line for line in mapped if name in line], name
