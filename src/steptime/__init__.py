"""Predicts the cost of a deep-learning training step before you run it, with the reasons and cheaper plans.

>>> import steptime
>>> result = steptime.api.plan("gpt3_1T", "dgx-b200", gpus=2048, global_batch=4096, strategy="1d")
>>> result.stop.reason
'pruned'

Names are loaded when they are first used, so that ``import steptime`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from steptime.registry import public
from steptime.version import __version__ as __version__

if TYPE_CHECKING:
    from steptime import api as api
    from steptime.api.models import load_model as load_model
    from steptime.captured.ops import register_operator as register_operator
    from steptime.captured.ops.operator import Operator as Operator
    from steptime.captured.profiling import profile as profile
    from steptime.captured.record import capture as capture
    from steptime.captured.record import jvp as jvp
    from steptime.captured.workload import captured_model as captured_model
    from steptime.doctor import diagnose_log as diagnose_log
    from steptime.doctor import read_log as read_log
    from steptime.errors import SteptimeError as SteptimeError
    from steptime.errors import UserError as UserError
    from steptime.estimate.result import Estimate as Estimate
    from steptime.hardware import load_cluster as load_cluster
    from steptime.hardware import load_device as load_device
    from steptime.search.planner import PlanResult as PlanResult
    from steptime.terms import Terms as Terms

#: Public name -> place of its definition.
PLACES: Final = {
    "Estimate": "steptime.estimate.result:Estimate",
    "Operator": "steptime.captured.ops.operator:Operator",
    "PlanResult": "steptime.search.planner:PlanResult",
    "SteptimeError": "steptime.errors:SteptimeError",
    "Terms": "steptime.terms:Terms",
    "UserError": "steptime.errors:UserError",
    "api": "steptime.api",
    "capture": "steptime.captured.record:capture",
    "captured_model": "steptime.captured.workload:captured_model",
    "diagnose_log": "steptime.doctor:diagnose_log",
    "jvp": "steptime.captured.record:jvp",
    "load_cluster": "steptime.hardware:load_cluster",
    "load_device": "steptime.hardware:load_device",
    "load_model": "steptime.api.models:load_model",
    "profile": "steptime.captured.profiling:profile",
    "read_log": "steptime.doctor:read_log",
    "register_operator": "steptime.captured.ops:register_operator",
}

__all__ = ["__version__", *sorted(PLACES)]
__getattr__, __dir__ = public(__name__, PLACES)
