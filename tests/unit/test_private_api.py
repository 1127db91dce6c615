"""Private names of torch and Lightning: all in `_private_api.py`, and each there in this version.

A new release that moves one makes exactly the test of that name fail.
"""

from __future__ import annotations

import ast
import inspect
import platform
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import hvd_strategy
from hvd_strategy._private_api import LIGHTNING_STRATEGY_NAMES, set_versions

PACKAGE = Path(hvd_strategy.__file__).parent
PRIVATE_API = PACKAGE / "_private_api.py"
OTHERS = ("torch", "torchmetrics", "lightning", "pytorch_lightning", "accelerate")

# Where each name is found. An attribute that instances get is found in the source of their class,
# an argument in the signature of its function.
# Lightning's are looked for in both packages in which it is published.
NAMES = (
    "threading._shutdown",
    "atexit._run_exitfuncs",
    "sys._current_frames",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.Tensor._version",
    "torch.UntypedStorage._cdata",
    "torch._C._current_autograd_node",
    "torch._C._autograd._unsafe_set_version_counter",
    "torch._C._storage_Use_Count",
    "torch.amp.GradScaler._enabled",
    "torch.amp.GradScaler._growth_tracker",
    "torch.amp.GradScaler._per_optimizer_states",
    "torch.amp.GradScaler._scale",
    "torch.amp.GradScaler._unscale_grads_",
    "torch._dynamo.compiled_autograd.in_compiled_autograd_region",
    "torch._utils._validate_loaded_sparse_tensors",
    "torch.autograd.Variable._execution_engine",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.nn.Module._modules",
    "torch.nn.Module._parameters",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.nn.parallel.DistributedDataParallel._ddp_params_and_buffers_to_ignore",
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "torch.optim.Adam._step_supports_amp_scaling",
    "torch.storage.TypedStorage.__init__._internal",
    "torch.storage.TypedStorage._untyped_storage",
    "torchmetrics.Metric._defaults",
    "torchmetrics.Metric._reductions",
    "torchmetrics.Metric._sync_dist",
    "lightning.fabric.utilities.distributed._DatasetSamplerWrapper._sampler_list",
    "lightning.fabric.utilities.imports._IS_INTERACTIVE",
    "lightning.pytorch.Trainer._checkpoint_connector",
    "lightning.pytorch.Trainer._data_connector",
    "lightning.pytorch.Trainer._signal_connector",
    "lightning.pytorch.callbacks.ModelCheckpoint._monitor_candidates",
    "lightning.pytorch.LightningModule._on_before_batch_transfer",
    "lightning.pytorch.loops.evaluation_loop._EvaluationLoop._max_batches",
    "lightning.pytorch.loops.evaluation_loop._EvaluationLoop._results",
    "lightning.pytorch.loops.evaluation_loop._EvaluationLoop._store_dataloader_outputs",
    "lightning.pytorch.loops.fetchers._DataLoaderIterDataFetcher",
    "lightning.pytorch.loops.fit_loop._FitLoop._combined_loader",
    "lightning.pytorch.loops.fit_loop._FitLoop._data_fetcher",
    "lightning.pytorch.loops.fit_loop._FitLoop._data_source",
    "lightning.pytorch.loops.loop._Loop._loaded_from_state_dict",
    "lightning.pytorch.loops.loop._Loop._restarting",
    "lightning.pytorch.loops.loop._Loop._resuming_from_checkpoint",
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._batches_that_stepped",
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor",
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._results",
    "lightning.pytorch.plugins.precision.Precision._clip_gradients",
    "lightning.pytorch.plugins.io.wrapper._WrappingCheckpointIO",
    "lightning.pytorch.strategies.launchers._MultiProcessingLauncher._start_method",
    "lightning.pytorch.strategies.launchers._MultiProcessingLauncher._strategy",
    "lightning.pytorch.strategies.launchers._MultiProcessingLauncher._wrapping_function",
    "lightning.pytorch.strategies.launchers._SubprocessScriptLauncher._call_children_scripts",
    "lightning.pytorch.strategies.launchers.launcher._Launcher",
    "lightning.pytorch.trainer.call._call_and_handle_interrupt",
    *(
        f"lightning.pytorch.trainer.connectors.{name}"
        for name in (
            "checkpoint_connector._CheckpointConnector._loaded_checkpoint",
            "checkpoint_connector._CheckpointConnector._select_ckpt_path",
            "checkpoint_connector._CheckpointConnector._user_managed",
            "data_connector._DataConnector._prepare_dataloader",
            "data_connector._DataConnector._requires_distributed_sampler",
            "logger_connector.result._Metadata",
            "logger_connector.result._ResultMetric._computed",
            "logger_connector.result._Sync._should",
            "logger_connector.result._ResultMetric._forward_cache",
            "signal_connector._SignalConnector._sigterm_notifier_fn",
            "signal_connector._SignalConnector._slurm_sigusr_handler_fn",
        )
    ),
    "lightning.pytorch.utilities.exceptions._TunerExitException",
    *(f"lightning.pytorch.strategies.DDPStrategy.{name}" for name in LIGHTNING_STRATEGY_NAMES),
)


