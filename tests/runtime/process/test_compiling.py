"""Updates beside a compilation on another thread round as usual, and neither waits for the other."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from zinf_compile.runtime.native.compiled import find_compiler
from zinf_compile.runtime.optim import fused_adamw
from zinf_compile.runtime.optim.fused_adamw import find_kernel
from zinf_compile.runtime.optim.shadow import shadow_step
from zinf_compile.runtime.process.compiling import Uncompiled
from zinf_compile.runtime.process.waiting import future_result

SECONDS = 60


def compile_meanwhile(do: Callable[[], object]) -> None:
    """Call a function in the middle of a compilation."""

    def backend(graph_module: Any, inputs: Any) -> Any:
        assert torch.compiler.is_compiling()
        do()
        assert torch.compiler.is_compiling()
        return graph_module.forward

    def add(x: Tensor) -> Tensor:
        return x + 1

    assert torch.compile(add, backend=backend)(torch.ones(1)).item() == 2


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def update() -> Tensor:
    """Return a parameter after some steps that depend on a count that is not a tensor."""
    generator = torch.Generator().manual_seed(0)
    parameter = torch.randn(1000, generator=generator)
    optimizer = torch.optim.NAdam([torch.zeros(1)], lr=0.1)
    state: dict[str, Any] = {}
    for _ in range(3):
        gradient = torch.randn(1000, generator=generator)
        state = shadow_step(optimizer, optimizer.param_groups[0], parameter.detach(), gradient, state)
    return parameter


@pytest.mark.skipif(not hasattr(torch.compiler, "_compile_session_context"), reason="this torch sets no flag")
def test_an_update_that_a_compiling_thread_waits_for_rounds_as_alone(pool: ThreadPoolExecutor) -> None:
    alone, found = update(), []
    compile_meanwhile(lambda: found.append(future_result(pool.submit(update), "an update")))
    compile_meanwhile(lambda: found.append(update()))  # and on the compiling thread itself
    assert all(torch.equal(each, alone) for each in found)
    assert len(found) == 2


@pytest.mark.skipif(find_compiler() is None, reason="this machine has no C++ compiler")
@pytest.mark.skipif(not hasattr(torch.compiler, "_compile_session_context"), reason="this torch sets no flag")
def test_the_kernel_is_not_given_up_for_a_compilation_beside_its_check(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_adamw, "_checked", {})
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    has_asked, try_begin = threading.Event(), Uncompiled.try_begin

    def ask(turn: Uncompiled) -> bool:
        begins = try_begin(turn)
        has_asked.set()
        return begins

    def find() -> object:
        return find_kernel(
            optimizer,
            optimizer.param_groups[0],
            master_dtype=torch.float32,
            gradient_dtype=torch.float32,
            compute_dtype=None,
        )

    monkeypatch.setattr(Uncompiled, "try_begin", ask)
    found = []

    def compile_until_it_has_asked() -> None:
        found.append(pool.submit(find))
        assert has_asked.wait(SECONDS)

    compile_meanwhile(compile_until_it_has_asked)
    assert found[0].result(timeout=SECONDS) is not None
    assert list(fused_adamw._checked.values()) == [True]
