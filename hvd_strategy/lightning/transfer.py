"""Objects on their way from a notebook to the ranks that it starts, and back.

Python's pickle finds classes and functions by name, which is no use for what a notebook defines: no
other process can import it. cloudpickle sends such things by value. Here that is completed:

* The functions of the notebook get the rank's `__main__` as their globals, and the classes and
  functions that were sent are entered there. So they see one another, and a checkpoint may hold
  instances of them, as in the notebook itself.
* On the way back, what the notebook has already (Trainer, modules, parameters, callbacks, its own
  definitions) is sent as a reference: what arrives speaks of the notebook's own objects.

The bytes lie in an anonymous file in memory (`memfd_create`), which the ranks inherit: nothing is
left over, whatever way a process ends. torch writes the tensors, each storage once, and a reader
maps them instead of copying.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any

import cloudpickle
import torch

_MAIN = "__main__"

__all__ = ["dump", "dump_bytes", "load", "load_bytes", "memory_file", "module_objects"]


def memory_file(name: str) -> int:
    """Makes an anonymous file in memory; returns its descriptor, which children may inherit."""
    return os.memfd_create(f"hvd-{name}")


def dump(obj: object, descriptor: int, known: Mapping[str, object] | None = None) -> None:
    """Writes `obj` into an empty memory file.

    Args:
        obj: the object.
        descriptor: the file; not to be written to again, because readers map it.
        known: on the way back, the objects to be sent as references, by the name under which the
            notebook has them.

    Raises:
        Exception: the object cannot be pickled; whatever pickling it raises.
    """
    with open(_path(descriptor), "wb") as file:
        torch.save([obj, _Definitions()], file, pickle_module=_pickle_module(known))


def load(descriptor: int, known: Mapping[str, object] | None = None) -> Any:
    """Returns what `dump` stored; tensors are on the CPU, and mapped from the file on demand."""
    if os.fstat(descriptor).st_size == 0:
        raise EOFError("the memory file is empty")
    with _resolving(known or {}):
        return torch.load(
            _path(descriptor),
            map_location="cpu",
            pickle_module=_pickle_module(None),
            weights_only=False,
            mmap=True,
        )[0]


def dump_bytes(obj: object, known: Mapping[str, object]) -> bytes:
    """Pickles something small on its way back."""
    stream = io.BytesIO()
    _pickle_module(known).Pickler(stream).dump(obj)
    return stream.getvalue()


def load_bytes(data: bytes, known: Mapping[str, object]) -> Any:
    """Returns what `dump_bytes` pickled."""
    with _resolving(known):
        return pickle.loads(data)


def module_objects(module: torch.nn.Module) -> dict[str, object]:
    """The modules, parameters and buffers of a module, by names that both sides agree on."""
    found: dict[str, object] = {f"module {name}": m for name, m in module.named_modules()}
    found |= {f"parameter {name}": p for name, p in module.named_parameters()}
    found |= {f"buffer {name}": b for name, b in module.named_buffers()}
    return found


def _path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


class _Definitions:
    """Stands, at the end of a pickle, for what of `__main__` the pickle contains."""


class _MainNamespace(dict[str, Any]):
    """Stands for the globals of `__main__`, wherever the pickle is read."""


def _pickle_module(known: Mapping[str, object] | None) -> Any:
    """What `torch.save` and `torch.load` take for a pickle module."""
    main = vars(sys.modules["__main__"])
    to_ranks = known is None
    keys = {id(obj): key for key, obj in (known or {}).items()}
    if not to_ranks:
        keys |= {id(main[name]): f"{_MAIN} {name}" for name in _received if name in main}

    class Pickler(cloudpickle.Pickler):
        def __init__(self, file: Any, protocol: int | None = None) -> None:
            super().__init__(file, protocol=protocol)
            self.definitions: dict[str, object] = {}
            if to_ranks:
                self.globals_ref[id(main)] = _MainNamespace(__name__="__main__")

        def reducer_override(self, obj: Any) -> Any:
            key = keys.get(id(obj))
            if key is not None:
                return _known_object, (key,)
            if isinstance(obj, _MainNamespace):
                return _main_namespace, ()
            if isinstance(obj, _Definitions):
                return _define_in_main, (self.definitions,)
            if to_ranks and isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__":
                name = obj.__name__
                if main.get(name) is obj:
                    self.definitions[name] = obj
            return super().reducer_override(obj)

    return SimpleNamespace(
        __name__="hvd_strategy", Pickler=Pickler, Unpickler=pickle.Unpickler, load=pickle.load
    )


# Names of `__main__` that this process got from the notebook.
_received: set[str] = set()

# What references are looked up in while a pickle is read. One pickle is read at a time: the ranks
# have one thread that reads, and a notebook's launcher blocks its caller.
_known: Mapping[str, object] = {}


@contextmanager
def _resolving(known: Mapping[str, object]) -> Iterator[None]:
    global _known
    before, _known = _known, known
    try:
        yield
    finally:
        _known = before


def _known_object(key: str) -> object:
    kind, _, name = key.partition(" ")
    found = vars(sys.modules["__main__"]) if kind == _MAIN else _known
    try:
        return found[name if kind == _MAIN else key]
    except KeyError:
        raise pickle.UnpicklingError(f"the notebook has no {key}") from None


def _main_namespace() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _define_in_main(definitions: dict[str, Any]) -> None:
    vars(sys.modules["__main__"]).update(definitions)
    _received.update(definitions)
