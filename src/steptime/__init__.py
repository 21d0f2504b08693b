"""What a deep-learning training step will cost before you run it, why, and how to make it cheaper.

>>> import steptime
>>> result = steptime.api.plan("gpt3_1T", "dgx-b200", gpus=2048, global_batch=4096, strategy="1d")
>>> result.stop.reason
'exhausted'

Names are loaded when they are first used, so that ``import steptime`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from steptime.version import __version__ as __version__

if TYPE_CHECKING:
    from steptime.errors import SteptimeError as SteptimeError
    from steptime.errors import UserError as UserError
    from steptime.estimate.result import Estimate as Estimate
    from steptime.hardware import load_cluster as load_cluster
    from steptime.hardware import load_device as load_device
    from steptime.search.result import PlanResult as PlanResult
    from steptime.surface import api as api
    from steptime.surface.models import load_model as load_model
    from steptime.surface.profiling import profile as profile
    from steptime.terms import Terms as Terms
    from steptime.workload.capture import capture as capture


#: Public name -> module that defines it; an empty attribute is the module itself.
_EXPORTS = {
    "Estimate": ("steptime.estimate.result", "Estimate"),
    "PlanResult": ("steptime.search.result", "PlanResult"),
    "SteptimeError": ("steptime.errors", "SteptimeError"),
    "Terms": ("steptime.terms", "Terms"),
    "UserError": ("steptime.errors", "UserError"),
    "api": ("steptime.surface.api", ""),
    "capture": ("steptime.workload.capture", "capture"),
    "load_cluster": ("steptime.hardware", "load_cluster"),
    "load_device": ("steptime.hardware", "load_device"),
    "load_model": ("steptime.surface.models", "load_model"),
    "profile": ("steptime.surface.profiling", "profile"),
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'steptime' has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    value = getattr(import_module(module), attribute) if attribute else import_module(module)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
