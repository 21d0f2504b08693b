"""Values of options without a schema: what needs no checking is taken as it is, and what our own parsers take.

To build the schema of each option takes longer than to rank a thousand plans; only a value that is plainly right does
without it, so that every refusal keeps its words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from typer.core import TyperArgument, TyperCommand, TyperOption

_UNKNOWN: Final = object()


def _plain(param: Any, value: Any) -> Any:
    """The value of a parameter where it is known without a schema."""
    if value is None:
        several = param.multiple or param.nargs == -1
        return _UNKNOWN if param.required else () if several else None
    kind = getattr(param, "type_descriptor", None)
    parser = getattr(getattr(kind, "parameter_info", None), "parser", None)
    if parser is not None and not param.multiple:
        try:
            return parser(value)
        except Exception:
            return _UNKNOWN
    return value if type(value) is str and getattr(kind, "annotation", None) is str and value else _UNKNOWN


def _processed(param: Any, ctx: Any, value: Any, checked: Callable[[Any, Any], Any]) -> Any:
    plain = _plain(param, value)
    if plain is _UNKNOWN:
        return checked(ctx, value)
    return plain if param.callback is None else param.callback(ctx, param, plain)


class _Option(TyperOption):
    def process_value(self, ctx: Any, value: Any) -> Any:
        """The value, checked."""
        return _processed(self, ctx, value, super().process_value)


class _Argument(TyperArgument):
    def process_value(self, ctx: Any, value: Any) -> Any:
        """The value, checked."""
        return _processed(self, ctx, value, super().process_value)


_KINDS: Final[dict[type, type]] = {TyperOption: _Option, TyperArgument: _Argument}


def plain_params(params: list[Any]) -> list[Any]:
    """The parameters of a command, so that each builds a schema only for a value that needs one."""
    for param in params:
        param.__class__ = _KINDS.get(type(param), type(param))
    return params


class PlainCommand(TyperCommand):
    """A command with :func:`plain_params`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Options and arguments."""
        return plain_params(super().get_params(ctx))
