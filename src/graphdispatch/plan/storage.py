"""Files that are written whole or not at all, and JSON documents, validated before anything of them is used."""

import os
import reprlib
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError

__all__ = ["read_document", "write_document", "write_text"]

_MOST_BYTES = 2**30

Document = TypeVar("Document", bound=BaseModel)


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` in UTF-8, replacing a file there in one step; an ``OSError`` leaves the old one as it was."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with open(partial, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_document(path: str | Path, document: BaseModel) -> None:
    """Write ``document`` as JSON, as ``write_text`` does."""
    write_text(path, document.model_dump_json(exclude_none=True) + "\n")


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
            f"{path} is not valid at {where}: {first['msg']}, got {reprlib.repr(first['input'])}; write it anew with "
            "save()"
        ) from None
