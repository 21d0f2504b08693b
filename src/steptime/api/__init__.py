"""The Python API: what the commands print is what these functions return.

Names are loaded when they are first used: those of real models (``fit``) and of the laboratory (``limits``) import what
the others do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from steptime.registry import loaded

if TYPE_CHECKING:
    from steptime.api.calls import estimate as estimate
    from steptime.api.collective_times import Collective as Collective
    from steptime.api.collective_times import collective as collective
    from steptime.api.comparison import Difference as Difference
    from steptime.api.comparison import diff as diff
    from steptime.api.decisions import Guide as Guide
    from steptime.api.decisions import guide as guide
    from steptime.api.ledgers import Ledger as Ledger
    from steptime.api.ledgers import ledger as ledger
    from steptime.api.parameter_updates import Consistency as Consistency
    from steptime.api.parameter_updates import consistency as consistency
    from steptime.api.searches import plan as plan
    from steptime.api.simulation import SimulatedStep as SimulatedStep
    from steptime.api.simulation import simulate as simulate
    from steptime.captured.fitting import fit as fit
    from steptime.goodput.fleet import fleet as fleet
    from steptime.goodput.shadow import shadow as shadow
    from steptime.lab.limits import Limits as Limits
    from steptime.lab.limits import limits as limits

#: Public name -> where it is defined.
PLACES: Final = {
    "Collective": "steptime.api.collective_times:Collective",
    "Consistency": "steptime.api.parameter_updates:Consistency",
    "Difference": "steptime.api.comparison:Difference",
    "Guide": "steptime.api.decisions:Guide",
    "Ledger": "steptime.api.ledgers:Ledger",
    "Limits": "steptime.lab.limits:Limits",
    "SimulatedStep": "steptime.api.simulation:SimulatedStep",
    "collective": "steptime.api.collective_times:collective",
    "consistency": "steptime.api.parameter_updates:consistency",
    "diff": "steptime.api.comparison:diff",
    "estimate": "steptime.api.calls:estimate",
    "fit": "steptime.captured.fitting:fit",
    "fleet": "steptime.goodput.fleet:fleet",
    "guide": "steptime.api.decisions:guide",
    "ledger": "steptime.api.ledgers:ledger",
    "limits": "steptime.lab.limits:limits",
    "plan": "steptime.api.searches:plan",
    "shadow": "steptime.goodput.shadow:shadow",
    "simulate": "steptime.api.simulation:simulate",
}

__all__ = sorted(PLACES)


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module 'steptime.api' has no attribute {name!r}")
    value = loaded(PLACES[name])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
