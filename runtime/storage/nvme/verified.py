"""An engine that checks what it reads: it keeps a checksum of all that is written, against a disk that changes bytes.

Checksums are of *pieces*, consecutive bytes of the file. A write makes one piece, or one for each that was there. If a
read or a write ends inside of a piece, the whole piece is read and checked once, and cut in two. Cuts stay, so that after
the first step only what was asked for is read::

    written      |----------- 4 MiB -----------|-------- 2 MiB --------|
    read                                |-- a tile --|                      reads both pieces whole, once
    from then on |----------------------|------|-----|-----------------|

Bytes that were not written by this engine have no checksum, nor have bytes that users may have changed by a mapping.
"""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple, Self

from zinf_compile.ir.errors import ConfigError, DamageError
from zinf_compile.runtime.device.host_mapping import map_memory
from zinf_compile.runtime.process.interrupts import without_interrupts
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.host_memory import Memory

_SCRATCH_NBYTES = 2**20


class _Piece(NamedTuple):
    """Bytes [start, stop) of the file and their checksum; None if they were found damaged."""

    start: int
    stop: int
    checksum: int | None


class VerifiedEngine:
    """An engine over another one. Reading bytes that differ from what was written is a DamageError."""

    def __init__(self, engine: Engine, *, name_at: Callable[[int], str | None]) -> None:
        """``name_at`` returns what lies at an offset, for messages. ConfigError without the package xxhash."""
        try:
            import xxhash
        except ImportError as error:
            raise ConfigError(
                "verify_store=True needs the package xxhash; install it with pip install 'zinf_compile[verify]', or leave "
                "verify_store out"
            ) from error
        self._digest: Callable[[memoryview], int]
        self._digest, self._hasher = xxhash.xxh3_64_intdigest, xxhash.xxh3_64
        self._engine = engine
        self._name_at = name_at
        self._lock = threading.Lock()  # guards the fields below; held while a piece is cut, so that nobody writes to it
        self._starts: list[int] = []  # of pieces, sorted; no two overlap
        self._pieces: dict[int, _Piece] = {}  # by start
        self._scratch: Memory | None = None
        self.damage: DamageError | None = None  # the first that was found

    @property
    def digest(self) -> Callable[[memoryview], int]:
        """Return the function that makes the checksums."""
        return self._digest

    @property
    def path(self) -> None:
        """None: reads of the file opened again would bypass the checks."""
        return

    @property
    def nbytes(self) -> int:
        """See Engine.nbytes."""
        return self._engine.nbytes

    @property
    def bytes_read(self) -> int:
        """See Engine.bytes_read; includes what was read to cut pieces."""
        return self._engine.bytes_read

    @property
    def bytes_written(self) -> int:
        """See Engine.bytes_written."""
        return self._engine.bytes_written

    def read(self, offset: int, buffer: memoryview) -> None:
        """See Engine.read. DamageError for bytes that differ from what was written."""
        self._engine.read(offset, buffer)
        stop = offset + len(buffer)
        with self._lock:
            self._cut(offset)
            self._cut(stop)
            pieces = list(self._within(offset, stop))
        for piece in pieces:
            self._check(piece, self._digest(buffer[piece.start - offset : piece.stop - offset]))

    def write(self, offset: int, buffer: memoryview) -> None:
        """See Engine.write."""
        stop = offset + len(buffer)
        with self._lock:
            self._cut(offset)
            self._cut(stop)
            inside = list(self._within(offset, stop))
        cuts = sorted({offset, stop, *(piece.start for piece in inside), *(piece.stop for piece in inside)})
        fresh = [
            _Piece(start, end, self._digest(buffer[start - offset : end - offset])) for start, end in pairwise(cuts)
        ]
        with self._lock:
            self._replace(offset, stop, fresh)
        try:
            self._engine.write(offset, buffer)
        except BaseException:
            self.forget(offset, len(buffer))
            raise

    @without_interrupts
    def let_go(self, offset: int, nbytes: int) -> None:
        """Check a range, then drop its checksums: users may change it. DamageError for damage, and the checksums stay."""
        with self._lock:
            for piece in list(self._within(offset, offset + nbytes)):
                self._check(piece, self._digests(piece, piece.stop)[0])
        self.forget(offset, nbytes)

    @without_interrupts
    def forget(self, offset: int, nbytes: int) -> None:
        """Drop the checksums of a range: something else is stored there, or users may write to it."""
        with self._lock:
            self._replace(offset, offset + nbytes, [])

    def forget_damage(self) -> None:
        """Clear the error: everything in use has been rewritten."""
        self.damage = None

    def reserve(self, nbytes: int) -> None:
        """See Engine.reserve."""
        self._engine.reserve(nbytes)

    def cut(self, nbytes: int) -> None:
        """See Engine.cut."""
        self._engine.cut(nbytes)

    def give_back(self, offset: int, nbytes: int) -> bool:
        """See Engine.give_back."""
        self.forget(offset, nbytes)
        return self._engine.give_back(offset, nbytes)

    def map(self, offset: int, nbytes: int) -> memoryview:
        """See Engine.map. Nothing that is read or written there is checked."""
        return self._engine.map(offset, nbytes)

    def drop_cache(self, offset: int, nbytes: int) -> None:
        """See Engine.drop_cache."""
        self._engine.drop_cache(offset, nbytes)

    def close(self) -> None:
        """See Engine.close."""
        self._engine.close()

    def leave_to_parent(self) -> list[int]:
        """See Engine.leave_to_parent."""
        self._lock = threading.Lock()
        return self._engine.leave_to_parent()

    def describe(self) -> str:
        """See Engine.describe."""
        return self._engine.describe()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _within(self, start: int, stop: int) -> Iterator[_Piece]:
        """Yield the pieces that overlap a range."""
        first = max(0, bisect_right(self._starts, start) - 1)
        for at in self._starts[first : bisect_left(self._starts, stop)]:
            if self._pieces[at].stop > start:
                yield self._pieces[at]

    def _replace(self, start: int, stop: int, pieces: list[_Piece]) -> None:
        """Replace the pieces that overlap a range."""
        for piece in list(self._within(start, stop)):
            del self._pieces[piece.start]
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, stop)
        if first > 0 and self._starts[first - 1] not in self._pieces:
            first -= 1
        self._starts[first:last] = [piece.start for piece in pieces]
        self._pieces.update((piece.start, piece) for piece in pieces)

    def _cut(self, at: int) -> None:
        """Cut the piece that spans an offset in two. Of a damaged one both are damaged, so that reads of either raise."""
        piece = next(self._within(at, at + 1), None)
        if piece is None or piece.start == at:
            return
        before: int | None
        after: int | None
        found, before, after = self._digests(piece, at)
        if found != piece.checksum:
            before = after = None
        self._replace(piece.start, piece.stop, [_Piece(piece.start, at, before), _Piece(at, piece.stop, after)])

    def _digests(self, piece: _Piece, at: int) -> tuple[int, int, int]:
        """Read a piece; return the checksums of all of it, of what lies before an offset, and of the rest.

        Nobody writes to it meanwhile: a write cuts it first.
        """
        if self._scratch is None:
            self._scratch = map_memory(_SCRATCH_NBYTES)
        hashers = [self._hasher() for _ in range(3)]
        bounds = [*range(piece.start, at, _SCRATCH_NBYTES), *range(at, piece.stop, _SCRATCH_NBYTES), piece.stop]
        for start, stop in pairwise(bounds):
            view = memoryview(self._scratch).cast("B")[: stop - start]
            self._engine.read(start, view)
            for hasher in (hashers[0], hashers[1 if start < at else 2]):
                hasher.update(view)
        whole, before, after = (hasher.intdigest() for hasher in hashers)
        return whole, before, after

    def _check(self, piece: _Piece, found: int) -> None:
        if found == piece.checksum:
            return
        name = self._name_at(piece.start)
        damage = DamageError(
            f"{'' if name is None else f'{name}: '}the store file in {self.describe()} is damaged: bytes {piece.start} to "
            f"{piece.stop} are not those that were written there; the disk has changed, lost or misplaced some. Load the "
            "last checkpoint, and look at the disk before you trust it again",
            is_named=name is not None,
        )
        self.damage = self.damage or damage
        raise damage
