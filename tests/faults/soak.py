"""Kills, stops and ends random ranks at random moments, and counts what goes wrong.

    python -m tests.faults.soak --kills 200 --ranks 3 --seed 1

Each round is a small real training (a plain loop or a Trainer, in turn) with one fault on one rank.
Afterwards every rank must have ended, with the right status; the survivors must have named the
culprit; no process, socket or shared memory may be left; and where the job was to survive (a rank
was stopped and resumed) its result must be right. Rounds depend on the seed and their number only,
so `--first 17 --kills 1` repeats round 17 with the same fault (at the same moment where it is tied
to a place in the program; otherwise a random time after the start).

Prints one line per round, a table, and the verdict; exit status 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.fork_server import ForkServer
from tests.faults.processes import Line, RankProcesses
from tests.faults.soak_job import (
    ENDING,
    LOOP_PLACES,
    STARTING,
    STEPS,
    TRAINER_PLACES,
    Fault,
    run,
)

# What may happen, and how often. "resume": stopped, and resumed after a while; "abandon": stopped
# for good, so that the others have to give up; "stop, kill": killed while it is stopped.
_ACTIONS = {
    "kill": 40,
    "resume": 15,
    "stop, kill": 8,
    "abandon": 5,
    "term": 16,
    "_exit": 5,
    "exit": 4,
    "raise": 7,
}
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
_TIMED = ("kill", "term", "resume", "stop, kill")
_MIDDLE = ("forward", "backward", "flush", "between", "barrier")
# Older kernels tell how a process ended to nobody but its parent, here the fork server.
_KERNEL_TELLS = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 15)
_SIGTERM_STATUS = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Round:
    """One job and its fault."""

    number: int
    action: str
    fault: Fault
    after: float  # seconds from the start to a signal from outside; 0: the place decides
    stopped: float  # seconds until a stopped rank is resumed or killed
    pidfd: bool

    def __str__(self) -> str:
        fault = self.fault
        when = f"after {self.after:.2f} s" if self.after else f"at '{fault.place}' {fault.step}"
        extras = " with workers" * fault.workers + " without pidfds" * (not self.pidfd)
        return f"{fault.program}: {self.action} rank {fault.rank} {when}{extras}"


@dataclass
class Outcome:
    """What came of a round."""

    problems: list[str] = field(default_factory=list)
    hang: bool = False
    leftover: bool = False
    named: list[float] = field(default_factory=list)  # seconds, by survivor
    statuses: list[int] = field(default_factory=list)
    happened: bool = True
    result: str | None = None  # what the ranks agree on at the end, where all of them get there
    trained: float = 0.0  # seconds from the start to that


def plan(number: int, seed: int, ranks: int, typical: dict[str, float]) -> Round:
    """The round of that number; depends on the seed and the number (and the machine's speed)."""
    chance = random.Random(f"{seed}/{number}")
    program = ("loop", "trainer")[number % 2]
    places = LOOP_PLACES if program == "loop" else TRAINER_PLACES
    action = chance.choices(list(_ACTIONS), list(_ACTIONS.values()))[0]
    after = 0.0
    if action in _TIMED and chance.random() < 0.3:
        after = chance.uniform(0.02, typical[program])
    allowed = list(places)
    if action == "abandon":
        allowed = [place for place in places if place in _MIDDLE]
    elif action in ("raise", "exit"):
        # A thread of its own cannot raise anything in the main thread.
        allowed = [p for p in places if p in ("forward", "backward", "between", "validation")]
        if action == "exit":
            allowed.remove("backward")
    elif action == "_exit":
        allowed = [place for place in places if place != "holding the GIL"]
    # Less often where hardly anybody needs the rank any more.
    place = chance.choices(allowed, [1 if p in ENDING else 3 for p in allowed])[0]
    if place == "holding the GIL" and action == "term" and program == "loop":
        place = "barrier"
    fault = Fault(
        program=program,
        action={"resume": "stop", "stop, kill": "stop", "abandon": "stop"}.get(action, action),
        rank=0 if place == "writing" and not after else chance.randrange(ranks),
        place="" if after else place,
        step=chance.choice(places[place]),
        workers=chance.random() < 0.15,
    )
    return Round(number, action, fault, after, chance.uniform(0.1, 1.2), chance.random() < 0.7)


def play(server: ForkServer, round_: Round, ranks: int, right: str | None) -> Outcome:
    """Runs one round and judges it."""
    fault = round_.fault
    outcome = Outcome()
    # Who has not said yet that it is there is missed only when time is up.
    timeout = 4.0 if _may_start(round_) and round_.action != "resume" else 60.0
    stall_abort = 1.5 if round_.action == "abandon" else 30.0
    shm = set(os.listdir("/dev/shm"))
    env = {} if round_.pidfd else {"HVD_DISABLE_PIDFD": "1"}
    with tempfile.TemporaryDirectory() as folder:
        processes = server.start_function(
            run, fault, folder, timeout, stall_abort, ranks=ranks, env=env
        )
        try:
            since = _inflict(processes, round_)
            outcome.happened = since is not None
            try:
                outcome.statuses = processes.wait(40)
            except AssertionError as error:
                outcome.hang = True
                outcome.problems.append(str(error))
                return outcome
            _judge(outcome, processes, round_, since, right)
            try:
                # torch's workers look for their parent every five seconds.
                processes.assert_nothing_left(12 if fault.workers else 3)
            except AssertionError as error:
                outcome.leftover = True
                outcome.problems.append(str(error).splitlines()[0])
            left = [name for name in set(os.listdir("/dev/shm")) - shm if "hvd" in name]
            if left:
                outcome.leftover = True
                outcome.problems.append(f"in /dev/shm: {left}")
            if outcome.problems:
                outcome.problems.append(processes.report())
        finally:
            processes.stop()
    return outcome


def _may_start(round_: Round) -> bool:
    """Whether the fault may come before the ranks know each other."""
    return round_.fault.place in STARTING or 0 < round_.after < 0.6


def _inflict(processes: RankProcesses, round_: Round) -> float | None:
    """Does from outside what is to be done there. When the fault happened; None if it did not."""
    victim = round_.fault.rank
    if round_.action == "none":
        return None
    process = processes.processes[victim]
    if round_.after:
        deadline = processes.started + round_.after
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        if process.poll() is not None:
            return None
        since = processes.kill(victim, _SIGNALS.get(round_.action, signal.SIGSTOP))
    elif round_.fault.place == "holding the GIL":
        processes.wait_for("signal me", victim, timeout=40)
        time.sleep(0.05)
        since = processes.kill(victim, _SIGNALS.get(round_.action, signal.SIGSTOP))
    else:
        try:
            line = processes.wait_for("FAULT ", victim, timeout=40)
        except AssertionError:
            return None  # it did not come there; the verdict will be on what it did instead
        since = float(line.text.split()[1])
    if round_.action in ("resume", "stop, kill"):
        time.sleep(round_.stopped)
        processes.kill(victim, signal.SIGCONT if round_.action == "resume" else signal.SIGKILL)
        if round_.action == "stop, kill":
            since = time.monotonic()
    return since


def _judge(
    outcome: Outcome,
    processes: RankProcesses,
    round_: Round,
    since: float | None,
    right: str | None,
) -> None:
    fault, statuses, problems = round_.fault, outcome.statuses, outcome.problems
    outputs = [processes.output(rank) for rank in range(len(statuses))]
    done = ["\nright" in f"\n{output}" for output in outputs]
    if since is None and not round_.after and round_.action != "none":
        problems.append(f"the victim never came to '{fault.place}' {fault.step}")
        return
    if since is None or round_.action == "resume":
        for rank, status in enumerate(statuses):
            if status != 0 or not done[rank]:
                problems.append(f"rank {rank} ended with {status} and is not right")
        lines = [line for line in processes.lines if line.text.startswith("right")]
        results = {line.text for line in lines}
        if len(results) != 1 or (right is not None and results != {right}):
            problems.append(f"results differ: {sorted(results)}, expected {right}")
        else:
            outcome.result = results.pop()
            outcome.trained = max(line.seconds for line in lines) - processes.started
        return
    status = statuses[fault.rank]
    ending = fault.place in ENDING or bool(round_.after)
    # Stopped in the last reduction, for which the others had done their part before they gave up:
    # resumed by them, it finds that it has finished.
    ending |= round_.action == "abandon" and fault.step == STEPS - 1
    graceful = fault.program == "trainer" and round_.action == "term"
    expected = {
        "kill": (-signal.SIGKILL,),
        "stop, kill": (-signal.SIGKILL,),
        "abandon": (1,),
        "term": (-signal.SIGTERM, _SIGTERM_STATUS, 0) if graceful else (-signal.SIGTERM,),
        "_exit": (0,),
        "exit": (0,),
        "raise": (1,),
    }[round_.action]
    if status not in expected and not (ending and done[fault.rank] and status == 0):
        problems.append(f"the victim ended with {status}, expected {expected}")
    if graceful and status == _SIGTERM_STATUS and fault.place != "validation" and not round_.after:
        ends = {re.search(r"ended by SIGTERM after \d+|$", output)[0] for output in outputs}  # type: ignore[index]
        if set(statuses) != {_SIGTERM_STATUS} or len(ends) != 1:
            problems.append(f"not graceful: {statuses}, {ends}")
        return
    for rank in range(len(statuses)):
        if rank == fault.rank:
            continue
        if statuses[rank] == 0:
            if not (ending and done[rank]):
                problems.append(f"rank {rank} ended with 0")
            continue
        if statuses[rank] == _SIGTERM_STATUS and status == _SIGTERM_STATUS:
            continue
        if statuses[rank] != 1:
            problems.append(f"rank {rank} ended with {statuses[rank]}")
        line = _naming(processes, rank, round_, since)
        if line is None:
            problems.append(f"rank {rank} does not name rank {fault.rank} as it should")
        else:
            outcome.named.append(max(0.0, line.seconds - since))
        if round_.action == "raise" and "ZeroDivisionError: the fault" not in outputs[rank]:
            problems.append(f"rank {rank} does not know the exception")


def _naming(processes: RankProcesses, rank: int, round_: Round, since: float) -> Line | None:
    """The first line of a rank that says which rank is to blame."""
    victim = round_.fault.rank
    named = (
        rf"rank {victim}( \(pid \d+\))? (was killed|exited|ended|has left|failed|is missing|"
        rf"did not|cannot)|for ranks? {victim}\b|failed on rank {victim}\b"
        rf"|waited for .*rank {victim}\b"
    )
    if not round_.after and round_.fault.place not in (*STARTING, "opened"):
        # The ranks know each other by now.
        how = {
            "kill": rf"was killed by signal {signal.SIGKILL:d}\b",
            "stop, kill": rf"was killed by signal {signal.SIGKILL:d}\b",
            "term": rf"was killed by signal {signal.SIGTERM:d}\b",
            "_exit": "exited with status 0",
        }.get(round_.action)
        graceful = round_.fault.program == "trainer" and round_.action == "term"
        if how is not None and not graceful:
            how = how if round_.pidfd and _KERNEL_TELLS else f"({how}|ended)"
            named = rf"rank {victim} \(pid {processes.pids[victim]}\) {how}"
    for line in processes.lines:
        if line.rank == rank and line.seconds >= since - 0.001 and re.search(named, line.text):
            return line
    return None


def soak(
    kills: int,
    *,
    ranks: int = 3,
    seed: int = 0,
    first: int = 0,
    seconds_limit: float = float("inf"),
    verbose: bool = False,
    server: ForkServer | None = None,
) -> int:
    """Plays the rounds and prints the result; the number of rounds in which something was wrong."""
    if server is None:
        with ForkServer() as own:
            return soak(
                kills,
                ranks=ranks,
                seed=seed,
                first=first,
                seconds_limit=seconds_limit,
                verbose=verbose,
                server=own,
            )
    began = time.monotonic()
    outcomes: list[tuple[Round, Outcome]] = []
    right: dict[str, str | None] = {}
    typical: dict[str, float] = {}
    for program in ("loop", "trainer"):
        # Without a fault: how long it takes, and what the result is.
        clean = Round(-1, "none", Fault(program), 0, 0, True)
        outcome = play(server, clean, ranks, None)
        if outcome.problems:
            print(f"{program} without a fault is not right:\n" + "\n".join(outcome.problems))
            return 1
        right[program] = outcome.result
        typical[program] = outcome.trained
    for number in range(first, first + kills):
        if time.monotonic() - began > seconds_limit:
            break
        round_ = plan(number, seed, ranks, typical)
        outcome = play(server, round_, ranks, right[round_.fault.program])
        outcomes.append((round_, outcome))
        verdict = "ok" if not outcome.problems else "WRONG"
        named = ", ".join(f"{seconds * 1000:.0f}" for seconds in outcome.named)
        if outcome.problems or verbose:
            print(
                f"{number:4d} {round_}: {verdict}, statuses {outcome.statuses}"
                + (f", named after {named} ms" if named else "")
                + ("" if outcome.happened else " (it had ended before)"),
                flush=True,
            )
        for problem in outcome.problems:
            print("     " + problem.replace("\n", "\n     "), flush=True)
    return _report(outcomes, time.monotonic() - began, seed)


def _report(outcomes: list[tuple[Round, Outcome]], seconds: float, seed: int) -> int:
    print(f"{'':12}{'rounds':>8}{'hangs':>8}{'left':>8}{'wrong':>8}   named after (ms)")
    for action in [*_ACTIONS, "all"]:
        chosen = [o for r, o in outcomes if action in (r.action, "all")]
        if not chosen:
            continue
        # Ranks that have not met are missed when time is up; that is another matter.
        times = [
            second * 1000
            for r, o in outcomes
            if action in (r.action, "all") and not _may_start(r) and r.action != "abandon"
            for second in o.named
        ]
        named = (
            f"median {statistics.median(times):.1f}, max {max(times):.1f} ({len(times)})"
            if times
            else ""
        )
        counts = [
            len(chosen),
            sum(o.hang for o in chosen),
            sum(o.leftover for o in chosen),
            sum(bool(o.problems) for o in chosen),
        ]
        print(f"{action:12}" + "".join(f"{count:8}" for count in counts) + f"   {named}")
    wrong = [r.number for r, o in outcomes if o.problems]
    print(
        f"{len(outcomes)} faults in {seconds:.0f} s, seed {seed}: "
        + (f"wrong in rounds {wrong}" if wrong else "all as it should be")
    )
    return len(wrong)


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="number of rounds, one fault each")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--seconds-limit", type=float, default=float("inf"))
    parser.add_argument("--verbose", action="store_true", help="a line for every round")
    args = parser.parse_args()
    wrong = soak(
        args.kills,
        ranks=args.ranks,
        seed=args.seed,
        first=args.first,
        seconds_limit=args.seconds_limit,
        verbose=args.verbose,
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    assert Path("tests/faults").is_dir(), "to be run from the root of the repository"
    sys.exit(_main())
