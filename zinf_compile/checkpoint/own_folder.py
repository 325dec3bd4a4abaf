"""Folders that we create in a user's folder and remove again: identified by a marker, emptied by name, not through links.

A marker holds a random identity, which is also recorded elsewhere: in a list beside the folder, or in its name. A
folder without such a marker is not ours, whatever its name. In our folders only files that we wrote are removed; a
folder to which the user added a file stays, with that file.
"""

import errno
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from zinf_compile.ir.user_files import read_regular

MARKER = ".zinf-made-this"
_MOST_NBYTES = 4096  # limit of a marker
_NOT_A_FILE = {errno.EISDIR, errno.EPERM}  # errors of unlink for a folder, on Linux and elsewhere


def new_identity() -> str:
    """Return a random identity for a folder: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def make_own_folder(path: Path, identity: str) -> None:
    """Create a folder with this identity; FileExistsError if the name exists, even as a broken link."""
    os.mkdir(path)
    mark(path, identity)


def mark(path: Path, identity: str) -> None:
    """Put a marker into a folder."""
    with open(path / MARKER, "x", encoding="utf-8") as file:
        file.write(json.dumps({"made_by": "zinf_compile", "identity": identity}))
        file.flush()
        os.fsync(file.fileno())


def identity_of(path: Path) -> str | None:
    """Return the identity in a folder's marker; None for anything else, including links to such folders."""
    try:
        folder = _open_folder(path)
    except OSError:
        return None
    try:
        fields = json.loads(read_regular(MARKER, at=folder, follow=False, most=_MOST_NBYTES))
    except (OSError, ValueError):
        return None
    finally:
        os.close(folder)
    found = fields.get("identity") if isinstance(fields, dict) else None
    return found if isinstance(found, str) else None


def remove_own_folder(path: Path, identity: str, files: Iterable[str]) -> bool:
    """Remove ``files`` from the folder with this identity, and then the folder; return whether it is gone.

    A folder with another marker, or with files but no marker, is left alone. An empty folder is removed: its creator
    was killed before writing the marker. OSError if the system refuses.
    """
    if (found := identity_of(path)) not in (identity, None):
        return False
    try:
        folder = _open_folder(path)
    except (FileNotFoundError, NotADirectoryError):
        return not os.path.lexists(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise
    try:
        if found is not None:
            for name in (*files, MARKER):  # the marker last, so that an interrupted removal can continue
                _remove_file(name, folder)
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        os.close(folder)
    return not os.path.lexists(path)


def _remove_file(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in _NOT_A_FILE:
            raise


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
