"""The strategy names get into Lightning's registries, whatever is imported first.

The first tests use a stand-in for Lightning, since the real one takes seconds to import.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = "horovod hvd hvd_fork hvd_notebook hvd_spawn"

STAND_IN = """
class Registry(dict):
    def register(self, name, strategy=None, description="", override=False, **init_params):
        if name in self and not override:
            raise ValueError(name)
        self[name] = {"strategy": strategy, "description": description, "init_params": init_params}

StrategyRegistry = Registry(ddp=None)
"""

REFUSING_STAND_IN = """
class Registry(dict):
    def register(self, name, strategy):
        pass

StrategyRegistry = Registry()
"""


def run(code: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with a `pytorch_lightning` that consists of its registry."""
    package = tmp_path / "pytorch_lightning"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "strategies.py").write_text(STAND_IN)
    return tmp_path


PRINT = 'print(*sorted(set(pytorch_lightning.strategies.StrategyRegistry) - {"ddp"}))\n'


@pytest.mark.parametrize(
    "imports",
    [
        "import hvd_strategy; import pytorch_lightning.strategies",
        "import pytorch_lightning.strategies; import hvd_strategy",
    ],
    ids=["before", "after"],
)
def test_order_of_imports(stand_in: Path, imports: str) -> None:
    assert run(f"{imports}\n{PRINT}", PYTHONPATH=str(stand_in)).stdout.strip() == NAMES


def test_install_twice_and_reload(stand_in: Path) -> None:
    done = run(
        f"""
import importlib, sys
import hvd_strategy
from hvd_strategy import _register
_register.install()
_register.autoload()
del sys.modules["hvd_strategy"], sys.modules["hvd_strategy._register"]
import hvd_strategy
print(sum(type(finder).__module__ == "hvd_strategy._register" for finder in sys.meta_path))
import pytorch_lightning.strategies
{PRINT}
importlib.reload(pytorch_lightning.strategies)
{PRINT}
""",
        PYTHONPATH=str(stand_in),
    )
    assert done.stdout.splitlines() == ["1", NAMES, NAMES]
    assert done.stderr == ""


def test_module_keeps_its_loader(stand_in: Path) -> None:
    done = run(
        """
import hvd_strategy, inspect, pytorch_lightning.strategies as strategies
print(type(strategies.__spec__.loader).__name__, "exec_module" in vars(strategies.__loader__))
print(len(inspect.getsource(strategies)))
""",
        PYTHONPATH=str(stand_in),
    )
    assert done.stdout.split() == ["SourceFileLoader", "False", str(len(STAND_IN))]


def test_registration_loads_neither_core_nor_torch(stand_in: Path) -> None:
    done = run(
        """
import sys, hvd_strategy, pytorch_lightning.strategies
print(*sorted(name for name in sys.modules if name.startswith(("hvd_strategy", "torch"))))
""",
        PYTHONPATH=str(stand_in),
    )
    assert done.stdout.split() == ["hvd_strategy", "hvd_strategy._register"]


@pytest.mark.parametrize("options", [(), ("-W", "error")], ids=["warns", "warnings are errors"])
def test_failure_to_register_breaks_no_import(stand_in: Path, options: tuple[str, ...]) -> None:
    (stand_in / "pytorch_lightning" / "strategies.py").write_text(REFUSING_STAND_IN)
    done = run(
        "import hvd_strategy, pytorch_lightning.strategies; print(hvd_strategy.__name__)",
        *options,
        PYTHONPATH=str(stand_in),
    )
    assert done.stdout.strip() == "hvd_strategy"
    assert "hvd-strategy could not register its names with Lightning" in done.stderr


