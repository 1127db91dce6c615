"""Checks of the arguments that HvdStrategy shares with DDPStrategy: Lightning's own objects.

They are tested by what they can do, not by their class: Lightning and its users' tests put objects
of other classes in their place.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_strategy.arguments import require

__all__ = ["require_devices", "require_plugin"]


def require_plugin(name: str, value: Any, kind: type, method: str, hint: str = "") -> None:
    """Raises unless the argument `name` is None or does what objects of a class do.

    Args:
        name: Name of the argument.
        value: The argument.
        kind: The class.
        method: A method that objects of the class have, and hardly anything else.
        hint: What else the user may have meant, for the message.

    Raises:
        TypeError: It is not; says what it accepts.
    """
    fits = value is None or (not isinstance(value, type) and callable(getattr(value, method, None)))
    accepts = f"an instance of {kind.__module__.split('.')[0]}'s {kind.__name__}, or None"
    require(fits, name, value, f"{accepts} ({hint})" if hint else accepts)


def require_devices(devices: Any) -> None:
    """Raises unless the argument `parallel_devices` is None or a list of devices.

    Raises:
        TypeError: It is not; says what it accepts.
    """
    fits = devices is None or (
        isinstance(devices, (list, tuple)) and all(isinstance(d, torch.device) for d in devices)
    )
    require(
        fits,
        "parallel_devices",
        devices,
        "a list of torch.device, one for each rank, or None (Trainer(devices=2) takes numbers)",
    )
