"""Maps parts of a file into memory: Python's mmap keeps a descriptor for each, and a model has thousands of homes."""

import ctypes
import functools
import mmap
import os
import weakref
from typing import NamedTuple

import torch

_PAGES_AT_ONCE = 2**15  # 256 KiB of entries
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # linux/mman.h; the mmap module does not name them


class _Place(NamedTuple):
    """Where a mapping lies, in memory and in the file."""

    address: int
    nbytes: int
    offset: int
    skip: int  # bytes before the view


class FileMappings:
    """The mappings of one open file that somebody holds."""

    def __init__(self, descriptor: int, *, private: bool = False) -> None:
        """With ``private`` what is written to a mapping stays in this process, and the file may be open for reading only."""
        self._descriptor = descriptor
        self._flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED
        self._shared: weakref.WeakValueDictionary[int, ctypes.Array[ctypes.c_ubyte]] = weakref.WeakValueDictionary()
        self._places: dict[int, _Place] = {}  # of the same, by address

    def map(self, offset: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` > 0 of the file at ``offset``, any number, readable and writable, shared unless ``private``.

        The mapping ends when the view and its slices are gone. OSError as of mmap(2).
        """
        skip = offset % mmap.ALLOCATIONGRANULARITY
        place = _Place(0, nbytes + skip, offset - skip, skip)
        address = self._map(place, self._flags)
        if address is None:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        mapped = (ctypes.c_ubyte * place.nbytes).from_address(address)
        # At interpreter exit the kernel ends it: doing it here could take memory that another thread still reads.
        weakref.finalize(mapped, self._unmap, address, place.nbytes).atexit = False
        self._places[address] = place._replace(address=address)
        self._shared[address] = mapped
        return memoryview(mapped).cast("B")[skip:]

    def make_private(self) -> list[int]:
        """Make the mappings private: writes to them stay in this process from now on. Return the addresses of their views.

        If the system cannot commit memory for that, a write to one ends the process; it does not reach the file.
        """
        held = dict(self._shared)  # a reference to each keeps it mapped meanwhile
        places = [self._places[address] for address in held]
        for place in places:
            if self._map(place, mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE) is None:
                _libc().mprotect(place.address, place.nbytes, mmap.PROT_READ)
        self._shared.clear()
        return [place.address + place.skip for place in places]

    def _unmap(self, address: int, nbytes: int) -> None:
        del self._places[address]  # first: others may be given the same address
        _libc().munmap(address, nbytes)

    def _map(self, place: _Place, flags: int) -> int | None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        found: int | None = _libc().mmap(
            place.address or None, place.nbytes, protection, flags, self._descriptor, place.offset
        )
        return None if found == ctypes.c_void_p(-1).value else found


def has_private_pages(address: int, nbytes: int) -> bool:
    """Return whether some pages of a private mapping were written, so that they are no longer those of the file.

    True as well where the system does not tell.
    """
    first, last = address // mmap.PAGESIZE, (address + nbytes - 1) // mmap.PAGESIZE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            for page in range(first, last + 1, _PAGES_AT_ONCE):
                count = min(_PAGES_AT_ONCE, last + 1 - page)
                entries = bytearray(8 * count)
                if os.preadv(file.fileno(), [entries], 8 * page) < len(entries):
                    return True
                # Bits 63 and 62: in memory or swapped; 61: of a file, or shared (Documentation/admin-guide/mm/pagemap.rst).
                bits = torch.frombuffer(entries, dtype=torch.int64).bitwise_right_shift_(61).bitwise_and_(0b111)
                if bool(((bits > 1) & (bits & 1 == 0)).any()):
                    return True
    except OSError:
        return True
    return False


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
