"""How ranks meet, without processes: ranks are threads, and the store is torch's in-memory one."""

import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch.distributed as dist

from hvd_strategy import connect, host_meeting, rendezvous
from hvd_strategy.errors import HvdError, HvdTimeoutError
from hvd_strategy.roll_call import Patience, Record, host_record, roll_call
from hvd_strategy.world import World


def call_roll(
    size: int,
    records: list[Record],
    check: Callable[[list[Record]], str | None] = lambda _: None,
    timeout: float = 20.0,
    ranks: list[int] | None = None,
) -> list[Any]:
    """What each rank gets, or the error it raises."""
    store = dist.HashStore()

    def one(rank: int, record: Record) -> Any:
        try:
            return roll_call(
                store, rank, size, record, check, timeout=timeout, warn_after=0, what="this test"
            )
        except HvdError as error:
            return error

    with ThreadPoolExecutor(len(records)) as pool:
        return list(pool.map(one, ranks or range(size), records))


class TestRollCall:
    @pytest.mark.parametrize("size", [2, 3, 8])
    def test_everybody_gets_all_records(self, size: int) -> None:
        answers = call_roll(size, [{"name": f"n{rank}"} for rank in range(size)])
        for answer in answers:
            assert [record["name"] for record in answer] == [f"n{rank}" for rank in range(size)]

    def test_an_error_of_one_is_raised_by_all(self) -> None:
        for answer in call_roll(3, [{}, {"error": "no sockets left"}, {}]):
            assert isinstance(answer, HvdError)
            assert "failed on rank 1: no sockets left" in str(answer)

    def test_a_failed_check_is_raised_by_all(self) -> None:
        for answer in call_roll(3, [{}, {}, {}], lambda records: f"{len(records)} are too many"):
            assert isinstance(answer, HvdError)
            assert str(answer) == "3 are too many"

    def test_missing_ranks_are_named_to_all(self) -> None:
        for answer in call_roll(4, [{}, {}], timeout=0.3, ranks=[0, 2]):
            assert isinstance(answer, HvdTimeoutError)
            assert "wait for ranks 1, 3" in str(answer)

    def test_a_missing_rank_0(self) -> None:
        started = time.monotonic()
        store = dist.HashStore()
        with pytest.raises(HvdTimeoutError, match="rank 1's wait for rank 0"):
            roll_call(store, 1, 2, {}, lambda _: None, timeout=-4.7, warn_after=0, what="this test")
        assert time.monotonic() - started < 5

    def test_two_processes_of_one_rank(self) -> None:
        started = time.monotonic()
        # Rank 2 has not come yet: nobody waits for it in vain.
        answers = call_roll(3, [{}, {"n": 1}, {"n": 2}], ranks=[0, 1, 1])
        assert time.monotonic() - started < 10
        for answer in answers:
            assert "Two processes claim to be rank 1 of 3" in str(answer)


def pause_for_ever(patience: Patience) -> None:
    while True:
        patience.pause()


class TestPatience:
    def test_says_once_whom_it_waits_for(self, caplog: pytest.LogCaptureFixture) -> None:
        patience = Patience(0.3, 0.05, lambda: "the wait for rank 7")
        with pytest.raises(HvdTimeoutError, match=r"the wait for rank 7 did not end within 0\.3 s"):
            pause_for_ever(patience)
        assert caplog.text.count("the wait for rank 7") == 1

    def test_never_says_anything_at_0(self, caplog: pytest.LogCaptureFixture) -> None:
        patience = Patience(0.1, 0, lambda: "the wait for rank 7")
        with pytest.raises(HvdTimeoutError):
            pause_for_ever(patience)
        assert caplog.records == []


class TestReach:
    here: ClassVar[Record] = {"host": "a", "boot": "1", "net": "5", "pid": 10, "one_host": True}

    def test_one_host(self) -> None:
        assert connect._out_of_reach([self.here, {**self.here, "pid": 11}]) is None
        # Containers with a common network: what counts is that sockets reach.
        assert connect._out_of_reach([self.here, {**self.here, "host": "b"}]) is None

    @pytest.mark.parametrize("other", [{"boot": "2"}, {"one_host": False}])
    def test_several_hosts_are_named_with_their_ranks(self, other: Record) -> None:
        there = {**self.here, "host": "b", **other}
        problem = connect._out_of_reach([self.here, there, self.here, there])
        assert problem is not None
        assert "not supported yet: rank 0, 2 on a; rank 1, 3 on b" in problem

    def test_network_namespaces(self) -> None:
        problem = connect._out_of_reach([self.here, {**self.here, "net": "6"}])
        assert problem is not None
        assert "Rank 1 and rank 0" in problem
        assert "network namespaces" in problem

    def test_this_process_reaches_itself(self) -> None:
        record = host_record()
        assert record["pid"] == os.getpid()
        assert record["boot"]
        assert record["net"]


