"""Builds `HvdStrategy`: the arguments, and the base classes, for one of the two Lightning packages.

It is a `DDPStrategy`, which other code of Lightning tests for. Annotations are evaluated when the
class is built, because command lines are made from them: they have to be classes of that package.
"""

from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import override

from hvd_strategy.lightning.class_tree import class_tree
from hvd_strategy.lightning.plugin_arguments import require_devices, require_plugin
from hvd_strategy.lightning.strategy import DataParallelStrategy


@cache
def build_strategy(tree: str) -> type[DataParallelStrategy]:
    """Builds the class that `hvd_strategy.lightning.strategy_class` returns."""
    names = class_tree(tree)
    if TYPE_CHECKING:
        from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
        from lightning.pytorch.accelerators import Accelerator
        from lightning.pytorch.plugins.precision import Precision
        from lightning.pytorch.strategies import DDPStrategy
    else:
        CheckpointIO = names.fabric_name("plugins", "CheckpointIO")
        ClusterEnvironment = names.fabric_name("plugins", "ClusterEnvironment")
        Accelerator = names.pytorch_name("accelerators", "Accelerator")
        Precision = names.pytorch_name("plugins.precision", "Precision")
        DDPStrategy = names.pytorch_name("strategies", "DDPStrategy")

    class HvdStrategy(DataParallelStrategy, DDPStrategy):
        """Synchronous data-parallel training, over an engine of its own.

        Every rank computes the gradients of its share of the batch; the engine averages them while
        backward goes on. After each step all ranks hold the same parameters, bit for bit.

        Options that are None come from the environment variable `HVD_` and their name in capitals,
        else they have the default given here.

        Args:
            accelerator: where to compute; "cpu" in this version. Usually given to the Trainer.
            parallel_devices: the devices of the ranks. Usually given to the Trainer.
            cluster_environment: what tells rank and world size. Found by itself.
            checkpoint_io: how checkpoints are written and read.
            precision_plugin: the precision. Usually given to the Trainer.
            start_method: how ranks come into being that no launcher has started: "popen" runs the
                script once per rank, "fork" and "spawn" start processes with multiprocessing,
                "interactive" starts fresh interpreters and sends them the work; "auto" (the
                default) is "popen", and "interactive" in notebooks and other interactive sessions.
            bucket_cap_mb: gradients are reduced in buckets of at most this size, in MiB (25).
            timeout: deadline of a collective (30 minutes).
            stall_warning_seconds: after this time a wait prints which ranks are missing (60; 0 for
                never). The first step gets ten times as long.
            stall_abort_seconds: after this time a wait for missing ranks is an error (1800; 0 for
                never).
            abort_grace_seconds: how long a process may go on after another rank failed before it is
                ended, and how long a wait may go on without progress after SIGTERM (30; 0 for
                ever).
            process_group_backend: backend of torch.distributed's default group ("auto": Gloo).
            sparse_as_dense: turn sparse gradients into dense ones before they are averaged (False:
                they stay sparse).
            wire_dtype: type in which gradients of fp32 and fp64 travel between the ranks: "fp16",
                "bf16", or a schedule by optimizer step (the Trainer's global_step) such as
                {0: null, 1000: bf16}, which is full precision first and 16 bit later (None: as
                they are). Gradients and their means keep their own type.
            sum_dtype: type in which gradients are added up: "fp32" or "fp64" (None: fp64 for
                gradients of fp64, fp32 for others).
            gradient_average: what the mean of the gradients is taken over: "ranks" (the default),
                or "items" (tokens, samples), whose number each training step reports: under the key
                "num_items" of what it returns, or by `strategy.set_items(n)`.
            log_grad_norm: whether the norm of the gradients, before clipping, is logged as
                "hvd/grad_norm" (False).
            consistency_check_every_n_steps: every so many optimizer steps the ranks compare their
                parameters, buffers and optimizer state (0: never).
            on_divergence: what happens when they differ: "error" (the default), or "repair", which
                gives all ranks the values of the majority.
            rank_seeds: whether each rank draws other random numbers, for dropout and augmentation.
                They follow from the seed of the run (`seed_everything`) and the rank. A sampler of
                your own that draws from torch's global generator needs a generator of its own then,
                or the ranks' shares overlap. (False.)
            uneven_inputs: what happens when a rank runs out of batches before the others: "join"
                (the default) goes on with the ranks that have some, "stop" ends the epoch for all,
                "error" is an error on every rank.
            exact_evaluation: whether each sample is validated and tested exactly once. Otherwise
                samples are repeated where they do not go round, as DistributedSampler does it.
                (False.)
            find_unused_parameters: not needed; accepted because DDPStrategy has it.
            static_graph: not needed; accepted because DDPStrategy has it.
            gradient_as_bucket_view: not needed; accepted because DDPStrategy has it.
            broadcast_buffers: not needed; accepted because DDPStrategy has it.
            ddp_comm_hook: not accepted; the error tells what to use.

        Raises:
            ValueError: an argument is not acceptable; the message says what is.
        """

        _tree = names

        def __init__(
            self,
            accelerator: Accelerator | None = None,
            parallel_devices: list[torch.device] | None = None,
            cluster_environment: ClusterEnvironment | None = None,
            checkpoint_io: CheckpointIO | None = None,
            precision_plugin: Precision | None = None,
            *,
            start_method: Literal["auto", "popen", "fork", "spawn", "interactive"] | None = None,
            bucket_cap_mb: float | None = None,
            timeout: timedelta | None = None,
            stall_warning_seconds: float | None = None,
            stall_abort_seconds: float | None = None,
            abort_grace_seconds: float | None = None,
            process_group_backend: str | None = None,
            sparse_as_dense: bool | None = None,
            wire_dtype: dict[int, str | None] | str | None = None,
            sum_dtype: Literal["none", "fp32", "fp64"] | None = None,
            gradient_average: Literal["ranks", "items"] | None = None,
            log_grad_norm: bool | None = None,
            consistency_check_every_n_steps: int | None = None,
            on_divergence: Literal["error", "repair"] | None = None,
            rank_seeds: bool | None = None,
            uneven_inputs: Literal["join", "stop", "error"] | None = None,
            exact_evaluation: bool | None = None,
            find_unused_parameters: bool | None = None,
            static_graph: bool | None = None,
            gradient_as_bucket_view: bool | None = None,
            broadcast_buffers: bool | None = None,
            ddp_comm_hook: object | None = None,
        ) -> None:
            require_plugin(
                "accelerator",
                accelerator,
                Accelerator,
                "setup_device",
                "Trainer(accelerator='cpu') takes names",
            )
            require_devices(parallel_devices)
            require_plugin(
                "cluster_environment", cluster_environment, ClusterEnvironment, "global_rank"
            )
            require_plugin("checkpoint_io", checkpoint_io, CheckpointIO, "save_checkpoint")
            require_plugin(
                "precision_plugin",
                precision_plugin,
                Precision,
                "optimizer_step",
                "Trainer(precision='16-mixed') takes names",
            )
            self._take_options(
                ddp_comm_hook,
                not_needed={
                    "find_unused_parameters": find_unused_parameters,
                    "static_graph": static_graph,
                    "gradient_as_bucket_view": gradient_as_bucket_view,
                    "broadcast_buffers": broadcast_buffers,
                },
                start_method=start_method,
                bucket_cap_mb=bucket_cap_mb,
                timeout=timeout,
                stall_warning_seconds=stall_warning_seconds,
                stall_abort_seconds=stall_abort_seconds,
                abort_grace_seconds=abort_grace_seconds,
                process_group_backend=process_group_backend,
                sparse_as_dense=sparse_as_dense,
                wire_dtype=wire_dtype,
                sum_dtype=sum_dtype,
                gradient_average=gradient_average,
                log_grad_norm=log_grad_norm,
                consistency_check_every_n_steps=consistency_check_every_n_steps,
                on_divergence=on_divergence,
                rank_seeds=rank_seeds,
                uneven_inputs=uneven_inputs,
                exact_evaluation=exact_evaluation,
            )
            super().__init__(
                accelerator=accelerator,
                parallel_devices=parallel_devices,
                cluster_environment=cluster_environment,
                checkpoint_io=checkpoint_io,
                precision_plugin=precision_plugin,
                process_group_backend=self._options["process_group_backend"],
                timeout=self._options["timeout"],
            )

        @classmethod
        @override
        def register_strategies(cls, strategy_registry: Any) -> None:
            """Does nothing: importing `hvd_strategy` registers the names."""

    HvdStrategy.__module__ = names.public_module
    HvdStrategy.__qualname__ = HvdStrategy.__name__
    HvdStrategy.__init__.__qualname__ = "HvdStrategy.__init__"  # as Python's errors name it
    return HvdStrategy


__all__ = ["build_strategy"]
