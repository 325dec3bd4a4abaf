"""How the streamed step is cut: staged tensors into chunks; tensors in memory are updated whole if nothing is allocated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.called_ops import CalledOps
from zinf_compile.runtime.native.compiled import load_compiled
from zinf_compile.runtime.optim import step_chunks
from zinf_compile.runtime.optim.fused_adamw import Kernel
from zinf_compile.runtime.optim.step_chunks import moved_to
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.storage.staging import StagingBuffer
from zinf_compile.runtime.store.store import Store

WIDTH, CHUNK = 256, 4096  # sixteen chunks in a weight


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Record the number of elements of each update: by the compiled kernel, and by the user's own optimizer."""
    if load_compiled("fused_adamw.cpp") is None:
        pytest.skip("this machine has no C++ compiler")
    counts: dict[str, list[int]] = {"kernel": [], "shadow": []}
    run_kernel, run_shadow = Kernel.update, step_chunks.shadow_step

    def update(self: Kernel, group: Any, state: Any, master: Tensor, *args: Any, **options: Any) -> dict[str, Any]:
        counts["kernel"].append(master.numel())
        return run_kernel(self, group, state, master, *args, **options)

    def shadow(optimizer: Any, group: Any, master: Tensor, *args: Any) -> dict[str, Any]:
        counts["shadow"].append(master.numel())
        return run_shadow(optimizer, group, master, *args)

    monkeypatch.setattr(Kernel, "update", update)
    monkeypatch.setattr(step_chunks, "shadow_step", shadow)
    return counts


def step(model: nn.Module, optimizer: torch.optim.Optimizer, store: Store) -> None:
    store.chunk_elements = CHUNK
    model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    store.synchronize()


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def test_the_compiled_update_gets_whole_what_is_in_memory(
    updates: dict[str, list[int]], optimize: Callable[..., nn.Module], store_of: Callable[[nn.Module], Store]
) -> None:
    model = optimize(make_model(), compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, store_of(model))
    updates["kernel"].clear()  # the first step compared the kernel with torch
    step(model, optimizer, store_of(model))
    assert updates["kernel"] == [WIDTH**2] * 3


def test_others_get_it_in_chunks_since_they_allocate(
    updates: dict[str, list[int]], optimize: Callable[..., nn.Module], store_of: Callable[[nn.Module], Store]
) -> None:
    model = optimize(make_model(), compute_dtype=torch.bfloat16)
    optimizer = torch.optim.NAdam(model.parameters())
    step(model, optimizer, store_of(model))
    updates["shadow"].clear()
    optimizer.step()
    assert updates == {"kernel": [], "shadow": [CHUNK] * 48}


def test_of_staging_only_chunks_are_leased(
    updates: dict[str, list[int]],
    optimize: Callable[..., nn.Module],
    store_of: Callable[[nn.Module], Store],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = optimize(make_model(), tiny=True, host_memory="2MiB", compute_dtype=torch.bfloat16)
    store = store_of(model)
    leased: list[int] = []
    grant = store.staging._grant

    def watch(nbytes: int, reserved: int) -> StagingBuffer:
        leased.append(nbytes)
        return grant(nbytes, reserved)

    optimizer = torch.optim.NAdam(model.parameters())
    step(model, optimizer, store)
    monkeypatch.setattr(store.staging, "_grant", watch)
    optimizer.step()
    store.synchronize()
    records: list[StoredParameter] = list(store.records.values())
    assert all(not slot.in_memory for record in records for slot in record.copies.states.values())
    num_chunks = sum(-(-record.copies.master.tensor.numel() // CHUNK) for record in records)
    assert len(leased) == num_chunks


@pytest.mark.parametrize(
    ("options", "at_once"),
    [
        ({"host_memory": "2MiB"}, 4),
        ({"host_memory": "512KiB"}, 1),
        ({"host_memory": "2MiB", "step_in_backward": True}, 1),
    ],
)
def test_a_kernel_gets_more_of_staging_at_once_where_there_is_room(
    options: dict[str, Any],
    at_once: int,
    updates: dict[str, list[int]],
    optimize: Callable[..., nn.Module],
    store_of: Callable[[nn.Module], Store],
) -> None:
    model = optimize(make_model(), tiny=True, compute_dtype=torch.bfloat16, **options)
    store, optimizer = store_of(model), torch.optim.AdamW(model.parameters())
    step(model, optimizer, store)
    optimizer.zero_grad()
    updates["kernel"].clear()
    step(model, optimizer, store)
    assert sum(updates["kernel"]) == 3 * WIDTH**2
    assert set(updates["kernel"]) == {at_once * CHUNK}


def test_what_allocates_is_updated_in_pieces(
    updates: dict[str, list[int]], optimize: Callable[..., nn.Module], store_of: Callable[[nn.Module], Store]
) -> None:
    model = optimize(make_model(), compute_dtype=torch.bfloat16)
    optimizer = torch.optim.NAdam(model.parameters())
    step(model, optimizer, store_of(model))
    store_of(model).chunk_elements = WIDTH**2
    updates["shadow"].clear()
    optimizer.step()
    assert updates["shadow"] == [WIDTH**2] * 3, "with enough room, updates are not cut"
    updates["shadow"].clear()
    store_of(model).ram.promise(0)
    optimizer.step()
    piece = 2**18 // 12 // 512 * 512  # two temporaries and the widened gradient, in 256 KiB
    assert updates["shadow"] == [piece, piece, piece, WIDTH**2 - 3 * piece] * 3


def test_a_step_count_is_made_on_the_device_and_not_copied_there() -> None:
    """A copy from memory that is not pinned would wait for what is enqueued, with each chunk."""
    with CalledOps() as seen:
        moved = moved_to(torch.device("meta"), torch.tensor(3.0))
    assert moved.device.type == "meta"
    assert torch.ops.aten._to_copy.default not in seen.ops
    assert torch.ops.aten.copy_.default not in seen.ops
