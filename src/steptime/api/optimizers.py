"""Names of optimisers: one list for modules that are captured and for models that are known by their dimensions.

A captured module runs PyTorch's optimiser of that name; a model by its dimensions has the states of
:data:`steptime.plan.job.OPTIMIZERS`. Two names of the same thing are accepted by every command.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from steptime.api.values import text
from steptime.errors import FieldError, UnknownNameError
from steptime.hardware.records import Device
from steptime.plan.job import OPTIMIZERS, Optimizer

CAPTURED_DEFAULT: Final = "adamw"
"""Of a captured module; a model by its dimensions costs the same with ``adam`` and ``adamw``."""
#: Name -> what captures call it; None: it cannot be captured.
_CAPTURED: Final[Mapping[str, str | None]] = {
    **{name: name for name in (
        "adamw", "adamw-loop", "adamw-fused", "adam", "adam-loop", "adam-fused", "sgd", "sgd-loop", "sgd-momentum",
        "sgd-momentum-loop", "adagrad", "rmsprop", "adafactor",
    )},
    "momentum": "sgd-momentum", "adam8bit": None,
}  # fmt: skip
CAPTURED: Final = tuple(name for name, own in _CAPTURED.items() if own == name)
"""Optimisers that can be captured, each by its first name."""
#: Name -> what the estimate calls it, where that differs.
_ESTIMATED: Final[Mapping[str, str]] = {"sgd-momentum": "momentum"}


def captured_optimizer(name: str, device: Device) -> str:
    """What captures call an optimiser: on the host itself its loop, which PyTorch takes there by default.

    Raises:
        UserError: there is none of that name, or it cannot be captured.

    >>> from dataclasses import replace
    >>> from steptime.hardware import load_device
    >>> h100 = load_device("h100-sxm")
    >>> captured_optimizer("momentum", h100), captured_optimizer("adamw", replace(h100, architecture="cpu"))
    ('sgd-momentum', 'adamw-loop')
    """
    if text("optimizer", name) not in _CAPTURED:
        raise UnknownNameError("optimizer", name, _CAPTURED)
    own = _CAPTURED[name]
    if own is None:
        raise FieldError("", "optimizer", f"{name} cannot be captured", hint=f"captured are {', '.join(CAPTURED)}")
    loop = f"{own}-loop"
    return loop if device.is_host and loop in CAPTURED else own


def estimated_optimizer(name: str) -> Optimizer:
    """States of an optimiser in the estimate of a model by its dimensions.

    Raises:
        UserError: there is none of that name, or it is for modules that are captured.

    >>> estimated_optimizer("sgd-momentum").name, estimated_optimizer("adamw").state_bytes
    ('momentum', 8.0)
    """
    own = _ESTIMATED.get(name, name)
    if own in OPTIMIZERS:
        return OPTIMIZERS[own]
    if name in _CAPTURED:
        problem = f"{name} is for a module that is captured"
        raise FieldError("", "optimizer", problem, hint=f"a model by its dimensions takes {', '.join(OPTIMIZERS)}")
    raise UnknownNameError("optimizer", str(name), (*OPTIMIZERS, *_ESTIMATED))
