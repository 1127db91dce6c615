"""Every argument of every public constructor and function: what it refuses, and what it says.

A wrong argument leaves nothing behind, so each case is followed by a right call.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

import hvd_strategy
from hvd_strategy import (
    GradientReducer,
    HvdError,
    HvdStrategy,
    ScheduledPrecision,
    Session,
    open_session,
)
from hvd_strategy._private_api import post_accumulate_hooks
from hvd_strategy.lightning import strategy_class
from hvd_strategy.options import OPTIONS
from hvd_strategy.world import World, detect_world

# Values that an option refuses; what it accepts is told by the table of options.
BAD_OPTIONS: dict[type, tuple[Any, ...]] = {
    bool: ("yes", 3),
    int: ("3", -1, 2.5, True),
    float: ("25", -1, float("nan"), True, [1]),
    str: ("no such thing", 3, ""),
    timedelta: ("30", timedelta(0), -1, True),
}

PAIRS = "pairs of a name and a parameter, as model.named_parameters() gives"
OPTIMIZERS = "a torch.optim.Optimizer, or several of them"
A_TENSOR = "a dense torch.Tensor on the CPU"
A_BOOL = "True or False"
FLAG = "True, False or None"
SPARSE = torch.eye(2).to_sparse()
A_SCHEDULE = "a dictionary of optimizer steps and precisions, one of the steps 0"
A_RECORD = "a list of what JSON can write"
KNOWN = "one that the reducer was given"
AMONG = "parameters that are among named_parameters"
STEPS = "a number of steps, or a function that tells it"
FROM_0 = "a number from 0 on"
ABOVE_0 = "a number above 0"

# By callable and argument: pairs of a value and what the message has to say besides the name.
CASES: dict[str, dict[str, list[tuple[Any, str]]]] = {
    "HvdStrategy": {
        "accelerator": [("cpu", "Accelerator, or None"), (3, "Trainer(accelerator='cpu')")],
        "parallel_devices": [(2, "a list of torch.device"), (["cpu"], "one for each rank")],
        "cluster_environment": [("slurm", "ClusterEnvironment, or None"), (World, "an instance")],
        "checkpoint_io": [("/tmp", "CheckpointIO, or None"), (TorchCheckpointIO, "an instance")],
        "precision_plugin": [("16-mixed", "Precision, or None"), (16, "Trainer(precision=")],
        "find_unused_parameters": [("yes", FLAG)],
        "static_graph": [(1, FLAG)],
        "gradient_as_bucket_view": [("no", FLAG)],
        "broadcast_buffers": [([], FLAG)],
        "uneven_inputs": [("skip", '"join", "stop" or "error"'), (True, '"join"')],
        "exact_evaluation": [("yes", "True or False"), (1, "True or False")],
        "ddp_comm_hook": [(print, "wire_dtype"), ("fp16", "wire_dtype")],
    },
    "ScheduledPrecision": {
        "schedule": [
            (None, A_SCHEDULE),
            ("32-true", A_SCHEDULE),
            ([(0, "32-true")], A_SCHEDULE),
            ({}, A_SCHEDULE),
            ({1: "32-true"}, A_SCHEDULE),
            ({-1: "64-true", 0: "32-true"}, A_SCHEDULE),
            ({False: "32-true"}, A_SCHEDULE),
            ({"0": "32-true"}, A_SCHEDULE),
            ({0: "32-true", 1.5: "bf16-mixed"}, A_SCHEDULE),
            ({0: "32-true", 9: "64-mixed"}, "'64-mixed' is no precision"),
            ({0: 8}, '"16-mixed", "bf16-mixed"'),
            ({0: None}, "None is no precision"),
            ({0: True}, "True is no precision"),
        ],
        "device": [(0, "or None"), (torch.device("cpu"), "or None")],
        "scaler": [
            (2.0**16, "a GradScaler, or None"),
            (torch.amp.GradScaler, "a GradScaler, or None"),
            (torch.amp.GradScaler("cpu"), 'no phase of the schedule is "16-mixed"'),
        ],
    },
    "GradientReducer": {
        "named_parameters": [
            (None, PAIRS),
            (3, PAIRS),
            (nn.Linear(1, 1), PAIRS),
            (nn.Linear(1, 1).parameters(), PAIRS),
            ([("weight", 3)], PAIRS),
            ([(1, nn.Parameter(torch.ones(1)))], PAIRS),
            (["weight"], PAIRS),
            (nn.LazyLinear(2).named_parameters(), "initialized parameters"),
            (nn.Linear(1, 1, device="meta").named_parameters(), "parameters with memory"),
        ],
        "optimizer": [("sgd", OPTIMIZERS), ([3], OPTIMIZERS), (torch.optim.SGD, OPTIMIZERS)],
        "session": [("mine", "what open_session() returns")],
        "module": [(nn.Linear, "a torch.nn.Module"), ("model", "a torch.nn.Module")],
        "broadcast_parameters": [("yes", A_BOOL), (1, A_BOOL), (None, A_BOOL)],
        "full_precision": [
            (3, AMONG),
            ("weight", AMONG),
            ([nn.Parameter(torch.ones(1))], AMONG),
            (["weight"], AMONG),
            (torch.ones(1), AMONG),
        ],
        "gradient_norms": [("yes", A_BOOL)],
        "force": [(2, A_BOOL)],
    },
    "GradientReducer.add_optimizer": {"optimizer": [(None, OPTIMIZERS), ("sgd", OPTIMIZERS)]},
    "GradientReducer.join": {"optimizer": [("sgd", KNOWN)]},
    "GradientReducer.step_is_over": {"optimizer": [("sgd", KNOWN)]},
    "GradientReducer.backward": {
        "loss": [(3.0, "a torch.Tensor"), (None, "a torch.Tensor")],
        "items": [(3, "create it with gradient_average='items'")],
    },
    "GradientReducer.weigh_backward": {
        "loss": [(3.0, "a torch.Tensor")],
        "items": [(3, "create it with gradient_average='items'")],
        "run": [(None, "a function of the weighted loss")],
        "times": [(0, ABOVE_0), (None, ABOVE_0)],
    },
    "GradientReducer.expect_items": {"items": [(0, ABOVE_0), (None, ABOVE_0)]},
    "GradientReducer.set_step": {"step": [(-1, STEPS), (True, STEPS), (1.0, STEPS), ("1", STEPS)]},
    "GradientReducer.set_weight": {
        "weight": [(-1, FROM_0), (True, FROM_0), ("1", FROM_0)],
        "factor": [(-1, FROM_0), (float("nan"), FROM_0)],
    },
    "GradientReducer.attach_notes": {"write": [(3, "returns two numbers")]},
    "GradientReducer.attach_scaler": {"scaler": [(torch.amp.GradScaler("cpu"), "or None")]},
    "GradientReducer.set_scale": {"scale": [(0, ABOVE_0), ("2", ABOVE_0)]},
    "GradientReducer.scale_kept": {"scale": [(-2, ABOVE_0), (float("inf"), ABOVE_0)]},
    "GradientReducer.unscale_": {
        "optimizer": [("sgd", "a torch.optim.Optimizer"), (None, "a torch.optim.Optimizer")],
        "factor": [(0, ABOVE_0), (None, ABOVE_0)],
    },
    "GradientReducer.grad_norm": {"of": [("sgd", "parameters, or None"), ([3], "parameters")]},
    "GradientReducer.clip_grad_norm_": {
        "of": [(3, "parameters, or None"), ("sgd", "parameters, or None")],
        "max_norm": [(-1, FROM_0), (True, FROM_0), ("1", FROM_0)],
    },
    "GradientReducer.by_products": {"parameter": [("weight", "a parameter of the reducer")]},
    "GradientReducer.record_events": {
        "capacity": [(-1, "a number of events"), ("many", "a number"), (1.5, "a number")]
    },
    "open_session": {
        "world": [("2", "a hvd_strategy.world.World"), ((0, 2), "a hvd_strategy.world.World")],
        "address": [
            ("127.0.0.1", "a pair of host and port"),
            (("127.0.0.1", "29500"), "a pair of host and port"),
            (("", 29500), "a pair of host and port"),
            (("127.0.0.1", 0), "a pair of host and port"),
            (("127.0.0.1", 70000), "a pair of host and port"),
        ],
    },
    "Session.allreduce": {
        "tensor": [(3, A_TENSOR), (SPARSE, A_TENSOR), (torch.ones(1, device="meta"), A_TENSOR)],
        "op": [("average", "sum, mean, min, max"), (None, "sum, mean, min, max")],
    },
    "Session.allgather": {"tensor": [([1.0], A_TENSOR), (SPARSE, A_TENSOR)]},
    "Session.broadcast": {
        "tensor": [(None, A_TENSOR)],
        "src": [(1, "from 0 to 0"), (-1, "from 0 to 0"), ("0", "a rank"), (True, "a rank")],
    },
    "Session.broadcast_object": {"src": [(1, "from 0 to 0"), (0.0, "a rank")]},
    "Session.exchange": {
        "purpose": [(None, "a str"), (b"lengths", "a str")],
        "record": [(3, A_RECORD), ((1, 2), A_RECORD), ([torch.ones(1)], A_RECORD)],
    },
    "Session.post_error": {"text": [(ValueError("no"), "a str")]},
    "Session.post_exception": {
        "error": [("no", "an exception"), (None, "an exception"), (ValueError, "an exception")]
    },
    "Session.set_activity": {"text": [(None, "a str"), (b"validation", "a str")]},
    "World": {
        name: [("0", "a whole number"), (True, "a whole number"), (-1, "it takes 0 <= rank")]
        for name in ("rank", "size", "local_rank", "local_size", "node_rank")
    }
    | {"launcher": [(3, "a name")]},
    "detect_world": {
        "environ": [("RANK=0", "a mapping of names to text"), ({"RANK": 0}, "text, or nothing")]
    },
    "strategy_class": {"tree": [("pl", "it can be 'lightning.pytorch'")]},
}

# Arguments that take whatever there is.
ANYTHING = {
    "GradientReducer.backward": {"arguments"},
    "Session.broadcast_object": {"obj"},
    "Session.allgather_object": {"obj"},
}


def call(name: str, **arguments: Any) -> Any:
    """Calls something by its name in `CASES`, with right arguments where none are given."""
    constructors: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "HvdStrategy": (HvdStrategy, {}),
        "ScheduledPrecision": (ScheduledPrecision, {"schedule": {0: "32-true", 9: "bf16-mixed"}}),
        "open_session": (open_session, {}),
        "World": (World, {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1}),
        "detect_world": (detect_world, {}),
        "strategy_class": (strategy_class, {"tree": "lightning.pytorch"}),
    }
    if name in constructors:
        function, defaults = constructors[name]
        return function(**{**defaults, **arguments})
    if name == "GradientReducer":
        defaults = {"named_parameters": MODEL.named_parameters(), "force": True}
        return GradientReducer(**{**defaults, **arguments})
    owner, _, method = name.partition(".")
    if owner == "Session":
        defaults = {
            "allreduce": {"tensor": torch.ones(1)},
            "allgather": {"tensor": torch.ones(1)},
            "broadcast": {"tensor": torch.ones(1)},
            "broadcast_object": {"obj": 1},
            "allgather_object": {"obj": 1},
            "exchange": {"purpose": "lengths", "record": [1]},
            "post_error": {"text": "no"},
            "post_exception": {"error": ValueError("no")},
            "set_activity": {"text": "validation"},
        }[method]
        return getattr(open_session(), method)(**{**defaults, **arguments})
    reducer = GradientReducer(MODEL.named_parameters(), OPTIMIZER, force=True)
    try:
        defaults = {
            "add_optimizer": {"optimizer": OPTIMIZER},
            "join": {"optimizer": OPTIMIZER},
            "step_is_over": {"optimizer": OPTIMIZER},
            "backward": {"loss": MODEL(torch.ones(1, 2)).sum()},
            "weigh_backward": {
                "loss": MODEL(torch.ones(1, 2)).sum(),
                "items": None,
                "run": torch.Tensor.backward,
            },
            "expect_items": {"items": 3},
            "set_weight": {"weight": 2},
            "set_step": {"step": 3},
            "attach_scaler": {"scaler": None},
            "attach_notes": {"write": None},
            "set_scale": {"scale": 2.0},
            "scale_kept": {"scale": 2.0},
            "unscale_": {"optimizer": OPTIMIZER, "factor": 0.5},
            "grad_norm": {},
            "clip_grad_norm_": {"of": None, "max_norm": 1.0},
            "by_products": {"parameter": MODEL.weight},
            "record_events": {},
        }[method]
        return getattr(reducer, method)(**{**defaults, **arguments})
    finally:
        reducer.close()


MODEL = nn.Linear(2, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
SIGNATURES: dict[str, Any] = {
    "HvdStrategy": HvdStrategy.__init__,
    "ScheduledPrecision": ScheduledPrecision.__init__,
    "GradientReducer": GradientReducer.__init__,
    "open_session": open_session,
    "World": World.__init__,
    "detect_world": detect_world,
    "strategy_class": strategy_class,
} | {
    f"{owner.__name__}.{name}": method
    for owner in (GradientReducer, Session)
    for name, method in inspect.getmembers(owner, inspect.isfunction)
    if not name.startswith("_")
}


def all_cases() -> Iterator[tuple[str, str, Any, str]]:
    for name, by_argument in CASES.items():
        for argument, values in by_argument.items():
            for value, accepts in values:
                yield name, argument, value, accepts
    for name, signature in SIGNATURES.items():
        for argument in inspect.signature(signature).parameters:
            if argument in OPTIONS and argument not in CASES.get(name, {}):
                for value in BAD_OPTIONS[OPTIONS[argument].type]:
                    yield name, argument, value, OPTIONS[argument].accepts


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    yield
    if (left := hvd_strategy.current_session()) is not None:
        left.close()


def what_is_there() -> dict[str, Any]:
    return {
        "hooks": sum(
            len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
            for parameter in MODEL.parameters()
        ),
        "gates": len(OPTIMIZER._optimizer_step_pre_hooks),
        "session": hvd_strategy.current_session(),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
        "environment": dict(os.environ),
    }


@pytest.mark.parametrize(
    ("name", "argument", "value", "accepts"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}-{i}") for i, case in enumerate(all_cases())],
)
def test_refused(name: str, argument: str, value: Any, accepts: str) -> None:
    owner = name.partition(".")[0]
    if owner in ("GradientReducer", "Session"):
        open_session()  # not what is looked at
    before = what_is_there()
    with pytest.raises((ValueError, TypeError, HvdError)) as caught:
        call(name, **{argument: value})
    text = str(caught.value)
    assert argument in text
    assert accepts in text
    # Also while the exception, and so the half-made object, is still there.
    assert what_is_there() == before

    result = call(name)
    if isinstance(result, GradientReducer):
        MODEL(torch.ones(1, 2)).sum().backward()
        assert result.statistics()["backwards"] == 1
        result.close()
    elif isinstance(result, Session):
        result.close()
    assert what_is_there() == {**before, "session": hvd_strategy.current_session()}


def test_every_argument_has_a_case() -> None:
    tested = {(name, argument) for name, argument, _, _ in all_cases()}
    missing = [
        f"{name}({argument})"
        for name, signature in SIGNATURES.items()
        for argument in inspect.signature(signature).parameters
        if argument != "self" and (name, argument) not in tested
        if argument not in ANYTHING.get(name, ())
    ]
    assert missing == []


# ---- at the wrong time


def test_a_second_reducer_of_a_parameter() -> None:
    first = GradientReducer(MODEL.named_parameters(), force=True)
    besides = "parameter 'bias' belongs to another GradientReducer, which has others besides"
    with pytest.raises(HvdError, match=besides):
        GradientReducer([("bias", MODEL.bias)], force=True)
    assert first.active
    assert len(post_accumulate_hooks(MODEL.bias)) == 1
    first.close()
    GradientReducer([("bias", MODEL.bias)], force=True).close()


def test_a_second_reducer_of_all_parameters_replaces_the_first() -> None:
    """Also where it has more of them; two would reduce a gradient twice."""
    first = GradientReducer([("bias", MODEL.bias)], OPTIMIZER, force=True)
    for optimizer in (None, OPTIMIZER):  # with more parameters, then with the same
        second = GradientReducer(MODEL.named_parameters(), optimizer, force=True)
        assert second.active
        assert not first.active
        with pytest.raises(HvdError, match="has been closed"):
            first.add_optimizer(OPTIMIZER)
        for parameter in MODEL.parameters():
            assert len(post_accumulate_hooks(parameter)) == 1
        MODEL(torch.ones(1, 2)).sum().backward()
        assert second.statistics()["backwards"] == 1
        first = second
    assert len(OPTIMIZER._optimizer_step_pre_hooks) == 1
    first.close()


def test_reducers_of_a_closed_session_give_way() -> None:
    first = GradientReducer(MODEL.named_parameters(), OPTIMIZER, force=True)
    open_session().close()
    second = GradientReducer(MODEL.named_parameters(), OPTIMIZER, force=True)
    assert not first.active
    MODEL(torch.ones(1, 2)).sum().backward()
    assert second.statistics()["backwards"] == 1
    second.close()


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name.startswith("Session.")])
def test_a_closed_session(name: str) -> None:
    session = open_session()
    session.close()
    method = name.partition(".")[2]
    arguments = {
        "tensor": torch.ones(1),
        "obj": 1,
        "purpose": "lengths",
        "record": [1],
        "text": "no",
        "error": ValueError("no"),
    }
    needed = [p for p in inspect.signature(getattr(session, method)).parameters if p in arguments]
    use = lambda: getattr(session, method)(*(arguments[name] for name in needed))  # noqa: E731
    if method in ("close", "post_error", "post_exception", "set_activity"):
        # Nobody is there to be told. The last two are called by hooks of the Trainer, also after
        # what ended the session: an error here would hide that one.
        use()
    else:
        with pytest.raises(HvdError, match=r"it has been closed. Open a new one with hvd_strategy"):
            use()
    with pytest.raises(HvdError, match="cannot be used: open a new one with open_session"):
        GradientReducer(MODEL.named_parameters(), session=session)
