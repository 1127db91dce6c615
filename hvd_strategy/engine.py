"""GradientReducer: averages gradients over the ranks while `backward` produces them.

    reducer = GradientReducer(model.named_parameters(), optimizer=optimizer)
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()   # p.grad is the mean over the ranks when this returns
        optimizer.step()

A hook on every parameter hands finished gradients to the C++ core, which fuses them into buckets
and reduces them on a thread of its own; the callback at the end of backward tells all ranks what
every rank has, waits for the rest and puts the gradients back. The optimizer's step is a gate: it
joins a rank whose loss had no graph, and finds gradients of parameters that nobody announced.

Fronts (Lightning, Accelerate, plain loops) use this class; it knows none of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_strategy import _core
from hvd_strategy._private_api import (
    compiled_autograd_runs,
    current_autograd_node,
    queue_end_of_backward,
    set_versions,
    storage_users,
    tensor_version,
)
from hvd_strategy.arguments import require, require_kind
from hvd_strategy.contribution import Contribution
from hvd_strategy.errors import HvdError
from hvd_strategy.gate import Gate, behind_closure, optimizers_of
from hvd_strategy.module_watch import ModuleWatch, module_behind
from hvd_strategy.observed_reducer import ObservedReducer
from hvd_strategy.options import resolve
from hvd_strategy.parameter_table import Named, ParameterTable
from hvd_strategy.parameters import names_of, unique
from hvd_strategy.reduced_gradients import ReducedGradients
from hvd_strategy.reduction_precision import ReductionPrecision, SteppedPrecision
from hvd_strategy.reduction_rounds import TWO_BACKWARDS, ReductionRounds, stepped_inside
from hvd_strategy.session import Session, open_session
from hvd_strategy.sparse import SparseGradients
from hvd_strategy.weighted_backward import WeightedBackward

__all__ = ["GradientReducer"]


class GradientReducer(
    ReductionRounds, WeightedBackward, SteppedPrecision, ReducedGradients, ObservedReducer
):
    """Leaves the mean over all ranks in `p.grad` of every parameter when `backward` returns.

    Nothing has to be announced: parameters that some or all ranks do not use, that are frozen now
    and unfrozen later, tied weights, reentrant checkpoints and accumulation over several backwards
    are right without a flag. A parameter that no rank used keeps its `p.grad` as it was. Sparse
    gradients stay sparse, and are coalesced.

    Every rank has to create its reducers in the same order. Keep a reference to the reducer (the
    optimizer keeps one too): gradients stay local once it is gone.

    Parameters may be converted later (`module.double()`). They may also be replaced, by
    `load_state_dict(assign=True)`, by parametrizations, by other layers, if the module is known:
    `module.named_parameters()` itself tells it, for a list of pairs give `module`. Without it,
    replaced parameters are found in the optimizers alone; give a new optimizer to `add_optimizer`.

    Thread contract: one backward at a time; reducers of their own may run in several threads.

    Args:
        named_parameters: Pairs (name, parameter), as of `model.named_parameters()`; frozen ones
            included. Ranks are matched by name.
        optimizer: The optimizer or optimizers that step these parameters.
        session: The session to work in; by default the process's own, opened if need be.
        module: The module the parameters belong to, by default the one whose `named_parameters()`
            are given. Parameters that it gets later are reduced, too, except those under names
            that it has now and that are not among `named_parameters`.
        broadcast_parameters: Give all ranks the parameters of rank 0, and the buffers of `module`
            where that is given, so that they start equal.
        bucket_cap_mb: Size of a gradient bucket in MiB.
        timeout: Deadline of a reduction.
        sparse_as_dense: Turn sparse gradients into dense ones, which then go through the buckets;
            False by default.
        wire_dtype: Type in which gradients of fp32 and fp64 travel between the ranks: None (as they
            are), "fp16", "bf16", or a schedule by optimizer step such as `{0: None, 1000: "bf16"}`.
            Every rank's gradient is rounded once; the mean is computed and kept in the gradient's
            own type. See `set_step`.
        sum_dtype: Type in which gradients are added up: None, "fp32" or "fp64". Those of fp64 are
            always added up in fp64, others in fp32 unless "fp64" is asked for.
        full_precision: Parameters whose gradients travel as they are, whatever `wire_dtype` says.
        gradient_average: "ranks": the gradient of the mean over the ranks of their losses.
            "items": that of the mean over all items (samples, tokens) of all ranks and of all
            micro-batches of an accumulation; each backward is `reducer.backward(loss, items=n)`.
        gradient_norms: Compute finite flag and sum of squares of each gradient on the way, so that
            clipping and loss scaling need not read the gradients again. Edits between backward and
            clipping count, except those through `.data` or numpy, which leave no trace: leave this
            off if you make such.
        force: Take the full path in a world of one rank too, where there is nothing to reduce
            (for measurements).

    Raises:
        MismatchError: Ranks have other parameters, shapes or dtypes, or another precision of the
            reduction; names the first difference.
        ValueError: An argument is not acceptable.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        session: Session | None = None,
        module: torch.nn.Module | None = None,
        broadcast_parameters: bool = True,
        bucket_cap_mb: float | None = None,
        timeout: timedelta | None = None,
        sparse_as_dense: bool | None = None,
        wire_dtype: str | Mapping[int, str | None] | None = None,
        sum_dtype: str | None = None,
        full_precision: Iterable[Tensor] = (),
        gradient_average: str | None = None,
        gradient_norms: bool = False,
        force: bool = False,
    ) -> None:
        self._closed = True  # until everything below stands
        bucket_cap_mb = resolve("bucket_cap_mb", bucket_cap_mb)
        timeout = resolve("timeout", timeout)
        sparse_as_dense = resolve("sparse_as_dense", sparse_as_dense)
        wire, total = resolve("wire_dtype", wire_dtype), resolve("sum_dtype", sum_dtype)
        gradient_average = resolve("gradient_average", gradient_average)
        optimizers = optimizers_of(optimizer)
        watched = module_behind(named_parameters)
        named = unique(named_parameters)
        exact = names_of(full_precision, named)
        require(
            session is None or isinstance(session, Session),
            "session",
            session,
            "what open_session() returns",
        )
        require(
            module is None or isinstance(module, torch.nn.Module),
            "module",
            module,
            "a torch.nn.Module",
        )
        for name, value in (
            ("broadcast_parameters", broadcast_parameters),
            ("gradient_norms", gradient_norms),
            ("force", force),
        ):
            require_kind(bool, name, value, "True or False")
        self._session = open_session() if session is None else session
        if self._session.closed:
            raise HvdError(f"{self._session} cannot be used: open a new one with open_session().")
        _replace_others(named)
        self._module = watched = watched if module is None else module
        self._handles: list[Any] = []
        self._parameter_hooks: list[Any] = []  # handles, in the order of the parameters
        # Not left to __del__: where the collector finds us in a cycle, the handles' weak
        # references are dead by then, and hooks would stay on parameters that live on.
        self._remove_hooks = weakref.finalize(
            self, _remove_all, self._handles, self._parameter_hooks
        )
        self._remove_hooks.atexit = False
        self._gate = Gate(self._handles)
        self._contribution = Contribution(by_items=gradient_average == "items")
        self._precision = ReductionPrecision(wire, total, self._gate, exact)
        self._flushes = 0
        self._unnamed = 0
        self._core: Any = None
        self._watch: ModuleWatch | None = None
        self._given = [parameter for _, parameter in named]
        self._rescaled = {}
        by_items = self._contribution.by_items
        self._active = self._session.size > 1 or force or by_items
        self._gradient_norms = gradient_norms
        gradient_norms = gradient_norms or by_items  # tells kept gradients from new ones
        if self._active:
            self._core = _core.Reducer(
                self._session.core,
                list(range(self._session.size)),
                bucket_cap_mb,
                gradient_norms,
                timeout.total_seconds(),
                self._precision.sum_in_f64,
            )
            # Weak, or the hooks would keep this object alive and it them.
            self._core.set_callbacks(
                _weakly(self._begin_backward),
                _weakly(self._accept_gradient),
                _weakly(self._refuse_other_thread),
                _weakly(self._look_for_hidden_step),
                storage_users(),
                torch.compiler.disable(tensor_version),  # see `_weakly`
                torch.Tensor,
            )
            if gradient_norms:
                self._core.set_mark(torch.compiler.disable(set_versions))
            self._table = ParameterTable(
                self._core,
                self._session,
                self._gate.group_of,
                self._parameter_hooks,
                self._precision.is_exact,
            )
            self._sparse = SparseGradients(
                self._session, sparse_as_dense, self._precision.sum_in_f64
            )
            # Parameters whose gradient came in another form than the ranks agreed on.
            self._converted: set[int] = set()
        self._closed = False
        try:
            for candidate in optimizers:
                self.add_optimizer(candidate)
            if self._active:
                self._precision.check_agreement(self._session)
                self._table.check_agreement(named)
                self._table.add(named)
                _reducers.add(self)
                if watched is not None:
                    self._watch = ModuleWatch(watched, self._table, self._handles)
                if broadcast_parameters:
                    buffers = {} if module is None else dict(module.named_buffers())
                    self._table.broadcast(named, buffers)
        except BaseException:
            # Not left to __del__: the exception keeps this object, and with it hooks, alive.
            self.close()
            raise

    # ---- life ----

    @property
    def active(self) -> bool:
        """False where there is nothing to reduce: in a world of one rank, and after `close`."""
        return self._active and not self._closed

    @property
    def session(self) -> Session:
        """The session in which the gradients are reduced."""
        return self._session

    def close(self) -> None:
        """Removes all hooks and frees the staging memory. Gradients stay local from then on."""
        if self._closed:
            return
        self._closed = True
        self._remove_hooks()
        self._watch = self._module = None
        self._given.clear()
        self._gate.clear()
        if self._core is not None:
            self._core.close()
            self._table.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise HvdError(
                f"Rank {self._session.rank}: this GradientReducer has been closed, so gradients "
                "stay local. Create a new one."
            )

    def _reduces(self, parameter: Tensor) -> bool:
        return parameter in self._table

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def __getstate__(self) -> Any:
        raise TypeError(
            "A GradientReducer cannot be copied or pickled: it is bound to the hooks of this "
            "process's parameters. Create one in each process instead."
        )

    # ---- parameters and optimizers ----

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Makes the optimizer's `step` a gate: see the module's text."""
        (optimizer,) = optimizers_of([optimizer])
        self._require_open()
        if not self.active or any(known is optimizer for known in self._gate.optimizers):
            return
        self._gate.add(optimizer, _weakly(self._before_step), self, self._flushes)

    def _adopt(self, optimizer: Optimizer) -> None:
        """Takes up parameters of the optimizer that were not there when the reducer was made."""
        unknown = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter not in self._table
        ]
        if not unknown:
            return
        if self._core.must_recover:
            self._core.recover()
        # The others may be in a backward instead: all of us learn of it here.
        self._exchange(_core.FLUSH_ADOPTS)
        self._core.complete()
        names = {}
        if self._module is not None:
            names = {id(p): name for name, p in self._module.named_parameters()}
        named = []
        for parameter in unknown:
            name = names.get(id(parameter))
            if name is None:
                name = f"unnamed.{self._unnamed}"
                self._unnamed += 1
            named.append((name, parameter))
        self._table.check_agreement(named)
        self._take_up(named)

    def _take_up(self, named: Named) -> None:
        """Adds parameters that came after the start, with the same values on all ranks."""
        self._table.make_equal(named)
        self._table.add(named)
        if self._watch is not None:
            self._watch.learn()

    def _settle_changes(self) -> None:
        """Takes up parameters that were replaced or converted. Collective."""
        table = self._table
        new: Named = []
        if self._watch is not None:
            self._watch.look([], 0)
            _, new = self._watch.unknown()
        known = list(zip(table.names, table.parameters, strict=True))
        table.check_agreement(known + new)
        for index in range(len(table)):
            if table.is_changed(index):
                table.redefine(index)
        for index in self._converted:
            self._core.set_dirty(index, True)
        self._converted.clear()
        table.make_equal(known)
        if new:
            self._take_up(new)

    # ---- one backward ----

    def _begin_backward(self) -> None:
        """Called by the hook of the first gradient of a backward."""
        if self._core.must_recover:
            self._core.recover()
        problem = ""
        if compiled_autograd_runs():
            problem = (
                "a backward that compiled autograd runs (torch._dynamo.config.compiled_autograd) "
                "cannot be the training backward, because it has no end at which gradients could "
                "be reduced. Leave compiled autograd off, and call backward() outside of what is "
                "compiled; torch.compile of the model compiles its backward as well."
            )
        elif torch.is_grad_enabled():
            problem = (
                "backward(create_graph=True) cannot be the training backward, because reducing its "
                "gradients in place would break their graph. Use torch.autograd.grad(..., "
                "create_graph=True) for the inner gradient and a plain backward() for the loss."
            )
        elif self._contribution.by_items and not self._contribution.in_weighted_backward:
            problem = (
                "a plain backward() does not tell how many items its loss is the mean of. With "
                "gradient_average='items', call reducer.backward(loss, items=n); under the Trainer "
                "strategy.set_items(n), and then self.manual_backward(loss)."
            )
        if problem:
            self._fail(problem)
            raise HvdError(f"Rank {self._session.rank}: {problem}")
        self._contribution.announce(self._core, in_backward=True)
        self._precision.announce(self._core)
        queue_end_of_backward(_EndOfBackward(self))

    def _refuse_other_thread(self, index: int) -> None:
        """Called by the hook of a gradient that comes in another thread than those before it."""
        if threading.current_thread().name.startswith("Dummy-"):
            return  # Python does not know it: autograd has moved the innermost backwards there
        raise HvdError(
            f"Rank {self._session.rank}: a gradient of '{self._table.names[index]}' came from a "
            f"second thread while {TWO_BACKWARDS}"
        )

    def _look_for_hidden_step(self, index: int, parameter: Tensor) -> None:
        """Called by the hook of a gradient that another hook has taken away."""
        if self._gate.stepped_unseen(index, tensor_version(parameter)):
            raise HvdError(
                f"Rank {self._session.rank}: {stepped_inside([self._table.names[index]])}"
            )

    def _end_of_backward(self) -> None:
        node = current_autograd_node()
        if node is None:
            self._flush()
            return
        # A backward inside another one (a reentrant checkpoint): the outer one goes on, and its
        # end is the end. The node that runs belongs to it.
        outer = _EndOfBackward(self)
        node.register_hook(lambda *_: queue_end_of_backward(outer))

    def _backward_failed(self, flushes: int) -> None:
        """The callback was destroyed uncalled: an exception ended the backward after `flushes`."""
        if self.active and self._core.begun and self._flushes == flushes:
            self._fail("an exception inside backward; see the output of that rank")

    def _fail(self, text: str) -> None:
        """Ends this round without a result, on all ranks; does not wait for them."""
        self._flushes += 1  # the others count this round, too
        self._core.fail(text)
        self._core.begun = False  # the next backward begins by recovering
        self._drop_deferred()

    def _drop_deferred(self) -> None:
        """The gradients of a failed round go, also those that the core never had."""
        for index in self._sparse.pending | self._converted:
            self._table.parameters[index].grad = None
        self._sparse.pending.clear()
        self._converted.clear()
        self._contribution.clear()  # the items, too, were those of gradients that are gone

    # ---- the gate ----

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.active:
            return None
        changed = behind_closure(args, kwargs, lambda: self._pass_gate(optimizer))
        if changed is None:
            self._pass_gate(optimizer)
        return changed

    def _pass_gate(self, optimizer: Optimizer) -> None:
        """The gate of a step."""
        if self.active and not self._stays_local:
            self.join(optimizer)
            self._gate.passed(self._gate.number_of(optimizer), self._flushes)

    def step_is_over(self, optimizer: Optimizer) -> None:
        """Says that the optimizer's step is over, whether it was made or, as by a scaler, skipped.

        What has been reduced for it does not count for the next one.
        """
        if self.active:
            self._gate.over(self._gate.number_of(optimizer), self._flushes)

    def join(self, optimizer: Optimizer) -> None:
        """Makes sure that the optimizer's gradients are reduced, before they are used. Collective.

        Happens by itself before each `optimizer.step`, or after its closure, and in what this
        object does with an optimizer's gradients. Call it yourself when something else has to see
        the final gradients although this rank may not have run a backward. Costs no communication
        when a backward has been reduced since the optimizer's last step.
        """
        self._require_open()
        if not self.active or self._stays_local:
            return
        number = self._gate.number_of(optimizer)
        if current_autograd_node() is not None:
            raise HvdError(
                f"Rank {self._session.rank}: optimizer.step() inside backward would use gradients "
                "that are not reduced yet. Call it after backward() has returned."
            )
        if self._core.begun_elsewhere:
            raise HvdError(
                f"Rank {self._session.rank}: optimizer.step() in one thread would use gradients "
                "that a backward in another one is still computing. Call it after that backward "
                "has returned."
            )
        if self._core.begun:
            # Its error came after the end of an inner backward, and the user keeps the graph.
            self._backward_failed(self._flushes)
            raise HvdError(
                f"Rank {self._session.rank}: an earlier backward ended in an exception, and its "
                "graph is still alive. The gradients are dropped on all ranks: free the loss of "
                "that backward, clear the gradients and run the step again."
            )
        if self._gate.nothing_reduced_since(number, self._flushes):
            # Without a backward, the gradients there are came another way: assigned by the user, or
            # computed inside a compiled step, where no hook runs. They are this rank's own.
            for index, parameter in enumerate(self._table.parameters):
                if parameter.grad is not None:
                    self._core.set_dirty(index, True)
            self._flush(_core.FLUSH_AT_GATE)
        self._adopt(optimizer)
        if self._unreduced():
            self._flush(_core.FLUSH_AT_GATE)

    # ---- for users ----

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Gradients of backwards inside stay local; the next backward outside reduces them."""
        if not self.active:
            yield
            return
        before = self._stays_local
        self._stay_local(True)
        try:
            yield
        finally:
            self._stay_local(before)


