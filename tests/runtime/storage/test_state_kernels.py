"""Kernels for codes give the bits of torch: their source runs on a CPU and on a GPU, and compiles for three of these."""

import ctypes
import logging
import re
import shutil
import subprocess
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.runtime.storage.test_state_codes import KINDS, is_same, numbers
from zinf_compile.ir.copies import Code
from zinf_compile.runtime.native.compiled import find_compiler
from zinf_compile.runtime.storage import state_codes, state_kernels
from zinf_compile.runtime.storage.state_codes import decode, encode
from zinf_compile.runtime.storage.state_kernels import KERNELS, OPTIONS, SOURCE, StateKernels, load_state_kernels

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SIZES = (1, 257, 3841, 2048 * 3 + 5)
NUMBERS = {"long long": ctypes.c_longlong, "unsigned": ctypes.c_uint}
_SIZES = {"long long": 8, "unsigned": 4}
DRAWS: tuple[dict[str, Any], ...] = ({}, {"first": 2**40 + 61_440, "seed": 2**32 - 1, "draws": True})


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> StateKernels:
    """Return the kernels compiled for a CPU, behind a CuPy that runs them in two blocks of threads."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    lines, parameters = ['#include "cuda_on_cpu.hpp"', f'#include "{SOURCE}"'], {}
    for name in KERNELS:
        declared = re.search(rf"{name}\((.*?)\) {{", SOURCE.read_text(), re.DOTALL)
        assert declared is not None
        listed = [each.strip() for each in declared[1].replace("__restrict__", "").split(",")]
        parameters[name] = [" ".join(each.split()[:-1]) for each in listed]
        arguments = ", ".join(each.split()[-1].lstrip("*") for each in listed)
        lines.append(
            f'extern "C" void run_{name}(unsigned num_blocks, unsigned num_threads, {", ".join(listed)}) '
            f"{{ launch(num_blocks, num_threads, {name}, {arguments}); }}"
        )
    (folder / "kernels.cpp").write_text("\n".join(lines) + "\n")
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-ffp-contract=off"]
    files = ["-o", str(folder / "kernels.so"), str(folder / "kernels.cpp")]
    subprocess.run([*command, f"-I{Path(__file__).parent}", *files], check=True)
    library = ctypes.CDLL(str(folder / "kernels.so"))

    class Module:
        """What CuPy makes of a source."""

        def __init__(self, *, code: str, options: tuple[str, ...], backend: str) -> None:
            assert (code, options, backend) == (SOURCE.read_text(), OPTIONS, "nvrtc")

        def compile(self) -> None:
            """Do nothing: it is compiled."""

        def get_function(self, name: str) -> Callable[..., None]:
            def run(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...], *, stream: object) -> None:
                assert stream == (0, 77)
                given = [*zip(parameters[name], arguments, strict=True)]
                assert all(value.nbytes == _SIZES.get(kind, 8) for kind, value in given)
                called = [NUMBERS.get(kind, ctypes.c_void_p)(int(value)) for kind, value in given]
                assert 1 <= grid[0] <= 16
                assert block == (256,)
                # Each of its threads is one of the system's: fewer of them do the same.
                getattr(library, f"run_{name}")(ctypes.c_uint(min(grid[0], 2)), ctypes.c_uint(24), *called)

            return run

    cuda = SimpleNamespace(
        Device=lambda index: nullcontext(),
        Stream=SimpleNamespace(from_external=lambda stream: stream.__cuda_stream__()),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=2))
        return StateKernels(SimpleNamespace(RawModule=Module, cuda=cuda), torch.device("cuda", 0))


@pytest.fixture
def on_a_gpu(kernels: StateKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of a CPU be those of a GPU with these kernels."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=77))
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


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("no module named cupy"), r"no module named cupy.*pip install 'zinf_compile\[cuda\]'"),
        (RuntimeError("no NVRTC"), "cannot compile state_codes.cu: no NVRTC"),
    ],
)
def test_why_there_are_no_kernels_is_logged_once(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    compiler = SimpleNamespace(CompileException=ValueError)
    cupy = SimpleNamespace(RawModule=fail, cuda=SimpleNamespace(compiler=compiler, Device=lambda _: nullcontext()))
    found = fail if isinstance(error, ImportError) else lambda _: cupy
    monkeypatch.setattr(state_kernels.importlib, "import_module", found)
    load_state_kernels.cache_clear()
    state_kernels._tell.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert all(load_state_kernels(torch.device("cuda", each)) is None for each in (0, 1, 0))
    assert len(caplog.records) == 1
    assert re.search(said, caplog.text)
    load_state_kernels.cache_clear()
    assert load_state_kernels(torch.device("cpu")) is None


def test_tensors_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="values on cpu are no bytes of int8 on meta"):
        encode(Code.INT8, torch.zeros(10), torch.zeros(4096, dtype=torch.uint8, device="meta"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_source_compiles(architecture: str, tmp_path: Path) -> None:
    compiler = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if compiler is None:
        pytest.skip("there is no nvcc to compile for a GPU with")
    command = [compiler, *OPTIONS, f"-arch={architecture}", "--Werror=all-warnings", "-cubin"]
    subprocess.run([*command, "-o", str(tmp_path / "kernels.cubin"), str(SOURCE)], check=True)
    assert all(name.encode() in (tmp_path / "kernels.cubin").read_bytes() for name in KERNELS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_source_compiles_at_run_time(architecture: str) -> None:
    """NVRTC has no standard headers."""
    nvrtc = _load_nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text, name = SOURCE.read_bytes(), SOURCE.name.encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None) == 0
    options = [option.encode() for option in (*OPTIONS, f"-arch={architecture}")]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    assert nvrtc.nvrtcDestroyProgram(ctypes.byref(program)) == 0


def _load_nvrtc() -> ctypes.CDLL:
    site_packages = Path(torch.__file__).parents[1]
    places = (site_packages / "nvidia").glob("*/lib/libnvrtc.so.*"), Path("/usr/local/cuda/lib64").glob("libnvrtc.so.*")
    found = [file for place in places for file in sorted(place)]
    if not found:
        pytest.skip("there is no NVRTC to compile for a GPU with")
    return ctypes.CDLL(str(found[0]))


def test_every_kernel_is_listed() -> None:
    assert {file.name for file in SOURCE.parent.glob("*.cu")} == {SOURCE.name}
    declared = re.findall(r'extern "C" __global__ void __launch_bounds__\(256\) (\w+)\(', SOURCE.read_text())
    assert sorted(declared) == sorted(KERNELS)


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
