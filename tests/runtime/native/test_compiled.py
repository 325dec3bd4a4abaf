"""Libraries are compiled once and kept; where that does not work, there is one warning and no library."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from zinf_compile.runtime.native import compiled
from zinf_compile.runtime.native.compiled import cache_folder, compile_library, load_compiled

NAME = "fused_adamw.cpp"


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled._load.cache_clear()
    yield
    compiled._load.cache_clear()


def need_compiler() -> None:
    if compiled.find_compiler() is None:
        pytest.skip("this machine has no C++ compiler")


def test_a_library_is_compiled_once_and_nothing_else_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    need_compiler()
    library = compile_library(compiled.SOURCES / NAME)
    assert list(cache_folder().iterdir()) == [library]
    monkeypatch.setattr(compiled, "find_compiler", lambda: None)
    assert compile_library(compiled.SOURCES / NAME) == library
    assert load_compiled(NAME) is not None


def test_flags_and_source_and_headers_and_torch_name_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_compiler()
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    first = compile_library(source)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    second = compile_library(source)
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    third = compile_library(source)
    source.write_text('extern "C" int one() { return 2; }\n')
    fourth = compile_library(source)
    (tmp_path / "two.h").write_text("constexpr int two = 2;\n")
    assert len({first, second, third, fourth, compile_library(source)}) == 5


def test_without_a_compiler_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert load_compiled(NAME) is None
    assert load_compiled(NAME) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "no C++ compiler (g++, c++, clang++) on the PATH" in record.getMessage()


def test_a_source_that_does_not_compile_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need_compiler()
    (tmp_path / "bad.cpp").write_text("this is no C++\n")
    monkeypatch.setattr(compiled, "SOURCES", tmp_path)
    assert load_compiled("bad.cpp") is None
    (record,) = caplog.records
    assert "compiling bad.cpp failed" in record.getMessage()
    assert "error:" in record.getMessage()
    assert list(cache_folder().iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    need_compiler()
    (tmp_path / "zinf_compile").write_text("a file where the folder should be\n")
    assert load_compiled(NAME) is None
    assert "there is no compiled fused_adamw.cpp" in caplog.text


def test_a_damaged_library_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    need_compiler()
    compile_library(compiled.SOURCES / NAME).write_bytes(b"not a library")
    assert load_compiled(NAME) is None
    assert "there is no compiled fused_adamw.cpp" in caplog.text


def test_threads_and_processes_may_compile_at_once() -> None:
    need_compiler()
    code = f"from zinf_compile.runtime.native.compiled import load_compiled; assert load_compiled({NAME!r}) is not None"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        assert None not in set(pool.map(load_compiled, [NAME] * 4))
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert len(list(cache_folder().iterdir())) == 1
