"""The ``zinf::`` operators: none is removed as dead code, and each matches its schema and its fake kernel."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from zinf_compile.ir import ops
from zinf_compile.ir.config import make_config
from zinf_compile.ir.errors import CapacityError, StoreError
from zinf_compile.ir.glossary import Tier
from zinf_compile.passes.analysis.parameters import analyze_parameter
from zinf_compile.passes.planner.placement.homes import plan_placement
from zinf_compile.runtime.execute.op_bodies import register
from zinf_compile.runtime.model.adoption import NamedParameter, adopt_parameters
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.store.store import Store

CPU = torch.device("cpu")
EFFECTS = (
    *(ops.STORE_GRAD, ops.ISSUE_GATHER, ops.RELEASE, ops.SINK_GRAD, ops.WAIT_SINKS),
    *(ops.SWAP_OUT, ops.WAIT_SWAP_OUT, ops.ISSUE_SWAP_IN),
)
ELEMENTS = 128 * 256  # 128 KiB: too large to be resident as a small parameter
SCHEMA_FAKE_AUTOGRAD = ("test_schema", "test_faketensor", "test_autograd_registration")


@pytest.fixture(params=["host", "nvme"])
def record(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoredParameter]:
    """Return the stored parameter of a model, with its home on host or nvme."""
    register()
    on_nvme = request.param == "nvme"
    # Half of host memory is for staging: with 128 KiB, no copy of the parameter fits.
    config = make_config({"device_memory": 2**20, "host_memory": 2**17 if on_nvme else 2**26, "nvme": tmp_path})
    parameter = nn.Parameter(torch.arange(ELEMENTS, dtype=torch.float32).view(128, 256))
    fact = analyze_parameter("weight", parameter, compute_dtype=None)
    store = Store(config)
    placements = plan_placement([fact], config)
    adopt_parameters(store, [NamedParameter(parameter=parameter, fact=fact)], placements, as_home=True)
    store.arena.reserve(2**18)
    record = store.records["weight"]
    assert record.copies.compute.tier is (Tier.NVME if on_nvme else Tier.HOST)
    yield record
    store.transfers.abandon_gathers()
    store.check_integrity()
    store.close()


def _expected() -> Tensor:
    return torch.arange(ELEMENTS, dtype=torch.float32).view(128, 256)


def test_no_op_takes_a_list_of_dtypes() -> None:
    """torch 2.11 passes a list of dtypes to Python kernels as integers; a single dtype stays a dtype."""
    schemas = [str(op._schema) for op in ops.ALL_OPS]
    assert any("ScalarType dtype" in schema for schema in schemas)
    assert [schema for schema in schemas if "ScalarType[]" in schema] == []


@pytest.mark.parametrize("op", EFFECTS, ids=str)
def test_an_op_with_an_effect_survives_dead_code_elimination(op: torch._ops.OpOverload) -> None:
    graph = fx.Graph()
    tensor = graph.placeholder("tensor")
    examples = {
        "Tensor": tensor,
        "Optional[Tensor]": tensor,
        "int": 1,
        "List[int]": [1],
        "List[str]": ["float32"],
        "str": "host",
    }
    graph.call_function(op, tuple(examples[str(argument.type)] for argument in op._schema.arguments))
    graph.output(tensor)
    graph.eliminate_dead_code()
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [op]


def test_tracing_keeps_what_nobody_reads() -> None:
    def step(grad: Tensor) -> Tensor:
        ticket = ops.ISSUE_GATHER(1, [2], ["float32"], [0])
        ops.RELEASE(ticket, 1)
        ops.SINK_GRAD(grad, 1, 2)
        ops.STORE_GRAD(grad, 2)
        ops.WAIT_SINKS(1)
        return grad + 1

    graph = make_fx(step, tracing_mode="fake")(torch.ones(2)).graph
    graph.eliminate_dead_code()
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert targets[:-1] == [ops.ISSUE_GATHER, ops.RELEASE, ops.SINK_GRAD, ops.STORE_GRAD, ops.WAIT_SINKS]


def test_an_unread_gather_is_dead_code() -> None:
    def step(anchor: Tensor) -> Tensor:
        ops.GATHER(anchor, 1, [2], torch.float32, CPU)
        return anchor + 1

    graph = make_fx(step, tracing_mode="fake")(torch.ones(2)).graph
    graph.eliminate_dead_code()
    assert not graph.find_nodes(op="call_function", target=ops.GATHER)


def test_gather_keeps_its_promises(record: StoredParameter) -> None:
    anchor = ops.make_anchor(requires_grad=True)
    args = (anchor, record.param, [128, 256], torch.float32, CPU)
    torch.library.opcheck(ops.GATHER, args, test_utils=SCHEMA_FAKE_AUTOGRAD)
    assert torch.equal(ops.GATHER(*args), _expected())


def test_gather_traces_with_its_backward(record: StoredParameter) -> None:
    anchor = ops.make_anchor(requires_grad=True)
    args = (anchor, record.param, [128, 256], torch.float32, CPU)
    torch.library.opcheck(ops.GATHER, args, test_utils="test_aot_dispatch_dynamic")


def test_store_grad_keeps_its_promises(record: StoredParameter) -> None:
    torch.library.opcheck(ops.STORE_GRAD, (torch.ones(128, 256), record.param), test_utils=SCHEMA_FAKE_AUTOGRAD)


def test_the_gradient_of_a_gather_goes_home(record: StoredParameter) -> None:
    anchor = ops.make_anchor(requires_grad=True)
    weight = ops.GATHER(anchor, record.param, [128, 256], torch.float32, CPU)
    weight.backward(torch.full((128, 256), 3.0))
    assert torch.equal(record.parameter.grad, torch.full((128, 256), 3.0))
    assert anchor.grad is not None
    assert anchor.grad.numel() == 0


def test_a_frozen_anchor_gives_no_gradient(record: StoredParameter) -> None:
    anchor = ops.make_anchor(requires_grad=False)
    assert not ops.GATHER(anchor, record.param, [128, 256], torch.float32, CPU).requires_grad


def test_issue_wait_and_release_keep_their_promises(record: StoredParameter) -> None:
    store_id = record.store.store_id
    for offset in (0, 4096):
        ticket = ops.ISSUE_GATHER(store_id, [record.param], ["float32"], [offset])
        args = (ticket, store_id, offset, [128, 256], torch.float32, CPU)
        torch.library.opcheck(ops.WAIT_GATHER, args, test_utils=SCHEMA_FAKE_AUTOGRAD)
        assert torch.equal(ops.WAIT_GATHER(*args), _expected())
        ops.RELEASE(ticket, store_id)


def test_issue_gather_keeps_its_promises(record: StoredParameter) -> None:
    """It has a side effect and cannot run twice for one arena, so only the checks that run it once are used."""
    args = (record.store.store_id, [record.param], ["float32"], [0])
    torch.library.opcheck(ops.ISSUE_GATHER, args, test_utils="test_autograd_registration")
    record.store.transfers.abandon_gathers()
    torch.library.opcheck(ops.ISSUE_GATHER, args, test_utils="test_faketensor")
    record.store.transfers.abandon_gathers()


def test_release_keeps_its_promises(record: StoredParameter) -> None:
    store_id = record.store.store_id
    for check in ("test_schema", "test_autograd_registration"):
        ticket = ops.ISSUE_GATHER(store_id, [record.param], ["float32"], [0])
        ops.WAIT_GATHER(ticket, store_id, 0, [128, 256], torch.float32, CPU)
        torch.library.opcheck(ops.RELEASE, (ticket, store_id), test_utils=check)


def test_sink_grad_and_wait_sinks_keep_their_promises(record: StoredParameter) -> None:
    store_id = record.store.store_id
    args = (torch.full((128, 256), 2.0), store_id, record.param)
    torch.library.opcheck(ops.SINK_GRAD, args, test_utils=SCHEMA_FAKE_AUTOGRAD)
    torch.library.opcheck(ops.WAIT_SINKS, (store_id,), test_utils=SCHEMA_FAKE_AUTOGRAD)
    record.parameter.grad = None
    ops.SINK_GRAD(*args)
    ops.WAIT_SINKS(store_id)
    assert torch.equal(record.parameter.grad, args[0])


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_swaps_keep_their_promises(record: StoredParameter, tier: str) -> None:
    """Ops that allocate arena bytes cannot run twice for the same bytes, so each check gets its own bytes."""
    store = record.store.store_id
    value = torch.arange(20_000, dtype=torch.float32).view(200, 100)
    out = (value, store, "sin", tier, [100, 1])
    if (
        record.copies.compute.tier is Tier.NVME and tier == "host"
    ):  # half of 128 KiB is for staging: the activation does not fit
        with pytest.raises(
            CapacityError, match=r"activation 'sin' needs 78\.1 KiB on host, where activations may take 64\.0"
        ):
            ops.SWAP_OUT(*out)
        return
    torch.library.opcheck(ops.SWAP_OUT, out, test_utils=("test_faketensor", "test_autograd_registration"))
    token = ops.SWAP_OUT(*out)
    torch.library.opcheck(ops.WAIT_SWAP_OUT, (token, store), test_utils=SCHEMA_FAKE_AUTOGRAD)
    for check in ("test_faketensor", "test_autograd_registration"):
        torch.library.opcheck(ops.ISSUE_SWAP_IN, (token, store, 4096), test_utils=check)
        record.store.transfers.abandon_gathers()
    ticket = ops.ISSUE_SWAP_IN(token, store, 4096)
    turned = (ticket, store, 4096, [50, 200], [1, 100], 50, torch.float32, CPU)  # the second half of the columns
    torch.library.opcheck(ops.WAIT_SWAP_IN, turned, test_utils=SCHEMA_FAKE_AUTOGRAD)
    assert torch.equal(ops.WAIT_SWAP_IN(*turned), value.t()[50:])
    ops.RELEASE(ticket, store)
    if tier == "host":
        read = (token, store, *turned[3:])
        torch.library.opcheck(ops.READ_SWAPPED, read, test_utils=SCHEMA_FAKE_AUTOGRAD)
        assert torch.equal(ops.READ_SWAPPED(*read), value.t()[50:])


@pytest.mark.parametrize("op", ops.ALL_OPS, ids=str)
def test_every_op_has_a_body_once_registered(op: torch._ops.OpOverload) -> None:
    register()
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeExplicitAutograd")


def test_an_op_of_a_model_that_is_gone_says_so(tmp_path: Path) -> None:
    register()
    gc.collect()
    with pytest.raises(StoreError, match="parameter number 0 belongs to a model that no longer exists"):
        ops.GATHER(ops.make_anchor(requires_grad=False), 0, [2], torch.float32, CPU)
