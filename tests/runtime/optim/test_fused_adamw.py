"""The compiled AdamW has the bits of torch's for every option that it supports; everything else is left to torch."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from zinf_compile.ir.copies import Code, low_halves_nbytes
from zinf_compile.runtime.native.compiled import load_compiled
from zinf_compile.runtime.optim import fused_adamw
from zinf_compile.runtime.optim.fused_adamw import Kernel, find_kernel
from zinf_compile.runtime.optim.shadow import shadow_step
from zinf_compile.runtime.storage.low_halves import join, split
from zinf_compile.runtime.storage.state_codes import decode, encode

NUM_STEPS = 3


@pytest.fixture(autouse=True)
def need_compiler() -> None:
    if load_compiled("fused_adamw.cpp") is None:
        pytest.skip("this machine has no C++ compiler")


@pytest.fixture
def fresh_checks(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[object, ...], bool]:
    checked: dict[tuple[object, ...], bool] = {}
    monkeypatch.setattr(fused_adamw, "_checked", checked)
    return checked


def make_optimizer(*, adam: bool = False, **options: Any) -> torch.optim.Optimizer:
    make = torch.optim.Adam if adam else torch.optim.AdamW
    return make([torch.zeros(1, requires_grad=True)], **options)


def find(
    optimizer: torch.optim.Optimizer,
    *,
    master: torch.dtype = torch.float32,
    gradient: torch.dtype = torch.bfloat16,
    compute: torch.dtype | None = torch.bfloat16,
) -> Kernel | None:
    group = optimizer.param_groups[0]
    return find_kernel(optimizer, group, master_dtype=master, gradient_dtype=gradient, compute_dtype=compute)


def bits(tensor: Tensor) -> Tensor:
    """Return the bits, so that NaNs compare equal and signs of zeros count."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def make_numbers(size: int, generator: torch.Generator) -> Tensor:
    """Return numbers of many magnitudes, including zeros and denormals."""
    numbers = torch.randn(size, generator=generator) * 10 ** (12 * torch.rand(size, generator=generator) - 10)
    numbers[::97], numbers[5::89] = 0.0, 1e-41
    return numbers


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("adam", [False, True])
def test_it_gives_the_bits_of_torch(adam: bool, fused: bool, amsgrad: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    sizes = itertools.cycle((1, 13, 2055, 8192, 100_003))
    choices = itertools.product(
        (0.0, 0.1),
        ((0.9, 0.999), (0.4, 0.95)),
        (False, True),
        (1e-3, torch.tensor(0.3)),
        (torch.float32, torch.bfloat16),
    )
    for (decay, betas, maximize, lr, dtype), size in zip(choices, sizes, strict=False):
        optimizer = make_optimizer(
            adam=adam, fused=fused, amsgrad=amsgrad, weight_decay=decay, betas=betas, maximize=maximize, lr=lr
        )
        group = optimizer.param_groups[0]
        kernel = find(optimizer, gradient=dtype)
        assert kernel is not None
        plain = torch.randn(size, generator=generator)
        master, compute = plain.clone(), torch.empty(size, dtype=torch.bfloat16)
        keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if amsgrad else 2]
        state: dict[str, Any] = {key: torch.full((size,), float("nan")) for key in keys}  # as fresh memory may hold
        upper, pages = plain.bfloat16(), torch.empty(low_halves_nbytes(size), dtype=torch.uint8)
        split(plain, upper, pages)
        split_state, joined = {key: value.clone() for key, value in state.items()}, torch.empty(size)
        plain_state: dict[str, Any] = {}
        for step in range(NUM_STEPS):
            gradient = make_numbers(size, generator).to(dtype)
            plain_state = shadow_step(optimizer, group, plain.detach(), gradient.to(plain.dtype), plain_state)
            assert kernel.takes(*parts_of(state))
            state = kernel.update(group, state, master, gradient, compute, num_threads=1 + step)
            assert torch.equal(bits(master), bits(plain)), (decay, betas, maximize, lr, dtype, size)
            split_state = kernel.update(group, split_state, pages, gradient, upper, num_threads=3 - step)
            join(pages, upper, joined)
            assert torch.equal(bits(joined), bits(plain))
            assert torch.equal(bits(upper), bits(compute))
            assert all(torch.equal(split_state[key], state[key]) for key in state)
            assert torch.equal(bits(compute), bits(plain.bfloat16()))
            assert state.keys() == plain_state.keys()
            for key in state:
                assert state[key].dtype == plain_state[key].dtype
                assert torch.equal(state[key], plain_state[key]), key


