"""Files that appear whole or not at all."""

import os
import uuid
from pathlib import Path

from zinf_compile.ir.errors import ConfigError


def write_whole(path: str | Path, content: bytes, *, what: str) -> None:
    """Write a file in one piece, by renaming. ConfigError that names ``what`` if the path cannot be written."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        try:
            aside.write_bytes(content)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the {what} cannot be written to {path}: {error.strerror}; give a file in a folder that can be written"
        ) from error
