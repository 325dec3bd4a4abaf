"""README and docs are correct: their Python runs, their links resolve, and their files, options and commands exist."""

import ast
import gc
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed import run as torchrun

import zinf_compile
from zinf_compile.cli import plan
from zinf_compile.cli.main import main
from zinf_compile.cli.planned_models import Sizes, find_model
from zinf_compile.ir.config import OPTIONS
from zinf_compile.runtime.params.records import owner_of

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]

_FENCE = re.compile(r"```(\w*)")
_MARK = re.compile(r"<!-- (file|edit|not executed): (.+) -->")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_ROW = re.compile(r"\| `([\w./-]+)` \|")
_COMMAND = re.compile(r"`(zinf [^`]+|make [^`]+|python [^`]+)`")
_PATH = re.compile(r"`((?:zinf_compile|passes|runtime|cuda|tests|benchmarks|docs|examples)/[\w./-]*)`")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: ``mark`` is the comment above it, such as ``("file", "passes/new.py")``."""

    language: str
    text: str
    line: int
    mark: tuple[str, str] | None


def blocks(document: Path) -> Iterator[Block]:
    """Return the fenced blocks of a document, in order."""
    lines = document.read_text(encoding="utf-8").splitlines()
    start, language = 0, None
    for number, line in enumerate(lines):
        fence = _FENCE.fullmatch(line)
        if fence is None:
            continue
        if language is None:
            start, language = number, fence[1]
            continue
        mark = _MARK.fullmatch(lines[start - 1]) if start else None
        text = "".join(f"{each}\n" for each in lines[start + 1 : number])
        yield Block(language=language, text=text, line=start + 2, mark=(mark[1], mark[2]) if mark else None)
        language = None
    assert language is None, f"{document.name}: the block at line {start + 1} has no end"


def python_blocks(document: Path) -> list[Block]:
    return [block for block in blocks(document) if block.language == "python" and block.mark is None]


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(each, marks=pytest.mark.long) if each.name == "large_models.md" else each
        for each in DOCUMENTS
        if python_blocks(each)
    ],
    ids=lambda path: path.name,
)
def test_python_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a document run in order, in one namespace and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    module = ModuleType("documentation")  # Dynamo imports it to trace the functions of a block
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = vars(module)
    try:
        for block in python_blocks(document):
            # Padded with empty lines, so that tracebacks have the line numbers of the document.
            exec(compile("\n" * (block.line - 1) + block.text, str(document), "exec"), names)
    finally:
        for value in names.values():
            if isinstance(value, torch.nn.Module) and any(map(owner_of, value.parameters())):
                zinf_compile.close(value)
        names.clear()
        torch._dynamo.reset()
        gc.collect()  # models whose names were reassigned are still open


def test_the_readme_runs_something() -> None:
    assert len(python_blocks(ROOT / "README.md")) == 2  # ten lines, and the plan


def test_blocks_that_do_not_run_are_rare() -> None:
    marks = [block.mark for document in DOCUMENTS for block in blocks(document) if block.mark is not None]
    assert len([reason for kind, reason in marks if kind == "not executed"]) <= 2


def _apply(edit: str, text: str) -> str:
    """Return ``text`` with each "+" line inserted after the " " line above it."""
    lines = text.splitlines()
    position = 0
    for line in edit.splitlines():
        sign, content = line[:1], line[1:]
        if sign == "+":
            lines.insert(position, content)
        else:
            assert sign == " ", f"an edit has lines that begin with ' ' or '+', not {line!r}"
            position = lines.index(content, position)
        position += 1
    return "\n".join(lines) + "\n"


@pytest.mark.long
def test_adding_a_pass_as_written(tmp_path: Path) -> None:
    """In a copy of the repository: write the files, edit the pipeline, run the new test, and train with the new pass."""
    for name in (
        "zinf_compile",
        "passes",
        "runtime",
        "cuda",
        "examples",
        "tests/passes",
        "tests/parity",
        "tests/support",
    ):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    written = []
    for block in blocks(ROOT / "docs" / "adding_a_pass.md"):
        match block.mark:
            case ("file", name):
                (tmp_path / name).write_text(block.text, encoding="utf-8")
                written.append(name)
            case ("edit", name):
                edited = _apply(block.text, (tmp_path / name).read_text(encoding="utf-8"))
                (tmp_path / name).write_text(edited, encoding="utf-8")
    (new_pass,) = [name for name in written if name.startswith("passes/")]
    (new_test,) = [name for name in written if name.startswith("tests/")]
    script = (
        "import sys, pytest, zinf_compile\n"
        "QUIET = ['-q', '-p', 'no:cacheprovider']\n"
        f"assert zinf_compile.__file__.startswith({str(tmp_path)!r}), zinf_compile.__file__\n"
        "from zinf_compile.passes.pipeline import LOWER\n"
        f"assert {Path(new_pass).stem!r} in [item.name for item in LOWER]\n"
        f"code = pytest.main([*QUIET, {new_test!r}, 'tests/passes/test_contract.py'])\n"
        "chosen = 'test_bitwise and gpt and nvme and captured and not tied'\n"
        "sys.exit(code or pytest.main([*QUIET, 'tests/parity/test_models.py', '-k', chosen]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_adding_a_pass_is_clean(tmp_path: Path) -> None:
    """The code on the page passes the linter."""
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for block in blocks(ROOT / "docs" / "adding_a_pass.md"):
        if block.mark is not None and block.mark[0] == "file":
            (tmp_path / Path(block.mark[1]).name).write_text(block.text, encoding="utf-8")
    for arguments in (["check"], ["format", "--check"]):
        done = subprocess.run([ruff, *arguments, tmp_path], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def _anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_links_resolve(document: Path) -> None:
    for link in _LINK.findall(document.read_text(encoding="utf-8")):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in _anchors(target), f"{link}: {target.name} has no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_named_paths_exist(document: Path) -> None:
    """Every file or folder of the repository that a document names in backticks exists."""
    named = set(_PATH.findall(document.read_text(encoding="utf-8")))
    made = {mark[1] for block in blocks(document) if (mark := block.mark) is not None}  # files the reader writes
    assert [path for path in sorted(named - made) if not (ROOT / path).exists()] == []


_TOUR_ROW = re.compile(r"\| `([\w./]+\.py)` \| (`[\w.]+`(?:, `[\w.]+`)*) \| .+ \|")


def _definitions(path: Path) -> set[str]:
    """Return the functions and classes of a file, and the methods of its classes as ``Class.method``."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    top = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, kinds)]
    methods = {
        f"{cls.name}.{node.name}"
        for cls in top
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if isinstance(node, kinds)
    }
    return {node.name for node in top} | methods


