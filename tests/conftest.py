"""What all tests share."""

import signal

import pytest

# A shell that runs the tests in the background has them ignore Ctrl-C, which all processes that
# they start would inherit, and some of these are interrupted to see what they do.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu:
        return
    # Only now: importing torch takes seconds, and most selections of tests need no GPU.
    import torch

    if not torch.cuda.is_available():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
