"""Small numbers that a file keeps in another file beside it: shapes and indices, never weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from steptime.captured.onnx.tensor import DTYPES, GENERATED
from steptime.errors import InputFileError, shorten
from steptime.model.spec import ELEMENT_BYTES, FLOATS

if TYPE_CHECKING:
    from onnx import TensorProto

MAX_ELEMENTS = 65536
"""Elements of the largest tensor that is fetched."""


def fetch(model: Path, tensor: TensorProto) -> None:
    """Put the data of a small tensor that is no weight into the tensor; a file that is missing is left missing.

    Raises:
        InputFileError: the file is, through a link, outside the folder of the model, or does not have the data.
    """
    elements = math.prod(tensor.dims)
    dtype = DTYPES.get(tensor.data_type)
    if not tensor.external_data or dtype is None or not 0 <= elements <= MAX_ELEMENTS:
        return
    if dtype in FLOATS and tensor.dims and GENERATED.fullmatch(tensor.name) is None:
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    folder = model.parent.resolve()
    place = (folder / entries.get("location", "")).resolve()
    if not place.is_relative_to(folder):
        raise InputFileError(str(model), f"the data of {shorten(tensor.name)!r} are outside its folder, through a link")
    if not place.is_file():
        return
    size = elements * ELEMENT_BYTES[dtype]
    try:
        with place.open("rb") as file:
            file.seek(int(entries.get("offset", "0")))
            data = file.read(size)
    except (OSError, ValueError, OverflowError):
        data = b""
    if len(data) != size:
        raise InputFileError(str(model), f"the data of {shorten(tensor.name)!r} are not in {shorten(place.name)!r}")
    del tensor.external_data[:]
    tensor.data_location = tensor.DEFAULT
    tensor.raw_data = data