@pytest.mark.parametrize("fused", [False, True])
def test_chunks_and_threads_change_nothing(fused: bool) -> None:
    size, chunk = 1_000_003, 4096 * 77
    optimizer = make_optimizer(fused=fused)
    group, kernel = optimizer.param_groups[0], find(optimizer)
    assert kernel is not None
    gradient, whole = torch.randn(size).bfloat16(), torch.randn(size)
    master, compute = whole.clone(), torch.empty(size, dtype=torch.bfloat16)
    moments = {key: torch.empty(size) for key in ("exp_avg", "exp_avg_sq")}
    shadow_step(optimizer, group, whole.detach(), gradient.float(), {})
    for start in range(0, size, chunk):
        cut = slice(start, start + chunk)
        state = {key: value[cut] for key, value in moments.items()}
        kernel.update(group, state, master[cut], gradient[cut], compute[cut], num_threads=1 + start // chunk)
    assert torch.equal(master, whole)
    assert torch.equal(compute, whole.bfloat16())


@pytest.mark.parametrize("code", Code)
@pytest.mark.parametrize(("fused", "amsgrad"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("is_split", [False, True])
def test_moments_in_codes(code: Code, fused: bool, amsgrad: bool, is_split: bool) -> None:
    """One pass has the bits of decoding, updating and encoding apart; so do pieces of whole pages, on any threads."""
    size, first = 5 * code.page_elements + 333, 17 * code.page_elements
    optimizer = make_optimizer(lr=1e-2, fused=fused, amsgrad=amsgrad)
    (group,), kernel = optimizer.param_groups, find(optimizer)
    assert kernel is not None
    names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
    generator = torch.Generator().manual_seed(0)
    plain = make_numbers(size, generator)
    compute, pages = plain.bfloat16(), {name: torch.full((code.nbytes(size),), 7, dtype=torch.uint8) for name in names}
    low_halves = torch.empty(low_halves_nbytes(size), dtype=torch.uint8)
    ours_compute = compute.clone()
    split(plain, ours_compute, low_halves, num_threads=1)
    ours = plain.clone()
    state: dict[str, Any] = {name: torch.empty(size) for name in names}
    expected = {name: torch.empty(code.nbytes(size), dtype=torch.uint8) for name in names}
    for step in range(NUM_STEPS):
        gradient = make_numbers(size, generator).bfloat16()
        seeds = {name: 1000 * step + number for number, name in enumerate(names)}
        state = kernel.update(group, state, plain, gradient, compute)
        for name in names:
            encode(code, state[name], expected[name], first=first, seed=seeds[name], drawn_from=plain)
            decode(code, expected[name], state[name])
        cut = 2 * code.page_elements
        pieces = [(0, cut), (cut, size)] if step == 1 and not is_split else [(0, size)]  # lower halves have other pages
        for start, stop in pieces:
            kernel.update_coded(
                group,
                None if step == 0 else float(step),
                {name: pages[name][code.nbytes(start) :][: code.nbytes(stop - start)] for name in names},
                code,
                low_halves if is_split else ours[start:stop],
                gradient[start:stop],
                ours_compute[start:stop],
                first=first + start,
                seeds=seeds,
                num_threads=2,
            )
        if is_split:
            join(low_halves, ours_compute, ours, num_threads=1)
        assert torch.equal(bits(ours), bits(plain))
        assert torch.equal(bits(ours_compute), bits(compute))
        assert all(torch.equal(pages[name], expected[name]) for name in names)


def test_gradients_that_are_not_finite() -> None:
    optimizer = make_optimizer()
    group, kernel = optimizer.param_groups[0], find(optimizer)
    assert kernel is not None
    gradient = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0] * 5).bfloat16()
    plain, master, compute = torch.ones(30), torch.ones(30), torch.empty(30, dtype=torch.bfloat16)
    state = shadow_step(optimizer, group, plain.detach(), gradient.float(), {})
    mine = kernel.update(group, {"exp_avg": torch.empty(30), "exp_avg_sq": torch.empty(30)}, master, gradient, compute)
    for left, right in ((plain, master), (plain.bfloat16(), compute), *((state[key], mine[key]) for key in mine)):
        assert torch.equal(left.nan_to_num(nan=7.0), right.nan_to_num(nan=7.0))
        assert torch.equal(left.isnan(), right.isnan())


def test_a_write_is_noticed_by_autograd() -> None:
    optimizer = make_optimizer()
    kernel = find(optimizer, gradient=torch.float32, compute=None)
    assert kernel is not None
    master, x = torch.ones(8), torch.ones(8, requires_grad=True)
    product = (x * master).sum()
    state = {"exp_avg": torch.empty(8), "exp_avg_sq": torch.empty(8)}
    kernel.update(optimizer.param_groups[0], state, master, torch.ones(8), None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize(
    ("optimizer", "dtypes"),
    [
        (torch.optim.SGD([torch.zeros(1)]), {}),
        (torch.optim.RAdam([torch.zeros(1)]), {}),
        (type("MyAdamW", (torch.optim.AdamW,), {})([torch.zeros(1)]), {}),
        (make_optimizer(capturable=True), {}),
        (make_optimizer(differentiable=True), {}),
        (make_optimizer(betas=(torch.tensor(0.9), torch.tensor(0.99))), {}),
        (make_optimizer(lr=torch.tensor(0.1, requires_grad=True)), {}),
        (make_optimizer(), {"master": torch.bfloat16}),
        (make_optimizer(), {"master": torch.float64}),
        (make_optimizer(), {"gradient": torch.float16}),
        (make_optimizer(), {"compute": torch.float16}),
    ],
)
def test_what_it_does_not_know_is_left_to_torch(optimizer: torch.optim.Optimizer, dtypes: dict[str, Any]) -> None:
    assert find(optimizer, **dtypes) is None


def test_a_fused_optimizer_that_a_gradient_scaler_steps_is_left_to_torch() -> None:
    optimizer = make_optimizer(fused=True)
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    assert find(optimizer) is None


def parts_of(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
    """Return the scalars of a state, and the dtypes of its moments."""
    moments = {key: value.dtype for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
    return {key: value for key, value in state.items() if key not in moments}, moments


def test_states_it_cannot_go_on_from() -> None:
    kernel = find(make_optimizer())
    assert kernel is not None
    moments = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    for state, is_known in (
        ({"step": torch.tensor(1.0), **moments}, True),
        ({"step": 1, **moments}, False),
        ({"exp_avg": torch.zeros(2)}, False),
        ({**moments, "exp_avg": torch.zeros(2, dtype=torch.float64)}, False),
        ({**moments, "more": torch.zeros(2)}, False),
        ({**moments, "more": 1}, False),
    ):
        assert kernel.takes(*parts_of(state)) is is_known


def test_a_kernel_with_other_bits_is_not_used(
    fresh_checks: dict[tuple[object, ...], bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    update = Kernel.update

    def be_off(self: Kernel, group: Any, state: Any, master: Tensor, *rest: Any, **options: Any) -> dict[str, Any]:
        new_state = update(self, group, state, master, *rest, **options)
        master[-1] = master[-1].nextafter(torch.tensor(9.0))
        return new_state

    monkeypatch.setattr(Kernel, "update", be_off)
    optimizer = make_optimizer()
    assert find(optimizer) is None
    assert find(optimizer) is None
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "the compiled AdamW does not round as torch does here, and torch's is used"
    ]


def test_each_combination_is_checked_once(
    fresh_checks: dict[tuple[object, ...], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = make_optimizer()
    assert find(optimizer) is not None
    monkeypatch.setattr(fused_adamw, "_is_bitwise_plain", None)
    optimizer.param_groups[0]["lr"] = 0.5  # as a schedule does
    optimizer.param_groups[0]["betas"] = (0.85, 0.99)
    assert find(optimizer) is not None
    assert len(fresh_checks) == 1
