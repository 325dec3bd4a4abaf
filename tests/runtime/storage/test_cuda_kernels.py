"""Sources of kernels compile for three GPUs, every kernel is listed, and the log says where there are none."""

import ctypes
import logging
import re
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zinf_compile.runtime.storage import cuda_kernels
from zinf_compile.runtime.storage.cuda_kernels import FOLDER, OPTIONS, Kernels, load_kernels
from zinf_compile.runtime.storage.row_kernels import RowKernels
from zinf_compile.runtime.storage.state_kernels import StateKernels

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
KINDS = (StateKernels, RowKernels)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("no module named cupy"), r"no module named cupy.*pip install 'zinf_compile\[cuda\]'"),
        (RuntimeError("no NVRTC"), r"cannot compile \w+.cu: no NVRTC"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_why_there_are_no_kernels_is_logged_once(
    kind: type[Kernels],
    error: Exception,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    compiler = SimpleNamespace(CompileException=ValueError)
    cupy = SimpleNamespace(RawModule=fail, cuda=SimpleNamespace(compiler=compiler, Device=lambda _: nullcontext()))
    found = fail if isinstance(error, ImportError) else lambda _: cupy
    monkeypatch.setattr(cuda_kernels.importlib, "import_module", found)
    load_kernels.cache_clear()
    cuda_kernels._tell.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert all(load_kernels(kind, torch.device("cuda", each)) is None for each in (0, 1, 0))
    assert len(caplog.records) == 1
    assert caplog.messages[0].startswith(f"{kind.OF_TORCH} on the GPU by torch")
    assert re.search(said, caplog.text)
    load_kernels.cache_clear()
    assert load_kernels(kind, torch.device("cpu")) is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_source_compiles(kind: type[Kernels], architecture: str, tmp_path: Path) -> None:
    compiler = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if compiler is None:
        pytest.skip("there is no nvcc to compile for a GPU with")
    command = [compiler, *OPTIONS, f"-arch={architecture}", "--Werror=all-warnings", "-cubin"]
    subprocess.run([*command, "-o", str(tmp_path / "kernels.cubin"), str(kind.SOURCE)], check=True)
    assert all(name.encode() in (tmp_path / "kernels.cubin").read_bytes() for name in kind.NAMES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_source_compiles_at_run_time(kind: type[Kernels], architecture: str) -> None:
    """NVRTC has no standard headers."""
    nvrtc = _load_nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text, name = kind.SOURCE.read_bytes(), kind.SOURCE.name.encode()
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
    assert {file.name for file in FOLDER.glob("*.cu")} == {kind.SOURCE.name for kind in KINDS}
    for kind in KINDS:
        declared = re.findall(r'extern "C" __global__ void __launch_bounds__\(256\) (\w+)\(', kind.SOURCE.read_text())
        assert sorted(declared) == sorted(kind.NAMES)