@pytest.mark.parametrize("tour", ["`optimize`", "one gather", "one gradient", "one update"])
def test_a_reading_tour_can_be_walked(tour: str) -> None:
    """A tour of the architecture has at most eight files, each once, and every function that it names exists."""
    _, found, rest = _section(ROOT / "docs" / "architecture.md", "Reading tours").partition(f"\n### Tour: {tour}\n")
    assert found, f"there is no tour of {tour}"
    lines = [line for line in rest.partition("\n### ")[0].splitlines() if line.startswith("| `")]
    rows = [_TOUR_ROW.fullmatch(line) for line in lines]
    assert all(rows), [line for line, row in zip(lines, rows, strict=True) if row is None]
    files = {row[1]: set(re.findall(r"`([\w.]+)`", row[2])) for row in rows if row is not None}
    assert 4 <= len(files) == len(rows) <= 8
    for name, functions in files.items():
        assert functions <= _definitions(ROOT / name), name
    for name, following in itertools.pairwise(files):
        assert _leads_to(name, following, files[following]), f"{name} does not lead to {following}"


def _leads_to(name: str, following: str, functions: set[str]) -> bool:
    """Return whether a file imports another, says that it comes next, or calls one of its functions."""
    text, module = (ROOT / name).read_text(encoding="utf-8"), following.removesuffix(".py").replace("/", ".")
    called = "|".join(re.escape(function.rpartition(".")[2]) for function in functions)
    imported = re.search(rf"^from (zinf_compile\.)?{re.escape(module)} import", text, re.MULTILINE)
    said = re.search(rf"``([\w/]+/)?{re.escape(Path(following).name)}``", text)
    return bool(imported or said or re.search(rf"\.({called})\b|(?<!def )\b({called})\(", text))


def test_files_that_do_not_follow_each_other_are_found() -> None:
    assert not _leads_to("runtime/optim/step_chunks.py", "runtime/optim/optimizer.py", {"StreamedStep.run"})
    assert not _leads_to("runtime/storage/arena.py", "runtime/transfer/in_flight.py", {"LinkFiller.fill_from_file"})
    assert _leads_to("runtime/transfer/io_pool.py", "runtime/storage/nvme/posix.py", {"PosixEngine.read"})


