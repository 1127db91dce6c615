"""Every private name of other packages that we touch, each with its reason and the versions tested.

Nothing else in this package may use a name with a leading underscore of Python, torch, Lightning,
torchmetrics or Accelerate: when a new release moves one, this file is where it breaks and where it
is mended. Imports happen inside the functions, so that importing this module imports nothing.

What a function replaces, it replaces on the instance, until the `Replacements` given are detached.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from torch import Tensor
    from torch.distributed import Store  # type: ignore[attr-defined]

    from hvd_strategy.lightning.replacements import Replacements


# ---- of Python


def run_exit_functions() -> None:
    """Waits for the threads of this process and runs what is to happen at its end.

    For a process that will leave by `os._exit`, which does neither.

    threading._shutdown, atexit._run_exitfuncs; tested with Python 3.11.
    """
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def stack_of_thread(identity: int) -> FrameType | None:
    """The innermost frame that a thread of this process executes, None when it has ended.

    sys._current_frames; tested with Python 3.11.
    """
    return sys._current_frames().get(identity)


# ---- of torch


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


def compiled_autograd_runs() -> bool:
    """Whether this backward is run as a compiled program, not by autograd's engine.

    It has no end that a callback could wait for: `queue_end_of_backward` then drops it silently.

    torch._dynamo.compiled_autograd.in_compiled_autograd_region; tested with torch 2.13.
    """
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region


def post_accumulate_hooks(parameter: Any) -> OrderedDict[int, Any]:
    """The post-accumulate hooks of a parameter that has some, by number, in the order of calling.

    torch.Tensor._post_accumulate_grad_hooks; tested with torch 2.13.
    """
    hooks: OrderedDict[int, Any] = parameter._post_accumulate_grad_hooks
    return hooks


def set_versions(tensors: list[Tensor], version: int) -> None:
    """Makes `version` the version of all the tensors.

    torch._C._autograd._unsafe_set_version_counter; tested with torch 2.13. Older releases take one
    tensor and one number.
    """
    import torch

    set_counters: Callable[[Any, Any], None] = torch._C._autograd._unsafe_set_version_counter
    try:
        set_counters(tuple(tensors), (version,) * len(tensors))
    except TypeError:
        for tensor in tensors:
            set_counters(tensor, version)


def scaler_is_ready_for(scaler: Any, optimizer: Any) -> bool:
    """Whether a GradScaler has not unscaled the optimizer's gradients since its last update.

    Overridden in our subclass: GradScaler._unscale_grads_. Read and written: _scale,
    _growth_tracker, _enabled.

    torch.amp.GradScaler._per_optimizer_states, torch.amp.grad_scaler.OptState; tested with torch
    2.13.
    """
    from torch.amp.grad_scaler import OptState

    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


def unscales_by_itself(optimizer: Any) -> bool:
    """Whether an optimizer undoes a loss scale in its `step`, as fused ones do.

    torch.optim.Adam._step_supports_amp_scaling; tested with torch 2.13.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def storage_users() -> Callable[[int], int]:
    """The function that counts the objects which refer to a storage, given its address (`_cdata`).

    More than one tensor that refers to it means that its memory is shared.

    torch._C._storage_Use_Count; tested with torch 2.13.
    """
    import torch

    found: Callable[[int], int] = torch._C._storage_Use_Count
    return found


# ---- of torch, for objects that are sent


def untyped_storage(storage: Any) -> Any:
    """The bytes behind a storage; a storage that is untyped is returned itself.

    The public `TypedStorage.untyped` warns that typed storages will go, at each call of ours.

    torch.storage.TypedStorage._untyped_storage; tested with torch 2.13.
    """
    import torch

    return storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage


def typed_storage(storage: Any, dtype: Any) -> Any:
    """What torch's functions that rebuild tensors take: a storage with the dtype of its elements.

    The argument `_internal` of torch.storage.TypedStorage; tested with torch 2.13.
    """
    from torch.storage import TypedStorage

    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def forget_rebuilt_sparse_tensors() -> None:
    """Checks sparse tensors that were unpickled, if the user wants that, and forgets them.

    torch keeps every sparse tensor that any unpickler has rebuilt until the next `torch.load`.

    torch._utils._validate_loaded_sparse_tensors; tested with torch 2.13.
    """
    from torch._utils import _validate_loaded_sparse_tensors

    _validate_loaded_sparse_tensors()


