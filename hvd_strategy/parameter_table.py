"""The parameters of one GradientReducer: their numbers, names, forms and hooks.

All ranks give a parameter the same number, because they add parameters in the order of their names
after comparing these. A number outlives the object: `load_state_dict(assign=True)` puts another
Parameter in the place of an old one, and `module.double()` gives it another dtype; the table then
moves the hook, or has the core plan the parameter anew.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hvd_strategy import _core
from hvd_strategy._private_api import post_accumulate_hooks
from hvd_strategy.errors import MismatchError
from hvd_strategy.parameters import (
    WIRE_NAMES,
    Form,
    describe,
    first_difference,
    form_of,
    may_be_lazy,
)
from hvd_strategy.session import Session

Named = list[tuple[str, Tensor]]


class ParameterTable:
    """What the reducer knows about each parameter, by number.

    Args:
        core: The core's reducer, which counts parameters in the same way.
        session: The ranks.
        group_of: Number of the optimizer that steps a parameter; different ones share no bucket.
        hooks: Filled with the handles of the hooks, one per parameter.
        is_exact: Whether the gradient of a parameter, given its name and whether it is complex,
            always travels as it is.

    Attributes:
        parameters: The objects.
        names: Their names.
    """

    def __init__(
        self,
        core: _core.Reducer,
        session: Session,
        group_of: Callable[[Tensor], int],
        hooks: list[Any],
        is_exact: Callable[[str, bool], bool],
    ) -> None:
        self._core = core
        self._session = session
        self._group_of = group_of
        self._hooks = hooks
        self._is_exact = is_exact
        self.parameters: list[Tensor] = []
        self.names: list[str] = []
        self._forms: list[Form] = []
        self._index: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.parameters)

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._index

    def index_of(self, parameter: Tensor) -> int | None:
        """Number of the parameter, None when it has none."""
        return self._index.get(id(parameter))

    def clear(self) -> None:
        """Forgets all parameters; their hooks are removed by whoever gave `hooks`."""
        self.parameters.clear()
        self.names.clear()
        self._forms.clear()
        self._index.clear()

    # ---- agreement ----

    def check_agreement(self, named: Named) -> None:
        """Compares parameters over all ranks. Collective.

        Raises:
            MismatchError: On every rank; names the first difference.
            ValueError: A parameter of this rank is not acceptable.
        """
        described = sorted(describe(name, form_of(name, tensor)) for name, tensor in named)
        exchange = self._session.communicator.exchange
        digest = hashlib.sha256(pickle.dumps(described, protocol=4)).digest()
        if len(set(exchange(digest))) == 1:
            return
        everybody = [pickle.loads(record) for record in exchange(pickle.dumps(described))]
        reference = everybody[0]
        for rank, other in enumerate(everybody):
            if other != reference:
                raise MismatchError(
                    f"Rank {self._session.rank}: ranks train different parameters. "
                    f"{first_difference(reference, rank, other)}. All ranks have to build the "
                    "same model; look for code that depends on the rank."
                )

    def broadcast(self, named: Named, buffers: dict[str, Tensor]) -> None:
        """Gives all ranks rank 0's values. Collective."""
        for _, tensor in [*sorted(named, key=lambda pair: pair[0]), *sorted(buffers.items())]:
            self._session.broadcast(tensor.detach())

    def make_equal(self, named: Named) -> None:
        """Gives all ranks rank 0's values of parameters that came later. Collective.

        Writes only where they differ: a graph that somebody keeps may need the tensor as it is.
        """
        named = sorted(named, key=lambda pair: pair[0])
        exchange = self._session.communicator.exchange
        digests = [hashlib.sha256(_bytes_of(tensor)).digest() for _, tensor in named]
        everybody = [pickle.loads(record) for record in exchange(pickle.dumps(digests))]
        for number, (_, tensor) in enumerate(named):
            if len({other[number] for other in everybody}) > 1:
                self._session.broadcast(tensor.detach())

    # ---- changes ----

    def add(self, named: Named) -> None:
        """Takes up parameters that all ranks have agreed on."""
        # Sorted by name, so that ranks which register in another order agree all the same.
        for name, parameter in sorted(named, key=lambda pair: pair[0]):
            if parameter.dtype in WIRE_NAMES:  # to integers autograd gives no gradient
                self._add(name, parameter)

    def _add(self, name: str, parameter: Tensor) -> None:
        index = len(self.parameters)
        self._core.add_parameter(name, **self._definition(name, parameter))
        self.parameters.append(parameter)
        self.names.append(name)
        self._forms.append(form_of(name, parameter))
        self._index[id(parameter)] = index
        self._hooks.append(self._hook(index, parameter))
        # A gradient from before counts as this rank's: the next flush takes it along.
        self._core.set_dirty(index, parameter.grad is not None)

    def replace(self, index: int, parameter: Tensor) -> None:
        """Another object takes the parameter's place. Not collective."""
        self._hooks[index].remove()
        del self._index[id(self.parameters[index])]
        self.parameters[index] = parameter
        self._index[id(parameter)] = index
        self._hooks[index] = self._hook(index, parameter)
        self._core.set_dirty(index, parameter.grad is not None)

    def is_changed(self, index: int) -> bool:
        """Whether shape, dtype or strides are not those that the ranks agreed on."""
        parameter, (shape, dtype, strides) = self.parameters[index], self._forms[index]
        if parameter.dtype is not dtype or tuple(parameter.shape) != shape:
            return True
        return form_of(self.names[index], parameter)[2] != strides

    def form_agreed(self, index: int) -> Form:
        """Shape, dtype and strides that the ranks agreed on."""
        return self._forms[index]

    def redefine(self, index: int) -> None:
        """Has the core plan a changed parameter anew, after all ranks have agreed on it."""
        name, parameter = self.names[index], self.parameters[index]
        self._core.redefine_parameter(index, name, **self._definition(name, parameter))
        self._forms[index] = form_of(name, parameter)

    def _definition(self, name: str, parameter: Tensor) -> dict[str, Any]:
        shape, dtype, strides = form_of(name, parameter)
        if dtype not in WIRE_NAMES:
            raise ValueError(f"Parameter '{name}' is {dtype}, which cannot be reduced.")
        wire, factor = WIRE_NAMES[dtype]
        contiguous = torch.empty(shape, device="meta").stride() == strides
        return {
            "count": parameter.numel() * factor,
            "dtype": wire,
            "group": self._group_of(parameter),
            # None has the core show us each gradient of the parameter.
            "torch_dtype": None if may_be_lazy(parameter) else dtype,
            "nbytes": parameter.numel() * parameter.element_size(),
            "strides": None if contiguous else strides,
            "exact": self._is_exact(name, dtype.is_complex),
        }

    # ---- hooks ----

    def _hook(self, index: int, parameter: Tensor) -> Any:
        # Frozen parameters get a hook too, for the day they are unfrozen; torch takes one only
        # while the parameter requires a gradient.
        frozen = not parameter.requires_grad
        if frozen:
            parameter.requires_grad_(True)
        try:
            handle = parameter.register_post_accumulate_grad_hook(self._core.hook(index))
        finally:
            if frozen:
                parameter.requires_grad_(False)
        self._core.set_last_of(index, post_accumulate_hooks(parameter))
        return handle

    def keep_hooks_last(self) -> None:
        """Has every parameter call our hook behind all others: the user's edits count."""
        for index, (parameter, handle) in enumerate(zip(self.parameters, self._hooks, strict=True)):
            hooks = post_accumulate_hooks(parameter)
            if handle.id in hooks and next(reversed(hooks)) != handle.id:
                # Not move_to_end: torch walks the dictionary below, which knows no such order.
                hooks[handle.id] = hooks.pop(handle.id)
            self._core.set_last_of(index, hooks)


def in_words(names: Iterable[str]) -> str:
    """The first three names, for messages."""
    listed = sorted(names)
    return ", ".join(f"'{name}'" for name in listed[:3]) + (", ..." if len(listed) > 3 else "")


def _bytes_of(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return b""
    return plain.view(-1).view(torch.uint8).numpy().tobytes()
