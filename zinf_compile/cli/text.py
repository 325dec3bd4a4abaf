"""Text for `zinf train`: files to tokens, tokens to seeded random batches."""

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zinf_compile.ir.errors import ConfigError

MAX_TEXT_BYTES = 8 << 20  # the standard library of Python 3.11 without its tests is 10.8 MiB; a demo reads far less
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
)


class Vocabulary(Protocol):
    """Text to token ids and back."""

    @property
    def size(self) -> int: ...
    def encode(self, text: bytes) -> Tensor: ...
    def decode(self, tokens: Tensor) -> str: ...


class ByteVocabulary:
    """A token is a byte."""

    size = 256

    def encode(self, text: bytes) -> Tensor:
        """uint8 [len(text)]."""
        # frombuffer wants writable memory and at least one byte
        return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)

    def decode(self, tokens: Tensor) -> str:
        return bytes(tokens.tolist()).decode("utf-8", errors="replace")


class TokenizerVocabulary:
    """The tokens of a Hugging Face ``tokenizer.json``; ConfigError when it or its library is missing."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ConfigError("--tokenizer needs the tokenizers library: pip install zinf_compile[hf]") from None
        if not path.is_file():
            raise ConfigError(f"the tokenizer file {path} does not exist; pass the path of a tokenizer.json")
        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(text)
        # the library raises bare Exception for every unreadable file
        except Exception as error:
            raise ConfigError(f"{path} is not a tokenizer.json: {error}") from error
        self.size: int = self._tokenizer.get_vocab_size()

    def encode(self, text: bytes) -> Tensor:
        """int32 [number of tokens]."""
        ids = self._tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False).ids
        return torch.tensor(ids, dtype=torch.int32)

    def decode(self, tokens: Tensor) -> str:
        return str(self._tokenizer.decode(tokens.tolist()))


class Batch(NamedTuple):
    """int64 [batch, seq] twice; ``targets`` is ``tokens`` moved on by one."""

    tokens: Tensor
    targets: Tensor


class Batches(Iterator[Batch]):
    """Random windows of a row of tokens, without end. ``position`` can be saved, and set to go on from there.

    Ranks deal out the batches of one process: rank 0 gets the first one, rank 1 the next one. Positions are the same on
    all of them.
    """

    def __init__(self, tokens: Tensor, *, batch: int, seq: int, seed: int, rank: int = 0, num_ranks: int = 1) -> None:
        self._tokens, self._batch = tokens, batch
        self._rank, self._num_ranks = rank, num_ranks
        self._window = torch.arange(seq + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> Batch:
        num_starts = len(self._tokens) - len(self._window) + 1
        drawn = [torch.randint(num_starts, (self._batch, 1), generator=self._generator) for _ in range(self._num_ranks)]
        rows = self._tokens[drawn[self._rank] + self._window].long()
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    @property
    def position(self) -> Tensor:
        return self._generator.get_state()

    @position.setter
    def position(self, state: Tensor) -> None:
        self._generator.set_state(state)


@dataclass(frozen=True, slots=True, eq=False)
class TokenStream:
    """A text as one row of tokens, uint8 or int32, with the vocabulary that made it."""

    tokens: Tensor
    vocabulary: Vocabulary
    source: str

    def batches(self, *, batch: int, seq: int, seed: int, rank: int = 0, num_ranks: int = 1) -> Batches:
        """Random windows without end, the same for the same seed; ConfigError when no window fits."""
        if len(self.tokens) <= seq:
            raise ConfigError(
                f"{self.source} has {len(self.tokens)} tokens, a sequence needs {seq + 1}: "
                "give more text with --text, or lower --seq"
            )
        return Batches(self.tokens, batch=batch, seq=seq, seed=seed, rank=rank, num_ranks=num_ranks)


def read_text(paths: Sequence[Path], vocabulary: Vocabulary, *, max_bytes: int = MAX_TEXT_BYTES) -> TokenStream:
    """The tokens of files and folders, or of the standard library's source when no path is given.

    Folders are walked in sorted order; reading stops at ``max_bytes``, so the same machine gives the same text.
    ConfigError for a path that does not exist, and when there is no text at all.
    """
    source = " ".join(str(path) for path in paths) or "the Python standard library"
    files = [file for path in paths for file in _files_below(path)] if paths else _standard_library()
    pieces: list[Tensor] = []
    left = max_bytes
    for file in files:
        text = _read_file(file, left)
        left -= len(text)
        pieces.append(vocabulary.encode(text))
        if left == 0:
            break
    tokens = torch.cat(pieces) if pieces else torch.empty(0)
    if len(tokens) == 0:
        raise ConfigError(f"there is no text in {source}; pass --text with files or folders that have some")
    return TokenStream(tokens, vocabulary, source)


def _read_file(file: Path, max_bytes: int) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(max_bytes)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [file for file in sorted(root.rglob("*.py")) if _SKIPPED_FOLDERS.isdisjoint(file.relative_to(root).parts)]


def _files_below(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    raise ConfigError(f"the text {path} does not exist; --text takes files and folders")
