"""What compiled segments allocate, read from the code that Inductor generates."""

import textwrap
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import standalone_compile
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

import zinf_compile
from tests.support.parity import on_streams
from zinf_compile.driver import program
from zinf_compile.ir.facts import GraphFacts
from zinf_compile.ir.sizes import Size
from zinf_compile.passes.analysis.collect import CapturedGraph
from zinf_compile.passes.analysis.peaks import scratch_of
from zinf_compile.runtime.execute.compiled_memory import collecting_code, count_compiled_workspace

MIB = 2**20


def workspace(body: str, segment: fx.Graph | None = None) -> int | None:
    code = "class Runner:\n    def call(self, args):\n" + textwrap.indent(textwrap.dedent(body), "        ")
    return count_compiled_workspace(code, segment or fx.Graph())


def test_buffers_count_until_they_are_deleted_and_results_do_not_count():
    body = """
        arg0_1, arg1_1 = args
        args.clear()
        assert_size_stride(arg0_1, (512, 1024), (1024, 1))
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((512, 1024), (1024, 1), torch.bfloat16)
            extern_kernels.mm(arg0_1, reinterpret_tensor(arg1_1, (1024, 1024), (1, 1024), 0), out=buf0)
            del arg0_1
            buf1 = empty_strided_cuda((512, 1024), (1024, 1), torch.float32)
            stream0 = get_raw_stream(0)
            triton_poi_fused_0.run(buf0, buf1, 524288, stream=stream0)
            del buf0
            buf2 = reinterpret_tensor(buf1, (1024, 512), (512, 1), 0); del buf1  # reuse
            buf3 = empty_strided_cuda((1024, 1024), (1024, 1), torch.float32)
        return (buf2, )
        """
    assert workspace(body) == 4 * MIB  # buf3 beside the result; buf0 is gone by then


def test_memory_of_inputs_is_the_callers():
    assert workspace("arg0_1, = args\nbuf0 = arg0_1; del arg0_1  # reuse\nreturn (buf0, )") == 0


def test_a_reduction_of_a_workspace_needs_no_more_than_it():
    body = """
        workspace_0 = empty_strided_cuda((262144, ), (1, ), torch.float32)
        buf1 = workspace_0[0 * 64 * 1024 : (0 + 1) * 64 * 1024].view(64, 1024).sum(dim=0)
        del workspace_0
        return (buf1, )
        """
    assert workspace(body) == MIB  # twice the workspace, less the result


def test_ops_called_by_name_return_what_they_return_in_the_graph():
    def topk(x: Tensor) -> list[Tensor]:
        values, indices = torch.ops.aten.topk.default(x, 256)
        return [values * 2, indices]

    graph = make_fx(topk, tracing_mode="fake")(torch.zeros(1024, 1024)).graph
    body = """
        buf0 = torch.ops.aten.topk.default(arg0_1, 256)
        buf1 = buf0[0]
        assert_size_stride(buf1, (1024, 256), (256, 1))
        buf2 = buf0[1]
        del buf0
        buf3 = empty_strided_cuda((1024, 256), (256, 1), torch.float32)
        del buf1
        return (buf3, buf2, )
        """
    # float32 values and int64 indices are counted as one, which is the result.
    assert workspace(body, graph) == 0
    assert workspace(body.replace("(buf3, buf2, )", "(buf3, )"), graph) == 3 * MIB


@pytest.mark.parametrize("kernel", ["cudnn", "efficient", "flash"])
def test_the_backward_of_attention_has_a_gradient_of_queries_in_float32(kernel: str):
    """Its three results take 1 MiB each in bfloat16, and 2 MiB beside them are gone when it has run."""
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    graph = fx.Graph()
    query = torch.empty(1, 8, 1024, 64, dtype=torch.bfloat16, device="meta")
    inputs = [graph.placeholder(name) for name in ("grad", "query", "key", "value")]
    for node in inputs:
        node.meta["val"] = query
    graph.call_function(op, tuple(inputs)).meta["val"] = (query, query, query)
    assert find_scratch(graph) == 2 * MIB
    body = f"""
        buf0 = torch.ops.aten._scaled_dot_product_{kernel}_attention_backward.default(arg0_1, arg1_1, arg2_1, arg3_1)
        buf1 = buf0[0]
        buf2 = buf0[1]
        buf3 = buf0[2]
        return (buf1, buf2, buf3, )
        """
    assert workspace(body, graph) == 2 * MIB


def test_flash_attention_has_gradients_of_shared_keys_for_each_head_of_queries():
    """Two heads of keys for eight of queries: 256 KiB each, and 1 MiB before those of four heads are added up."""
    graph = fx.Graph()
    values = [torch.empty(1, heads, 1024, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 8, 2, 2)]
    inputs = [graph.placeholder(name) for name in ("grad", "query", "key", "value")]
    for node, each in zip(inputs, values, strict=True):
        node.meta["val"] = each
    for kernel, scratch in (("cudnn", 2 * MIB), ("efficient", 2 * MIB), ("flash", 4 * MIB)):
        op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward").default
        called = graph.call_function(op, tuple(inputs))
        called.meta["val"] = values[1:]
        assert scratch_of(called) == scratch


def find_scratch(graph: fx.Graph) -> Size:
    return max(scratch_of(node) for node in graph.nodes)


