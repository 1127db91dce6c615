"""ScheduledPrecision: computes in one precision first, and in others from later steps on.

    Trainer(strategy="hvd", plugins=[ScheduledPrecision({0: "32-true", 1000: "bf16-mixed"})])

In each of its phases it is the plugin that Lightning has for that precision: the same context
around a step, the same conversion of parameters and batches, the same loss scaling. The change
comes between two optimizer steps, before the first batch of the later one.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from hvd_strategy._private_api import lightning_loaded_checkpoint, unscales_by_itself
from hvd_strategy.arguments import require
from hvd_strategy.errors import MismatchError
from hvd_strategy.lightning.class_tree import ClassTree, class_tree
from hvd_strategy.log import get_logger
from hvd_strategy.session import Session

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import MixedPrecision as _Base
else:
    _Base = object

_log = get_logger(__name__)


@dataclass(frozen=True)
class _Precision:
    """What one of Lightning's precisions consists of.

    Attributes:
        parameters: dtype of parameters and batches.
        autocast: dtype to which operations are cast; None for none.
    """

    parameters: torch.dtype
    autocast: torch.dtype | None = None

    @property
    def default_dtype(self) -> torch.dtype | None:
        """The dtype of new tensors in a step, where it is another than usual."""
        return None if self.parameters is torch.float32 else self.parameters


_PRECISIONS = {
    "64-true": _Precision(torch.float64),
    "32-true": _Precision(torch.float32),
    "16-true": _Precision(torch.float16),
    "bf16-true": _Precision(torch.bfloat16),
    "16-mixed": _Precision(torch.float32, autocast=torch.float16),
    "bf16-mixed": _Precision(torch.float32, autocast=torch.bfloat16),
}

# As the Trainer understands them.
_SHORT_NAMES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}

_SCALED = "16-mixed"

# By name, because torchmetrics tells by it that the states of metrics are to stay as they are.
_CONVERSIONS: dict[torch.dtype, Callable[[nn.Module], nn.Module]] = {
    torch.float64: nn.Module.double,
    torch.float32: nn.Module.float,
    torch.float16: nn.Module.half,
    torch.bfloat16: nn.Module.bfloat16,
}

# Where MixedPrecision has the state of its scaler in a checkpoint, and long ago had it.
_SCALER_KEYS = ("MixedPrecision", "native_amp_scaling_state")


class PrecisionSchedule(_Base):
    """Computes in the precision that a schedule has for the optimizer step.

        Trainer(plugins=[ScheduledPrecision({0: "32-true", 1000: "bf16-mixed"})])

    computes the first 1000 optimizer steps in fp32 and all later ones in bf16. Steps are those of
    `trainer.global_step`, which counts the steps of all optimizers, and those that a loss scaler
    skips. A phase begins before the first batch of its first step, never inside of an accumulation,
    on all ranks at once; whatever comes before that batch (a validation, a checkpoint) is still in
    the precision of the step before.

    In a schedule with "64-true", "16-true" or "bf16-true" the floating point parameters and
    buffers, the optimizer's state of the same dtype, and the batches have the dtype of the phase;
    fp32 in "32-true" and the mixed ones. Without those, the schedule leaves the dtypes alone.
    Loss scaling begins with the first phase of "16-mixed", and a later one goes on with its scale.

    A run that is resumed goes on in the phase of its checkpoint; its own schedule decides, if the
    checkpoint has another one. Checkpoints are interchangeable with those of Lightning's plugins,
    the state of the loss scaler included.

    Args:
        schedule: precision by the optimizer step from which on it holds: "64-true", "32-true",
            "16-true", "bf16-true", "16-mixed" or "bf16-mixed", or short as in Trainer(precision=).
            One of the steps is 0.
        device: type of the device, for autocast and loss scaling; the Trainer's by default.
        scaler: scales the loss in phases of "16-mixed"; torch's with its defaults if not given.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: the schedule has no step 0, or something else than a precision.
    """

    _tree: ClassTree

    def __init__(
        self,
        schedule: dict[int, str | int],
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        # Not MixedPrecision's own, which sets the same attributes and accepts only its two.
        self._schedule = _checked(schedule)
        require(device is None or isinstance(device, str), "device", device, '"cpu", or None')
        kind = torch.amp.GradScaler
        require(
            scaler is None or isinstance(scaler, kind), "scaler", scaler, "a GradScaler, or None"
        )
        if scaler is not None and _SCALED not in self._schedule.values():
            raise ValueError(
                f"scaler={scaler!r} is not accepted: it takes None where no phase of the schedule "
                f'is "{_SCALED}", because only that one scales the loss.'
            )
        self._given_device = device
        self.device = device or "cpu"
        self._steps = list(self._schedule)
        self._changes_parameters = any(
            _PRECISIONS[name].default_dtype is not None for name in self._schedule.values()
        )
        self._loss_scaler = scaler
        self._module: weakref.ref[nn.Module] | None = None
        self._begin(self.precision_at(0))

    # ---- the phases

    def precision_at(self, step: int) -> str:
        """Returns the precision in which an optimizer step (from 0) is computed."""
        return self._schedule[self._steps[bisect_right(self._steps, step) - 1]]

    def _begin(self, precision: str) -> None:
        self.precision = precision  # type: ignore[assignment]
        self.scaler = self._loss_scaler if precision == _SCALED else None

    @property
    def loss_scaler(self) -> torch.amp.GradScaler | None:
        """The scaler of all phases of "16-mixed"; `scaler` is None in the others."""
        return self._loss_scaler

    @loss_scaler.setter
    def loss_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._loss_scaler = scaler
        self._begin(self.precision)

    def _settle(self) -> None:
        """Begins another phase, if the Trainer is about to train a step of it."""
        module: Any = None if self._module is None else self._module()
        if module is None or not module.trainer.training:
            return
        step = module.trainer.global_step
        precision = self.precision_at(step)
        if precision == self.precision:
            return
        before, after = _PRECISIONS[self.precision], _PRECISIONS[precision]
        _log.info(
            "From optimizer step %d on the precision is %s; it was %s.",
            step,
            precision,
            self.precision,
        )
        self._begin(precision)
        if before.parameters is not after.parameters:
            _CONVERSIONS[after.parameters](module)
            for optimizer in module.trainer.optimizers:
                _convert_state(optimizer.state, before.parameters, after.parameters)

    # ---- what the Trainer calls

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prepares for a run: the phase is that of the last step of the Trainer or checkpoint."""
        self._module = weakref.ref(module)
        trainer: Any = module.trainer
        self.device = self._given_device or trainer.strategy.root_device.type
        if self._loss_scaler is None and _SCALED in self._schedule.values():
            self._loss_scaler = torch.amp.GradScaler(self.device)
        checkpoint = lightning_loaded_checkpoint(trainer)
        self._begin(self._precision_of(checkpoint or {"global_step": trainer.global_step}))
        if self._changes_parameters:
            dtype = _PRECISIONS[self.precision].parameters
            rounded = dtype is torch.float64 and any(
                tensor.is_floating_point() and tensor.dtype is not dtype
                for tensor in chain(module.parameters(), module.buffers())
            )
            _CONVERSIONS[dtype](module)
            if rounded and "state_dict" in checkpoint:
                # Lightning has loaded the weights already, into parameters of less precision.
                strict = module.strict_loading
                trainer.strategy.load_model_state_dict(checkpoint, strict=strict)
        return module

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Looks, before the first step, for what would fail in a later phase."""
        dtypes = {_PRECISIONS[name].parameters for name in self._schedule.values()}
        if isinstance(model, DistributedDataParallel) and len(dtypes) > 1:
            raise ValueError(
                f"ScheduledPrecision({self._schedule}) changes the dtype of the parameters, which "
                "DistributedDataParallel cannot follow: its buckets keep the dtype they have. Use "
                'Trainer(strategy="hvd"), or a schedule of "32-true" and mixed precisions.'
            )
        if _SCALED in self._schedule.values():
            module: Any = None if self._module is None else self._module()
            clips = module is not None and bool(module.trainer.gradient_clip_val)
            for optimizer in optimizers:
                if isinstance(optimizer, LBFGS) or (clips and unscales_by_itself(optimizer)):
                    cause = (
                        "calls its closure several times in a step"
                        if isinstance(optimizer, LBFGS)
                        else "undoes the scale itself (fused=True), after gradients are clipped"
                    )
                    raise ValueError(
                        f"ScheduledPrecision({self._schedule}) comes to scale the loss, but "
                        f"{type(optimizer).__name__} {cause}. Use another optimizer, or "
                        f'"bf16-mixed" instead of "{_SCALED}".'
                    )
        return super().connect(model, optimizers, lr_schedulers)

    def check_agreement(self, session: Session) -> None:
        """Compares the schedule over all ranks. Collective.

        Raises:
            MismatchError: on every rank; names two ranks and their schedules.
        """
        own = [[step, name] for step, name in self._schedule.items()]
        everybody = session.exchange("the schedule of ScheduledPrecision", own)
        for rank, other in enumerate(everybody):
            if other != everybody[0]:
                theirs = [dict(map(tuple, pairs)) for pairs in (everybody[0], other)]
                raise MismatchError(
                    f"Rank {session.rank}: ranks compute in different precisions. Rank 0 has "
                    f"ScheduledPrecision({theirs[0]}), rank {rank} has "
                    f"ScheduledPrecision({theirs[1]}). Give all ranks the same schedule."
                )

    @override
    def convert_input(self, data: Any) -> Any:
        """Gives the floating point tensors of a batch the dtype of the parameters."""
        # The first thing that the Trainer does with a batch, so it is here that a phase begins.
        self._settle()
        if not self._changes_parameters:
            return data
        dtype = _PRECISIONS[self.precision].parameters
        return apply_to_collection(
            data, Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
        )

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """The context of a training step."""
        # For steps that take the batch themselves, from a `dataloader_iter`.
        self._settle()
        with super().train_step_context():
            yield

    @override
    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Steps; with a loss scaler, where the phase has one."""
        if model.automatic_optimization:
            # Before the closure takes a batch itself: what follows depends on the phase.
            self._settle()
        return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)

    @override
    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Clips the gradients."""
        owner: Any = super()
        if self.scaler is None:
            # MixedPrecision refuses fused optimizers, also where no scale is to be undone.
            owner = super(self._tree.pytorch_name("plugins.precision", "MixedPrecision"), self)
        owner.clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    @override
    def tensor_init_context(self) -> AbstractContextManager[None]:
        dtype = _PRECISIONS[self.precision].default_dtype
        return nullcontext() if dtype is None else _default_dtype(dtype)

    @override
    def module_init_context(self) -> AbstractContextManager[None]:
        return self.tensor_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """What surrounds a step of any kind in this phase."""
        autocast = _PRECISIONS[self.precision].autocast
        with (
            # Without the cache, as in MixedPrecision.
            nullcontext()
            if autocast is None
            else torch.autocast(self.device, dtype=autocast, cache_enabled=False),
            self.tensor_init_context(),
        ):
            yield

    # ---- checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        """The schedule, and the precision of the moment."""
        return {"schedule": dict(self._schedule), "precision": self.precision}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Says so when the checkpoint has another schedule; the rest is done already."""
        theirs = state_dict.get("schedule", self._schedule)
        if theirs != self._schedule:
            _log.info(
                "The checkpoint was written with ScheduledPrecision(%s); what counts from now on "
                "is ScheduledPrecision(%s).",
                theirs,
                self._schedule,
            )

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the state of the scaler, where MixedPrecision has and looks for it."""
        state = None if self._loss_scaler is None else self._loss_scaler.state_dict()
        if state:
            checkpoint[_SCALER_KEYS[0]] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes the state of the scaler, by whichever plugin it was written."""
        if self._loss_scaler is None or not self._loss_scaler.is_enabled():
            return
        for key in _SCALER_KEYS:
            if checkpoint.get(key):
                self._loss_scaler.load_state_dict(checkpoint[key])
                return

    def _precision_of(self, checkpoint: dict[str, Any]) -> str:
        state = checkpoint.get(type(self).__qualname__, {})
        if state.get("schedule") == self._schedule:
            precision: str = state["precision"]
            return precision
        return self.precision_at(max(checkpoint.get("global_step", 0) - 1, 0))

    def __getstate__(self) -> dict[str, Any]:
        # Of this process; the next run sets it.
        return {**vars(self), "_module": None}


