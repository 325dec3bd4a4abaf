"""Kernels match torch: their sources run on a CPU, compile for three architectures, and run on a GPU if there is one."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.native.compiled import find_compiler
from zinf_compile.runtime.optim import kernels
from zinf_compile.runtime.optim.kernels import (
    KERNELS,
    OPTIONS,
    QUANTIZED_BLOCK,
    SOURCES,
    AdamWScalars,
    dequantize,
    fused_adamw,
    pack_gradient,
    quantize,
)

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SIZES = (1, 3, 4, 255, 1024, 4 * QUANTIZED_BLOCK + 13)
SCALARS = AdamWScalars(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=3)
# Tolerance for fused multiply-adds in a few float32 operations: CUDA compilers use them where they can, torch's CPU kernels
# elsewhere. Where terms cancel, errors are relative to the terms.
MERGED = {"rtol": 1e-6, "atol": 1e-8}
ROUNDING = 2.0**-22  # half a unit in the last place of values from 4 to 8, the largest of four million drawn ones

Launch = Callable[..., None]


@pytest.fixture(scope="module", params=sorted(KERNELS))
def source(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Return a function that runs a kernel on CPU tensors: in one block of 64 threads, or in the given number of blocks."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    lines = ['#include "cuda_on_cpu.hpp"', *(f'#include "{SOURCES / file}"' for file in KERNELS)]
    for file, names in KERNELS.items():
        for name in names:
            declared = re.search(rf"{name}\((.*?)\) {{", (SOURCES / file).read_text(), re.DOTALL)
            assert declared is not None
            parameters = declared[1].replace("__restrict__", "")
            arguments = ", ".join(parameter.split()[-1].lstrip("*") for parameter in parameters.split(","))
            lines.append(
                f'extern "C" void run_{name}(unsigned num_blocks, unsigned num_threads, {parameters}) '
                f"{{ launch(num_blocks, num_threads, {name}, {arguments}); }}"
            )
    (folder / "kernels.cpp").write_text("\n".join(lines) + "\n")
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-ffp-contract=off"]
    command += [
        f"-I{Path(__file__).parent}",
        f"-I{SOURCES}",
        "-o",
        str(folder / "kernels.so"),
        str(folder / "kernels.cpp"),
    ]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "kernels.so"))

    def run(name: str, tensors: tuple[Tensor, ...], floats: tuple[float, ...] = (), *, num_blocks: int = 1) -> None:
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        scalars = [ctypes.c_longlong(tensors[0].numel()), *map(ctypes.c_float, floats)]
        getattr(library, f"run_{name}")(ctypes.c_uint(num_blocks), ctypes.c_uint(64), *pointers, *scalars)

    return run


def make_states(size: int, device: str = "cpu") -> tuple[Tensor, ...]:
    """Return master, mean, square, gradient, compute copy and factors."""
    generator = torch.Generator().manual_seed(size)
    master, mean, gradient = (torch.randn(size, generator=generator) for _ in range(3))
    square = torch.rand(size, generator=generator)
    states = (
        master,
        mean,
        square,
        gradient.bfloat16(),
        torch.zeros(size, dtype=torch.bfloat16),
        torch.tensor([0.5, 0.25]),
    )
    return tuple(tensor.to(device) for tensor in states)


def make_packed(size: int, num_blocks: int) -> tuple[Tensor, ...]:
    """Return buffers for a packed gradient, partial sums and the flag."""
    return (
        torch.zeros(size, dtype=torch.bfloat16),
        torch.zeros(num_blocks, dtype=torch.float64),
        torch.zeros((), dtype=torch.int32),
    )


@pytest.mark.parametrize("size", SIZES)
def test_adamw_on_a_cpu_is_what_torch_does(launch: Launch, size: int) -> None:
    ours, expected = make_states(size), make_states(size)
    launch("zinf_fused_adamw", ours, SCALARS.as_floats(), num_blocks=2)
    fused_adamw(*expected, SCALARS)
    for found, wanted in zip(ours[:4], expected[:4], strict=True):
        torch.testing.assert_close(found, wanted, **MERGED)
    assert torch.equal(ours[4], ours[0].bfloat16())


def test_the_reference_of_adamw_is_adamw() -> None:
    master, mean, square, gradient, compute, factors = make_states(1000)
    parameter = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    moments = {"exp_avg": mean.clone(), "exp_avg_sq": square.clone()}
    optimizer.state[parameter] = {"step": torch.tensor(SCALARS.step - 1.0), **moments}
    parameter.grad = gradient.float() * 0.5 * 0.25
    optimizer.step()
    fused_adamw(master, mean, square, gradient, compute, factors, SCALARS)
    state = optimizer.state[parameter]
    for found, wanted in ((master, parameter), (mean, state["exp_avg"]), (square, state["exp_avg_sq"])):
        torch.testing.assert_close(found, wanted.detach(), **MERGED)


@pytest.mark.parametrize("size", SIZES)
def test_a_gradient_on_a_cpu_is_packed_as_torch_does(launch: Launch, size: int) -> None:
    gradient = make_states(size)[0] * 1e3
    expected = pack_gradient(gradient)
    packed, partials, flag = make_packed(size, num_blocks=3)
    launch("zinf_pack_gradient", (gradient, packed, partials, flag), num_blocks=3)
    assert torch.equal(packed, expected.values)
    torch.testing.assert_close(partials.sum(), expected.square_sum, rtol=1e-14, atol=0)
    assert flag.item() == expected.is_not_finite.item() == 0


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 1030])  # inside a vector, and after the last one
def test_what_is_not_finite_is_found(launch: Launch, value: float, place: int) -> None:
    gradient = make_states(1031)[0]
    gradient[place] = value
    expected = pack_gradient(gradient)
    packed, partials, flag = make_packed(1031, num_blocks=2)
    launch("zinf_pack_gradient", (gradient, packed, partials, flag), num_blocks=2)
    assert flag.item() == expected.is_not_finite.item() == 1
    torch.testing.assert_close(packed, expected.values, rtol=0, atol=0, equal_nan=True)


def test_the_largest_gradients_are_finite() -> None:
    assert pack_gradient(torch.full((8,), torch.finfo(torch.float32).max)).is_not_finite.item() == 0


@pytest.mark.parametrize("size", SIZES)
def test_values_on_a_cpu_are_quantized_as_torch_does(launch: Launch, size: int) -> None:
    values = make_states(size)[0]
    values[size // 2] = 0
    codes, scales = torch.zeros(size, dtype=torch.int8), torch.zeros(-(-size // QUANTIZED_BLOCK))
    launch("zinf_quantize", (values, codes, scales), num_blocks=2)
    expected = quantize(values)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scales, expected[1])
    back = torch.zeros(size)
    launch("zinf_dequantize", (codes, scales, back), num_blocks=2)
    assert torch.equal(back, dequantize(codes, scales))
    assert bool(((back - values).abs() <= 0.5001 * scales.repeat_interleave(QUANTIZED_BLOCK)[:size]).all())


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e-45])
def test_blocks_of_what_has_no_codes(launch: Launch, value: float) -> None:
    values = torch.ones(2 * QUANTIZED_BLOCK)
    values[:QUANTIZED_BLOCK] = 0
    values[5] = value
    codes, scales = torch.zeros_like(values, dtype=torch.int8), torch.zeros(2)
    launch("zinf_quantize", (values, codes, scales))
    expected = quantize(values)
    assert torch.equal(codes, expected[0])
    torch.testing.assert_close(scales, expected[1], rtol=0, atol=0, equal_nan=True)
    back = dequantize(codes, scales)
    assert bool((back[QUANTIZED_BLOCK:] == 1).all())
    assert bool(back[:QUANTIZED_BLOCK].isnan().all()) == (value != 1e-45)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sources_compile(source: str, architecture: str, tmp_path: Path) -> None:
    compiler = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if compiler is None:
        pytest.skip("there is no nvcc to compile for a GPU with")
    command = [compiler, *OPTIONS, f"-arch={architecture}", "--Werror=all-warnings", "-cubin"]
    subprocess.run([*command, "-o", str(tmp_path / "kernels.cubin"), str(SOURCES / source)], check=True)
    assert all(name.encode() in (tmp_path / "kernels.cubin").read_bytes() for name in KERNELS[source])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sources_compile_at_run_time(source: str, architecture: str) -> None:
    """NVRTC has no standard headers."""
    nvrtc = _load_nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = (SOURCES / source).read_bytes()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), 0, None, None) == 0
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


def test_every_source_is_listed() -> None:
    assert {file.name for file in SOURCES.glob("*.cu")} == set(KERNELS)
    for file, names in KERNELS.items():
        declared = re.findall(
            r'extern "C" __global__ void __launch_bounds__\(256\) (\w+)\(', (SOURCES / file).read_text()
        )
        assert tuple(declared) == names


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"mean": torch.zeros(5)}, r"mean is a tensor torch.float32 \[5\]"),
        ({"gradient": torch.zeros(4)}, r"gradient is a tensor torch.float32 .* has to be torch.bfloat16 \[4\]"),
        ({"square": torch.zeros(2, 2)}, r"square is a tensor"),
        ({"compute": torch.zeros(8, dtype=torch.bfloat16)[::2]}, "compute .* contiguous"),
        ({"factors": torch.ones(1)}, r"factors .* has to be torch.float32 \[2\]"),
        ({"master": torch.zeros(4, device="meta")}, "on meta"),
    ],
)
def test_wrong_tensors_are_refused(change: dict[str, Tensor], complaint: str) -> None:
    names = ("master", "mean", "square", "gradient", "compute", "factors")
    given: dict[str, Any] = dict(zip(names, make_states(4), strict=True)) | change
    with pytest.raises(ValueError, match=complaint):
        fused_adamw(**given, scalars=SCALARS)


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_import(name: str) -> None:
        raise ImportError(f"no module named {name}")

    monkeypatch.setattr(kernels.importlib, "import_module", cannot_import)
    with pytest.raises(UnsupportedError, match=r"pip install 'zinf_compile\[cuda\]'"):
        kernels._load_cupy()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("size", [*SIZES, 2**22 + 5])
def test_kernels_on_a_gpu_are_what_torch_does(size: int) -> None:
    ours, expected = make_states(size, "cuda"), make_states(size)
    fused_adamw(*ours, SCALARS)
    fused_adamw(*expected, SCALARS)
    for found, wanted in zip(ours[:3], expected[:3], strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=MERGED["rtol"], atol=ROUNDING)
    assert torch.equal(ours[4], ours[0].bfloat16())
    packed, wanted_pack = pack_gradient(ours[0]), pack_gradient(ours[0].cpu())
    assert torch.equal(packed.values.cpu(), wanted_pack.values)
    torch.testing.assert_close(packed.square_sum.cpu(), wanted_pack.square_sum, rtol=1e-12, atol=0)
    codes, scales = quantize(ours[1])
    wanted_codes, wanted_scales = quantize(ours[1].cpu())
    assert torch.equal(codes.cpu(), wanted_codes)
    assert torch.equal(scales.cpu(), wanted_scales)
    assert torch.equal(dequantize(codes, scales).cpu(), dequantize(wanted_codes, wanted_scales))
