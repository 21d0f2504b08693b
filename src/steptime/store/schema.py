"""Keys of a file whose form is a model of pydantic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel


def keys_at(model: type[BaseModel], path: Iterable[str | int]) -> list[str]:
    """Keys of the table at ``path`` below ``model``; names and numbers that a table or list has of its own lead on.

    >>> from pydantic import create_model
    >>> Link = create_model("Link", source=(str, ...), rate=(float, ...))
    >>> File = create_model("File", links=(list[Link] | None, None))
    >>> keys_at(File, []), keys_at(File, ["links", 0])
    (['links'], ['source', 'rate'])
    """
    for part in path:
        info = model.model_fields.get(str(part))
        found = _model_in(info.annotation) if info is not None else None
        model = found if found is not None else model
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg)) is not None), None)
