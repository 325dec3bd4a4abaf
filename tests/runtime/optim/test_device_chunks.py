"""Chunks on a device have the bits of plain PyTorch: by torch's fused ops, or by the optimizer's own step."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import zinf_compile
from tests.support.parity import on_streams
from zinf_compile.runtime.optim.device_chunks import DeviceChunks
from zinf_compile.runtime.optim.fused_ops import FusedOp
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.store.store import store_of

INPUTS, OUTPUTS, CHUNK = 129, 127, 4096  # a weight of four chunks, the last of which is shorter, and a bias
NUM_CHUNKS, NUM_STEPS = 5, 3
Make = Callable[[Iterable[Tensor]], Optimizer]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count chunks that are updated on the device, and those that one op updates."""
    counts = {"chunks": 0, "ops": 0}
    run, change = FusedOp.update, DeviceChunks.update

    def count_op(op: FusedOp, *of: Any) -> None:
        counts["ops"] += 1
        run(op, *of)

    def count_chunk(chunks: DeviceChunks, *of: Any) -> Any:
        counts["chunks"] += 1
        return change(chunks, *of)

    monkeypatch.setattr(FusedOp, "update", count_op)
    monkeypatch.setattr(DeviceChunks, "update", count_chunk)
    return counts


class Pair:
    """A model on a device with streams, and plain parameters that get the same gradients."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        torch.manual_seed(0)
        self.dtype, self.model = dtype, nn.Linear(INPUTS, OUTPUTS)
        self.plain = [parameter.detach().clone().requires_grad_() for parameter in self.model.parameters()]
        budgets = {"device_memory": "1MiB", "host_memory": "64MiB"}
        zinf_compile.optimize(self.model, capture=False, compute_dtype=dtype, **budgets)
        record = record_of(self.model.weight)
        assert record is not None
        self.store = store_of(record)
        self.store.device_share, self.store.chunk_elements = 1.0, CHUNK
        self.gradients: list[Tensor] = []  # of the last step, before it
        self._scales = itertools.cycle((1.0, 1e-3, 10.0))

    def step(self, ours: Optimizer, plain: Optimizer, *, zeroes: bool = True) -> None:
        """Take a step of both optimizers with the gradients of a backward."""
        x = next(self._scales) * torch.randn(2, INPUTS, dtype=self.dtype)
        self.model(x).float().square().sum().backward()
        for parameter, other in zip(self.model.parameters(), self.plain, strict=True):
            assert parameter.grad is not None
            other.grad = parameter.grad.float().clone()
        self.gradients = [parameter.grad.clone() for parameter in self.model.parameters()]
        ours.step()
        plain.step()
        if zeroes:
            ours.zero_grad()

    def check(self, ours: Optimizer, plain: Optimizer) -> None:
        """Compare all values and all state, bit by bit."""
        for parameter, other in zip(self.model.parameters(), self.plain, strict=True):
            assert torch.equal(parameter, other)
            state, expected = ours.state[parameter], plain.state[other]
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                assert isinstance(value, Tensor) == isinstance(state[key], Tensor)
                assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key
                assert not isinstance(value, Tensor) or state[key].dtype == value.dtype
            record = record_of(parameter)
            assert record is not None
            copies = record.copies
            assert torch.equal(copies.compute.tensor, copies.master.tensor.to(copies.compute.tensor.dtype))


@pytest.fixture(
    params=[(None, False), (torch.bfloat16, False), (None, True), (torch.bfloat16, True)],
    ids=["float32", "bfloat16", "float32 in place", "bfloat16 in place"],
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    dtype, integrated = request.param
    with on_streams(integrated=integrated):
        pair = Pair(dtype)
        yield pair
        zinf_compile.close(pair.model)


def train(pair: Pair, make: Make) -> tuple[Optimizer, Optimizer]:
    """Train some steps, and compare after each."""
    ours, plain = make(pair.model.parameters()), make(pair.plain)
    for _ in range(NUM_STEPS):
        pair.step(ours, plain)
        pair.check(ours, plain)
    return ours, plain


def options_of(cls: type[Optimizer]) -> Iterator[dict[str, Any]]:
    """Yield sets of options of a fused optimizer."""
    for decay, maximize, lr in itertools.product((0.0, 0.1), (False, True), (0.02, "tensor")):
        common = {"weight_decay": decay, "maximize": maximize, "lr": lr}
        if cls is SGD:
            yield from ({**common, **own} for own in ({}, {"momentum": 0.9, "dampening": 0.1}))
            yield {**common, "momentum": 0.9, "nesterov": True}
        else:
            yield from ({**common, **own} for own in ({}, {"amsgrad": True, "betas": (0.4, 0.9), "eps": 1e-3}))


CASES = [
    pytest.param(cls, options, id=" ".join([cls.__name__, *(f"{key}={value}" for key, value in options.items())]))
    for cls in (AdamW, Adam, SGD)
    for options in options_of(cls)
]


@pytest.mark.parametrize(("cls", "options"), CASES)
def test_ops_give_the_bits_of_torch(
    cls: type[Any], options: dict[str, Any], pair: Pair, counts: dict[str, int]
) -> None:
    def make(parameters: Iterable[Tensor]) -> Optimizer:
        lr = torch.tensor(0.02) if options["lr"] == "tensor" else options["lr"]
        optimizer: Optimizer = cls(parameters, **{**options, "lr": lr}, fused=True)
        return optimizer

    train(pair, make)
    assert counts == {"chunks": NUM_CHUNKS * NUM_STEPS, "ops": NUM_CHUNKS * NUM_STEPS}


def test_options_and_state_that_change_on_the_way(pair: Pair, counts: dict[str, int]) -> None:
    ours, plain = train(pair, lambda parameters: AdamW(parameters, fused=True))
    for change in ({"lr": 0.5}, {"betas": (0.3, 0.8)}, {"fused": None}, {"fused": True, "maximize": True}):
        for optimizer in (ours, plain):
            optimizer.param_groups[0].update(change)
        pair.step(ours, plain)
        pair.check(ours, plain)
    for optimizer in (ours, plain):
        optimizer.load_state_dict(optimizer.state_dict())
        for state in optimizer.state.values():
            state["step"] += 1000
    pair.step(ours, plain)
    pair.check(ours, plain)
    assert counts["chunks"] - counts["ops"] == NUM_CHUNKS, "without fused=True it is the optimizer's own step"


class Halved(AdamW):
    """A subclass with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        """Take a step with half of the learning rate."""
        for group in self.param_groups:
            group["lr"] /= 2
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 2


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda parameters: AdamW(parameters, foreach=True), id="foreach"),
        pytest.param(lambda parameters: AdamW(parameters), id="by default"),
        pytest.param(lambda parameters: SGD(parameters, momentum=0.9, foreach=False), id="SGD, tensor by tensor"),
        pytest.param(lambda parameters: torch.optim.NAdam(parameters), id="NAdam"),
        pytest.param(lambda parameters: Halved(parameters, fused=True), id="a subclass"),
    ],
)
def test_others_take_their_own_step(make: Make, pair: Pair, counts: dict[str, int]) -> None:
    train(pair, make)
    assert counts == {"chunks": NUM_CHUNKS * NUM_STEPS, "ops": 0}


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_step_that_was_replaced_is_taken(
    is_hooked: bool, pair: Pair, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    step: Any = AdamW.step
    called: list[int] = []

    def patched(optimizer: AdamW, closure: Any = None) -> Any:
        called.append(len(optimizer.param_groups))
        optimizer.param_groups[0]["eps"] = 0.1
        return step(optimizer, closure)

    if is_hooked:  # torch wraps the step of a class when its first optimizer is made
        AdamW(pair.plain)
    monkeypatch.setattr(AdamW, "step", patched)
    train(pair, lambda parameters: AdamW(parameters, fused=True))
    assert called
    assert counts["chunks"] > counts["ops"] == 0


@pytest.mark.parametrize("cls", [Adam, AdamW, SGD])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_ops_divide_by_the_scale_of_a_gradient_scaler_and_skip_infinities(
    cls: type[Any], scale: float | None, pair: Pair, counts: dict[str, int]
) -> None:
    options = {"momentum": 0.9} if cls is SGD else {}
    ours, plain = (cls(each, lr=0.01, fused=True, **options) for each in (pair.model.parameters(), pair.plain))
    for found_inf in (0.0, 1.0, 0.0):
        for optimizer in (ours, plain):
            optimizer.grad_scale = None if scale is None else torch.tensor(scale)
            optimizer.found_inf = torch.tensor(found_inf)
        pair.step(ours, plain, zeroes=False)
        pair.check(ours, plain)
        for parameter, gradient in zip(pair.model.parameters(), pair.gradients, strict=True):
            assert torch.equal(parameter.grad, gradient), "the one at home is not unscaled"
        ours.zero_grad()
    assert counts["chunks"] == counts["ops"] == 3 * NUM_CHUNKS


def test_an_error_of_an_op_stops_the_model(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = train(pair, lambda parameters: AdamW(parameters, fused=True))
    run, num_run = FusedOp.update, 0

    def fail(op: FusedOp, *of: Any) -> None:
        nonlocal num_run
        num_run += 1
        if num_run == 3:
            raise RuntimeError("the op failed")
        run(op, *of)

    monkeypatch.setattr(FusedOp, "update", fail)
    pair.step(ours, plain)
    with pytest.raises(zinf_compile.StoreError, match="the op failed"):
        zinf_compile.synchronize(pair.model)
    with pytest.raises(zinf_compile.StoreError, match="an earlier error stopped this model"):
        pair.model(torch.randn(2, INPUTS, dtype=pair.dtype))
