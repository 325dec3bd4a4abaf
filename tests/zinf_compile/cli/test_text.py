"""Text to tokens to batches."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

from zinf_compile.cli.text import ByteVocabulary, TokenizerVocabulary, TokenStream, read_text
from zinf_compile.ir.errors import ConfigError


def _stream(folder: Path, text: bytes) -> TokenStream:
    (folder / "text.txt").write_bytes(text)
    return read_text([folder / "text.txt"], ByteVocabulary())


def test_bytes_are_tokens_and_back(tmp_path: Path) -> None:
    stream = _stream(tmp_path, "naïve".encode())
    assert stream.tokens.dtype == torch.uint8
    assert stream.tokens.tolist() == list("naïve".encode())
    assert stream.vocabulary.decode(stream.tokens) == "naïve"


def test_targets_are_the_tokens_moved_on_by_one(tmp_path: Path) -> None:
    stream = _stream(tmp_path, bytes(range(100)))
    tokens, targets = next(stream.batches(batch=5, seq=7, seed=0))
    assert tokens.shape == targets.shape == (5, 7)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens[:, 1:], tokens[:, :-1] + 1)


def test_the_same_seed_gives_the_same_batches(tmp_path: Path) -> None:
    stream = _stream(tmp_path, bytes(range(200)))

    def draw(seed: int) -> list[torch.Tensor]:
        return [batch.tokens for batch in itertools.islice(stream.batches(batch=2, seq=8, seed=seed), 3)]

    assert all(torch.equal(one, same) for one, same in zip(draw(1), draw(1), strict=True))
    assert not torch.equal(torch.stack(draw(1)), torch.stack(draw(2)))
    assert not torch.equal(*draw(1)[:2])


def test_every_window_is_drawn_and_the_last_token_is_reached(tmp_path: Path) -> None:
    stream = _stream(tmp_path, bytes(range(6)))
    tokens, targets = next(stream.batches(batch=64, seq=4, seed=0))
    assert set(tokens[:, 0].tolist()) == {0, 1}
    assert int(targets.max()) == 5


def test_folders_are_walked_in_sorted_order_and_reading_is_capped(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one").write_bytes(b"2222")
    (tmp_path / "a").write_bytes(b"11")
    (tmp_path / "c").write_bytes(b"33")
    stream = read_text([tmp_path], ByteVocabulary(), max_bytes=7)
    assert bytes(stream.tokens.tolist()) == b"1122223"


def test_the_default_text_is_the_standard_library() -> None:
    stream = read_text([], ByteVocabulary(), max_bytes=10_000)
    assert len(stream.tokens) == 10_000
    assert "import" in stream.vocabulary.decode(stream.tokens)
    assert torch.equal(stream.tokens, read_text([], ByteVocabulary(), max_bytes=10_000).tokens)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent does not exist"):
        read_text([tmp_path / "absent"], ByteVocabulary())


def test_no_text_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no text in"):
        read_text([tmp_path], ByteVocabulary())
    with pytest.raises(ConfigError, match="there is no text in"):
        _stream(tmp_path, b"")


def test_text_shorter_than_a_sequence_is_an_error(tmp_path: Path) -> None:
    stream = _stream(tmp_path, b"12345678")
    next(stream.batches(batch=1, seq=7, seed=0))
    with pytest.raises(ConfigError, match="has 8 tokens, a sequence needs 9"):
        stream.batches(batch=1, seq=8, seed=0)


def test_a_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "alpha": 1, "beta": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = TokenizerVocabulary(tmp_path / "tokenizer.json")
    assert vocabulary.size == 3
    tokens = vocabulary.encode(b"beta alpha gamma")
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == [2, 1, 0]
    assert vocabulary.decode(tokens[:2]) == "beta alpha"


def test_a_tokenizer_file_that_cannot_be_used(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(ConfigError, match="does not exist"):
        TokenizerVocabulary(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        TokenizerVocabulary(tmp_path / "broken.json")


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install zinf_compile\[hf\]"):
        TokenizerVocabulary(Path("tokenizer.json"))
