"""The metrics of torchmetrics, synchronised over the engine.

A metric that is computed gathers its states with a function that it can be given. torchmetrics's
own goes through torch.distributed, which knows nothing of a rank that fails meanwhile, and mistakes
a state of one dtype for one of another. It also fails for a rank that has seen no data, whose list
states are empty and have the default dtype, and waits for ever where ranks have lists of different
lengths which it gathers entry by entry (retrieval, inception score, ROUGE).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from hvd_strategy._private_api import (
    gather_metric,
    gathers_entry_by_entry,
    replace_metric_gathering,
    restore_metric_gathering,
)
from hvd_strategy.errors import MismatchError
from hvd_strategy.session import current_session


class MetricStates:
    """Lets the metrics of a module synchronise over the engine, until `detach`.

    Metrics with a function or a process group of their own keep it.

    Args:
        module: all metrics in it, at any depth.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [
            metric
            for metric in module.modules()
            if isinstance(metric, Metric)
            and metric.dist_sync_fn is None
            and metric.process_group is None
        ]
        for metric in self._metrics:
            metric.dist_sync_fn = gather_states
            if gathers_entry_by_entry(metric):
                # A bound method: copies of the metric get one that is bound to them.
                replace_metric_gathering(metric, MethodType(gather_lists, metric))

    def detach(self) -> None:
        """Leaves the metrics as they were. Idempotent."""
        for metric in self._metrics:
            metric.dist_sync_fn = None
            restore_metric_gathering(metric)
        self._metrics = []


def gather_states(state: Tensor, group: Any = None) -> list[Tensor]:
    """Returns the states of all ranks, in rank order; any shapes. Collective.

    A module-level function without state of its own, so that metrics which have it still pickle.

    Raises:
        MismatchError: on every rank, when the dtypes differ.
    """
    session = current_session()
    if session is None or group not in (None, distributed.group.WORLD):
        gathered: list[Tensor] = gather_all_tensors(state, group)
        return gathered
    if session.size == 1:
        return [state]
    try:
        parts = session.allgather(state)
    except MismatchError:
        # Raised on every rank, so that all are here.
        parts = session.allgather(_empty_as_others(state))
    parts[session.rank] = state  # keeps its graph
    return parts


def gather_lists(metric: Metric, *args: Any, **kwargs: Any) -> None:
    """Gathers all states of a metric, also lists that are not equally long on all ranks.

    Collective. Called by the metric in the place of torchmetrics's own function.
    """
    session = current_session()
    if session is None:  # a copy of the metric, used after the run
        gather_metric(metric, *args, **kwargs)
        return
    names = gathers_entry_by_entry(metric)
    lists = {name: list(getattr(metric, name)) for name in names}
    lengths = session.exchange("metric lists", [len(entries) for entries in lists.values()])
    if all(other == lengths[0] for other in lengths):
        gather_metric(metric, *args, **kwargs)
        return
    everybody = session.allgather_object(lists)
    for name in names:
        setattr(metric, name, [])
    gather_metric(metric, *args, **kwargs)
    for name in names:
        setattr(metric, name, [entry for rank in everybody for entry in rank[name]])


def _empty_as_others(state: Tensor) -> Tensor:
    """The state; one without elements gets the dtype of the ranks that have some."""
    session = current_session()
    assert session is not None
    described = session.exchange("metric state", [str(state.dtype), state.numel()])
    dtypes = [dtype for dtype, count in described if count]
    if state.numel() or not dtypes:
        return state
    return state.to(getattr(torch, dtypes[0].removeprefix("torch.")))


__all__ = ["MetricStates", "gather_lists", "gather_states"]