@pytest.mark.parametrize(
    "body",
    [
        "buf0 = empty_strided_cuda((s77, 64), (64, 1), torch.float32)\nreturn (buf0, )",
        "buf0 = torch.ops.aten.unknown.default(arg0_1)\nreturn (buf0, )",
        "buf0 = empty_strided_cuda((64, ), (1, ), torch.no_such_dtype)\nreturn (buf0, )",
        "for each in args:\n    each.clear()\nreturn ()",
        "buf0 = empty_strided_cuda((64, ), (1, ), torch.float32)",
        "del buf0\nreturn ()",
    ],
    ids=["a symbol", "an op that the graph has not", "a dtype", "a loop", "no results", "an unknown name"],
)
def test_what_is_not_understood_is_unknown(body):
    assert workspace(body) is None


def test_code_without_the_function_is_unknown():
    assert count_compiled_workspace("def main(args):\n    return ()", fx.Graph()) is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(torch.softmax(x, -1)).relu()))


@pytest.mark.long
@pytest.mark.parametrize("in_cache", [False, True])
def test_it_is_what_the_profiler_sees(in_cache, tmp_path, monkeypatch):
    """The peak of real allocations in a run of the compiled code, also of code that was on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    block, x = Block().requires_grad_(requires_grad=False), torch.randn(512, 256)
    parameters = list(block.parameters())

    def run(x: Tensor, *values: Tensor) -> list[Tensor]:
        named = dict(zip(dict(block.named_parameters()), values, strict=True))
        return [torch.func.functional_call(block, named, (x,))]

    module = make_fx(run)(x, *parameters)
    for _ in range(1 + in_cache):
        with collecting_code() as found, torch.no_grad():
            compiled = standalone_compile(module, [x, *parameters], dynamic_shapes="from_example_inputs")
    (code,) = found
    counted = count_compiled_workspace(code, module.graph)
    with torch.no_grad():
        compiled(x, *parameters)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            (result,) = compiled(x, *parameters)
    changes = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    assert counted == peak - result.nbytes
    assert 512 * 1024 * 4 <= counted < 2 * 512 * 1024 * 4  # what is wide is made once, and changed in place


def test_torch_keeps_its_own_hook():
    from torch._inductor.graph import GraphLowering

    before = GraphLowering.save_output_code
    with pytest.raises(KeyError), collecting_code():
        raise KeyError
    assert GraphLowering.save_output_code is before


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Block(), nn.Linear(256, 4096)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(self.body(x))
        rough = scores.sin() * scores.cos() + scores.neg().exp().sigmoid() * scores.tanh()
        return nn.functional.cross_entropy(rough, targets)


@pytest.mark.long
def test_beside_a_gpu_the_plan_counts_what_is_allocated():
    """The same plan with what ops would need one by one has room for less, and the model trains to the same bits."""
    torch.manual_seed(0)
    x, targets, initial = torch.randn(512, 256), torch.randint(4096, (512,)), Classifier().state_dict()

    def train() -> tuple[list[float], int]:
        model = Classifier()
        model.load_state_dict(initial)
        with on_streams():
            zinf_compile.optimize(
                model, device="cuda", compute="inductor", device_memory="512MiB", host_memory="256MiB"
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for _ in range(3):
                loss = model(x, targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            nbytes = zinf_compile.report(model).plans[0].activations.peak_nbytes
            zinf_compile.close(model)
        return losses, nbytes

    losses, nbytes = train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zinf_compile.driver.program.with_compiled_workspaces", lambda captured, facts: facts)
        torch._dynamo.reset()
        expected, before = train()
    assert losses == expected
    assert nbytes < before - 8 * MIB  # of scores


def test_a_graph_whose_compiled_segments_do_not_fit_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_more(captured: object, facts: GraphFacts[Size]) -> GraphFacts[Size]:
        more = (replace(value, nbytes=2**30) if value.name.endswith("_workspace") else value for value in facts.values)
        return replace(facts, values=tuple(more))

    monkeypatch.setattr("zinf_compile.driver.program.with_compiled_workspaces", with_more)
    torch.manual_seed(0)
    x, targets, model = torch.randn(512, 256), torch.randint(4096, (512,)), Classifier()
    expected = model(x, targets).item()
    with on_streams():
        zinf_compile.optimize(model, device="cuda", compute="inductor", device_memory="512MiB", host_memory="256MiB")
        assert model(x, targets).item() == expected
        (fallback,) = zinf_compile.report(model).fallbacks
        zinf_compile.close(model)
    assert "runs op by op: compiled, it does not fit: " in fallback


def test_memory_in_which_kernels_were_timed_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's configurations are timed on tensors of full size, which torch's allocator would keep."""
    compile_all, reserved = program.compile_segments, list[int]()

    def compile_and_time(captured: CapturedGraph) -> None:
        compile_all(captured)
        with device.own_memory.counted() as allocator:
            allocator.free(allocator.allocate(64 * MIB, "compute"))
            reserved.append(allocator.reserved_nbytes)

    monkeypatch.setattr(program, "compile_segments", compile_and_time)
    x, targets, model = torch.randn(8, 256), torch.randint(4096, (8,)), Classifier()
    with on_streams() as device:
        zinf_compile.optimize(model, device="cuda", compute="inductor", device_memory="512MiB", host_memory="256MiB")
        model(x, targets)
        with device.own_memory.counted() as allocator:
            assert reserved[0] >= 64 * MIB > allocator.reserved_nbytes
        zinf_compile.close(model)
