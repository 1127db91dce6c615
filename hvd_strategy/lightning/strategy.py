"""The Trainer's strategy: what Lightning calls, turned into calls of session and reducer.

There is no wrapper around the model. Hooks on the parameters make `loss.backward()` leave averaged
gradients, whoever calls it, so automatic and manual optimization, `manual_backward` and a plain
`backward()` are the same thing here. What remains for the strategy is the life cycle (who the ranks
are, when parameters and buffers are made equal, how a run ends) and Lightning's own collectives.

The life cycle is here; the rest is in the base classes: what Lightning's loops call in
`loop_strategy`, what steps report in `step_reports`, the collectives in `collective_strategy`.
`build` derives `HvdStrategy` from `DataParallelStrategy` and from Lightning's `DDPStrategy`.
"""

from __future__ import annotations

import signal
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from hvd_strategy._private_api import (
    lightning_is_interactive,
    names_ignored_by_ddp,
)
from hvd_strategy.arguments import require
from hvd_strategy.engine import GradientReducer
from hvd_strategy.errors import HvdError
from hvd_strategy.lightning.after_backward import AfterBackward
from hvd_strategy.lightning.attachments import Attachments
from hvd_strategy.lightning.data_shards import DataShards
from hvd_strategy.lightning.environment import LauncherEnvironment, launcher_environment
from hvd_strategy.lightning.graceful_stop import GracefulStop
from hvd_strategy.lightning.launch import InterruptHandlerKept, launcher_class
from hvd_strategy.lightning.layer_sync import synchronised_layers
from hvd_strategy.lightning.loop_strategy import LoopStrategy
from hvd_strategy.lightning.module_state import ModuleState, require_content
from hvd_strategy.lightning.replica_check import ReplicaCheck
from hvd_strategy.lightning.step_votes import StepVotes
from hvd_strategy.lightning.uneven_inputs import UnevenInputs
from hvd_strategy.log import FOR_ALL_RANKS, get_logger, set_level, set_rank
from hvd_strategy.options import resolve
from hvd_strategy.seeds import seed_by_rank
from hvd_strategy.session import Session, open_session
from hvd_strategy.world import World

_log = get_logger(__name__)

_SESSION_OPTIONS = (
    "timeout",
    "stall_warning_seconds",
    "stall_abort_seconds",
    "abort_grace_seconds",
    "process_group_backend",
)

_NOT_NEEDED = (
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
)


