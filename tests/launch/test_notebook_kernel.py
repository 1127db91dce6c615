"""The notebook among the examples, in a real kernel; then Ctrl-C in the same kernel."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.processes import clean_environment

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "digits.ipynb"

pytestmark = pytest.mark.timeout(240)

ENDLESS = """
import os, pathlib, signal

class Endless(DigitsNet):
    def training_step(self, batch, batch_idx):
        if self.global_step == 3 and self.global_rank == 0:
            pathlib.Path("running").touch()
        return super().training_step(batch, batch_idx)

arguments = dict(accelerator="cpu", devices=2, strategy="hvd", logger=False,
                 enable_checkpointing=False, enable_progress_bar=False)
endless = Endless()
trainer = Trainer(max_epochs=-1, **arguments)
trainer.fit(endless, train_loader)
"""

AFTERWARDS = """
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert trainer.state.status == "interrupted", trainer.state
assert len(endless.losses) > 3
children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text()
print("children:", children.split())
trainer = Trainer(max_epochs=1, **arguments)
trainer.fit(net, train_loader)
print("steps:", trainer.global_step)
"""


class Kernel:
    """The kernel of the notebook, from its first cell to the end of the tests here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notebook = nbformat.read(NOTEBOOK, as_version=4)
        self.client = nbclient.NotebookClient(
            self.notebook,
            timeout=200,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
            allow_errors=True,
        )

    def run(self, cell: Any) -> str:
        """Runs a cell, and returns all text that it shows."""
        index = self.notebook.cells.index(cell)
        self.client.execute_cell(cell, index)
        return "".join(
            output.get("text", "") + "\n".join(output.get("traceback", []))
            for output in cell.get("outputs", [])
        )

    def run_code(self, code: str) -> str:
        self.notebook.cells.append(nbformat.v4.new_code_cell(code))
        return self.run(self.notebook.cells[-1])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    with kernel.client.setup_kernel(env=clean_environment()):
        yield kernel


def test_the_notebook_among_the_examples(kernel: Kernel) -> None:
    shown = [kernel.run(cell) for cell in kernel.notebook.cells if cell.cell_type == "code"]
    everything = "\n".join(shown)
    assert "Error" not in everything, everything
    fit, weights, accuracy, again = shown[-4:]
    assert "Epoch 5/5" in fit  # the progress bar
    assert "\r" in fit
    assert "[rank 1] " in fit
    assert "epoch 6, step 132" in weights
    assert "accuracy computed in this process 0.9" in accuracy
    assert "Epoch 7/7" in again
    assert "after epoch 8, step 176" in again


def test_an_interrupt_leaves_no_rank_and_a_usable_notebook(kernel: Kernel) -> None:
    pid = int(kernel.run_code("import os; print(os.getpid())"))
    ended = threading.Event()

    def interrupt() -> None:
        while not (kernel.folder / "running").exists() and not ended.wait(0.1):
            pass
        if not ended.is_set():
            os.kill(pid, signal.SIGINT)  # what "interrupt kernel" does

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        started = time.monotonic()
        shown = kernel.run_code(ENDLESS)
        assert time.monotonic() - started < 150
    finally:
        ended.set()
        thread.join()
    assert "SystemExit" in shown
    shown = kernel.run_code(AFTERWARDS)
    assert "children: []" in shown, shown
    assert "steps: 22" in shown, shown


def test_the_notebook_is_committed_without_outputs() -> None:
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
