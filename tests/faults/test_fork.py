"""Forks inherit nothing that works; sessions leave nothing behind; idle engines do nothing."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_strategy import HvdError, open_session
from tests.faults.processes import start_function
from tests.faults.ranks import Training, say


def engine_descriptors() -> list[str]:
    """Unix sockets, pidfds and shared memory of this process: only the engine has any here."""
    inodes = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    found = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue  # the descriptor of this loop
        is_unix = target.startswith("socket:[") and target[8:-1] in inodes
        if is_unix or "pidfd" in target or "memfd:hvd" in target:
            found.append(target)
    return found


def engine_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:hvd")


def engine_threads() -> dict[str, int]:
    """Voluntary context switches of each of the engine's threads."""
    switches = {}
    for task in Path("/proc/self/task").iterdir():
        status = dict(
            line.split(":\t", 1)
            for line in (task / "status").read_text().splitlines()
            if ":\t" in line
        )
        if status["Name"].startswith("hvd"):
            switches[f"{status['Name']} {task.name}"] = int(status["voluntary_ctxt_switches"])
    return switches


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(HvdError, match="forked"):
        call()


def check_child(training: Training) -> None:
    session = training.session
    assert engine_mappings() == 0
    assert engine_descriptors() == []
    assert engine_threads() == {}
    assert session.closed
    refused(session.barrier)
    refused(lambda: session.allreduce(torch.ones(3)))
    refused(session.communicator.barrier)
    refused(lambda: session.communicator.exchange(b"x"))
    refused(lambda: session.core.communicator([0, 1]))
    refused(training.step)
    # Nobody is there to hear it, and no memory to write it to.
    session.post_error("from the child")
    session.core.post_error("from the child")
    session.core.request_stop()
    assert session.core.pass_point()
    session.set_activity("something in the child")
    session.core.set_activity("something in the child")
    assert session.core.failure() is None
    session.close()
    session.core.close()
    training.reducer.close()


def wait_for_child(pid: int) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 6)  # prints its stack
    os.waitpid(pid, 0)
    raise AssertionError("the child hung")


def fork_and_check(training: Training) -> None:
    pid = os.fork()
    if pid == 0:
        check_child(training)
        del training
        gc.collect()
        sys.exit(0)  # through atexit and the end of the interpreter
    assert wait_for_child(pid) == 0


def drop_in_child(box: list[Training]) -> None:
    # The destructors meet mutexes and threads that stayed with the parent.
    box.clear()
    gc.collect()


def forks_and_sessions() -> None:
    session = open_session()
    training = Training(session)
    for _ in range(3):
        training.step()
    assert engine_mappings() > 0
    assert engine_descriptors()
    if session.rank == 0:
        box = [training]
        fork_and_check(training)
        training.step()
        child = multiprocessing.get_context("fork").Process(target=drop_in_child, args=(box,))
        child.start()
        assert child.pid is not None
        child.join(20)
        assert child.exitcode == 0, child.exitcode
        box.clear()
    else:
        training.step()
    training.step()
    training.check()
    assert session.core.failure() is None
    assert session.core.pass_point()
    say("parent trains on")

    session.barrier()
    before, spent = engine_threads(), time.process_time()
    assert before
    time.sleep(2)
    after, spent = engine_threads(), time.process_time() - spent
    assert after.keys() == before.keys()
    assert sum(after.values()) - sum(before.values()) <= 2, (before, after)
    say(f"idle: {spent / 2:.2%} of a core")

    training.reducer.close()
    session.close()
    del session, training
    gc.collect()
    gc.freeze()  # only what comes from now on matters; a collection takes long with all of torch
    counts = []
    for number in range(103):
        with open_session() as session:
            assert session.allreduce(torch.ones(2)).tolist() == [2.0, 2.0]
            if number % 10 == 2:
                training = Training(session)
                training.step()
                training.check()
                training.reducer.close()
                del training
        del session
        gc.collect()
        if number >= 2:
            descriptors = len(os.listdir("/proc/self/fd"))
            threads = len(os.listdir("/proc/self/task"))
            counts.append((descriptors, threads, engine_mappings(), len(engine_descriptors())))
    assert counts[-1] == counts[0], (counts[0], counts[-1])
    assert counts[-1][2:] == (0, 0)
    assert engine_threads() == {}
    say("no leaks")


def test_forks_and_sessions() -> None:
    with start_function(forks_and_sessions) as ranks:
        assert ranks.wait(100) == [0, 0], ranks.report()
        for rank in range(2):
            ranks.wait_for("no leaks", rank)
            print(ranks.wait_for("idle: ", rank).text)
        assert ranks.output(stream="stderr") == ""