def _checked(schedule: Any) -> dict[int, str]:
    """The schedule with full names, in the order of the steps."""
    accepts = (
        "a dictionary of optimizer steps and precisions, one of the steps 0, as in "
        '{0: "32-true", 1000: "bf16-mixed"}'
    )
    require(isinstance(schedule, dict), "schedule", schedule, accepts)
    steps_fit = all(isinstance(step, int) and not isinstance(step, bool) for step in schedule)
    require(steps_fit, "schedule", schedule, accepts)
    if not schedule or min(schedule) != 0:
        raise ValueError(f"schedule={schedule!r} is not accepted: it takes {accepts}.")
    checked = {}
    for step in sorted(schedule):
        precision = schedule[step]
        known = isinstance(precision, (str, int)) and not isinstance(precision, bool)
        name = _SHORT_NAMES.get(str(precision), str(precision))
        if not known or name not in _PRECISIONS:
            names = ", ".join(f'"{each}"' for each in _PRECISIONS)
            raise ValueError(
                f"schedule={schedule!r} is not accepted: {precision!r} is no precision; it takes "
                f"{accepts}, with {names}."
            )
        checked[step] = name
    return checked


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _convert_state(state: Any, before: torch.dtype, after: torch.dtype) -> Any:
    """Converts what an optimizer remembers in the dtype of its parameters, in place where it can.

    Counters of steps stay as they are: `load_state_dict` of torch's optimizers leaves them, too.
    """
    if isinstance(state, Tensor):
        return state.to(after) if state.dtype is before else state
    if isinstance(state, dict):
        for key, value in state.items():
            if key != "step":
                state[key] = _convert_state(value, before, after)
    elif isinstance(state, list):
        state[:] = [_convert_state(value, before, after) for value in state]
    return state


@cache
def scheduled_precision_class(tree_name: str) -> type[PrecisionSchedule]:
    """Returns `ScheduledPrecision` as a plugin of one of the two Lightning packages."""
    tree = class_tree(tree_name)
    attributes = {
        "__module__": tree.public_module,
        "__doc__": PrecisionSchedule.__doc__,
        "_tree": tree,
    }
    bases = (PrecisionSchedule, tree.pytorch_name("plugins.precision", "MixedPrecision"))
    return type("ScheduledPrecision", bases, attributes)


__all__ = ["PrecisionSchedule", "scheduled_precision_class"]
