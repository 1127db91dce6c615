"""Lightning is published twice, as two unrelated trees of the same classes.

`lightning.pytorch` (package "lightning") and `pytorch_lightning` (package "pytorch-lightning") hold
the same code, but a Trainer of one does not accept a strategy derived from the other's classes. So
everything here that derives from Lightning is built once per tree, and `ClassTree` is how it
reaches the classes of its tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class ClassTree:
    """One of the two trees.

    Attributes:
        name: root of the Trainer's package, "lightning.pytorch" or "pytorch_lightning".
        fabric: root of the package below it, "lightning.fabric" or "lightning_fabric".
        public_module: the module of ours in which the classes built for this tree are found, by
            users and by pickle.
    """

    name: str
    fabric: str
    public_module: str

    def pytorch_name(self, module: str, name: str) -> Any:
        """Returns `name` from a module of the Trainer's package."""
        return getattr(import_module(f"{self.name}.{module}"), name)

    def fabric_name(self, module: str, name: str) -> Any:
        """Returns `name` from a module of the Fabric package."""
        return getattr(import_module(f"{self.fabric}.{module}"), name)


_TREES = (
    ClassTree("lightning.pytorch", "lightning.fabric", "hvd_strategy.lightning"),
    ClassTree("pytorch_lightning", "lightning_fabric", "hvd_strategy.lightning.pytorch_lightning"),
)


@cache
def class_tree(name: str) -> ClassTree:
    """Returns the tree whose root is `name`.

    Raises:
        ValueError: there is no such tree.
    """
    for tree in _TREES:
        if tree.name == name:
            return tree
    known = " or ".join(repr(tree.name) for tree in _TREES)
    raise ValueError(f"tree={name!r} is not a Lightning package; it can be {known}")


__all__ = ["ClassTree", "class_tree"]