def test_switched_off(stand_in: Path) -> None:
    done = run(
        f"import torch, hvd_strategy, pytorch_lightning.strategies\n{PRINT}",
        PYTHONPATH=str(stand_in),
        HVD_STRATEGY_AUTOREGISTER="0",
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_horovod_of_another_package_is_left_alone(stand_in: Path, first: str) -> None:
    """Whether it came before our names, or replaced ours before they were entered again."""
    strategies = stand_in / "pytorch_lightning" / "strategies.py"
    if first == "theirs":
        strategies.write_text(f"{STAND_IN}\nStrategyRegistry.register('horovod', int)\n")
    done = run(
        f"""
import hvd_strategy, pytorch_lightning.strategies
registry = pytorch_lightning.strategies.StrategyRegistry
if {first == "ours"}:
    assert registry["horovod"]["strategy"] is not int
    registry.register("horovod", int, override=True)
hvd_strategy._register.install()
print(registry["horovod"]["strategy"].__name__)
{PRINT}
""",
        PYTHONPATH=str(stand_in),
    )
    assert done.stdout.splitlines() == ["int", NAMES]


PRINT_BOTH = """
import sys
for tree in ("lightning.pytorch", "pytorch_lightning"):
    registry = sys.modules[tree + ".strategies"].StrategyRegistry
    ours = "horovod", "hvd", "hvd_spawn", "hvd_fork", "hvd_notebook"
    print(*sorted(set(ours) & set(registry.available_strategies())))
    for name in ours:
        if name in registry:
            assert registry[name]["description"]
            assert list(registry[name]["init_params"]) == ["start_method"]
assert "hvd_strategy._core" not in sys.modules
assert "hvd_strategy.lightning" not in sys.modules
"""


def test_lightning_without_any_import_of_ours() -> None:
    done = run(f"import lightning.pytorch, pytorch_lightning\n{PRINT_BOTH}")
    assert done.stdout.splitlines() == [NAMES, NAMES]


def test_lightning_first_then_explicit_import() -> None:
    done = run(
        f"""
import lightning.pytorch, pytorch_lightning, sys
assert "hvd_strategy" not in sys.modules
{PRINT_BOTH}
import hvd_strategy
{PRINT_BOTH}
""",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.stdout.splitlines() == ["", "", NAMES, NAMES]


@pytest.mark.parametrize("tree", ["lightning.pytorch", "pytorch_lightning"])
def test_factory_makes_the_strategy_of_its_own_tree(tree: str) -> None:
    done = run(f"""
import {tree} as pl
from hvd_strategy.lightning import strategy_class
registry = pl.strategies.StrategyRegistry
strategy = registry.get("hvd_spawn")
assert type(strategy) is strategy_class("{tree}")
assert isinstance(strategy, pl.strategies.DDPStrategy), type(strategy).__mro__
print(*(registry[name]["init_params"]["start_method"] for name in "{NAMES}".split()))
print(*(registry.get(name).replaces_horovod for name in "{NAMES}".split()))
""")
    assert done.stdout.splitlines() == [
        "None None fork interactive spawn",
        "True False False False False",
    ]


# ---- ranks that a launcher of ours has started ---------------------------------------------------

# Says what the garbage collector is told while Lightning is imported.
WATCHED_STAND_IN = f"import gc; print('meanwhile', *gc.get_threshold()){STAND_IN}"


@pytest.mark.parametrize(
    ("code", "meanwhile", "afterwards"),
    [
        ("import hvd_strategy", "1000000 7 9", "600 7 9"),
        ("gc.set_threshold(0); import hvd_strategy", "0 7 9", "0 7 9"),
        ("import hvd_strategy; gc.set_threshold(500)", "500 7 9", "500 7 9"),
        ("gc.disable(); import hvd_strategy", "1000000 7 9", "600 7 9"),
        ("import hvd_strategy; gc.freeze()", "1000000 7 9", "600 7 9"),
        ("import pytorch_lightning.strategies, hvd_strategy", "600 7 9", "600 7 9"),
    ],
    ids=["put off", "switched off", "changed", "disabled", "frozen", "too late"],
)
def test_collections_of_a_started_rank(
    stand_in: Path, code: str, meanwhile: str, afterwards: str
) -> None:
    """They wait until Lightning is there; what the script decides about them counts."""
    (stand_in / "pytorch_lightning" / "strategies.py").write_text(WATCHED_STAND_IN)
    done = run(
        f"""
import gc, os
gc.set_threshold(600, 7, 9)
{code}
enabled, frozen = gc.isenabled(), gc.get_freeze_count() > 0
import pytorch_lightning.strategies
print("afterwards", *gc.get_threshold())
assert "HVD_STRATEGY_STARTED_RANK" not in os.environ
assert (gc.isenabled(), gc.get_freeze_count() > 0) == (enabled, frozen)
""",
        PYTHONPATH=str(stand_in),
        HVD_STRATEGY_STARTED_RANK="1",
    )
    assert done.stdout.splitlines() == [f"meanwhile {meanwhile}", f"afterwards {afterwards}"]
    assert done.stderr == ""


def test_what_a_started_rank_imported_counts_as_old(stand_in: Path) -> None:
    """It is not looked at by the first collection that comes."""
    (stand_in / "pytorch_lightning" / "strategies.py").write_text(
        f"{STAND_IN}\nmany = [[] for _ in range(100_000)]\n"
    )
    done = run(
        """
import gc, hvd_strategy, pytorch_lightning.strategies
print(*(len(gc.get_objects(generation=age)) > 100_000 for age in range(3)))
""",
        PYTHONPATH=str(stand_in),
        HVD_STRATEGY_STARTED_RANK="1",
    )
    assert done.stdout.split() == ["False", "False", "True"]


def test_collections_come_back_when_lightning_cannot_be_imported(stand_in: Path) -> None:
    (stand_in / "pytorch_lightning" / "strategies.py").write_text("raise ImportError\n")
    done = run(
        """
import gc
before = gc.get_threshold()
import hvd_strategy
assert gc.get_threshold() != before
try:
    import pytorch_lightning.strategies
except ImportError:
    print(gc.get_threshold() == before)
""",
        PYTHONPATH=str(stand_in),
        HVD_STRATEGY_STARTED_RANK="1",
    )
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("environment", [{}, {"HVD_STRATEGY_AUTOREGISTER": "0"}])
def test_collections_of_other_processes_are_left_alone(environment: dict[str, str]) -> None:
    """Also where nothing would end it."""
    if environment:
        environment["HVD_STRATEGY_STARTED_RANK"] = "1"
    done = run(
        """
import gc, os, sys
before = gc.get_threshold()
import hvd_strategy
print(gc.get_threshold() == before, "hvd_strategy._rank_imports" in sys.modules)
assert "HVD_STRATEGY_STARTED_RANK" not in os.environ
""",
        **environment,
    )
    assert done.stdout.split() == ["True", "False"]