class DataParallelStrategy(LoopStrategy):
    """Synchronous data-parallel training of a LightningModule; see `HvdStrategy`."""

    _cluster_environment: Any = None
    _data: DataShards | None = None
    _after_backward: AfterBackward | None = None
    # Whether it was asked for by the name "horovod", and so has to tell what is different.
    replaces_horovod = False

    def _take_options(self, ddp_comm_hook: Any, not_needed: dict[str, Any], **options: Any) -> None:
        """Checks the arguments that are not Lightning's own. Touches nothing else."""
        if ddp_comm_hook is not None:
            raise ValueError(
                "ddp_comm_hook is not accepted: hooks of DistributedDataParallel work on its own "
                "buckets. Leave it out; to send gradients in 16 bits, as bf16_compress_hook and "
                "fp16_compress_hook do, use wire_dtype='bf16' or wire_dtype='fp16'."
            )
        set_level()
        for name, value in not_needed.items():
            require(value is None or isinstance(value, bool), name, value, "True, False or None")
        self._options = {name: resolve(name, value) for name, value in options.items()}
        # A session that is open already keeps its options unless others are asked for.
        self._session_options = {
            name: value
            for name, value in options.items()
            if name in _SESSION_OPTIONS and value is not None
        }
        self._ignored_arguments = [name for name in _NOT_NEEDED if not_needed.get(name) is not None]

    # ---- who the ranks are

    @property
    def cluster_environment(self) -> Any:
        """What tells rank and world size; another than Lightning's choice where that is wrong."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: Any) -> None:
        self._cluster_environment = launcher_environment(self._tree, environment)

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this host's ranks."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        for device in devices or ():
            if device.type != "cpu":
                raise HvdError(
                    f"This version of hvd-strategy trains on CPUs only, and the Trainer chose the "
                    f"device {device}: its GPU path does not exist yet. Use "
                    "Trainer(accelerator='cpu')."
                )
        self._parallel_devices = devices

    @property
    @override
    def num_nodes(self) -> int:
        """Number of hosts; 1 in this version."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise HvdError(
                f"num_nodes={num_nodes} is not supported: this version of hvd-strategy trains on "
                "the ranks of one host only. Use Trainer(num_nodes=1)."
            )
        self._num_nodes = num_nodes

    @property
    @override
    def is_distributed(self) -> bool:
        """True: without it no sampler is injected."""
        return True

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The share of the data set that is this rank's; during a run with rank 0's seed."""
        share = {"num_replicas": self.world_size, "rank": self.global_rank}
        if self._data is not None:
            share["seed"] = self._data.seed
        return share

    @property
    def reducer(self) -> GradientReducer | None:
        """What averages the gradients; None outside of `fit`."""
        return self._reducer

    @property
    def session(self) -> Session | None:
        """The engine's session; None before the first `fit`, `validate`, `test` or `predict`."""
        return self._session

    @override
    def set_world_ranks(self) -> None:
        """Tells rank and size to Lightning, after taking them from the launcher where it decides.

        A launcher started a certain number of ranks, which `Trainer(devices=...)` cannot change:
        each of them has one device.
        """
        super().set_world_ranks()
        environment = self.cluster_environment
        if environment is None or self.parallel_devices is None:
            return
        size = environment.world_size()
        set_rank(self.global_rank, size)
        if size != len(self.parallel_devices):
            if environment.node_rank() != 0:
                raise HvdError(
                    f"Rank {environment.global_rank()} of {size} runs on host number "
                    f"{environment.node_rank()}: this version of hvd-strategy trains on the ranks "
                    "of one host only."
                )
            if len(self.parallel_devices) > 1:
                _log.warning(
                    "Trainer(devices=%d) is ignored: the launcher started %d ranks, one device "
                    "each.",
                    len(self.parallel_devices),
                    size,
                    extra=FOR_ALL_RANKS,
                )
            self.parallel_devices = [self.parallel_devices[0]] * size

    @override
    def _configure_launcher(self) -> None:
        method = self._options["start_method"]
        environment = self.cluster_environment
        if method == "auto":
            interactive = lightning_is_interactive(self._tree.fabric)
            started = environment.creates_processes_externally
            method = "interactive" if interactive and not started else "popen"
        if environment.creates_processes_externally and not isinstance(
            environment, self._default_environment()
        ):
            # The ranks exist already; this launcher starts none in that case.
            method = "popen"
        self._start_method = method
        if method == "popen":
            script = launcher_class(self._tree.name, "ScriptLauncher")
            self._launcher = script(environment, self.num_processes, self.num_nodes)
        elif method == "interactive":
            self._launcher = launcher_class(self._tree.name, "NotebookLauncher")(self)
        else:
            multiprocessing = launcher_class(self._tree.name, "MultiProcessingLauncher")
            self._launcher = multiprocessing(self, start_method=method)

    # ---- life cycle

    @override
    def setup_distributed(self) -> None:
        """Makes sure of torch.distributed's default group and opens the session."""
        environment = self.cluster_environment
        address = None
        self.set_world_ranks()
        if self.world_size > 1:
            # The session makes the group, in a way that notices a rank which ends meanwhile.
            self._tree.fabric_name("utilities.seed", "reset_seed")()
            # A launcher that Lightning does not know gives no port to meet at: the session finds
            # its own way.
            if not isinstance(environment, LauncherEnvironment):
                address = (environment.main_address, environment.main_port)
        else:
            super().setup_distributed()
        world = World(
            rank=self.global_rank,
            size=self.world_size,
            local_rank=self.local_rank,
            local_size=self.num_processes,
            node_rank=self.node_rank,
        )
        self._session = open_session(world, address=address, **self._session_options)
        self._failed = False
        self._write_failure = None
        for name in self._ignored_arguments:
            _log.info(
                "HvdStrategy(%s=...) is not needed and has no effect: parameters that a step does "
                "not use and changing graphs need no preparation, gradients stay where autograd "
                "made them, and buffers are kept equal.",
                name,
            )
        if self.replaces_horovod:
            self.replaces_horovod = False
            _log.warning(
                'strategy="horovod" is hvd-strategy here, which leaves the learning rate alone: '
                "Lightning's HorovodStrategy multiplied it by the number of ranks, in the "
                "optimizers and in the base of their schedulers. To train as before, multiply it "
                'yourself (lr * %d); to train as now without this message, use strategy="hvd".',
                self.world_size,
                extra=FOR_ALL_RANKS,
            )
        self.forget_messages()

    def forget_messages(self) -> None:
        """To be called when the messages about this strategy's arguments have been shown."""
        self._ignored_arguments = []
        self.replaces_horovod = False

    @override
    def _get_process_group_backend(self) -> str:
        if self._process_group_backend == "auto":
            self._process_group_backend = None
        return super()._get_process_group_backend()

    @override
    def setup(self, trainer: Any) -> None:
        """Prepares the model for the run: equal on all ranks, and with averaged gradients in fit.

        Runs once per fit, validate, test and predict, in any order.
        """
        assert self._session is not None
        self._end_run()
        fitting = self._is_fitting(trainer)
        self._layer_sync = synchronised_layers(self._tree, self._layer_sync)
        if fitting and self._layer_sync is not None:
            assert self.model is not None
            self.model = self._layer_sync.apply(self.model)
        if self._session.size > 1:
            # Before the optimizers are made: a schedule may ask for the number of batches.
            exact = self._options["exact_evaluation"]
            self._data = DataShards(trainer, self._session, self._tree, exact)
            self._inputs = UnevenInputs(
                trainer, self._session, self._tree, self._options["uneven_inputs"], exact
            )
        # Not DDPStrategy's own, which differs from it in the wrapper only.
        super(self._tree.pytorch_name("strategies", "DDPStrategy"), self).setup(trainer)
        self._begin_reports(trainer)
        if fitting:
            assert self.model is not None
            self._after_backward = AfterBackward(
                trainer, self.precision_plugin, self._tree, self._options["log_grad_norm"]
            )
            self._reducer = GradientReducer(
                self._named_parameters(self.model),
                self.optimizers,
                session=self._session,
                module=self.model,
                broadcast_parameters=False,  # done, before the optimizers were made
                bucket_cap_mb=self._options["bucket_cap_mb"],
                timeout=self._options["timeout"],
                sparse_as_dense=self._options["sparse_as_dense"],
                wire_dtype=self._options["wire_dtype"],
                sum_dtype=self._options["sum_dtype"],
                gradient_average=self._options["gradient_average"],
                gradient_norms=self._after_backward.wants_norms,
            )
            self._reducer.set_step(lambda: trainer.global_step)
            self._after_backward.attach(self._reducer)
            self._attach_reports(trainer, self._reducer)
            if self._options["rank_seeds"]:
                seed_by_rank(self._session, trainer.global_step)
            every_n_steps = self._options["consistency_check_every_n_steps"]
            if every_n_steps:
                self._replica_check = ReplicaCheck(
                    trainer,
                    self._session,
                    every_n_steps,
                    self._options["on_divergence"],
                )
        if self._session.size > 1:
            self._stop = GracefulStop(
                trainer,
                self._session,
                self._tree.pytorch_name("utilities.exceptions", "SIGTERMException"),
            )
            assert self.model is not None
            assert self._data is not None
            assert self._inputs is not None
            self._attachments = Attachments(
                trainer,
                self.model,
                self._session,
                self._tree,
                lambda: not self._failed,
                self._data,
                self._inputs,
                self._items_of_step,
            )
            if self._reducer is not None:
                attachments, inputs = self._attachments, self._inputs
                votes = StepVotes(
                    self._reducer,
                    self._session.size,
                    lambda: attachments.has_logged,
                    lambda: inputs.active,
                    self._after_joined_backward,
                )
                self._votes = votes
                self._reducer.attach_notes(lambda: (inputs.note(), votes.note()))
                attachments.attach_to_fit(trainer, self._broadcast_buffers, votes, self._reducer)

    @override
    def model_to_device(self) -> None:
        """Lightning calls this first in the set-up of a run, and torch would say less."""
        if self.model is not None:
            require_content(self._named_parameters(self.model), self.global_rank)
            require_content(self.model.named_buffers(), self.global_rank)
        super().model_to_device()

    @override
    def _setup_model(self, model: nn.Module) -> Any:
        """Lightning calls this before the optimizers are made, so they see rank 0's parameters."""
        assert self._session is not None
        self._state = ModuleState(model, self._session)
        self._state.broadcast()
        return model

    def _named_parameters(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        ignored = names_ignored_by_ddp(model)
        return [
            (name, parameter) for name, parameter in model.named_parameters() if name not in ignored
        ]

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the run; each one set here is watched by the reducer."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        super(DataParallelStrategy, type(self)).optimizers.fset(  # type: ignore[attr-defined]
            self, optimizers
        )
        if self._reducer is not None:
            for optimizer in optimizers:
                self._reducer.add_optimizer(optimizer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks, which would wait for this one in vain."""
        if isinstance(exception, SystemExit) and exception.code is None and self._reports_status():
            # Lightning's end by SIGTERM would look like success to whoever started this process,
            # and like a missing result to the parent of a fork.
            exception.code = 128 + signal.SIGTERM
        if self._session is None or (self._stop is not None and self._stop.agreed):
            return
        self._failed = True
        self._session.post_exception(exception)

    def _reports_status(self) -> bool:
        """Whether anybody but rank 0 looks at this process's exit status.

        Rank 0 kills itself when a process that it started by popen ends with another than 0.
        """
        environment = self.cluster_environment
        return (
            self._start_method != "popen"
            or self.local_rank == 0
            or not isinstance(environment, self._default_environment())
        )

    def _default_environment(self) -> Any:
        return self._tree.fabric_name("plugins.environments", "LightningEnvironment")

    @override
    def teardown(self) -> None:
        """Ends the run. The session stays open for the next one, unless this one failed."""
        self._end_run()
        try:
            self._finish_saving()
            super().teardown()
        except NotImplementedError:
            # Of a module on the meta device, which cannot be moved: the run's own error counts.
            if not self._failed:
                raise
        except Exception as error:
            # A plugin that writes later repeats what all ranks know already.
            if error is not self._write_failure:
                raise
        finally:
            self._written_late = None
            if isinstance(self._launcher, InterruptHandlerKept):
                self._launcher.restore_interrupt_handler()
            if self._failed and self._session is not None:
                self._session.close()
                self._session = None

    def _end_run(self) -> None:
        if self._stop is not None:
            self._stop.detach()
        if self._attachments is not None:
            self._attachments.detach()
        if self._inputs is not None:
            self._inputs.detach()
        if self._data is not None:
            self._data.detach()
        self._end_reports()
        if self._after_backward is not None:
            self._after_backward.detach()
        if self._reducer is not None:
            self._reducer.close()
        self._stop = self._attachments = self._votes = self._replica_check = None
        self._after_backward = self._data = self._inputs = None
        self._reducer = self._state = None

    def _broadcast_buffers(self) -> None:
        # Outside of a fit all ranks have loaded or received the same, and nothing changes it.
        if self._reducer is not None and self._state is not None and not self._failed:
            self._state.broadcast_buffers()

    # ---- the rest

    def _is_fitting(self, trainer: Any) -> bool:
        function = self._tree.pytorch_name("trainer.states", "TrainerFn")
        return bool(trainer.state.fn == function.FITTING)

    @override
    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # They belong to this process, and are None where a strategy is to be sent to another.
        for name in (
            "_session",
            "_reducer",
            "_state",
            "_stop",
            "_attachments",
            "_votes",
            "_data",
            "_inputs",
            "_after_backward",
            "_replica_check",
            "_item_counts",
            "_grad_norm",
        ):
            state.pop(name, None)
        return state


__all__ = ["DataParallelStrategy"]
