"""Which fitted framework a run behaves like, from what its log or its trace shows of the software."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Framework of a log -> fitted framework, where nothing says that it is older.
_FITTED: Final[Mapping[str, str]] = {
    "megatron": "megatron-core", "megatron-deepspeed": "megatron-deepspeed", "nemo": "megatron-core",
    "deepspeed": "deepspeed", "torchtitan": "torchtitan", "maxtext": "maxtext",
}  # fmt: skip
#: Arguments of Megatron-LM of 2020 and 2021, before it recomputed selectively.
_OF_2021: Final = ("checkpoint_activations", "activations_checkpoint_method")
#: Argument that only releases before Megatron Core print, and those by which later ones ask for the old model code.
_BEFORE_CORE: Final = "DDP_impl"
_LEGACY: Final[Mapping[str, str]] = {"use_legacy_models": "True", "use_mcore_models": "False"}


def fitted_framework(framework: str, flags: Mapping[str, str]) -> str:
    """Fitted framework to predict with; empty where none belongs to the software.

    Args:
        framework: as of :class:`~steptime.doctor.records.Log`.
        flags: what the log prints, under the framework's own names; they tell old releases of Megatron-LM.

    >>> fitted_framework("nemo", {}), fitted_framework("megatron", {"use_legacy_models": "True"})
    ('megatron-core', 'megatron')
    """
    name = _FITTED.get(framework, "")
    if framework in ("megatron", "megatron-deepspeed") and any(flag in flags for flag in _OF_2021):
        flash = any(flag.startswith("use_flash_attn") for flag in flags)
        return name if flash else framework + "-2021"
    if framework == "megatron":
        legacy = any(flags.get(flag) == value for flag, value in _LEGACY.items())
        return "megatron" if legacy or _BEFORE_CORE in flags else name
    return name


def written_by(parser: str, flags: Mapping[str, str], *, deepspeed: bool) -> str:
    """The framework of a log: Megatron-LM under DeepSpeed's engine is one of its own.

    Args:
        parser: name of the parser that found the steps.
        flags: printed arguments.
        deepspeed: DeepSpeed's engine wrote into the log too.
    """
    under = deepspeed or flags.get("deepspeed") == "True"
    return "megatron-deepspeed" if parser == "megatron" and under else parser
