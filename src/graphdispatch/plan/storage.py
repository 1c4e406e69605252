"""JSON documents on disk: written whole or not at all, and validated before anything of them is used."""

import os
import reprlib
import tempfile
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError

__all__ = ["read_document", "write_document"]

_MOST_BYTES = 2**30

Document = TypeVar("Document", bound=BaseModel)


def write_document(path: str | Path, document: BaseModel) -> None:
    """Write ``document`` as JSON, replacing a file there in one step; an ``OSError`` leaves the old one as it was."""
    path = Path(path)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(document.model_dump_json(exclude_none=True))
            file.write("\n")
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def read_document(path: str | Path, kind: type[Document]) -> Document:
    """The ``kind`` in the JSON file ``path``. Raises ``ConfigError`` that names the file and the field at fault."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{path} is larger than {_MOST_BYTES} bytes; expected a JSON document of this library")
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ConfigError(
            f"{path} is not valid at {where}: {first['msg']}, got {reprlib.repr(first['input'])}; "
            "write it anew with save()"
        ) from None