class _EndOfBackward:
    """The callback at the end of a backward; notices when it is dropped without a call."""

    __slots__ = ("_called", "_flushes", "_reducer")

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._flushes = reducer._flushes
        self._called = False

    @torch.compiler.disable  # see `_weakly`
    def __call__(self) -> None:
        self._called = True
        self._reducer._end_of_backward()

    def __del__(self) -> None:
        if not self._called:
            self._reducer._backward_failed(self._flushes)


# Those that have hooks on parameters, in this process.
_reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


def _replace_others(named: list[tuple[str, Tensor]]) -> None:
    """Closes reducers whose parameters a new one takes over; two would reduce a gradient twice."""
    new = {id(parameter) for _, parameter in named}
    replaced = []
    for other in list(_reducers):
        if not other.active:
            continue
        if other.session.closed or all(id(p) in new for p in other._table.parameters):
            replaced.append(other)
            continue
        for name, parameter in named:
            if other._reduces(parameter):
                raise HvdError(
                    f"Rank {other.session.rank}: parameter '{name}' belongs to another "
                    "GradientReducer, which has others besides, and which its optimizer may keep "
                    "alive. Close that one first, or leave the parameter out of named_parameters."
                )
    for other in replaced:
        other.close()


def _remove_all(*lists: list[Any]) -> None:
    for handles in lists:
        for handle in handles:
            handle.remove()
        handles.clear()


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args)

    # Where the user compiles a whole step, Dynamo looks at every function that runs in it. Ours
    # hold nothing that it could compile, and counters that would have it compile again each time.
    uncompiled: Callable[..., Any] = torch.compiler.disable(call)
    return uncompiled