def in_both_packages(path: str) -> list[str]:
    for ours, theirs in (
        ("lightning.pytorch.", "pytorch_lightning."),
        ("lightning.fabric.", "lightning_fabric."),
    ):
        if path.startswith(ours):
            return [path, theirs + path.removeprefix(ours)]
    return [path]


def find(path: str) -> Any:
    """The object at a dotted path; modules on the way are imported."""
    parts = path.split(".")
    found = import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part) and inspect.ismodule(found):
            import_module(".".join(parts[:number]))
        found = getattr(found, part)
    return found


@cache
def instance_attributes(owner: Any) -> set[str]:
    """Attributes that a class, or one that it derives from, gives its instances."""
    names: set[str] = set()
    for base in inspect.getmro(owner) if inspect.isclass(owner) else ():
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # built in
            continue
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names


def arguments(owner: Any) -> set[str]:
    return set(inspect.signature(owner).parameters) if inspect.isfunction(owner) else set()


def release(path: str) -> str:
    package = path.split(".")[0]
    if package in sys.stdlib_module_names:
        return f"Python {platform.python_version()}"
    distribution = {"pytorch_lightning": "pytorch-lightning", "lightning_fabric": "lightning"}
    return f"{package} {version(distribution.get(package, package))}"


@pytest.mark.parametrize("path", [path for name in NAMES for path in in_both_packages(name)])
def test_name_exists(path: str) -> None:
    owner_path, _, name = path.rpartition(".")
    try:
        owner = find(owner_path)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{release(path)} has lost {owner_path}, where we look for {name}: {error}")
    assert hasattr(owner, name) or name in instance_attributes(owner) | arguments(owner), (
        f"{release(path)} has lost {name} of {owner_path}: see who uses it in {PRIVATE_API.name}"
    )


def test_a_lost_name_is_noticed() -> None:
    """The test above can fail: for a module, a class, an attribute of a class, an argument."""
    for path in (
        "atexit._no_such_function",
        "torch.storage.TypedStorage.__init__._no_such_argument",
        "torch._no_such_module.name",
        "torch.nn.modules.batchnorm._NoSuchClass",
        "torch.Tensor._no_such_attribute",
        "lightning.pytorch.Trainer._no_such_connector",
    ):
        with pytest.raises((pytest.fail.Exception, AssertionError), match="has lost"):
            test_name_exists(path)


def test_every_name_in_the_file_has_its_test() -> None:
    text = PRIVATE_API.read_text()
    tested = {part for path in NAMES for part in path.split(".")}
    used = {name for name, _ in private_names(ast.parse(text))}
    assert used - tested - own_names(PRIVATE_API) == set(), "add them to NAMES"
    stale = [path for path in NAMES if path.rpartition(".")[2] not in text]
    assert stale == [], "nothing uses them: take them out of NAMES"


# ---- nothing private anywhere else


