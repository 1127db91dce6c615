"""Notices that a module's Parameter objects are no longer those that its GradientReducer knows.

Hooks live on the objects, so whatever puts other ones in their place would silently end the
reduction. Three looks at the module find it:

* after `load_state_dict`, through the hook that every submodule offers: with `assign=True` other
  objects have taken the place of the old ones, and the reducer's hooks move over at once;
* at the end of a backward, at the places of those parameters that did not fire although they have a
  bucket: after an exchange of layers, or a parametrization, that is so. It takes about 0.5 us for
  each of them (measured four names deep), and nothing where all fire;
* at the whole module every 256 backwards (0.2 ms for 200 parameters), for layers that were added
  and replace nothing.

A parameter that takes the place of another one gets its number without a word to the other ranks.
New ones all ranks take up together, in the flush in which one of them found it.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import GeneratorType
from typing import Any

from torch import Tensor, nn

from hvd_strategy._private_api import own_modules, own_parameters
from hvd_strategy.parameter_table import Named, ParameterTable
from hvd_strategy.parameters import WIRE_NAMES

_LOOK_EVERY = 256  # flushes


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
        self._found = False
        self.learn()

    def learn(self) -> None:
        """Takes note of the table's parameters and of the places where they are."""
        self._number_of_name: dict[str, int] = {}
        self._paths: dict[int, list[str]] = {}
        self._tied: set[int] = set()
        self._found = False
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            index = self._table.index_of(parameter)
            if index is None:
                continue
            self._number_of_name[name] = index
            if index in self._paths:
                self._tied.add(index)
            else:
                self._paths[index] = name.split(".")
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
        """Follows `load_state_dict(assign=True)`."""
        for key, parameter in own_parameters(submodule).items():
            if parameter is None or parameter in self._table:
                continue
            index = numbers.get(key)
            if index is not None and index not in self._tied and _is_trainable(parameter):
                self._table.replace(index, parameter)
            else:
                self._found = True  # tied ones that are tied no more: all ranks have to take it up

    def look(self, absent: list[int], flushes: int) -> bool:
        """Finds what has changed, and follows what replaces something.

        Args:
            absent: Numbers of the parameters that did not fire, although they have a bucket.
            flushes: Number of the flush.

        Returns:
            Whether all ranks should look: something is new, or was replaced.
        """
        in_place = all(self._at_place_of(index) is None for index in absent)
        if in_place and not self._found and flushes % _LOOK_EVERY:
            return False
        replaced, new = self.unknown()
        for index, parameter in replaced.items():
            self._table.replace(index, parameter)
        if not new:
            self.learn()  # also that something is gone
        return bool(replaced or new)

    def follow(self, index: int) -> None:
        """Looks at the place of one parameter only."""
        found = self._at_place_of(index)
        if isinstance(found, Tensor) and found not in self._table and _is_trainable(found):
            self._table.replace(index, found)

    def _at_place_of(self, index: int) -> object | None:
        """What is in the parameter's place; None when it is the parameter itself."""
        path = self._paths.get(index)
        if path is None:
            return None
        module: Any = self._module
        for part in path[:-1]:
            module = own_modules(module).get(part)
            if module is None:
                return _NOTHING
        found = own_parameters(module).get(path[-1], _NOTHING)
        if found is self._table.parameters[index]:
            return None
        return _NOTHING if found is None else found

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
            free = index is not None and id(self._table.parameters[index]) not in present
            if index is not None and free and index not in replaced:
                replaced[index] = parameter
            else:
                new.append((name, parameter))
        return replaced, new


def module_behind(named_parameters: object) -> nn.Module | None:
    """The module whose `named_parameters()` this is, to be asked before anything is taken from it.

    `nn.Module.named_parameters` is a generator function, and a generator that has not ended shows
    the local variables of its function (`gi_frame`, see Python's `inspect`): `self` among them.
    Should torch write it in another way, or a subclass its own, or somebody wrap it, nothing is
    found here, and the reducer works without the module as it does for any list.

    Returns:
        None as well where only a part of the parameters is given, or other names than the module's.
    """
    if not isinstance(named_parameters, GeneratorType):
        return None
    code = getattr(nn.Module.named_parameters, "__code__", None)
    if named_parameters.gi_code is not code or named_parameters.gi_frame is None:
        return None
    variables = named_parameters.gi_frame.f_locals
    module = variables.get("self")
    whole = variables.get("prefix") == "" and variables.get("recurse") is True
    return module if whole and isinstance(module, nn.Module) else None


_NOTHING = object()


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


__all__ = ["ModuleWatch", "module_behind"]
