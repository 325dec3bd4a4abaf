"""How long does the host take to enqueue work for a GPU: the forward and backward of a block, and the update of a chunk?

    python -m benchmarks.host_overhead [--only blocks|ops|updates] [--rounds 9]

Trains small models on a fake device whose streams do nothing, with tensors so small that their arithmetic takes hardly any
time: what is left is Python, and the launch of each op. Prints one JSON line per question, in microseconds:

``blocks``   a Llama of 32 blocks, compiled in segments, most of whose weights are streamed, over its number of blocks:
             ``forward`` and ``backward``, medians and all steps. It has the graph of one of 7 billion parameters, and its
             block is enqueued by as many calls. The goal is 1500 us forward: an H200 computes a block of 7 B at 4096 tokens
             in 2.4 ms. Also a ``transfer``: what issuing one, waiting for it and releasing it take.
``ops``      the same, op by op; ``median node`` is forward and backward over the number of nodes of their graphs, which are
             ops, views, gathers and the outputs of ops that have several. In ``blocks`` a compiled block is one op.
``updates``  the updates of sixteen layers on the device, over the number of their chunks. The goal is 40 us per chunk; a
             chunk of 10 Mi elements of AdamW moves for 3 ms through a link of 50 GB/s.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.json_lines import JsonLines
from tests.support.fake_device import FakeDevice, FakeEvent, FakeStream, on_fake_device
from tests.support.parity import on_cuda
from zinf_compile.runtime.device.device import CopyStreams, Pair
from zinf_compile.runtime.optim.optimizer import StreamedStep
from zinf_compile.runtime.transfer.transfers import Transfers

_BLOCKS, _TOKENS, _BLOCK_MEMORY = 32, 16, "2MiB"  # so that more than half of the parameters are streamed
_LAYERS, _WIDTH, _CHUNK = 16, 256, 4096
_CHUNKS = _LAYERS * _WIDTH * _WIDTH // _CHUNK


class _Done(FakeEvent):
    """An event that has happened."""

    def has_happened(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""


class _NoStream(FakeStream):
    """A stream that does nothing."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__("none", seed=0, memory=device.own_memory, computes=True)
        self._done = self._make_event()

    def wait(self, event: object) -> None:
        """Do not wait."""

    def record(self, *, timed: bool = False) -> _Done:
        """Return an event that has happened: without a time it is always the same one, which costs less than one of CUDA."""
        return self._make_event() if timed else self._done

    def _make_event(self) -> _Done:
        event = _Done(self)
        event.happen()
        return event

    def copy_all(self, pairs: Iterable[Pair]) -> None:
        """Copy nothing."""


def _make_device() -> FakeDevice:
    device = FakeDevice(is_late=False)
    stream = _NoStream(device)
    device.compute = device.update = stream
    device.copies = device.update_copies = CopyStreams(stream, stream)
    return device


class _Transfers:
    """Counts transfers of parameters, and the seconds in which the host issues them, waits for them and releases them."""

    _PARTS = ("issue_gather", "wait_gather", "release")

    def __init__(self) -> None:
        self.num_issued, self.seconds = 0, 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A block in which they are counted."""
        with ExitStack() as stack:
            for name in self._PARTS:
                stack.enter_context(mock.patch.object(Transfers, name, self._timed(getattr(Transfers, name))))
            yield

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        is_issue = call is Transfers.issue_gather

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - start
                self.num_issued += is_issue

        return timed


def measure_blocks(rounds: int, compute: str = "inductor") -> dict[str, Any]:
    """Return the microseconds of some steps per block, forward and backward, and per transfer and node."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import zinf_compile

    torch.set_num_threads(1)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4}
    found: dict[str, list[float]] = {"forward": [], "backward": [], "transfer": []}
    with on_fake_device(_make_device()), on_cuda():
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=_BLOCKS, use_cache=False, **sizes))
        options = {"compute": compute, "compute_dtype": torch.bfloat16, "speculate": False, "overlap_step": False}
        zinf_compile.optimize(model, device="cuda", device_memory=_BLOCK_MEMORY, host_memory="1GiB", **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        tokens = torch.randint(256, (1, _TOKENS))
        for number in range(rounds + 2):
            transfers = _Transfers()
            with transfers.counted():
                start = time.perf_counter()
                loss = model(input_ids=tokens, labels=tokens).loss
                middle = time.perf_counter()
                loss.backward()
                end = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            if number > 1:
                found["forward"].append((middle - start) / _BLOCKS * 1e6)
                found["backward"].append((end - middle) / _BLOCKS * 1e6)
                found["transfer"].append(transfers.seconds / transfers.num_issued * 1e6)
        report = zinf_compile.report(model)
        plan, homes = report.plans[0], report.plans[0].placements
        zinf_compile.close(model)
    times = found["forward"], found["backward"]
    return {
        "blocks": _BLOCKS,
        "compute": compute,
        "streamed": sum(each.compute != "device" for each in homes) / len(homes),
        "op by op": len(report.fallbacks),
        "nodes": plan.num_ticks / _BLOCKS,
        "transfers": transfers.num_issued / _BLOCKS,
        **{f"median {phase}": statistics.median(each) for phase, each in found.items()},
        "median node": statistics.median(map(sum, zip(*times, strict=True))) * _BLOCKS / plan.num_ticks,
        **found,
    }


def measure_updates(rounds: int) -> list[float]:
    """Return the microseconds per chunk of some steps."""
    import zinf_compile

    torch.set_num_threads(1)
    found: list[float] = []
    run = StreamedStep.run

    def timed(step: StreamedStep) -> None:
        start = time.perf_counter()
        run(step)
        found.append((time.perf_counter() - start) / _CHUNKS * 1e6)

    with on_fake_device(_make_device()), on_cuda():
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)))
        budgets = {"device_memory": "3MiB", "host_memory": "1GiB"}
        options = {"compute": "aten", "compute_dtype": torch.bfloat16, "speculate": False, "overlap_step": False}
        zinf_compile.optimize(model, device="cuda", **budgets, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        store = next(model.parameters())._zinf_record.store  # type: ignore[attr-defined]
        x = torch.randn(4, _WIDTH, dtype=torch.bfloat16)
        for number in range(rounds + 2):
            model(x).sum().backward()
            if number == 1:  # what is prepared once has been
                store.device_share, store.chunk_elements = 1.0, _CHUNK
            with mock.patch.object(StreamedStep, "run", timed):
                optimizer.step()
            optimizer.zero_grad()
        zinf_compile.close(model)
    return found[2:]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("blocks", "ops", "updates"))
    parser.add_argument("--rounds", type=int, default=9, help="timed steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines to a file, not to standard output")
    args = parser.parse_args()
    lines = JsonLines("host_overhead", args.json)
    for question, compute in (("blocks", "inductor"), ("ops", "aten")):
        if args.only in (None, question):
            lines.note({"question": question, **measure_blocks(args.rounds, compute)})
    if args.only in (None, "updates"):
        each = measure_updates(args.rounds)
        lines.note({"question": "updates", "chunks": _CHUNKS, "microseconds": each, "median": statistics.median(each)})


if __name__ == "__main__":
    main()
