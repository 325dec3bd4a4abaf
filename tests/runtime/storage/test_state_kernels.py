"""Kernels for codes give the bits of torch: their source runs on a CPU and on a GPU."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.runtime.storage.test_state_codes import KINDS, is_same, numbers
from tests.support import cuda_on_cpu
from tests.support.cuda_on_cpu import compile_for_cpu
from zinf_compile.ir.copies import Code
from zinf_compile.runtime.storage import state_codes
from zinf_compile.runtime.storage.state_codes import decode, encode
from zinf_compile.runtime.storage.state_kernels import StateKernels, load_state_kernels

SIZES = (1, 257, 3841, 2048 * 3 + 5)
DRAWS: tuple[dict[str, Any], ...] = ({}, {"first": 2**40 + 61_440, "seed": 2**32 - 1, "draws": True})


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> StateKernels:
    """Return the kernels compiled for a CPU."""
    return compile_for_cpu(StateKernels, tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def on_a_gpu(kernels: StateKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of a CPU be those of a GPU with these kernels."""
    cuda_on_cpu.on_a_gpu(monkeypatch)
    monkeypatch.setattr(state_codes, "load_state_kernels", lambda _: kernels)


def options_of(draws: dict[str, Any], values: Tensor) -> dict[str, Any]:
    """Return arguments of ``encode``."""
    options = dict(draws)
    if options.pop("draws", False):
        options["drawn_from"] = torch.randn(values.shape, generator=torch.Generator().manual_seed(3)).to(values.device)
    return options


def encoded_and_decoded(
    code: Code, values: Tensor, draws: dict[str, Any], *, at: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return pages, and what they are decoded to; tensors begin ``at`` elements behind what is aligned."""
    size, nbytes = values.numel(), code.nbytes(values.numel())
    given = torch.zeros(size + at, device=device)[at:].copy_(values)
    pages = torch.full((nbytes + at,), 77, dtype=torch.uint8, device=device)[at:]
    back = torch.full((size + at + 1,), 99.0, device=device)
    encode(code, given, pages, **options_of(draws, given))
    decode(code, pages, back[at : at + size])
    assert back[at + size] == 99  # nothing is written behind the last element
    assert (back[:at] == 99).all()
    return pages.cpu(), back[at : at + size].cpu()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", Code)
def test_kernels_on_a_cpu_give_the_bits_of_compiled_code(
    code: Code, kind: str, kernels: StateKernels, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    wanted = [encoded_and_decoded(code, numbers(kind, size), draws) for size in SIZES for draws in DRAWS]
    request.getfixturevalue("on_a_gpu")
    found = [
        encoded_and_decoded(code, numbers(kind, size), draws, at=at)
        for size, at in zip(SIZES, (0, 1, 0, 3), strict=True)
        for draws in DRAWS
    ]
    for one, other in zip(found, wanted, strict=True):
        assert is_same(one[0], other[0])
        assert is_same(one[1], other[1])


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("code", Code)
def test_values_beside_what_is_rounded_to(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to each value of the data type, and to the middles between them."""
    values = torch.cat([state_codes.dynamic_values(signed=signed) for signed in (True, False)])
    values = torch.cat([values, (values[:-1] + values[1:]) / 2])
    bits = values.view(torch.int32)
    near = torch.cat([values, *((bits + step).view(torch.float32) for step in (-1, 1))]).nan_to_num(0)
    found = encoded_and_decoded(code, near, {})
    monkeypatch.undo()
    wanted = encoded_and_decoded(code, near, {})
    assert is_same(found[0], wanted[0])
    assert is_same(found[1], wanted[1])


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("code", Code)
def test_nothing_is_encoded(code: Code) -> None:
    pages, values = encoded_and_decoded(code, torch.zeros(0), {})
    assert pages.numel() == values.numel() == 0


@pytest.mark.parametrize("code", Code)
def test_torch_takes_their_place(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither kernels nor compiled code are, pages are encoded some at a time."""
    monkeypatch.setattr(state_codes, "_MOST_PAGES", 3)
    values = numbers("normal", 8 * code.page_elements - 5)
    wanted = encoded_and_decoded(code, values, DRAWS[1])
    monkeypatch.setattr(state_codes, "_library_on", lambda _: None)
    for at in (0, 1):
        found = encoded_and_decoded(code, values, DRAWS[1], at=at)
        assert is_same(found[0], wanted[0])
        assert is_same(found[1], wanted[1])


class _Held(TorchDispatchMode):
    """Counts the bytes that ops have allocated and somebody holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {
            tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        }
        for tensor in tree_leaves(made):
            if not isinstance(tensor, Tensor) or (storage := tensor.untyped_storage())._cdata in given | self._known:
                continue
            self._known.add(storage._cdata)
            self.held += storage.nbytes()
            self.most = max(self.most, self.held)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return made

    def _forget(self, storage: int, nbytes: int) -> None:
        self._known.discard(storage)
        self.held -= nbytes


@pytest.mark.parametrize("code", Code)
def test_what_torch_holds_is_no_more_than_an_update_does(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count six tensors of a chunk's size for the optimizer, which has freed its own by then, and the tables."""
    monkeypatch.setattr(state_codes, "_library_on", lambda _: None)
    values = numbers("normal", 40 * 30_720)
    pages = torch.empty(code.nbytes(values.numel()), dtype=torch.uint8)
    tables = state_codes._tables(torch.device("cpu"))
    assert tables.values.nbytes + tables.codes.nbytes == 2 * (2**18 + 2**10)
    for call in (lambda: encode(code, values, pages, drawn_from=values), lambda: decode(code, pages, values)):
        with _Held() as held:
            call()
        assert values.numel() / 3 < held.most < 24 * values.numel()


def test_tensors_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="values on cpu are no bytes of int8 on meta"):
        encode(Code.INT8, torch.zeros(10), torch.zeros(4096, dtype=torch.uint8, device="meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("is_torch", [False, True])
@pytest.mark.parametrize("code", Code)
def test_a_gpu_gives_the_bits_of_compiled_code(code: Code, is_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_torch:
        monkeypatch.setattr(state_codes, "load_state_kernels", lambda _: None)
    elif load_state_kernels(torch.device("cuda", 0)) is None:
        pytest.skip("CuPy compiles nothing")
    for kind in KINDS:
        for size in (*SIZES, 2**20 + 5):
            for at in (0, 1):
                wanted = encoded_and_decoded(code, numbers(kind, size), DRAWS[1])
                found = encoded_and_decoded(code, numbers(kind, size), DRAWS[1], at=at, device="cuda:0")
                assert is_same(found[0], wanted[0]), (kind, size)
                assert is_same(found[1], wanted[1]), (kind, size)
