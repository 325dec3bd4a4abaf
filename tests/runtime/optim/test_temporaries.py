"""Temporary memory of an update: measured on a few elements, and bounded for any optimizer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zinf_compile
from examples.soap import SOAP
from zinf_compile.ir.plan import UPDATE_NBYTES
from zinf_compile.runtime.device.cpu import emulates_bfloat16
from zinf_compile.runtime.optim.optimizer import StreamedStep
from zinf_compile.runtime.optim.step_chunks import Chunk
from zinf_compile.runtime.optim.temporaries import TemporaryCount, piece_elements, small_shape
from zinf_compile.runtime.store.store import Store

Tight = Callable[[nn.Module], nn.Module]

WIDTH = 512  # a weight in float64 is 2 MiB


def test_what_is_alive_at_once_is_counted() -> None:
    given = torch.zeros(100)
    with TemporaryCount() as count:
        first = given + 1
        given.add_(first)
        given.view(10, 10).mul_(2)  # in existing memory
        del first
        second = given * 2
        third = second.sqrt()
        torch.zeros(())  # a scalar
    assert count.most_nbytes == second.nbytes + third.nbytes


def test_what_ops_convert_inside_is_counted() -> None:
    narrow, wide = torch.zeros(100, dtype=torch.bfloat16), torch.zeros(100)
    with TemporaryCount() as count:
        narrow.copy_(wide)
        narrow.add_(wide * 2 > 1, alpha=0)  # a boolean mask is not converted
    assert count.most_nbytes == wide.nbytes + 100  # 100 bytes of mask
    with TemporaryCount() as count:
        narrow.add_(wide)
    assert count.most_nbytes == 2 * wide.nbytes, "converted once as input, and once as output"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_emulated_products_allocate_is_counted(device: str) -> None:
    wide, square = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in ((16, 64), (16, 16)))
    for given, scratch in ((False, 0), (True, 4 * wide.numel() + wide.nbytes + square.nbytes)):
        with TemporaryCount(emulates_bfloat16=given) as count:
            product = square @ wide
        assert count.most_nbytes == product.nbytes + scratch
        with TemporaryCount(emulates_bfloat16=given) as count:
            torch.addmm(wide, square, wide)
            torch.mm(square.float(), square.float())  # float32 is not emulated
        assert count.most_nbytes == max(wide.nbytes + scratch, 3 * 4 * square.numel())


@pytest.mark.parametrize(
    ("shape", "small"),
    [
        ((3, 5), (3, 5)),
        ((1024, 4096), (32, 128)),
        ((512, 512, 3, 3), (22, 22, 3, 3)),
        ((1, 10**7), (1, 4096)),
        ((), ()),
        ((0, 9000), (0, 9000)),
    ],
)
def test_small_shapes_have_the_same_proportions(shape: tuple[int, ...], small: tuple[int, ...]) -> None:
    assert small_shape(torch.Size(shape)) == small


@pytest.mark.parametrize(
    ("nbytes", "temporary", "elements"), [(2**20, 0, None), (2**20, 8, 2**17), (2**20, 12, 87_040), (100, 8, 512)]
)
def test_pieces_are_as_large_as_their_temporaries_allow(nbytes: int, temporary: int, elements: int | None) -> None:
    assert piece_elements(nbytes, temporary) == elements


class _Greedy(torch.optim.Optimizer):
    """An unknown element-wise optimizer that allocates a dozen tensors more than it needs."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    held = [parameter.grad * factor for factor in range(12)]
                    parameter.sub_(held[1], alpha=group["lr"])


