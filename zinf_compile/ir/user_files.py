"""Files that a person names, or that lie in a folder of theirs: opened without blocking, and only if they are regular."""

import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
}


def open_regular(path: str | os.PathLike[str], *, follow: bool = True, at: int | None = None) -> int:
    """Return a descriptor that reads a regular file, below the open folder ``at`` if there is one.

    OSError, whose ``strerror`` says what is there, for anything else: a FIFO or a device would block, or have effects,
    so it is never read. Without ``follow`` a symbolic link is refused too.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, dir_fd=at)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise _refusal(stat.S_IFLNK, path) from error
        if error.errno == errno.ENXIO:  # how the open of a socket fails, and of some devices
            raise _refusal(os.stat(path, dir_fd=at, follow_symlinks=follow).st_mode, path) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _refusal(mode, path)
    return descriptor


def read_regular(
    path: str | os.PathLike[str], *, follow: bool = True, at: int | None = None, most: int | None = None
) -> bytes:
    """Return what a regular file holds; OSError as from ``open_regular``, and for more than ``most`` bytes."""
    with os.fdopen(open_regular(path, follow=follow, at=at), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if most is not None and nbytes > most:
            raise OSError(errno.EFBIG, f"it has {nbytes} bytes, {most} are the most that are read", os.fspath(path))
        return file.read()


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path, all symbolic links resolved, lies below a folder."""
    return path.resolve().is_relative_to(folder.resolve())


def _refusal(mode: int, path: str | os.PathLike[str]) -> OSError:
    what = _KINDS.get(stat.S_IFMT(mode), "of a kind of its own")
    return OSError(errno.EINVAL, f"it is {what}, not a regular file", os.fspath(path))
