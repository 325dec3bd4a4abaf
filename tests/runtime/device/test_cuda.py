"""The calls that a device makes to torch: streams, events, pinned memory, limits. A fake ``torch.cuda`` records them."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.fake_device import AutogradThread
from tests.support.small_training import train
from zinf_compile.ir.config import FoundDevice, make_config
from zinf_compile.ir.errors import CapacityError, ConfigError
from zinf_compile.ir.hardware import MemorySpace
from zinf_compile.runtime.device import cuda as cuda_module
from zinf_compile.runtime.device import device as device_module
from zinf_compile.runtime.device.allocations import largest_budget
from zinf_compile.runtime.device.cpu import CPU
from zinf_compile.runtime.device.cuda import CudaDevice
from zinf_compile.runtime.device.device import Device
from zinf_compile.runtime.device.make_device import find_device
from zinf_compile.runtime.transfer import link as link_module
from zinf_compile.runtime.transfer.link import Link
from zinf_compile.runtime.transfer.transfers import Transfers

KIB, MIB, GIB = 2**10, 2**20, 2**30
UUID = "4a9f0d1c-1c4e-5a0b-9d7e-2f6c8b3a1e55"


class StandIn:
    """The part of ``torch.cuda`` that a device uses; ``calls`` records what was called.

    Each thread has a current GPU, at first the first one. The last of ``count`` is the one that computes, and work of it on
    a thread whose current GPU is another is an error: CUDA would make a context there.
    """

    def __init__(self, *, count: int = 1, free: int = 8 * GIB, refusal: int = 0) -> None:
        self.calls: list[str] = []
        self._thread = threading.local()
        self.used_by: set[str] = set()  # names of threads
        self.misplaced: list[str] = []  # work on a thread whose current GPU is another; some threads keep errors
        self.count, self.free, self.refusal = count, free, refusal
        self.total = 16 * GIB
        self.is_integrated, self.major = False, 8
        self.current = "stream 0"
        self.num_streams = 0
        self.fraction = 1.0
        self.has_happened = False  # every event, as long as nobody waits for it
        self.chosen: list[tuple[str, object]] = []  # threads, and the device that each has chosen for itself
        self.settings: list[str] = []
        self.backend = "native"
        self.stats = {
            "requested_bytes.all.current": GIB - 3,
            "requested_bytes.all.peak": 2 * GIB - 3,
            "allocated_bytes.all.current": GIB,
            "allocated_bytes.all.peak": 2 * GIB,
        }
        outer = self

        class Event:
            def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
                assert blocking, "a thread that waits must not spin"
                self.is_timed, self.milliseconds = enable_timing, 0.0

            def synchronize(self) -> None:
                outer.use("waiting for an event", is_guarded=True)
                outer.calls.append("synchronize event")

            def query(self) -> bool:
                outer.use("a query of an event", is_guarded=True)
                return outer.has_happened

            def elapsed_time(self, later: "Event") -> float:
                assert self.is_timed
                assert later.is_timed
                return later.milliseconds - self.milliseconds

        class Stream:
            def __init__(self, device: Any = None, name: str | None = None) -> None:
                if name is None:
                    outer.num_streams += 1
                self.name = name or f"stream {outer.num_streams}"
                self.device = torch.device("cuda", outer._index_of(device))

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Stream) and self.name == other.name

            def __hash__(self) -> int:
                return hash(self.name)

            def wait_event(self, event: Event) -> None:
                outer.use(f"a wait of {self.name}", is_guarded=True)
                outer.calls.append(f"{self.name} waits for an event")

            def wait_stream(self, other: "Stream") -> None:
                outer.calls.append(f"{self.name} waits for {other.name}")

            def record_event(self, event: Event) -> Event:
                outer.use(f"an event of {self.name}", is_guarded=True)
                outer.calls.append(f"{self.name} records")
                return event

        self.Event, self.Stream = Event, Stream
        self.cudart = lambda: SimpleNamespace(
            cudaHostRegister=self._register,
            cudaHostUnregister=self._unregister,
            cudaGetErrorString=lambda code: f"error {code}",
        )

    def use(self, what: str, *, is_guarded: bool = False) -> None:
        """Raise AssertionError if the current GPU of the calling thread is not the one that computes.

        The user's thread may have any for what is guarded: torch chooses the right one itself. Ours choose it first.
        """
        thread, current = threading.current_thread(), self.current_device()
        if current != self.count - 1 and not (is_guarded and thread is threading.main_thread()):
            self.misplaced.append(
                f"{what} of GPU {self.count - 1} on {thread.name}, whose current one is GPU {current}"
            )
            raise AssertionError(self.misplaced[-1])
        self.used_by.add(thread.name)

    def current_device(self) -> int:
        return getattr(self._thread, "current", 0)

    def set_device(self, device: object) -> None:
        self.chosen.append((threading.current_thread().name, device))
        self._thread.current = self._index_of(device)

    def _index_of(self, device: Any) -> int:
        """Return the index of a GPU. It is called "cpu" where the tensors of the one that computes are there."""
        if isinstance(device, int):
            return device
        return self.count - 1 if device == torch.device("cpu") else torch.device(device).index or 0

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.use(f"work on {stream.name}")  # at the end torch chooses the GPU from before
        self.calls.append(f"on {stream.name}")
        yield

    @contextlib.contextmanager
    def device(self, device: object) -> Iterator[None]:
        before, self._thread.current = self.current_device(), self._index_of(device)
        try:
            yield
        finally:
            self._thread.current = before

    def current_stream(self, device: object) -> Any:
        return self.Stream(device, name=self.current)

    def __getattr__(self, name: str) -> Any:
        return {
            "is_available": lambda: self.count > 0,
            "device_count": lambda: self.count,
            "get_device_properties": lambda device: SimpleNamespace(
                total_memory=self.total, uuid=UUID, is_integrated=int(self.is_integrated), major=self.major
            ),
            "empty_cache": lambda: self.calls.append("empty cache"),
            "mem_get_info": lambda device: (self.free, self.total),
            "memory_reserved": lambda device: 2 * GIB,
            "memory_allocated": lambda device: GIB,
            "max_memory_reserved": lambda device: 3 * GIB,
            "memory_stats": lambda device: self.stats,
            "get_allocator_backend": lambda: self.backend,
            "reset_peak_memory_stats": lambda device: self.calls.append("reset peak"),
            "set_per_process_memory_fraction": self._limit,
            "get_per_process_memory_fraction": lambda device: self.fraction,
            "synchronize": lambda device: self.calls.append("synchronize device"),
        }[name]

    def _limit(self, fraction: float, device: object) -> None:
        self.fraction = fraction

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        self.use("registering memory")
        return self.refusal

    def _unregister(self, address: int) -> None:
        self.use("unregistering memory")
        self.calls.append("unregister")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(torch, "cuda", stand_in)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", stand_in.settings.append)
    return stand_in


def test_no_gpu_or_none_of_that_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", StandIn(count=0))
    with pytest.raises(ConfigError, match=r"device='cuda' asks for an NVIDIA GPU, but torch .*; give device='cpu'"):
        CudaDevice("cuda")
    monkeypatch.setattr(torch, "cuda", StandIn(count=2))
    with pytest.raises(ConfigError, match=r"device='cuda:2' does not exist: torch finds 2 GPUs, the last is 'cuda:1'"):
        CudaDevice("cuda:2")
    assert CudaDevice("cuda:1").torch_device == torch.device("cuda:1")
    assert CudaDevice("cuda").torch_device == torch.device("cuda:0")


def test_copies_are_told_to_their_streams(cuda: StandIn) -> None:
    device = CudaDevice("cuda")
    sources = [torch.arange(length, dtype=torch.uint8) for length in (16, 8, 1)]
    destinations = [torch.zeros_like(source) for source in sources]
    ready = device.compute.record()
    device.copies.to_device.wait(ready)
    device.copies.to_device.copy_all(zip(sources, destinations, strict=True))
    arrived = device.copies.to_device.record()
    device.compute.wait(arrived)
    assert all(map(torch.equal, sources, destinations))
    own = [line for line in cuda.calls if line != "synchronize event"]
    assert own == [
        "stream 0 records",
        "stream 1 waits for an event",
        "on stream 1",  # once, for all three copies
        "stream 1 records",
        "stream 0 waits for an event",
    ]
    assert (
        len(
            {
                device.copies.to_device.stream.name,
                device.copies.to_host.stream.name,
                device.update.stream.name,
                "stream 0",
            }
        )
        == 4
    )
    arrived.wait()
    assert cuda.calls[-1] == "synchronize event"


def test_compute_is_followed_to_another_stream(cuda: StandIn) -> None:
    device = CudaDevice("cuda")
    device.follow()
    before = device.compute
    device.follow()
    assert device.compute is before
    assert cuda.calls == []
    cuda.current = "stream 7"
    assert device.compute is before, "only follow() changes it: background threads have a current stream of their own"
    device.follow()
    assert device.compute.stream.name == "stream 7"
    assert cuda.calls == ["stream 7 waits for stream 0"]
    with device.selected():
        assert cuda.calls[-1] == "on stream 7"
    with device.updating():
        assert cuda.calls[-1] == f"on {device.update.stream.name}"


def test_timed_events_tell_seconds(cuda: StandIn) -> None:
    device = CudaDevice("cuda")
    start, end = device.compute.record(timed=True), device.compute.record(timed=True)
    end.event.milliseconds = 250.0
    assert start.seconds_until(end) == 0.25


def test_pinning_that_is_refused_says_why(cuda: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice("cuda")

    def fail(*args: object, **kwargs: object) -> None:
        cuda.calls.append("a kernel that is blamed")
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", fail)
    assert device.pin(4096, 8192) is None
    device.unpin(4096)
    assert cuda.calls == ["synchronize device", "unregister"]
    cuda.refusal = 2
    assert device.pin(4096, 8192) == "error 2"
    assert cuda.calls[-1] == "a kernel that is blamed", "a kernel of ours must consume the error that CUDA remembers"


def test_memory_is_pinned_for_the_device_that_computes(cuda: StandIn) -> None:
    cuda.count = 2
    device = CudaDevice("cuda:1")
    device.pin(4096, 8192)
    device.unpin(4096)
    assert cuda.used_by == {"MainThread"}
    assert cuda.current_device() == 0


def test_a_thread_begins_on_the_device_that_computes(cuda: StandIn) -> None:
    """It would have the first one: waiting for an event there would make a context on it."""
    cuda.count = 2
    link = Link(CudaDevice("cuda:1"))
    source, destination = torch.arange(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    with cuda.device("cuda:1"):
        link.bring(source, destination, behind=link.mark()).done.result(60)
        link.take(source, destination).done.result(60)
        link.close()
    assert cuda.chosen == [("zinf-to-device", torch.device("cuda:1")), ("zinf-to-host", torch.device("cuda:1"))]
    assert cuda.used_by == {"MainThread", "zinf-to-device", "zinf-to-host"}
    with CudaDevice("cuda:1").selected():
        assert cuda.current_device() == 1
    assert cuda.current_device() == 0


class WithCuda:
    """The module ``torch`` with another ``torch.cuda``, for one module that uses it."""

    def __init__(self, cuda: StandIn) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class SecondGpu(CudaDevice):
    """The second of two GPUs, whose tensors are on the CPU."""

    def __init__(self, cuda: StandIn) -> None:
        super().__init__("cuda:1")
        self._cuda = cuda
        self.torch_device = torch.device("cpu")

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory."""
        self._cuda.use("an allocation", is_guarded=True)
        return super().allocate(shape, dtype)


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Models are on the second of two GPUs, and autograd runs backward on a thread of that GPU."""
    cuda = StandIn(count=2)
    for module in (cuda_module, device_module):
        monkeypatch.setattr(module, "torch", WithCuda(cuda))
    device = SecondGpu(cuda)
    begin, wait, engine = device_module.use_on_this_thread, Transfers.wait_gather, torch.autograd._engine_run_backward
    autograd = AutogradThread()

    def make(name: str) -> Device:
        return CPU if name == "cpu" else device

    def wait_gather(transfers: Transfers, *args: Any) -> Any:
        cuda.use("an op of a graph")
        return wait(transfers, *args)

    def backward(*args: Any, **kwargs: Any) -> Any:
        with cuda.device("cuda:1"):
            return engine(*args, **kwargs)

    monkeypatch.setattr("zinf_compile.runtime.store.store.make_device", make)
    monkeypatch.setattr("zinf_compile.runtime.device.make_device.make_device", make)
    monkeypatch.setattr(link_module, "use_on_this_thread", lambda _: begin(torch.device("cuda:1")))
    monkeypatch.setattr(Transfers, "wait_gather", wait_gather)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", partial(autograd.run, backward))
    yield cuda
    autograd.close()


# How a small model trains, and threads that then work for the device.
WAYS = {
    "resident": ({"device_memory": 64 * MIB, "update_on": "device"}, {"update"}),
    "offloaded": ({"num_micro_steps": 2, "update_on": "host"}, {"to-host", "to-device"}),
    "on disk": ({"depth": 5, "host_memory": 700 * KIB, "update_on": "device"}, {"transfer", "update-to-host"}),
    "on disk, updated on the host": (
        {"depth": 5, "host_memory": 700 * KIB, "update_on": "host"},
        {"transfer", "update"},
    ),
    "ahead": ({"speculate": True, "depth": 3}, {"update", "update-to-host"}),
    "in backward": ({"step_in_backward": True, "update_on": "device"}, {"to-device"}),
    "at once": ({"overlap_step": False, "update_on": "device"}, {"to-device"}),
}
LONG = ("on disk, updated on the host", "in backward")


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.long) if way in LONG else way for way in WAYS])
def test_all_work_is_for_the_second_of_two_gpus(second_gpu: StandIn, tmp_path: Path, way: str) -> None:
    """The first is the current one of the user's thread, and of every thread when it begins."""
    changed, workers = WAYS[way]
    budgets = {"device_memory": 900 * KIB, "host_memory": 64 * MIB, "nvme": tmp_path, "tiles": False, "compute": "aten"}
    train(**{"width": 96, "depth": 2, **budgets, "device": "cuda:1", **changed})
    assert second_gpu.misplaced == []
    names = {name.removeprefix("zinf-").rstrip("_0123456789") for name in second_gpu.used_by}
    assert names >= {"MainThread", "fake-autograd"} | workers


