"""Every private name of other packages that we touch, each with its reason and the versions tested.

Nothing else in this package may use a name with a leading underscore of torch, Lightning or
Accelerate: when a new release moves one, this file is where it breaks and where it is mended.
Imports happen inside the functions, so that importing this module imports nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store  # type: ignore[attr-defined]


def torch_default_store() -> Store:
    """The store behind torch.distributed's default group.

    There is no public way to it. The group is required to exist.

    torch.distributed.distributed_c10d._get_default_store; tested with torch 2.13.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Has `callback` called at the end of the running backward, on the thread that runs it.

    The callback is destroyed uncalled when the backward ends in an exception.

    torch.autograd.Variable._execution_engine; tested with torch 2.13.
    """
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(callback)


def current_autograd_node() -> Any:
    """The node of the graph that is being executed, None outside of any.

    In a callback of `queue_end_of_backward` it is None only when no other backward surrounds the
    one that ended.

    torch._C._current_autograd_node; tested with torch 2.13.
    """
    import torch

    return torch._C._current_autograd_node()


def post_accumulate_hooks(parameter: Any) -> OrderedDict[int, Any]:
    """The post-accumulate hooks of a parameter that has some, by number, in the order of calling.

    torch.Tensor._post_accumulate_grad_hooks; tested with torch 2.13.
    """
    hooks: OrderedDict[int, Any] = parameter._post_accumulate_grad_hooks
    return hooks


def storage_users() -> Callable[[int], int]:
    """The function that counts the objects which refer to a storage, given its address (`_cdata`).

    More than one tensor that refers to it means that its memory is shared.

    torch._C._storage_Use_Count; tested with torch 2.13.
    """
    import torch

    found: Callable[[int], int] = torch._C._storage_Use_Count
    return found


# ---- of torch, for modules


def normalization_layers() -> type[Any]:
    """Base class of all layers that keep running statistics (BatchNorm, InstanceNorm, ...).

    torch.nn.modules.batchnorm._NormBase; tested with torch 2.13.
    """
    from torch.nn.modules.batchnorm import _NormBase

    return _NormBase


def tensor_version(tensor: Tensor) -> int:
    """A number that grows whenever the tensor is written to in place.

    torch.Tensor._version; tested with torch 2.13.
    """
    # Inference tensors have none; autograd's training cannot write to them either.
    return 0 if tensor.is_inference() else tensor._version


def names_ignored_by_ddp(module: Any) -> frozenset[str]:
    """Parameters and buffers that the user told DistributedDataParallel to leave alone.

    Module._ddp_params_and_buffers_to_ignore, set by DistributedDataParallel's
    _set_params_and_buffers_to_ignore_for_model; tested with torch 2.13.
    """
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


# ---- of Lightning; all tested with lightning and pytorch-lightning 2.6.6

# What `hvd_strategy.lightning.strategy` overrides or reads of DDPStrategy, as a subclass does.
LIGHTNING_STRATEGY_NAMES = (
    "_configure_launcher",
    "_get_process_group_backend",
    "_launcher",
    "_layer_sync",
    "_num_nodes",
    "_optimizers",
    "_parallel_devices",
    "_process_group_backend",
    "_setup_model",
    "_start_method",
)


def lightning_is_interactive(fabric: str) -> bool:
    """Whether Lightning takes this process for a notebook; `fabric` is the root of the package.

    lightning.fabric.utilities.imports._IS_INTERACTIVE.
    """
    return bool(import_module(f"{fabric}.utilities.imports")._IS_INTERACTIVE)


def lightning_launchers(pytorch: str) -> tuple[type[Any], type[Any], type[Any]]:
    """The launchers that run a script once per rank and that use multiprocessing, and the base.

    Overridden: _SubprocessScriptLauncher._call_children_scripts, which starts the other ranks;
    _MultiProcessingLauncher._wrapping_function, what a worker runs. Read: _strategy.

    lightning.pytorch.strategies.launchers._SubprocessScriptLauncher, _MultiProcessingLauncher;
    lightning.pytorch.strategies.launchers.launcher._Launcher.
    """
    launchers = import_module(f"{pytorch}.strategies.launchers")
    base = import_module(f"{pytorch}.strategies.launchers.launcher")._Launcher
    return launchers._SubprocessScriptLauncher, launchers._MultiProcessingLauncher, base


def lightning_tuner_exit(pytorch: str) -> type[BaseException]:
    """The exception by which a tuner ends a run that went as planned.

    lightning.pytorch.utilities.exceptions._TunerExitException.
    """
    exit_class: type[BaseException] = import_module(
        f"{pytorch}.utilities.exceptions"
    )._TunerExitException
    return exit_class


def lightning_sigterm_flag(trainer: Any) -> Any:
    """The object whose `received_sigterm` ends the loops of the Trainer.

    lightning.pytorch.Trainer._signal_connector.
    """
    return trainer._signal_connector


def replace_lightning_sigterm(
    trainer: Any, on_sigterm: Callable[[int, Any], None]
) -> Callable[[], None]:
    """Replaces the SIGTERM handler that the Trainer will register, and its flag at every batch.

    On the instances; the function returned gives them their own back, any number of times. The
    handler is registered after the strategy's setup.

    lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._sigterm_notifier_fn;
    lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor, new
    in 2.6: before, the loop looked at the flag of the own rank only.
    """
    replaced = []
    for owner, name, replacement in (
        (trainer._signal_connector, "_sigterm_notifier_fn", on_sigterm),
        (trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None),
    ):
        if hasattr(owner, name):
            vars(owner)[name] = replacement
            replaced.append((owner, name))

    def restore() -> None:
        for owner, name in replaced:
            vars(owner).pop(name, None)

    return restore


def lightning_run_handling_exceptions(pytorch: str) -> Callable[..., Any]:
    """What `fit`, `validate`, `test` and `predict` run their work in: (trainer, function, ...).

    It goes through the strategy's launcher, calls callbacks on exceptions, and ends the process by
    SystemExit on KeyboardInterrupt.

    lightning.pytorch.trainer.call._call_and_handle_interrupt.
    """
    function: Callable[..., Any] = import_module(
        f"{pytorch}.trainer.call"
    )._call_and_handle_interrupt
    return function


def forget_lightning_resume(loop: Any) -> None:
    """Makes a loop that has loaded its progress, and all loops in it, not resume from the middle.

    lightning.pytorch.loops.loop._Loop._restarting, _loaded_from_state_dict and
    _resuming_from_checkpoint; the latter two are new in 2.5.
    """
    for name in ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"):
        if hasattr(loop, name):
            setattr(loop, name, False)
    for inner in vars(loop).values():
        if hasattr(inner, "_restarting"):
            forget_lightning_resume(inner)


def replace_lightning_requeue(
    trainer: Any, on_signal: Callable[[int, Any], None]
) -> tuple[Callable[[int, Any], None], Callable[[], None]]:
    """Replaces what the Trainer will do on the signal by which SLURM announces a job's end.

    Returns what it would have done, which saves a checkpoint and requeues the job, and a function
    that gives it back. The handler is registered after the strategy's setup, and only under SLURM.

    lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._slurm_sigusr_handler_fn.
    """
    connector = trainer._signal_connector
    original: Callable[[int, Any], None] = connector._slurm_sigusr_handler_fn
    vars(connector)["_slurm_sigusr_handler_fn"] = on_signal

    def restore() -> None:
        vars(connector).pop("_slurm_sigusr_handler_fn", None)

    return original, restore
