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

import hashlib
import pickle
import weakref
from collections.abc import Callable, Generator, Iterable
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
    post_accumulate_hooks,
    queue_end_of_backward,
    storage_users,
)
from hvd_strategy.arguments import require, require_kind
from hvd_strategy.errors import HvdError, MismatchError
from hvd_strategy.options import resolve
from hvd_strategy.parameters import (
    WIRE_NAMES,
    describe,
    first_difference,
    may_be_lazy,
    unique,
    zeros,
)
from hvd_strategy.session import Session, open_session

__all__ = ["GradientReducer"]


class GradientReducer:
    """Leaves the mean over all ranks in `p.grad` of every parameter when `backward` returns.

    Nothing has to be announced: parameters that some or all ranks do not use, that are frozen now
    and unfrozen later, tied weights, reentrant checkpoints and accumulation over several backwards
    are right without a flag. A parameter that no rank used keeps its `p.grad` as it was.

    Every rank has to create its reducers in the same order. Keep a reference to the reducer (the
    optimizer keeps one too): gradients stay local once it is gone.

    Args:
        named_parameters: Pairs (name, parameter), as of `model.named_parameters()`; frozen ones
            included. Ranks are matched by name.
        optimizer: The optimizer or optimizers that step these parameters.
        session: The session to work in; by default the process's own, opened if need be.
        module: The module the parameters belong to, for names of parameters found later.
        broadcast_parameters: Give all ranks the parameters of rank 0, and the buffers of `module`,
            so that they start equal.
        bucket_cap_mb: Size of a gradient bucket in MiB.
        timeout: Deadline of a reduction.
        gradient_norms: Compute finite flag and sum of squares of each gradient on the way.
        force: Take the full path in a world of one rank too, where there is nothing to reduce
            (for measurements).

    Raises:
        MismatchError: Ranks have other parameters, shapes or dtypes; names the first difference.
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
        gradient_norms: bool = False,
        force: bool = False,
    ) -> None:
        self._closed = True  # until everything below stands
        bucket_cap_mb = resolve("bucket_cap_mb", bucket_cap_mb)
        timeout = resolve("timeout", timeout)
        optimizers = _optimizers_of(optimizer)
        named = unique(named_parameters)
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
        _refuse_second_reducer(named)
        self._session = open_session() if session is None else session
        if self._session.closed:
            raise HvdError(f"{self._session} cannot be used: open a new one with open_session().")
        self._module = module
        self._parameters: list[Tensor] = []
        self._names: list[str] = []
        self._expected: list[tuple[torch.Size, torch.dtype]] = []
        self._index: dict[int, int] = {}
        self._parameter_hooks: list[Any] = []  # handles, in the order of the parameters
        self._handles: list[Any] = []
        # Not left to __del__: where the collector finds us in a cycle, the handles' weak
        # references are dead by then, and hooks would stay on parameters that live on.
        self._remove_hooks = weakref.finalize(self, _remove_all, self._handles)
        self._remove_hooks.atexit = False
        self._optimizers: list[Optimizer] = []
        self._flushes = 0
        self._flushes_at_gate: list[int] = []
        self._steps = 0
        self._unnamed = 0
        self._core: Any = None
        self._active = self._session.size > 1 or force
        if self._active:
            self._core = _core.Reducer(
                self._session.core,
                list(range(self._session.size)),
                bucket_cap_mb,
                gradient_norms,
                timeout.total_seconds(),
            )
            # Weak, or the hooks would keep this object alive and it them.
            self._core.set_callbacks(
                _weakly(self._begin_backward),
                _weakly(self._accept_gradient),
                storage_users(),
                torch.Tensor,
            )
        self._closed = False
        try:
            for candidate in optimizers:
                self.add_optimizer(candidate)
            if self._active:
                self._add_parameters(named)
                _reducers.add(self)
                if broadcast_parameters:
                    self._broadcast(named)
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
        if self._core is not None:
            self._core.close()
        self._parameters.clear()
        self._parameter_hooks.clear()
        self._index.clear()
        self._optimizers.clear()
        self._flushes_at_gate.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise HvdError(
                f"Rank {self._session.rank}: this GradientReducer has been closed, so gradients "
                "stay local. Create a new one."
            )

    def _reduces(self, parameter: Tensor) -> bool:
        return id(parameter) in self._index

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
        (optimizer,) = _optimizers_of([optimizer])
        self._require_open()
        if not self.active or any(known is optimizer for known in self._optimizers):
            return
        self._optimizers.append(optimizer)
        self._flushes_at_gate.append(self._flushes)
        before_step = _weakly(self._before_step)
        self._handles.append(optimizer.register_step_pre_hook(before_step))
        # Whoever keeps the optimizer keeps the reducer.
        self._handles.append(_KeptBy(optimizer, self))

    def _add_parameters(self, named: list[tuple[str, Tensor]]) -> None:
        # Sorted by name, so that ranks which register in another order agree all the same.
        named = sorted(named, key=lambda pair: pair[0])
        described = [describe(name, parameter) for name, parameter in named]
        self._check_agreement(described)
        for (name, parameter), (_, _, dtype, _) in zip(named, described, strict=True):
            if parameter.dtype not in WIRE_NAMES:
                continue  # integers: autograd gives them no gradient
            del dtype
            self._add_parameter(name, parameter)

    def _broadcast(self, named: list[tuple[str, Tensor]]) -> None:
        tensors = [tensor for _, tensor in sorted(named, key=lambda pair: pair[0])]
        if self._module is not None:
            tensors += [buffer for _, buffer in sorted(self._module.named_buffers())]
        for tensor in tensors:
            self._session.broadcast(tensor.detach())

    def _add_parameter(self, name: str, parameter: Tensor) -> None:
        index = len(self._parameters)
        wire, factor = WIRE_NAMES[parameter.dtype]
        with torch.no_grad():
            like = torch.empty_like(parameter, device="meta")
        self._core.add_parameter(
            name,
            parameter.numel() * factor,
            wire,
            self._group_of(parameter),
            # None has the core show us each gradient of the parameter (`_accept_gradient`).
            None if may_be_lazy(parameter) else parameter.dtype,
            parameter.numel() * parameter.element_size(),
            None if like.is_contiguous() else like.stride(),
        )
        self._parameters.append(parameter)
        self._names.append(name)
        self._expected.append((parameter.shape, parameter.dtype))
        self._index[id(parameter)] = index
        # Frozen parameters get a hook too, for the day they are unfrozen; torch takes one only
        # while the parameter requires a gradient.
        frozen = not parameter.requires_grad
        if frozen:
            parameter.requires_grad_(True)
        try:
            handle = parameter.register_post_accumulate_grad_hook(self._core.hook(index))
        finally:
            if frozen:
                parameter.requires_grad_(False)
        self._handles.append(handle)
        self._parameter_hooks.append(handle)
        # A gradient from before counts as this rank's: the next flush takes it along.
        self._core.set_dirty(index, parameter.grad is not None)

    def _group_of(self, parameter: Tensor) -> int:
        for number, optimizer in enumerate(self._optimizers):
            for group in optimizer.param_groups:
                if any(member is parameter for member in group["params"]):
                    return number + 1
        return 0

    def _check_agreement(self, described: list[tuple[str, tuple[int, ...], str, Any]]) -> None:
        """Compares the parameters of all ranks; the same error on every rank where they differ."""
        exchange = self._session.communicator.exchange
        digest = hashlib.sha256(pickle.dumps(described, protocol=4)).digest()
        if len(set(exchange(digest))) == 1:
            return
        everybody = [pickle.loads(record) for record in exchange(pickle.dumps(described))]
        reference = everybody[0]
        for rank, other in enumerate(everybody):
            if other != reference:
                raise MismatchError(
                    f"Rank {self._session.rank}: ranks train different parameters. "
                    f"{first_difference(reference, rank, other)}. All ranks have to build the "
                    "same model; look for code that depends on the rank."
                )

    def _adopt(self, optimizer: Optimizer) -> None:
        """Takes up parameters of the optimizer that were not there when the reducer was made."""
        unknown = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in self._index
        ]
        if not unknown:
            return
        if self._core.must_recover:
            self._core.recover()
        # The others may be in a backward instead: all of us learn of it here.
        self._core.exchange(self._steps, _core.FLUSH_ADOPTS)
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
        self._add_parameters(named)

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
        if problem:
            self._fail(problem)
            raise HvdError(f"Rank {self._session.rank}: {problem}")
        queue_end_of_backward(_EndOfBackward(self))

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

    def _flush(self, flags: int = 0) -> None:
        core = self._core
        if core.must_recover:
            core.recover()
        self._flushes += 1
        with self._telling_the_others():
            arrived = core.take_noted()
            for index in self._unreduced():
                core.take(index, self._parameters[index])
            if arrived:
                # From the next backward on, hooks take gradients early: after the user's hooks.
                self._keep_hooks_last()
        lacking = core.exchange(self._steps, flags)
        with self._telling_the_others():
            for index in lacking:
                parameter = self._parameters[index]
                # A gradient kept from an earlier step counts; without one this rank adds nothing.
                gradient = parameter.grad
                core.provide(index, parameter, zeros(parameter) if gradient is None else gradient)
        if core.complete():
            self._extra_round()

    @contextmanager
    def _telling_the_others(self) -> Generator[None, None, None]:
        """An exception in the block ends the round on all ranks, which may wait for this one."""
        try:
            yield
        except BaseException as error:
            self._core.fail(f"{type(error).__name__}: {error}")
            self._core.begun = False
            raise

    def _keep_hooks_last(self) -> None:
        for parameter, handle in zip(self._parameters, self._parameter_hooks, strict=True):
            hooks = post_accumulate_hooks(parameter)
            if handle.id in hooks and next(reversed(hooks)) != handle.id:
                # Not move_to_end: torch walks the dictionary below, which knows no such order.
                hooks[handle.id] = hooks.pop(handle.id)

    def _unreduced(self) -> list[int]:
        """Parameters with a gradient of this rank alone, whose hook did not fire since."""
        indices = []
        for index in self._core.dirty():
            if self._parameters[index].grad is None:
                self._core.set_dirty(index, False)  # the user cleared it
            else:
                indices.append(index)
        return indices

    def _extra_round(self) -> None:
        """Reduces what fired again after its bucket had left, and adds it to the gradients."""
        core = self._core
        deltas: dict[int, Tensor] = {}
        with self._telling_the_others():
            for index, _, delta in core.begin_extra_round():
                deltas[index] = deltas[index] + delta if index in deltas else delta
            for index, delta in deltas.items():
                core.take_delta(index, self._parameters[index], delta, False)
        lacking = core.exchange(self._steps, _core.FLUSH_EXTRA)
        with self._telling_the_others():
            for index in lacking:
                parameter = self._parameters[index]
                core.take_delta(index, parameter, zeros(parameter), True)
        core.complete_extra()

    def _accept_gradient(self, index: int, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Makes a gradient that the core can take of one that it cannot, or raises."""
        problem = ""
        if gradient.layout is not torch.strided:
            problem = (
                f"is sparse ({gradient.layout}), which is not supported yet. Create the layer with "
                "sparse=False."
            )
        elif gradient.device.type != "cpu":
            problem = (
                f"is on {gradient.device}; only CPU tensors are supported so far. Train with "
                "accelerator='cpu'."
            )
        elif (gradient.shape, gradient.dtype) != self._expected[index]:
            shape, dtype = self._expected[index]
            problem = (
                f"is a {tuple(gradient.shape)} {gradient.dtype}, but the parameter was a "
                f"{tuple(shape)} {dtype} when the GradientReducer was created. Convert and reshape "
                "the model first, then create the reducer."
            )
        if problem:
            raise HvdError(
                f"Rank {self._session.rank}: the gradient of '{self._names[index]}' {problem}"
            )
        gradient = gradient.resolve_conj().resolve_neg()
        strides = torch.empty_like(parameter, device="meta").stride()
        if gradient.stride() == strides or gradient.numel() <= 1:
            return gradient
        return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype).copy_(gradient)

    # ---- the gate ----

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.active:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.gate(optimizer)
            return None

        # The gradients come into being inside the closure, so the gate is behind it.
        def closure_and_gate() -> Any:
            loss = closure()
            self.gate(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_and_gate}
        return (args[0], closure_and_gate, *args[2:]), kwargs

    def gate(self, optimizer: Optimizer) -> None:
        """Makes sure that the optimizer's gradients are reduced, before they are used.

        Called by itself before each `optimizer.step`, or after its closure. Call it yourself when
        something has to see the final gradients earlier (clipping) although this rank may not
        have run a backward. Costs no communication when a backward has been reduced since the
        optimizer's last step.
        """
        self._require_open()
        if not self.active or self._core.local:
            return
        number = self._number_of(optimizer)
        if current_autograd_node() is not None:
            raise HvdError(
                f"Rank {self._session.rank}: optimizer.step() inside backward would use gradients "
                "that are not reduced yet. Call it after backward() has returned."
            )
        if self._core.begun:
            # Its error came after the end of an inner backward, and the user keeps the graph.
            self._backward_failed(self._flushes)
            raise HvdError(
                f"Rank {self._session.rank}: an earlier backward ended in an exception, and its "
                "graph is still alive. The gradients are dropped on all ranks: free the loss of "
                "that backward, clear the gradients and run the step again."
            )
        self._adopt(optimizer)
        if self._flushes == self._flushes_at_gate[number]:
            # Without a backward, the gradients there are came another way: assigned by the user, or
            # computed inside a compiled step, where no hook runs. They are this rank's own.
            for index, parameter in enumerate(self._parameters):
                if parameter.grad is not None:
                    self._core.set_dirty(index, True)
            self._flush(_core.FLUSH_AT_GATE)
        elif self._unreduced():
            self._flush(_core.FLUSH_AT_GATE)
        self._flushes_at_gate[number] = self._flushes
        self._steps += 1

    def _number_of(self, optimizer: Optimizer) -> int:
        for number, known in enumerate(self._optimizers):
            if known is optimizer:
                return number
        raise ValueError(
            f"optimizer={type(optimizer).__name__} is not accepted: it takes one that the reducer "
            "was given, at its creation or by add_optimizer."
        )

    # ---- for users ----

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Gradients of backwards inside stay local; the next backward outside reduces them."""
        if not self.active:
            yield
            return
        before = self._core.local
        self._core.local = True
        try:
            yield
        finally:
            self._core.local = before

    def statistics(self) -> dict[str, float]:
        """Counters since the reducer was created.

        Returns:
            backwards: Reduced backwards.
            communication_seconds: Time during which a reduction was under way.
            exposed_seconds: Time the training thread waited for it at the end of backward.
            hidden_share: 1 - exposed / communication; 0 when there was none.
        """
        if self._core is None:
            return {
                "backwards": 0,
                "communication_seconds": 0.0,
                "exposed_seconds": 0.0,
                "hidden_share": 0.0,
            }
        counters: dict[str, float] = self._core.statistics()
        busy = counters["communication_seconds"]
        hidden = 1.0 - counters["exposed_seconds"] / busy if busy > 0 else 0.0
        return {**counters, "hidden_share": max(0.0, hidden)}

    def buckets(self) -> list[list[int]]:
        """Parameter numbers (in order of their names) of each bucket formed so far."""
        return [] if self._core is None else self._core.buckets()

    def by_products(self, parameter: Tensor) -> tuple[float, bool] | None:
        """Sum of squares and finite flag of the parameter's last reduced gradient.

        None when it was not reduced in the last backward, or without `gradient_norms=True`.
        """
        require_kind(Tensor, "parameter", parameter, "a parameter of the reducer")
        index = self._index.get(id(parameter))
        if self._core is None or index is None:
            return None
        found: tuple[float, bool] | None = self._core.by_products(index)
        return found

    def record_events(self, capacity: int = 100_000) -> None:
        """Keeps the last `capacity` events (fired, posted, started, done) for `events`."""
        require_kind(int, "capacity", capacity, "a number of events")
        if capacity < 0:
            raise ValueError(f"capacity={capacity} is not accepted: it takes a number of events.")
        if self._core is not None:
            self._core.record_events(capacity)

    def events(self) -> list[tuple[str, int, int, float]]:
        """Recorded events as (kind, parameter or bucket, backward, seconds), oldest first."""
        return [] if self._core is None else self._core.events()


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


class _KeptBy:
    """Ties the reducer's life to the optimizer's, through a hook that does nothing."""

    def __init__(self, optimizer: Optimizer, reducer: GradientReducer) -> None:
        def keep(*_: Any, _reducer: GradientReducer = reducer) -> None:
            return None

        self._handle = optimizer.register_step_post_hook(keep)

    def remove(self) -> None:
        self._handle.remove()


def _optimizers_of(optimizer: Any) -> list[Optimizer]:
    if optimizer is None:
        return []
    listed = isinstance(optimizer, Iterable) and not isinstance(optimizer, (str, Optimizer))
    optimizers = list(optimizer) if listed else [optimizer]
    for candidate in optimizers:
        if not isinstance(candidate, Optimizer):
            raise TypeError(
                f"optimizer={candidate!r} is not accepted: it takes a torch.optim.Optimizer, or "
                "several of them."
            )
    return optimizers


# Those that have hooks on parameters, in this process.
_reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


def _refuse_second_reducer(named: list[tuple[str, Tensor]]) -> None:
    """Two reducers would both take the gradients of a parameter, and reduce them twice."""
    for other in list(_reducers):
        if other.session.closed:
            other.close()  # it reduces nothing any more
        for name, parameter in named:
            if other.active and other._reduces(parameter):
                raise HvdError(
                    f"Rank {other.session.rank}: parameter '{name}' belongs to another "
                    "GradientReducer already, which its optimizer may keep alive. Close that one "
                    "first, or leave the parameter out of named_parameters."
                )


def _remove_all(handles: list[Any]) -> None:
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