def test_two_gpus_are_two_devices(cuda: StandIn) -> None:
    """Their rates are measured apart, also by a cache that has those of the other one."""
    cuda.count = 2
    assert CudaDevice("cuda:0") == CudaDevice("cuda") != CudaDevice("cuda:1")
    assert len({CudaDevice("cuda:0"), CudaDevice("cuda"), CudaDevice("cuda:1")}) == 2


@pytest.mark.parametrize("chosen", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", None])
def test_segments_are_expandable_unless_a_user_chooses(
    cuda: StandIn, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    if chosen is not None:
        monkeypatch.setenv(chosen, "backend:native")
    CudaDevice("cuda")
    assert cuda.settings == ([] if chosen else ["expandable_segments:True"])


def test_memory_is_asked_of_torch_and_limited(cuda: StandIn) -> None:
    device = CudaDevice("cuda")
    assert device.free_nbytes == 8 * GIB + 2 * GIB - GIB
    assert (device.allocated_nbytes, device.peak_reserved_nbytes) == (GIB, 3 * GIB)
    device.limit(4 * GIB)
    assert cuda.fraction == 0.25
    device.limit(32 * GIB)
    assert cuda.fraction == 1.0
    device.limit(GIB)
    device.limit(None)
    assert cuda.fraction == 1.0
    cuda.fraction = 0.5  # the user's
    device.limit(32 * GIB)
    assert cuda.fraction == 0.5
    device.limit(2 * GIB)
    device.limit(None)
    device.limit(None)
    assert cuda.fraction == 0.5
    device.give_back()
    assert cuda.calls[-1] == "empty cache"
    device.forget_peak()
    assert cuda.calls[-1] == "reset peak"


def test_bytes_of_tensors_are_those_that_were_requested(cuda: StandIn) -> None:
    """Of a block of torch's allocator up to 1 MiB is not the tensor's. CUDA's own allocator counts no requests."""
    device = CudaDevice("cuda")
    assert (device.requested_nbytes, device.peak_requested_nbytes) == (GIB - 3, 2 * GIB - 3)
    cuda.backend = "cudaMallocAsync"
    cuda.stats |= {"requested_bytes.all.current": 0, "requested_bytes.all.peak": 0}
    assert (device.requested_nbytes, device.peak_requested_nbytes) == (GIB, 2 * GIB)


def test_what_is_free_is_no_more_than_a_user_allows(cuda: StandIn) -> None:
    """Else a budget would fit in the memory of the device, and the allocator would refuse it in the middle of a step."""
    device = CudaDevice("cuda")
    cuda.fraction = 0.25  # the user's: 4 GiB, of which 2 are reserved and 1 is allocated
    assert device.free_nbytes == 3 * GIB
    device.limit(GIB)
    assert device.free_nbytes == 3 * GIB, "our limit is not the user's"
    device.limit(None)
    cuda.fraction = 0.0625
    assert device.free_nbytes == GIB, "what is reserved already"
    assert find_device("cuda").largest_budget == largest_budget(GIB)


def test_a_slice_of_a_gpu_is_limited_by_its_own_memory(cuda: StandIn) -> None:
    """The allocator takes the fraction of what the properties say, which of a slice (MIG) is the memory of the slice."""
    cuda.total = 10 * GIB
    device = CudaDevice("cuda")
    device.limit(5 * GIB)
    assert cuda.fraction == 0.5
    assert device.identity == UUID


def test_memory_that_others_have_taken(cuda: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice("cuda")
    cuda.free = GIB

    def refuse(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(
        CapacityError,
        match=r"no 4.00 GiB left: 1.00 GiB of 16.00 GiB are free, this process holds 2.00 GiB and others hold 13.00 GiB",
    ):
        device.allocate([GIB], torch.float32)


class Driver:
    """The part of CUDA's driver that is asked whether kernels find registered memory at the host's address."""

    def __init__(self, *, can: int, failed: int = 0) -> None:
        self.can, self.failed = can, failed

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        return self.failed

    def cuDeviceGetAttribute(self, found: Any, attribute: int, device: Any) -> int:  # noqa: N802
        assert attribute == 91
        found._obj.value = self.can
        return 0


@pytest.mark.parametrize(
    ("is_integrated", "driver", "expected"),
    [
        (True, Driver(can=1), True),
        (True, Driver(can=0), False),
        (True, Driver(can=1, failed=100), False),
        (True, None, False),
        (False, Driver(can=1), False),
    ],
    ids=["integrated", "other addresses", "error", "no driver", "apart"],
)
def test_an_integrated_gpu_reads_host_memory_in_place(
    cuda: StandIn, monkeypatch: pytest.MonkeyPatch, is_integrated: bool, driver: Driver | None, expected: bool
) -> None:
    def load(name: str) -> Driver:
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(cuda_module.ctypes, "CDLL", load)
    monkeypatch.setattr(cuda_module, "free_memory", lambda: 20 * GIB)
    cuda.is_integrated, cuda.total = is_integrated, 32 * GIB
    device = CudaDevice("cuda")
    assert device.memory == MemorySpace(unified=False, integrated=expected)
    assert device.memory.is_in_ram == expected
    assert device.free_nbytes == (20 if expected else 8) * GIB + 2 * GIB - GIB
    home = torch.arange(12.0).view(3, 4)
    device.torch_device = torch.device("cpu")  # here the same addresses are those of a CPU's tensor
    alias = device.in_place(home[1:])
    home[1] = 7
    assert torch.equal(alias, home[1:])
    assert alias.data_ptr() == home[1:].data_ptr()


@pytest.mark.parametrize(
    ("major", "variable", "nbytes"),
    [
        (8, None, 2 * (8 * 2**20 + 2**17)),
        (9, None, 2 * 32 * 2**20),
        (12, "wrong", 2 * 32 * 2**20),
        (9, ":4096:8", 2 * 32 * 2**20),
        (9, ":4096:2:16:8", 2 * (8 * 2**20 + 2**17)),
        (9, ":0:0", 0),
    ],
)
def test_plans_leave_room_for_workspaces_of_cublas(
    cuda: StandIn, monkeypatch: pytest.MonkeyPatch, major: int, variable: str | None, nbytes: int
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", variable)
    cuda.major = major
    device = CudaDevice("cuda")
    assert device.libraries_nbytes == nbytes
    found = FoundDevice(memory=device.memory, largest_budget=8 * GIB, libraries_nbytes=device.libraries_nbytes)
    budgets = {"device": "cuda", "device_memory": "1GiB", "host_memory": "1GiB", "reserve_memory": "auto"}
    assert make_config(budgets, find_device=lambda name: found).reserve_memory == nbytes
    assert make_config({**budgets, "reserve_memory": 5}, find_device=lambda name: found).reserve_memory == 5
    tiny = {**budgets, "device_memory": "255MiB"}
    assert make_config(tiny, find_device=lambda name: found).reserve_memory == 0