# ---- of torch, for modules


def normalization_layers() -> type[Any]:
    """Base class of all layers that keep running statistics (BatchNorm, InstanceNorm, ...).

    torch.nn.modules.batchnorm._NormBase; tested with torch 2.13.
    """
    from torch.nn.modules.batchnorm import _NormBase

    return _NormBase


def own_parameters(module: Any) -> dict[str, Any]:
    """The parameters that a module itself holds, by attribute; the values may be None.

    A public look at them would also compute parametrizations.

    torch.nn.Module._parameters; tested with torch 2.13.
    """
    parameters: dict[str, Any] = module._parameters
    return parameters


def own_modules(module: Any) -> dict[str, Any]:
    """The submodules that a module itself holds, by attribute; the values may be None.

    torch.nn.Module._modules; tested with torch 2.13.
    """
    modules: dict[str, Any] = module._modules
    return modules


def batch_normalization() -> type[Any]:
    """Base class of torch's BatchNorm layers: parameters, buffers, and forward of one process.

    torch.nn.modules.batchnorm._BatchNorm; tested with torch 2.13.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    return _BatchNorm


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
    "_checkpoint_io",
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
    _MultiProcessingLauncher._wrapping_function, what a worker runs. Read: _strategy, _start_method.

    lightning.pytorch.strategies.launchers._SubprocessScriptLauncher, _MultiProcessingLauncher;
    lightning.pytorch.strategies.launchers.launcher._Launcher.
    """
    launchers = import_module(f"{pytorch}.strategies.launchers")
    base = import_module(f"{pytorch}.strategies.launchers.launcher")._Launcher
    return launchers._SubprocessScriptLauncher, launchers._MultiProcessingLauncher, base


def set_lightning_launcher(strategy: Any, launcher: Any) -> None:
    """Gives a strategy the launcher that it would otherwise configure for itself.

    lightning.pytorch.strategies.Strategy._launcher.
    """
    strategy._launcher = launcher


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


def lightning_log_step(trainer: Any) -> int:
    """The number under which Lightning logs what belongs to the running training batch.

    Batches after which an optimizer stepped, where `global_step` counts the steps of each
    optimizer.

    lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._batches_that_stepped.
    """
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


def replace_lightning_sigterm(
    replacements: Replacements,
    trainer: Any,
    on_sigterm: Callable[[int, Any], None],
    between_batches: Callable[[], None],
) -> bool:
    """Replaces the SIGTERM handler that the Trainer will register, and its flag at every batch.

    The handler is registered after the strategy's setup. Returns whether the loop will call
    `between_batches`, before it fetches each batch: Lightning before 2.6 has no such place.

    lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._sigterm_notifier_fn;
    lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor, new
    in 2.6: before, the loop looked at the flag of the own rank only.
    """
    replacements.put(trainer._signal_connector, "_sigterm_notifier_fn", on_sigterm)
    loop = trainer.fit_loop.epoch_loop
    if not hasattr(loop, "_broadcast_sigterm_tensor"):
        return False
    replacements.put(loop, "_broadcast_sigterm_tensor", between_batches)
    return True


def replace_lightning_requeue(
    replacements: Replacements, trainer: Any, on_signal: Callable[[int, Any], None]
) -> Callable[[int, Any], None]:
    """Replaces what the Trainer will do on the signal by which SLURM announces a job's end.

    Returns what it would have done, which saves a checkpoint and requeues the job. The handler is
    registered after the strategy's setup, and only under SLURM.

    lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._slurm_sigusr_handler_fn.
    """
    connector = trainer._signal_connector
    original: Callable[[int, Any], None] = connector._slurm_sigusr_handler_fn
    replacements.put(connector, "_slurm_sigusr_handler_fn", on_signal)
    return original


