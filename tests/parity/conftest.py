"""Fixtures of the parity tests: the harness, the placements, and the ways to compute."""

import os
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from tests.support.parity import PLACEMENTS, Parity, on_cuda, on_streams
from zinf_compile.runtime.native.compiled import find_compiler

_COMPILED = ("test_models.py",)  # others keep it for `make test-long`


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``long`` all but one placement for each combination of a test's other parameters.

    The placement that stays changes from combination to combination, and starts at a different one for each test. So each
    workload and each way to capture meets all placements, though not in the same test. Of a test's combinations in
    compiled segments, which run a C++ compiler, one stays, and that in every 24th test of the files of ``_COMPILED``.
    """
    by_test: dict[tuple[Path, str], dict[Hashable, list[pytest.Item]]] = {}
    for item in items:
        given = getattr(item, "callspec", None)
        if isinstance(item, pytest.Function) and given is not None and given.params.keys() & {"placement", "way"}:
            others = tuple(sorted((name, repr(value)) for name, value in given.params.items() if name != "placement"))
            by_test.setdefault((item.path, item.originalname), {}).setdefault(others, []).append(item)
    compiled_tests: Counter[Path] = Counter()
    for (path, name), combinations in by_test.items():
        first = crc32(f"{path.name}::{name}".encode())
        chosen = {
            others: same[turn % len(same)] for turn, (others, same) in enumerate(combinations.items(), start=first)
        }
        compiled = [
            item
            for others, item in chosen.items()
            if ("way", "'inductor'") in others and not item.get_closest_marker("long")
        ]
        stays = bool(compiled) and path.name in _COMPILED and compiled_tests[path] % 24 == 0
        compiled_tests[path] += bool(compiled)
        surplus = {item for index, item in enumerate(compiled) if not stays or index != first % len(compiled)}
        for others, same in combinations.items():
            for item in same:
                if item is not chosen[others] or item in surplus:
                    item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Fix the number of threads, by which kernels split work. One is enough for tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _streams(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run all of these tests on a fake device with streams if ZINF_STREAMS is set, and on a GPU if ZINF_GPU is.

    With ZINF_STREAMS=integrated that device lies in the host's RAM.
    """
    mark = request.node.get_closest_marker("needs_more_on_streams")
    more = mark.kwargs if mark is not None else {}
    streams = os.environ.get("ZINF_STREAMS")
    fake = nullcontext() if streams is None else on_streams(more, integrated=streams == "integrated")
    with on_cuda(more) if "ZINF_GPU" in os.environ else fake:
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """On a device with streams, skip what is for a CPU; on an integrated one, what is for memory of its own."""
    streams = os.environ.get("ZINF_STREAMS")
    if streams is not None and (mark := item.get_closest_marker("of_a_cpu")) is not None:
        pytest.skip(f"it is for a device that computes in host memory: {mark.kwargs['reason']}")
    if streams == "integrated" and (mark := item.get_closest_marker("of_own_memory")) is not None:
        pytest.skip(f"it is for a device with memory of its own: {mark.kwargs['reason']}")


@pytest.fixture(scope="session", autouse=True)
def _deterministic() -> None:
    """Let kernels on a GPU give the same bits at every run."""
    if "ZINF_GPU" in os.environ:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="session")
def session_cache() -> dict[Any, Any]:
    """Return the results that tests share: runs of plain PyTorch, and smallest budgets."""
    return {}


@pytest.fixture
def parity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session_cache: dict[Any, Any], request: pytest.FixtureRequest
) -> Iterator[Parity]:
    """Return the harness."""
    node = request.node
    given = getattr(node, "callspec", None)
    others = {} if given is None else {name: repr(each) for name, each in given.params.items() if name != "placement"}
    case = (node.path, node.originalname, *sorted(others.items()))
    harness = Parity(tmp_path, monkeypatch, session_cache, case)
    yield harness
    harness.close()


@pytest.fixture(params=PLACEMENTS)
def placement(request: pytest.FixtureRequest) -> str:
    """Return where parameters live."""
    return str(request.param)


WAYS: Mapping[str, Mapping[str, Any]] = {
    "captured": {"captured": True},
    "eager": {"captured": False},
    "inductor": {"captured": True, "compute": "inductor", "recompute": False},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    """Return how a model computes: captured op by op, captured in compiled segments, or eagerly in its own forward."""
    if request.param == "inductor" and find_compiler() is None:
        pytest.skip("there is no C++ compiler on the PATH")
    return WAYS[request.param]


@pytest.fixture(params=["captured", "eager"])
def captured(request: pytest.FixtureRequest) -> bool:
    """Return whether the model is captured; otherwise its own forward runs eagerly."""
    return request.param == "captured"