def _section(document: Path, heading: str) -> str:
    """Return the text of a level-2 section."""
    text = document.read_text(encoding="utf-8")
    _, found, rest = text.partition(f"\n## {heading}\n")
    assert found, f"{document.name} has no section {heading!r}"
    return rest.partition("\n## ")[0]


def test_the_option_table_is_config() -> None:
    documented = _ROW.findall(_section(ROOT / "docs" / "options.md", "Options"))
    assert sorted(documented) == sorted(OPTIONS)


def _commands(document: Path) -> Iterator[list[str]]:
    """Return the words of every command line in shell blocks and in inline code."""
    for block in blocks(document):
        if block.language == "bash":
            for line in block.text.splitlines():
                words = shlex.split(line, comments=True)
                yield [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)]
    for text in _COMMAND.findall(document.read_text(encoding="utf-8")):
        yield shlex.split(text)


_HELP = """
import os, runpy, sys
import torch  # which all of them import, and which takes longer than all else

for module in sys.argv[1:]:
    print(f"{module}:", flush=True)
    if not (pid := os.fork()):  # where nothing else has been imported
        sys.argv = [module, "--help"]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as left:
            sys.stdout.flush()
            os._exit(left.code or 0)  # at once: to take down what torch has made takes a second
        sys.exit(f"python -m {module} --help went on")
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"python -m {module} --help has failed")
"""


@pytest.fixture(scope="module")
def help_texts() -> dict[str, str]:
    """What ``python -m module --help`` prints, for every such command of the documents."""
    modules = sorted(
        {
            words[2]
            for document in DOCUMENTS
            for words in _commands(document)
            if Path(words[0]).name == "python" and words[1] == "-m" and words[2] != "pytest"
        }
    )
    printed = subprocess.run(
        [sys.executable, "-c", _HELP, *modules], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    texts = re.split(rf"^({'|'.join(map(re.escape, modules))}):$", printed, flags=re.MULTILINE)
    return dict(zip(texts[1::2], texts[2::2], strict=True))


def _assert_options(words: list[str], text: str) -> None:
    for word in words:
        if word.startswith("--"):
            assert re.search(rf"{re.escape(word)}\b", text), f"{' '.join(words)}: there is no {word}"


def _build_planned_model(words: list[str]) -> None:
    """Build the model of a ``zinf plan`` command: a size that is missing or does not divide is refused here."""
    parser = ArgumentParser()
    plan.add_arguments(parser)
    arguments = parser.parse_args(words)
    find_model(arguments.model, Sizes(**{name: getattr(arguments, name) for name in Sizes.__slots__}))


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_commands_exist(document: Path, capsys: pytest.CaptureFixture[str], help_texts: dict[str, str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for words in _commands(document):
        program, *rest = words
        if program == "torchrun":
            first = next(place for place, word in enumerate(rest) if word == "-m" or word.endswith(".py"))
            _assert_options(rest[:first], torchrun.get_args_parser().format_help())
            program, rest = "python", rest[first:]
            if rest[:2] == ["-m", "zinf_compile.cli"]:
                program, rest = "zinf", rest[2:]
        if program == "make":
            assert set(rest) <= targets, f"make {rest}: the Makefile has {sorted(targets)}"
        elif program == "zinf":
            with pytest.raises(SystemExit) as left:
                main([rest[0], "--help"])
            assert left.value.code == 0, f"zinf {rest[0]}"
            _assert_options(rest, capsys.readouterr().out)
            if rest[:2] == ["plan", "gpt"]:
                _build_planned_model(rest[1:])
        elif Path(program).name == "python" and rest[0] == "-m":
            if rest[1] == "pytest":
                folders = [word for word in rest[2:] if not word.startswith("-")]
                assert all((ROOT / folder).exists() or "skip_detaches" in folder for folder in folders), folders
            else:
                _assert_options(rest, help_texts[rest[1]])
        elif program == "python":
            assert (ROOT / rest[0]).is_file(), f"{rest[0]} does not exist"
        else:
            pytest.fail(f"{document.name}: nobody checks {' '.join(words)!r}")


def test_the_documented_commands_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in set(re.findall(r"`zinf (\w+)", readme)):
        assert re.search(rf"^\s+{command}\b", printed, flags=re.MULTILINE), f"zinf --help does not have {command!r}"


def test_the_public_names_are_documented() -> None:
    """Every function a user calls is in the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("optimize", "report", "Plan", "CapacityError"):
        assert name in zinf_compile.__all__
        assert name in readme