# What our own functions are named like too (`_values`, say).
TENSOR_NAMES = frozenset(dir(torch.Tensor))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def private_names(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Private names that are asked of an object, imported, or given as text to getattr and such.

    With each: whether a class asks it of itself, as it does with what it inherits.
    """
    ends = {  # of text that begins with something else, as f"{metric}_step" does
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values[1:]
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, is_self(node.value)
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            for path in imported(node):
                if path.split(".")[0] in OTHERS:
                    yield from ((part, False) for part in path.split(".") if is_private(part))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.isidentifier() and is_private(node.value) and id(node) not in ends:
                yield node.value, False
        elif isinstance(node, ast.keyword) and node.arg is not None and is_private(node.arg):
            yield node.arg, False


def is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def imported(node: ast.ImportFrom | ast.Import) -> list[str]:
    module = getattr(node, "module", None)
    return [f"{module}.{alias.name}" if module else alias.name for alias in node.names]


@cache
def own_names(*files: Path) -> set[str]:
    """Private names that files define, modules among them; not what they import from others."""
    names = {file.stem for file in files}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if is_self(node.value) else set()
    return names


def without_type_checking(tree: ast.AST) -> ast.AST:
    """The tree without what only type checkers see."""

    class Remove(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> Any:
            checking = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            return [self.visit(other) for other in node.orelse] if checking else node

    return Remove().visit(tree)


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PRIVATE_API)


def violations(source: str) -> set[str]:
    """Private names in a module's source that are neither ours nor inherited and told about.

    A name counts as ours when this package defines it. `os._exit` and its like are documented.
    """
    tree = without_type_checking(ast.parse(source))
    standard = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("os", "sys")
    }
    known = own_names(PRIVATE_API, *modules()) | standard | {"_core"}  # the extension module
    told = {path.rpartition(".")[2] for path in NAMES}
    return {
        name
        for name, on_self in private_names(tree)
        if (not on_self if name in told | TENSOR_NAMES else name not in known)
    }


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_are_touched_in_one_file(path: Path) -> None:
    assert violations(path.read_text()) == set(), "this belongs into _private_api.py"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("version = tensor._version", {"_version"}),
        ("node = torch._C._current_autograd_node()", {"_C", "_current_autograd_node"}),
        ("from torch.nn.modules.batchnorm import _NormBase", {"_NormBase"}),
        ("import torch._dynamo", {"_dynamo"}),
        ("flag = getattr(trainer, '_signal_connector')", {"_signal_connector"}),
        ("trainer._signal_connector = None", {"_signal_connector"}),
        ("flag = getattr(trainer, f'_forward{kind}')", {"_forward"}),
        ("name = f'{metric}_forward'", set()),
        ("values = gradient._values()", {"_values"}),
        ("def _values(gradient): ...\n_values(gradient)", set()),
        ("class A:\n    def f(self):\n        return self._launcher", set()),
        ("class A:\n    def f(self):\n        return self._no_such_thing", {"_no_such_thing"}),
        ("if TYPE_CHECKING:\n    from torch import _C", set()),
        ("from hvd_strategy import _core\n_core.Session", set()),
    ],
)
def test_violations_are_noticed(source: str, expected: set[str]) -> None:
    assert violations(source) == expected


def test_names_of_ddp_strategy_are_told() -> None:
    """A name that DDPStrategy has is Lightning's, even where ours assigns to it."""
    strategy = find("lightning.pytorch.strategies.DDPStrategy")
    theirs = {name for name in dir(strategy()) if is_private(name)}
    used: set[str] = set()
    for name in ("strategy.py", "loop_strategy.py", "collective_strategy.py", "build.py"):
        tree = ast.parse((PACKAGE / "lightning" / name).read_text())
        used |= {private for private, _ in private_names(tree)}
        used |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert used & theirs == set(LIGHTNING_STRATEGY_NAMES)


@pytest.mark.parametrize("several", [True, False])
def test_versions_are_set_by_both_forms_of_the_function(
    several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    autograd = find("torch._C._autograd")
    current = autograd._unsafe_set_version_counter

    def of_one(tensor: Any, version: int) -> None:
        if not isinstance(version, int):
            raise TypeError("must be an int")
        current((tensor,), (version,))

    monkeypatch.setattr(autograd, "_unsafe_set_version_counter", current if several else of_one)
    tensors = [torch.ones(2), torch.ones(3)]
    set_versions(tensors, 1 << 30)
    assert [tensor._version for tensor in tensors] == [1 << 30] * 2
