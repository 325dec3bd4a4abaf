"""The calls that a device makes to torch: streams, events, pinned memory, limits. A fake ``torch.cuda`` records them."""

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zinf_compile.ir.config import FoundDevice, make_config
from zinf_compile.ir.errors import CapacityError, ConfigError
from zinf_compile.ir.hardware import MemorySpace
from zinf_compile.runtime.device import cuda as cuda_module
from zinf_compile.runtime.device.allocations import largest_budget
from zinf_compile.runtime.device.cuda import CudaDevice
from zinf_compile.runtime.device.make_device import find_device
from zinf_compile.runtime.transfer.link import Link

GIB = 2**30
UUID = "4a9f0d1c-1c4e-5a0b-9d7e-2f6c8b3a1e55"


class StandIn:
    """The part of ``torch.cuda`` that a device uses; ``calls`` records what was called."""

    def __init__(self, *, count: int = 1, free: int = 8 * GIB, refusal: int = 0) -> None:
        self.calls: list[str] = []
        self.count, self.free, self.refusal = count, free, refusal
        self.total = 16 * GIB
        self.is_integrated, self.major = False, 8
        self.current = "stream 0"
        self.num_streams = 0
        self.fraction = 1.0
        self.has_happened = False  # every event, as long as nobody waits for it
        self.current_device_is: object = None
        self.chosen: list[tuple[str, object]] = []  # threads, and the device that each has chosen for itself
        self.registered_on: list[object] = []
        self.entered_on: list[object] = []  # the current devices where streams were chosen
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
                outer.calls.append("synchronize event")

            def query(self) -> bool:
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

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Stream) and self.name == other.name

            def __hash__(self) -> int:
                return hash(self.name)

            def wait_event(self, event: Event) -> None:
                outer.calls.append(f"{self.name} waits for an event")

            def wait_stream(self, other: "Stream") -> None:
                outer.calls.append(f"{self.name} waits for {other.name}")

            def record_event(self, event: Event) -> Event:
                outer.calls.append(f"{self.name} records")
                return event

        self.Event, self.Stream = Event, Stream
        self.cudart = lambda: SimpleNamespace(
            cudaHostRegister=self._register,
            cudaHostUnregister=lambda address: self.calls.append("unregister"),
            cudaGetErrorString=lambda code: f"error {code}",
        )

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append(f"on {stream.name}")
        self.entered_on.append(self.current_device_is)
        yield

    @contextlib.contextmanager
    def device(self, device: object) -> Iterator[None]:
        before, self.current_device_is = self.current_device_is, device
        yield
        self.current_device_is = before

    def current_stream(self, device: object) -> Any:
        return self.Stream(name=self.current)

    def __getattr__(self, name: str) -> Any:
        return {
            "is_available": lambda: self.count > 0,
            "device_count": lambda: self.count,
            "set_device": lambda device: self.chosen.append((threading.current_thread().name, device)),
            "current_device": lambda: 0,
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
        self.registered_on.append(self.current_device_is)
        return self.refusal


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
    CudaDevice("cuda:1").pin(4096, 8192)
    assert cuda.registered_on == [torch.device("cuda:1")]
    assert cuda.current_device_is is None


def test_a_thread_begins_on_the_device_that_computes(cuda: StandIn) -> None:
    """It would have the first one: waiting for an event there would make a context on it."""
    cuda.count = 2
    link = Link(CudaDevice("cuda:1"))
    source, destination = torch.arange(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    link.bring(source, destination, behind=link.mark()).done.result(60)
    link.take(source, destination).done.result(60)
    link.close()
    assert cuda.chosen == [("zinf-to-device", torch.device("cuda:1")), ("zinf-to-host", torch.device("cuda:1"))]
    with CudaDevice("cuda:1").selected():
        assert cuda.current_device_is == torch.device("cuda:1")
        assert cuda.entered_on[-1] == torch.device("cuda:1")
    assert cuda.current_device_is is None


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
