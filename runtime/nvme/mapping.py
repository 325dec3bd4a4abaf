"""Maps a part of a file into memory: Python's mmap keeps a descriptor for each, and a model has thousands of homes."""

import ctypes
import functools
import mmap
import os
import weakref


def map_file(descriptor: int, offset: int, nbytes: int) -> memoryview:
    """Return ``nbytes`` > 0 of an open file at ``offset``, any number, readable and writable and shared with the file.

    The mapping needs the descriptor no more once this has returned, and ends when the view and its slices are gone.
    OSError as of mmap(2).
    """
    skip = offset % mmap.ALLOCATIONGRANULARITY
    libc = _libc()
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
    address = libc.mmap(None, nbytes + skip, protection, flags, descriptor, offset - skip)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    mapped = (ctypes.c_ubyte * (nbytes + skip)).from_address(address)
    # At interpreter exit the kernel ends it: doing it here could take memory that another thread still reads.
    weakref.finalize(mapped, libc.munmap, address, nbytes + skip).atexit = False
    return memoryview(mapped).cast("B")[skip:]


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
