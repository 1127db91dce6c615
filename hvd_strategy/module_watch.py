"""Notices that a module's Parameter objects are no longer those that its GradientReducer knows.

Hooks live on the objects, so whatever puts other ones in their place would silently end the
reduction. Three looks at the module find it, and none of them costs a step anything measurable:

* after `load_state_dict`, through the hook that every submodule offers: with `assign=True` other
  objects have taken the place of the old ones, and the reducer's hooks move over at once;
* at the end of a backward in which a parameter did not fire that is usually used: parametrizations
  and exchanged layers look like that. Once looked at, it counts as merely unused for a while;
* every 256 backwards, for layers that were added without another one falling silent.

What is found is taken up by all ranks together, in the flush in which one of them found it.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from hvd_strategy._private_api import own_parameters
from hvd_strategy.parameter_table import Named, ParameterTable
from hvd_strategy.parameters import WIRE_NAMES

_LOOK_EVERY = 256  # flushes
_FORGET_EVERY = 64  # flushes, after which a silent parameter is looked at again


class ModuleWatch:
    """Compares the module's parameters with those of the table.

    Args:
        module: The module that the parameters belong to.
        table: The reducer's parameters. Those of the module that are not among them now were left
            out on purpose.
        handles: Filled with the handles of the hooks.
    """

    def __init__(self, module: nn.Module, table: ParameterTable, handles: list[Any]) -> None:
        self._module = module
        self._table = table
        self._handles = handles
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._left_out = {name for name, p in module.named_parameters() if p not in table}
        self._explained: set[int] = set()
        self._found = False
        self._number_of_name: dict[str, int] = {}
        self._tied: set[int] = set()
        self.learn()

    def learn(self) -> None:
        """Takes note of the table's parameters and of the places where they are."""
        seen: set[int] = set()
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            index = self._table.index_of(parameter)
            if index is None:
                continue
            self._number_of_name[name] = index
            if index in seen:
                self._tied.add(index)
            seen.add(index)
        for submodule in self._module.modules():
            if submodule not in self._hooked and own_parameters(submodule):
                self._hooked.add(submodule)
                self._handles.append(
                    submodule.register_load_state_dict_post_hook(_AfterLoad(self, submodule))
                )

    def numbers_in(self, submodule: nn.Module) -> dict[str, int]:
        """The table's numbers of what a submodule itself holds, by attribute."""
        return {
            key: index
            for key, parameter in own_parameters(submodule).items()
            if parameter is not None and (index := self._table.index_of(parameter)) is not None
        }

    def loaded(self, submodule: nn.Module, numbers: dict[str, int]) -> None:
        """Follows `load_state_dict(assign=True)`. On this rank alone: numbers stay as they are."""
        for key, parameter in own_parameters(submodule).items():
            if parameter is None or parameter in self._table:
                continue
            index = numbers.get(key)
            if index is not None and index not in self._tied and _is_trainable(parameter):
                self._table.replace(index, parameter)
            else:
                self._found = True  # tied ones that are tied no more: all ranks have to take it up

    def finds_change(self, absent: list[int], flushes: int) -> bool:
        """Whether there is anything for `unknown` to find.

        Args:
            absent: Numbers of the parameters that did not fire, although they have a bucket.
            flushes: Number of the flush.
        """
        if flushes % _FORGET_EVERY == 0:
            self._explained.clear()
        silent = not self._explained.issuperset(absent)
        if self._found:
            return True
        if not silent and flushes % _LOOK_EVERY:
            return False
        self._explained.update(absent)
        replaced, new = self.unknown()
        return bool(replaced or new)

    def unknown(self) -> tuple[dict[int, Tensor], Named]:
        """Parameters that are not in the table.

        Returns:
            Those that have taken the place of another one, by its number, and the others.
        """
        replaced: dict[int, Tensor] = {}
        new: Named = []
        named = dict(self._module.named_parameters())
        present = {id(parameter) for parameter in named.values()}
        for name, parameter in named.items():
            if parameter in self._table or name in self._left_out or not _is_trainable(parameter):
                continue
            index = self._number_of_name.get(name)
            if index is not None and id(self._table.parameters[index]) not in present:
                replaced[index] = parameter
            else:
                new.append((name, parameter))
        return replaced, new

    def settled(self) -> None:
        """All ranks have taken up what was found."""
        self._found = False
        self.learn()


class _AfterLoad:
    """What a submodule calls after `load_state_dict`; a copy of it does nothing."""

    def __init__(self, watch: ModuleWatch, submodule: nn.Module) -> None:
        self._watch = weakref.ref(watch)
        self._numbers = watch.numbers_in(submodule)

    def __call__(self, submodule: nn.Module, incompatible_keys: Any) -> None:
        watch = self._watch()
        if watch is not None:
            watch.loaded(submodule, self._numbers)

    def __reduce__(self) -> Any:
        # Copied and pickled with the module, also to where this package is not installed.
        return getattr, (nullcontext(), "__exit__")


def _is_trainable(parameter: Tensor) -> bool:
    return parameter.dtype in WIRE_NAMES and parameter.is_leaf


__all__ = ["ModuleWatch"]