class _Listing(torch.optim.Optimizer):
    """An element-wise optimizer whose state has a list; each piece has to start from the same list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                seen = self.state[parameter].setdefault("seen", [])
                seen.append(len(seen))
                parameter.sub_(parameter.grad * 2, alpha=group["lr"] / len(seen))


OPTIMIZERS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {"weight_decay": 0.1}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adagrad, {"weight_decay": 0.1}),
    (torch.optim.Adadelta, {"weight_decay": 0.1}),
    (torch.optim.ASGD, {"weight_decay": 0.1}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.Rprop, {}),
    (_Greedy, {}),
    (_Listing, {}),
)


@pytest.fixture
def tight(store_of: Callable[[nn.Module], Store]) -> Tight:
    """Return a function that promises a model no device memory, so that its updates have no room for temporaries."""

    def promise_nothing(model: nn.Module) -> nn.Module:
        store_of(model).ram.promise(0)
        return model

    return promise_nothing


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the peak of temporary bytes of each streamed step."""
    counts: list[int] = []
    run = StreamedStep.run

    def run_counted(self: StreamedStep) -> None:
        with TemporaryCount() as count:
            run(self)
        counts.append(count.most_nbytes)

    monkeypatch.setattr(StreamedStep, "run", run_counted)
    return counts


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("tiny", [False, True], ids=["memory", "nvme"])
def test_an_update_takes_no_more_than_plans_count_for_it(
    make: Any, options: dict[str, Any], tiny: bool, optimize: Callable[..., nn.Module], tight: Tight, peaks: list[int]
) -> None:
    models = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, model = models[0], tight(optimize(models[1], tiny=tiny, host_memory="8MiB" if tiny else "64MiB"))
    optimizers = [make(each.parameters(), **options) for each in models]
    for _ in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    zinf_compile.synchronize(model)
    assert len(peaks) == 3
    assert max(peaks) <= UPDATE_NBYTES // 2, "the other half is a margin for the allocator"
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_what_widening_gradients_takes_is_counted_too(
    compute_dtype: torch.dtype | None, optimize: Callable[..., nn.Module], tight: Tight, peaks: list[int]
) -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    model = tight(optimize(layer, tiny=True, host_memory="8MiB", compute_dtype=compute_dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    model(torch.ones(2, WIDTH, dtype=compute_dtype)).float().sum().backward()
    optimizer.step()
    zinf_compile.synchronize(model)
    (taken,) = peaks
    assert UPDATE_NBYTES // 4 < taken <= UPDATE_NBYTES // 2


class _Asking(torch.optim.Optimizer):
    """An optimizer of whole tensors whose loop depends on values: it asks for them until one is small, or for ever."""

    def __init__(self, params: Any, *, least: float) -> None:
        super().__init__(params, {"least": least})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                step = parameter.grad / parameter.grad.norm()
                while step.norm().item() > group["least"]:
                    step = step / 2
                parameter.sub_(step, alpha=0.1)


class _Making(torch.optim.Optimizer):
    """An optimizer of whole tensors that makes a matrix where it thinks that all tensors are: on the CPU."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(torch.ones(parameter.shape[:1] * 2) @ parameter.grad, alpha=0.1)


@pytest.mark.parametrize(
    "make",
    [
        # A matrix for the short side only. A small tensor of the same proportions has two short sides.
        lambda params: SOAP(params, most_rows=512, every=1),
        torch.optim.Adafactor,
        torch.optim.Muon,
        lambda params: _Asking(params, least=2.0),
        lambda params: _Asking(params, least=0.1),  # without end where all values are 1
        _Making,
    ],
    ids=["SOAP", "Adafactor", "Muon", "asking", "endless", "making"],
)
def test_what_whole_tensors_take_is_known_ahead(
    make: Any, optimize: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, int]] = []
    compute = StreamedStep._compute

    def compute_counted(self: StreamedStep, chunk: Chunk) -> None:
        with TemporaryCount(emulates_bfloat16=emulates_bfloat16()) as count:
            compute(self, chunk)
        steps.append((count.most_nbytes, chunk.job.temporary_nbytes * chunk.job.num_elements))

    monkeypatch.setattr(StreamedStep, "_compute", compute_counted)
    model = optimize(nn.Linear(1024, 64, bias=False), tiny=False, host_memory="64MiB")
    optimizer = make(model.parameters())
    for _ in range(3):
        model(torch.rand(8, 1024)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for taken, counted in steps:
        assert taken <= counted < 1.02 * taken + 64 * 1024, "rounded up to a byte of each element"
    assert len(steps) == 3
