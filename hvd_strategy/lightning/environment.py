"""The cluster environment for launchers that Lightning does not recognise.

Lightning knows torchrun, SLURM, LSF, and MPI where mpi4py is installed. Under any other launcher,
`mpirun` without mpi4py above all, it would take every rank for the only process and start the job
once per rank.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from hvd_strategy.errors import HvdError
from hvd_strategy.lightning.class_tree import ClassTree, class_tree
from hvd_strategy.world import World, detect_world

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment as _Base
else:
    _Base = object


class LauncherEnvironment(_Base):
    """The ranks that a launcher started, as `hvd_strategy.world` reads them.

    Mixed with Lightning's `ClusterEnvironment` by `launcher_environment`.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    @override
    def main_port(self) -> int:
        if "MASTER_PORT" not in os.environ:
            raise HvdError(
                f"The launcher ({self.world.launcher}) gives the ranks no common port, and needs "
                "none: `hvd_strategy.open_session` lets them find each other. Set MASTER_PORT on "
                "all ranks for code that asks for a port."
            )
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    @override
    def detect() -> bool:
        return detect_world().size > 1

    @override
    def world_size(self) -> int:
        return self.world.size

    @override
    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher has decided."""

    @override
    def global_rank(self) -> int:
        return self.world.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher has decided."""

    @override
    def local_rank(self) -> int:
        return self.world.local_rank

    @override
    def node_rank(self) -> int:
        return self.world.node_rank


def launcher_environment(tree: ClassTree, chosen: Any) -> Any:
    """Returns the environment to use where Lightning has chosen `chosen`.

    That is another one only where Lightning found no launcher although there is one.
    """
    default = tree.fabric_name("plugins.environments", "LightningEnvironment")
    if type(chosen) is not default:
        return chosen
    try:
        world = detect_world()
    except HvdError:
        # In a process that Lightning started, numbers meant for another level of the job (the pods
        # of a cluster, say) may contradict its own, which count.
        if chosen.creates_processes_externally:
            return chosen
        raise
    if world.size == 1 or world.launcher == "lightning":
        return chosen
    return environment_class(tree.name)(world)


@cache
def environment_class(tree_name: str) -> type[LauncherEnvironment]:
    """Returns `LauncherEnvironment` as a class of the tree; pickle finds it where it says."""
    tree = class_tree(tree_name)
    base = tree.fabric_name("plugins", "ClusterEnvironment")
    name = LauncherEnvironment.__name__
    return type(name, (LauncherEnvironment, base), {"__module__": tree.public_module})


__all__ = ["LauncherEnvironment", "environment_class", "launcher_environment"]