def replace_lightning_clipping(
    replacements: Replacements, plugin: Any, before: Callable[[Any], None]
) -> None:
    """Has `before` called with the optimizer whose gradients a precision plugin is about to clip.

    In automatic optimization whether it clips or not, after `on_before_optimizer_step`; in manual
    optimization in `clip_gradients`, and in each step.

    lightning.pytorch.plugins.precision.Precision._clip_gradients; clip_gradients is public.
    """

    def step(clip: Callable[..., Any], model: Any, optimizer: Any, *args: Any, **kw: Any) -> Any:
        before(optimizer)
        return clip(model, optimizer, *args, **kw)

    def by_hand(clip: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before(optimizer)
        return clip(optimizer, *args, **kwargs)

    replacements.around(plugin, "_clip_gradients", step)
    replacements.around(plugin, "clip_gradients", by_hand)


def lightning_result_collections(trainer: Any) -> list[Any]:
    """Where `self.log` puts what it is given: of training, its validation, validate and test.

    Replaced on the instances: `log`, `update_metrics`, `metrics`. Read: `batch`, `batch_size`,
    `dataloader_idx`, `DATALOADER_SUFFIX`; of the entries `meta`, `value`, `cumulated_batch_size`,
    `is_tensor`, `has_reset`.

    lightning.pytorch.trainer.connectors.logger_connector.result._ResultCollection and
    _ResultMetric, in the loops' _results.
    """
    fit = trainer.fit_loop.epoch_loop
    loops = (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop)
    return [loop._results for loop in loops]


def logged_step_value(entry: Any) -> Tensor | None:
    """What was logged last under an entry of a result collection, for the step.

    lightning...logger_connector.result._ResultMetric._forward_cache.
    """
    value: Tensor | None = entry._forward_cache
    return value


def logged_epoch_value(entry: Any) -> Tensor | None:
    """The value of the epoch, None while it has not been computed from what was logged last.

    lightning...logger_connector.result._ResultMetric._computed, as in torchmetrics.Metric.
    """
    value: Tensor | None = entry._computed
    return value


def set_logged_epoch_value(entry: Any, value: Tensor) -> None:
    """Sets it, until something is logged under the entry again."""
    entry._computed = value


# What is the same on all ranks of an entry of a result collection, and JSON can write.
_FIELDS_OF_LOGGED = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


def fields_of_logged(entry: Any) -> dict[str, Any]:
    """How something was logged, as far as other ranks can use it.

    lightning...logger_connector.result._Metadata.
    """
    fields = {name: getattr(entry.meta, name) for name in _FIELDS_OF_LOGGED}
    return {
        "meta": {**fields, "reduce_fx": entry.meta.reduce_fx.__name__},
        "sync": bool(entry.meta.sync.should),
        "is_tensor": entry.is_tensor,
    }


def add_logged(
    results: Any, module: Any, key: str, fields: dict[str, Any], sync: Callable[..., Any]
) -> None:
    """Adds an entry to a result collection as if something without any weight had been logged.

    `module` has the metric, where it is one; `sync` is the function that reduces values.

    lightning...logger_connector.result._ResultMetric, _Metadata, _Sync.
    """
    result = sys.modules[type(results).__module__]
    meta = result._Metadata(**fields["meta"])
    meta.sync = result._Sync(_should=fields["sync"], fn=sync)
    entry = result._ResultMetric(meta, fields["is_tensor"])
    if not fields["is_tensor"]:
        for name in meta.metric_attribute.split("."):
            module = getattr(module, name)
        entry.value = module
    results[key] = entry


def lightning_evaluation_loops(trainer: Any) -> list[tuple[Any, str, Any]]:
    """Loops that validate or test; the method by which each stores what an epoch logged; where.

    The method is called by all ranks at the end of every data loader, before any hook.

    lightning.pytorch.loops.evaluation_loop._EvaluationLoop._store_dataloader_outputs, _results.
    """
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    return [(loop, "_store_dataloader_outputs", loop._results) for loop in loops]


def replace_lightning_train_data(
    replacements: Replacements, trainer: Any, join: Callable[[Any, str], Any]
) -> None:
    """Passes what a fit reads through a function that returns a CombinedLoader.

    `join` gets it with the mode in which Lightning would combine loaders that are none yet.

    lightning.pytorch.loops.fit_loop._FitLoop._data_source, whose `dataloader` is replaced, and what
    `setup_data` does with the result.
    """
    replacements.around(
        trainer.fit_loop._data_source,
        "dataloader",
        lambda original: join(original(), "max_size_cycle"),
    )


def lightning_reads_by_iterator(trainer: Any) -> bool:
    """Whether the `training_step` of the running fit takes an iterator, and no batch.

    lightning.pytorch.loops.fit_loop._FitLoop._data_fetcher;
    lightning.pytorch.loops.fetchers._DataLoaderIterDataFetcher.
    """
    fetcher = trainer.fit_loop._data_fetcher
    fetchers = sys.modules[type(trainer.fit_loop).__module__.rpartition(".")[0] + ".fetchers"]
    return isinstance(fetcher, fetchers._DataLoaderIterDataFetcher)


def replace_lightning_batch_hook(
    replacements: Replacements, trainer: Any, hook: Callable[..., Any]
) -> None:
    """Replaces what the loops call with a batch before it is moved to the device.

    `hook` is called with the original before the arguments.

    lightning.pytorch.LightningModule._on_before_batch_transfer.
    """
    replacements.around(trainer.lightning_module, "_on_before_batch_transfer", hook)


def set_up_lightning_evaluation(loop: Any, set_up: Callable[[], None]) -> list[int | None] | None:
    """Has an evaluation loop set its data up, by its own `setup_data`.

    Returns the number of batches of each data loader, None where it is not known; None for all
    where the data is that of the last time, or there is none.

    lightning.pytorch.loops.evaluation_loop._EvaluationLoop._max_batches.
    """
    before = loop._max_batches
    set_up()
    if loop._max_batches is before:
        return None
    return [None if count == float("inf") else int(count) for count in loop._max_batches]


def set_lightning_evaluation_limits(loop: Any, limits: list[int | None]) -> None:
    """Sets how many batches an evaluation loop reads from each data loader, None for all.

    lightning.pytorch.loops.evaluation_loop._EvaluationLoop._max_batches.
    """
    loop._max_batches = [float("inf") if limit is None else limit for limit in limits]


def lightning_checkpoint_connector(trainer: Any) -> Any:
    """The object whose `dump_checkpoint` collects what a checkpoint holds, on all ranks.

    lightning.pytorch.Trainer._checkpoint_connector.
    """
    return trainer._checkpoint_connector


def lightning_loaded_checkpoint(trainer: Any) -> dict[str, Any]:
    """The checkpoint from which a run starts, while it is set up; empty where there is none.

    lightning.pytorch.Trainer._checkpoint_connector, _CheckpointConnector._loaded_checkpoint.
    """
    loaded: dict[str, Any] = trainer._checkpoint_connector._loaded_checkpoint
    return loaded


def replace_lightning_loader_preparation(
    replacements: Replacements, trainer: Any, prepare: Callable[..., Any]
) -> None:
    """Replaces how a Trainer gives a DataLoader the samplers of this rank.

    `prepare` is called with the original before the arguments.

    lightning.pytorch.Trainer._data_connector, _DataConnector._prepare_dataloader.
    """
    replacements.around(trainer._data_connector, "_prepare_dataloader", prepare)


def requires_distributed_sampler(trainer: Any, loader: Any) -> bool:
    """Whether Lightning wants to split the data of a DataLoader between the ranks.

    lightning...connectors.data_connector._DataConnector._requires_distributed_sampler.
    """
    return bool(trainer._data_connector._requires_distributed_sampler(loader))


def wraps_a_sampler(fabric: str, sampler: Any) -> bool:
    """Whether a DistributedSampler of Lightning's splits what a sampler of the user's gives.

    `fabric` is the root of the package. Its `dataset` has the user's sampler then; replaced there,
    on the instance: `reset`.

    lightning.fabric.utilities.distributed._DatasetSamplerWrapper.
    """
    wrapper = import_module(f"{fabric}.utilities.distributed")._DatasetSamplerWrapper
    return isinstance(sampler.dataset, wrapper)


def drawn_by_wrapper(listed: Any) -> Any:
    """What the user's sampler gave at the last `reset` of DistributedSamplerWrapper.dataset.

    lightning.fabric.utilities.distributed._DatasetSamplerWrapper._sampler_list.
    """
    return listed._sampler_list


def lightning_train_loaders(trainer: Any) -> list[Any]:
    """What the running fit reads its batches from: DataLoaders and other iterables.

    lightning.pytorch.loops.fit_loop._FitLoop._combined_loader.
    """
    loaders: list[Any] = trainer.fit_loop._combined_loader.flattened
    return loaders


def lightning_wrapping_checkpoint_io(pytorch: str) -> type[Any]:
    """Base class of the plugins that write through another one, such as AsyncCheckpointIO.

    lightning.pytorch.plugins.io.wrapper._WrappingCheckpointIO.
    """
    wrapper: type[Any] = import_module(f"{pytorch}.plugins.io.wrapper")._WrappingCheckpointIO
    return wrapper


def lightning_chosen_checkpoint(
    trainer: Any, function: Any, ckpt_path: Any = None, **_: Any
) -> Any:
    """What the user gave as checkpoint to load: for this run, or as `trainer.ckpt_path`.

    Takes what is given to _CheckpointConnector._select_ckpt_path.

    lightning.pytorch.Trainer._checkpoint_connector; _CheckpointConnector._user_managed.
    """
    if ckpt_path is None and trainer._checkpoint_connector._user_managed:
        return trainer.ckpt_path
    return ckpt_path


def replace_lightning_checkpoint_choice(
    replacements: Replacements,
    trainer: Any,
    select: Callable[..., Any],
    resume: Callable[..., Any],
) -> None:
    """Replaces how a Trainer chooses the checkpoint to load, and how it starts to load it.

    Both are called with the original before the arguments.

    lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector
    ._select_ckpt_path and .resume_start, of Trainer._checkpoint_connector.
    """
    connector = trainer._checkpoint_connector
    replacements.around(connector, "_select_ckpt_path", select)
    replacements.around(connector, "resume_start", resume)


def replace_lightning_monitor_candidates(
    replacements: Replacements, callback: Any, share: Callable[[Any], Any]
) -> None:
    """Passes what a ModelCheckpoint decides by through a function.

    Nothing happens to callbacks of other classes.

    lightning.pytorch.callbacks.ModelCheckpoint._monitor_candidates.
    """

    def candidates(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return share(original(*args, **kwargs))

    if hasattr(callback, "_monitor_candidates"):
        replacements.around(callback, "_monitor_candidates", candidates)


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


# ---- of torchmetrics


def gathers_entry_by_entry(metric: Any) -> list[str]:
    """The list states of a metric that stay lists of entries when they are synchronised.

    torchmetrics.Metric._reductions, _defaults; tested with torchmetrics 1.9.
    """
    return [
        name
        for name, reduction in metric._reductions.items()
        if reduction is None and isinstance(metric._defaults[name], list)
    ]


def gather_metric(metric: Any, *args: Any, **kwargs: Any) -> None:
    """Gathers the states of a metric as its class does it.

    torchmetrics.Metric._sync_dist, called by `sync` with the function that gathers a tensor, and
    overridden by some metrics; tested with torchmetrics 1.9.
    """
    type(metric)._sync_dist(metric, *args, **kwargs)


def replace_metric_gathering(metric: Any, method: Callable[..., None]) -> None:
    """Has one metric call `method` instead."""
    vars(metric)["_sync_dist"] = method


def restore_metric_gathering(metric: Any) -> None:
    """Undoes it. Idempotent."""
    vars(metric).pop("_sync_dist", None)