class TestAddress:
    world = World(1, 2, 1, 2)

    def test_from_the_environment(self) -> None:
        environ = {"MASTER_ADDR": "h", "MASTER_PORT": "29500"}
        assert rendezvous._address_from(environ, self.world) == ("h", 29500)
        assert rendezvous._address_from({"MASTER_ADDR": "h"}, self.world) is None
        # Lightning sets the port alone before it forks.
        assert rendezvous._address_from({"MASTER_PORT": "1"}, self.world) == ("127.0.0.1", 1)

    def test_port_alone_with_several_hosts(self) -> None:
        with pytest.raises(HvdError, match="MASTER_PORT=1 is set, but MASTER_ADDR is not"):
            rendezvous._address_from({"MASTER_PORT": "1"}, World(1, 2, 0, 1))

    @pytest.mark.parametrize("port", ["0", "x", "-1", "65536", "1.5"])
    def test_bad_port(self, port: str) -> None:
        with pytest.raises(HvdError, match=f"MASTER_PORT='{port}'"):
            rendezvous._address_from({"MASTER_ADDR": "h", "MASTER_PORT": port}, self.world)

    def test_nowhere_to_meet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for launcher in ("env", "horovod"):
            world = World(1, 2, 1, 2, launcher=launcher)
            with pytest.raises(HvdError, match="set MASTER_ADDR"):
                rendezvous._open_store(world, None, timedelta(seconds=1), 0)

    def test_several_hosts_without_an_address(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MASTER_PORT", raising=False)
        world = World(1, 4, 1, 2, launcher="mpich")
        with pytest.raises(HvdError, match=r"one of 2 ranks here, of 4 in all.*not supported yet"):
            rendezvous._open_store(world, None, timedelta(seconds=1), 0)

    def test_port_in_use(self) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(HvdError, match=f"127.0.0.1:{port}.*choose another MASTER_PORT"):
                rendezvous._store_at(
                    ("127.0.0.1", port), World(0, 2, 0, 2), timedelta(seconds=5), 0
                )

    def test_rank_0_serves_the_store_without_waiting(self) -> None:
        """Who is missing is said by the roll call, which then looks at who has come."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        minute = timedelta(seconds=60)
        store = rendezvous._store_at(("127.0.0.1", port), World(0, 2, 0, 2), minute, 0)
        with pytest.raises(HvdTimeoutError, match="rank 0's wait for ranks 1 did not end"):
            roll_call(store, 0, 2, {}, lambda _: None, timeout=0.1, warn_after=0, what="this test")
        rank_1 = rendezvous._store_at(("127.0.0.1", port), World(1, 2, 1, 2), minute, 0)
        assert b"rank 0's wait for ranks 1" in rank_1.get("list")

    def test_ranks_of_two_launches(self) -> None:
        first = {"boot": "1", "launch": "mpiexec 5", "pid": 1, "host": "a"}
        assert rendezvous._two_launches([first, {**first, "pid": 2}]) is None
        assert rendezvous._two_launches([first, {**first, "launch": ""}]) is None
        problem = rendezvous._two_launches([first, first, {**first, "launch": "mpiexec 6"}])
        assert problem is not None
        assert "rank 2" in problem
        assert "MASTER_PORT" in problem


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_needs_a_gpu(backend: str) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match=f'process_group_backend="{backend}" needs a CUDA device'):
        rendezvous._available_backend(backend)


class TestLauncherProcess:
    @pytest.mark.parametrize(
        "name",
        [
            "hydra_pmi_proxy",
            "mpirun",
            "mpiexec",
            "mpiexec.hydra",
            "orterun",
            "orted",
            "prterun",
            "prted",
            "srun",
            "slurmstepd",
            "horovodrun",
            "hvdrun",
        ],
    )
    def test_known_by_name(self, name: str) -> None:
        assert host_meeting._LAUNCHER_PROCESS.fullmatch(name)

    @pytest.mark.parametrize("name", ["bash", "python", "pytest", "my_mpirun.sh", "mpirun_wrapper"])
    def test_others_are_not_mistaken_for_one(self, name: str) -> None:
        assert not host_meeting._LAUNCHER_PROCESS.fullmatch(name)

    def test_ancestors_are_read_to_the_first(self) -> None:
        found = list(host_meeting._ancestors())
        assert found[0][0] == os.getppid()
        assert all(re.fullmatch("[0-9]+", start) for _, _, start in found)
        assert [start for _, _, start in found] == sorted(
            (start for _, _, start in found), key=int, reverse=True
        )

    def test_identity_is_the_nearest_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in host_meeting._JOB_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        tree = [(9, "bash", "900"), (7, "hydra_pmi_proxy", "700"), (5, "mpiexec", "500")]
        monkeypatch.setattr(host_meeting, "_ancestors", lambda: iter(tree))
        identity = host_meeting.launch_identity("mpich")
        assert identity.endswith(" 7 700")
        tree[1] = (7, "hydra_pmi_proxy", "701")  # another process that got the number later
        assert host_meeting.launch_identity("mpich") != identity
        tree[1:] = []
        assert host_meeting.launch_identity("mpich").endswith(" 9 900")
        assert host_meeting.launch_identity("horovod") == ""
        assert host_meeting.launch_identity("env") == ""
        monkeypatch.setenv("SLURM_JOB_ID", "12")
        monkeypatch.setenv("SLURM_STEP_ID", "3")
        assert host_meeting.launch_identity("slurm").endswith("SLURM_JOB_ID=12 SLURM_STEP_ID=3")


class TestPortExchange:
    """The abstract socket by which rank 0 tells the port."""

    name = f"\0hvd-test-{os.getpid()}"

    def meet(self, size: int, others: list[tuple[int, int]], timeout: float = 10) -> list[Any]:
        def guarded(function: Callable[..., Any], *args: Any) -> Any:
            try:
                return function(*args)
            except HvdError as error:
                return error

        with ThreadPoolExecutor(len(others) + 1) as pool:
            answers = [
                pool.submit(guarded, host_meeting._ask_port, self.name, rank, count, timeout, 0)
                for rank, count in others
            ]
            time.sleep(0.1)  # rank 0 is usually not the first
            teller = pool.submit(
                guarded, host_meeting._tell_port, self.name, 4711, size, timeout, 0
            )
            return [teller.result(), *(answer.result() for answer in answers)]

    def test_all_ranks_hear_it(self) -> None:
        assert self.meet(4, [(1, 4), (2, 4), (3, 4)]) == [None, 4711, 4711, 4711]

    def test_who_does_not_fit_is_turned_away(self) -> None:
        told, *answers = self.meet(2, [(1, 3), (5, 2), (1, 2)], timeout=3)
        assert told is None
        assert answers[2] == 4711
        for answer in answers[:2]:
            # Turned away, or too late to meet anybody.
            assert isinstance(answer, HvdError)
            assert "MASTER_PORT" in str(answer)

    def test_missing_ranks_are_named(self) -> None:
        told, answer = self.meet(4, [(2, 4)], timeout=0.5)
        assert isinstance(told, HvdTimeoutError)
        assert "ranks 1, 3 of 4" in str(told)
        assert answer == 4711

    def test_strangers_do_not_disturb(self) -> None:
        def stranger() -> None:
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                with socket.socket(socket.AF_UNIX) as connection:
                    try:
                        connection.connect(self.name)
                    except OSError:
                        time.sleep(0.01)
                        continue
                    connection.sendall(struct.pack("!8sii", b"nonsense", 1, 2))
                    return

        thread = threading.Thread(target=stranger)
        thread.start()
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(host_meeting._tell_port, self.name, 4711, 2, 10, 0)
            thread.join()
            assert host_meeting._ask_port(self.name, 1, 2, 10, 0) == 4711
            assert told.result() is None

    def test_second_rank_0(self) -> None:
        with socket.socket(socket.AF_UNIX) as first:
            first.bind(self.name)
            with pytest.raises(HvdError, match="claims to be rank 0 as well"):
                host_meeting._tell_port(self.name, 1, 2, 1, 0)

    def test_another_users_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket(socket.AF_UNIX) as first:
            first.bind(self.name)
            first.listen()
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
            with pytest.raises(HvdError, match="process of another user"):
                host_meeting._ask_port(self.name, 1, 2, 1, 0)
