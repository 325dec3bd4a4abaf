"""Let a rank compute its stages for the batches of all ranks, one stage after another, so that it reads each weight once.

A *stage* is what a graph computes, in the order of the program, between two parameters of different ranks. Rank 1 of two
has stages 1 and 3 of a model with four::

    rank 0    stage 0, batch 1    stage 0, batch 0    stage 2, batch 1    stage 2, batch 0
    rank 1                        stage 1, batch 1    stage 1, batch 0    stage 3, batch 1    stage 3, batch 0

Emitted on rank 1::

    tokens_0, tokens_1 = placeholder                          the inputs of both ranks
    up                 = zinf.gather(anchor, 7, ...)          its own parameters only, once
    x_1, token_1       = zinf.receive(token, .., 0, ...)      what stage 1 reads of stage 0
    y_1                = linear(x_1, up)                      batch 1
    token_2            = zinf.send(y_1, token_1, .., 0, ...)
    x_0, token_3       = zinf.receive(token_2, .., 0, ...)
    y_0                = linear(x_0, up)                      batch 0
    ...
    return outputs of batch 1, which is its own, and the last token

Batches go in descending order, so that backward, which is the mirror image, adds their gradients up in the order of ranks.
Every rank works through (stage, batch) in the same order, and a value is sent at the end of the stage that computes it and
received at the beginning of the one that reads it: so some rank can always go on. What one rank has sent to another is
received in that order, so that no message waits for one that is read later.

What follows from inputs without any parameter, such as a mask, is computed by each rank that reads it. An input that needs a
gradient is only on the rank whose batch it is of, which sends it as a stage before the first one would. Autocast and
``no_grad`` are entered and left around what is computed in them, wherever that goes. Regions of torch.utils.checkpoint are
inlined before: what is recomputed, the plan decides.
"""

import operator
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils._pytree import tree_leaves

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.ir.ops import GATHER, RECEIVE, SEND
from zinf_compile.passes.contract import Pass, RoundInputs
from zinf_compile.passes.fx_edit import describe_place, node_name
from zinf_compile.passes.transforms.tiling.calls import value_of
from zinf_compile.passes.transforms.tiling.order import find_barrier, may_write

_GATHERS = (GATHER, torch.ops.zinf.gather)
_INPUTS = ("placeholder", "get_attr")
_DRAWS = ("dropout", "rand", "bernoulli", "multinomial", "normal", "exponential", "poisson")  # in names of functions
TOKEN = "zinf_token"  # the placeholder of the first token
_GIVEN = -1  # the stage of an input that needs a gradient: before the first one, and on the rank of its batch
_MODES = (_enter_autocast, _exit_autocast, torch._C._set_grad_enabled)  # calls that change the modes of those behind
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


class _Modes(NamedTuple):
    """The modes that a node runs in."""

    autocasts: tuple[fx.Node, ...] = ()  # calls that have entered them, from the outermost on
    has_grad: bool | None = None  # None: as the graph was called


class _Stage(NamedTuple):
    """What is computed between two parameters of different ranks."""

    owner: int
    nodes: list[fx.Node]


class _Message(NamedTuple):
    """A value of one batch, from a stage that computes or reads it to the next one that reads it, or to the caller."""

    value: fx.Node
    batch: int
    behind: int  # the stage at whose end it is sent
    reader: int | None  # the stage at whose beginning it is received; None for the caller
    source: int  # the rank that sends it
    to: int  # the rank that receives it


def _run(graph_module: fx.GraphModule, inputs: RoundInputs) -> None:
    graph_module.graph = _Rounds(graph_module.graph, inputs).emit()


def find_gathered(graph: fx.Graph) -> list[int]:
    """Return the numbers of the parameters that a torch-level graph gathers."""
    return [node.args[1] for node in graph.nodes if node.op == "call_function" and node.target in _GATHERS]


def count_under_way(graph: fx.Graph, num_ranks: int) -> int:
    """Return the bytes of messages of a rank that are under way at once, at most: a copy of one of each batch is kept."""
    sent = [value_of(node.args[0]) for node in graph.nodes if node.target is SEND]
    return num_ranks * max((value.nbytes for value in sent if isinstance(value, Tensor)), default=0)


def refuse_values_of_parameters(graph: fx.Graph) -> None:
    """Raise UnsupportedError if a graph returns a parameter: code that was not captured reads it."""
    for node in graph.output_node().all_input_nodes:
        if node.target in _GATHERS:
            raise UnsupportedError(
                "code of the model that was not captured reads a parameter, for example since there is a graph break inside "
                "of a loop (a print, .item()), and with schedule='rounds' other ranks have parameters of their own; take "
                "the graph break out of the loop, as TORCH_LOGS=graph_breaks shows it, or leave schedule out"
            )


def inline_checkpoints(graph_module: fx.GraphModule) -> None:
    """Edit a torch-level graph in place so that regions of torch.utils.checkpoint are part of it.

    Raises UnsupportedError for other nested graphs that read parameters.
    """
    graph = graph_module.graph
    while regions := graph.find_nodes(op="call_function", target=_CHECKPOINT):
        for region in regions:
            _inline(graph_module, region)
    for node in graph.find_nodes(op="get_attr"):
        nested = getattr(graph_module, str(node.target), None)
        if not isinstance(nested, fx.GraphModule):
            continue
        reads = any(find_gathered(each.graph) for each in nested.modules() if isinstance(each, fx.GraphModule))
        if reads:
            (user, *_) = node.users
            raise UnsupportedError(
                f"{user.target}{describe_place(user)} has a graph of its own that reads parameters, which schedule='rounds' "
                "cannot deal out in this version; leave schedule out, which shards the model (ZeRO stage 3)"
            )


def _inline(graph_module: fx.GraphModule, region: fx.Node) -> None:
    graph, (body_node, *given) = graph_module.graph, region.args
    assert isinstance(body_node, fx.Node)
    assert isinstance(body_node.target, str)
    body = getattr(graph_module, body_node.target)
    known: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
    with graph.inserting_before(region):
        for node in body.graph.find_nodes(op="get_attr"):
            name = f"{body_node.target}_{node.target}".replace(".", "_")
            setattr(graph_module, name, operator.attrgetter(node.target)(body))
            known[node] = graph.get_attr(name)
            known[node].meta = dict(node.meta)
        results: Any = graph.graph_copy(body.graph, val_map=known)
    for user in list(region.users):
        assert user.target is operator.getitem  # Dynamo unpacks what a region returns
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(region)
    if not body_node.users:
        graph.erase_node(body_node)


class _Rounds:
    """The graph of one rank, from that of the model."""

    def __init__(self, graph: fx.Graph, inputs: RoundInputs) -> None:
        self._old, self._inputs = graph, inputs
        self._stages = _find_stages(graph, inputs)
        self._stage_of = {node: number for number, stage in enumerate(self._stages) for node in stage.nodes}
        self._given = [node for node in graph.find_nodes(op="placeholder") if node.name in inputs.own]
        self._stage_of |= dict.fromkeys(self._given, _GIVEN)
        self._modes_of = _find_modes(graph)
        self._repeated = _find_repeated(graph, inputs)
        # Each rank that reads what is written to writes too, and whatever comes before that stays before it.
        last = max((at for at, node in enumerate(self._repeated) if _writes(node)), default=-1)
        self._written = list(self._repeated)[: last + 1]
        (outputs,) = graph.output_node().args
        self._results: Sequence[Any] = outputs if isinstance(outputs, list | tuple) else [outputs]
        self._check()
        self._messages = self._find_messages()
        self._numbers = {message: number for number, message in enumerate(self._messages)}
        mine = sorted(self._messages, key=lambda message: (message.behind, -message.batch, self._numbers[message]))
        self._expected = {  # by this rank, in the order in which they are sent
            rank: deque(message for message in mine if (message.source, message.to) == (rank, inputs.rank))
            for rank in range(inputs.num_ranks)
        }
        self._received: dict[_Message, fx.Node] = {}
        self._new = fx.Graph(tracer_cls=graph._tracer_cls)
        self._gathered: dict[int, fx.Node] = {}  # by the number of the parameter
        self._seen: dict[tuple[int, int], fx.Node] = {}  # what each batch reads of those that are read several times
        self._read_again = _find_read_again(graph)
        self._of_batch: list[dict[fx.Node, fx.Node]] = [{} for _ in range(inputs.num_ranks)]
        self._token: fx.Node | None = None
        self._modes = _Modes()  # of the node that was emitted last
        self._entered: list[fx.Node] = []  # for each of its autocasts

    def emit(self) -> fx.Graph:
        """Return the graph of this rank."""
        mine = self._inputs.rank
        self._emit_inputs()
        self._send(_GIVEN, mine)
        for number, stage in enumerate(self._stages):
            if stage.owner != mine:
                continue
            for batch in reversed(range(self._inputs.num_ranks)):
                self._receive(number, batch)
                for node in stage.nodes:
                    self._emit(node, batch)
                self._send(number, batch)
        self._receive(None, mine)
        results = [self._find(result, mine) if isinstance(result, fx.Node) else result for result in self._results]
        self._enter(_Modes())
        self._new.output((*results, self._token)).meta = dict(self._old.output_node().meta)
        return self._new

    def _emit_inputs(self) -> None:
        """Emit the placeholders: those that ranks share once, others once for each batch."""
        self._token = self._new.placeholder(TOKEN)
        self._token._dynamo_source = None  # AOTAutograd reads it of every input
        for node in self._old.nodes:
            if node.op not in _INPUTS:
                continue
            if node.op == "get_attr" or node.name in self._inputs.shared:
                self._set_everywhere(node, self._new.node_copy(node))
                continue
            for batch, known in enumerate(self._of_batch):
                if node in self._given and batch != self._inputs.rank:
                    continue
                known[node] = self._new.placeholder(node_name(f"{node.name}_{batch}"))
                known[node].meta = dict(node.meta)
        for node in self._new.find_nodes(op="placeholder"):
            if not hasattr(node, "_dynamo_source"):
                node._dynamo_source = None

    def _set_everywhere(self, node: fx.Node, made: fx.Node) -> None:
        for known in self._of_batch:
            known[node] = made

    def _emit(self, node: fx.Node, batch: int) -> None:
        """Emit a node of a stage of this rank for a batch; what follows from inputs may come before."""
        known = self._of_batch[batch]
        if node in known or node not in self._modes_of:
            return
        if self._written and node in self._repeated and self._written[-1] not in known:
            written, self._written = self._written, []  # once for each batch, and in the order of the program
            for before in written:
                self._emit(before, batch)
            self._written = written
            self._emit(node, batch)
            return
        for used in node.all_input_nodes:
            self._find(used, batch)
        if node.target in _GATHERS:
            self._enter(_Modes())  # what is read without gradients now may be read with them later
            known[node] = self._gather(node, batch)
            return
        self._enter(self._modes_of[node])
        known[node] = self._new.node_copy(node, known.__getitem__)
        known[node].meta = dict(node.meta)

    def _enter(self, modes: _Modes) -> None:
        """Emit what leaves the modes of the node that was emitted last, and enters those of the next one."""
        same = 0
        while modes.autocasts[: same + 1] == self._modes.autocasts[: same + 1] and same < len(modes.autocasts):
            same += 1
        while len(self._entered) > same:
            self._new.call_function(_exit_autocast, (self._entered.pop(),))
        for autocast in modes.autocasts[same:]:
            self._entered.append(self._new.node_copy(autocast))
        if modes.has_grad != self._modes.has_grad:
            has_grad = self._inputs.has_grad if modes.has_grad is None else modes.has_grad
            self._new.call_function(torch._C._set_grad_enabled, (has_grad,))
        self._modes = modes

    def _find(self, node: fx.Node, batch: int) -> fx.Node:
        """Return a value of a batch: what is there, or can be computed from inputs alone."""
        known = self._of_batch[batch]
        if node not in known:
            assert node in self._repeated, f"{node} is read before it is computed or received"
            self._emit(node, batch)
        return known[node]

    def _gather(self, node: fx.Node, batch: int) -> fx.Node:
        """Return a parameter. What is read several times gets the gradient of one batch after another, as in one process."""
        known, number = self._of_batch[batch], node.args[1]
        assert isinstance(number, int)
        if number not in self._gathered:
            self._gathered[number] = self._new.node_copy(node, known.__getitem__)
            self._gathered[number].meta = dict(node.meta)
        if number not in self._read_again:
            return self._gathered[number]
        if (number, batch) not in self._seen:
            seen = self._new.create_node(
                "call_function", torch.ops.aten.alias.default, (self._gathered[number],), name=f"{node.name}_{batch}"
            )
            seen.meta = dict(node.meta)
            self._seen[number, batch] = seen
        return self._seen[number, batch]

    def _receive(self, reader: int | None, batch: int) -> None:
        """Emit what a stage receives at its beginning; messages of the same rank that were sent before come first."""
        for message in self._messages:
            if (message.reader, message.batch, message.to) == (reader, batch, self._inputs.rank):
                while message not in self._received:
                    first = self._expected[message.source].popleft()
                    self._received[first] = self._receive_one(first)
                self._of_batch[batch][message.value] = self._received[message]

    def _receive_one(self, message: _Message) -> fx.Node:
        self._enter(_Modes())
        value, name = value_of(message.value), f"{message.value.name}_{message.batch}"
        arguments = (self._inputs.store_id, self._numbers[message], message.source, value.requires_grad)
        both = self._new.create_node(
            "call_function",
            RECEIVE,
            (self._token, *arguments, list(value.shape), value.dtype, value.device),
            name=f"{name}_received",
        )
        received = self._new.create_node("call_function", operator.getitem, (both, 0), name=name)
        if value.is_floating_point() and not value.requires_grad:
            received = self._new.create_node("call_method", "detach", (received,), name=f"{name}_detached")
        self._token = self._new.create_node("call_function", operator.getitem, (both, 1), name=f"{name}_token")
        received.meta = {"example_value": value, "val": value, **_place_of(message.value)}
        return received

    def _send(self, stage: int, batch: int) -> None:
        """Emit the messages at the end of a stage."""
        for message in self._messages:
            if (message.behind, message.batch, message.source) != (stage, batch, self._inputs.rank):
                continue
            self._enter(_Modes())
            node, value = self._of_batch[batch][message.value], value_of(message.value)
            if not value.is_contiguous():
                node = self._new.create_node("call_method", "contiguous", (node,), name=f"{message.value.name}_sent")
                node.meta = dict(message.value.meta)
            arguments = (self._inputs.store_id, self._numbers[message], message.to, value.requires_grad)
            name = f"{message.value.name}_{batch}_to_{message.to}"
            self._token = self._new.create_node("call_function", SEND, (node, self._token, *arguments), name=name)

    def _find_messages(self) -> list[_Message]:
        """Return all messages, in an order that is the same on every rank.

        What backward needs gradients of goes from each stage that reads it to the next one. So gradients are added up on
        their way back in the order in which autograd does. Anything else goes to every rank once.
        """
        readers: dict[fx.Node, list[int | None]] = {}
        for number, stage in enumerate(self._stages):
            for value in self._crossing(stage.nodes, number):
                readers.setdefault(value, []).append(number)
        for value in self._crossing([self._old.output_node()], None):
            readers.setdefault(value, []).append(None)
        messages = []
        for value, stages in readers.items():
            for batch in range(self._inputs.num_ranks):
                behind = self._stage_of[value]
                have = {self._owner_of(behind, batch)}
                for reader in stages:
                    to = batch if reader is None else self._stages[reader].owner
                    source = self._owner_of(behind, batch)
                    is_there = to == source if value_of(value).requires_grad else to in have
                    if not is_there:
                        messages.append(_Message(value, batch, behind, reader, source, to))
                        have.add(to)
                    if reader is not None and value_of(value).requires_grad:
                        behind = reader
        return messages

    def _owner_of(self, stage: int, batch: int) -> int:
        return batch if stage == _GIVEN else self._stages[stage].owner

    def _crossing(self, nodes: Sequence[fx.Node], number: int | None) -> Iterator[fx.Node]:
        """Yield the values that nodes of a stage read of other stages, and that are not computed again."""
        for used in dict.fromkeys(used for node in nodes for used in node.all_input_nodes):
            is_input = used.op in _INPUTS and used not in self._given
            is_here = is_input or used in self._repeated or self._stage_of[used] == number
            if not is_here:
                yield used

    def _check(self) -> None:
        """Raise UnsupportedError for what stages cannot pass on."""
        self._check_writes()
        for number, stage in enumerate(self._stages):
            for node in self._crossing(stage.nodes, number):
                self._check_crossing(node)
        for node in self._crossing([self._old.output_node()], None):
            self._check_crossing(node)

    def _check_writes(self) -> None:
        inputs = {number: node for node in self._old.nodes if node.op in _INPUTS for number in _storages_of(node)}
        stages: dict[int, int] = {}  # of a storage, where it is made
        for node, stage in self._stage_of.items():
            for number in _storages_of(node):
                stages[number] = min(stage, stages.get(number, stage))
        for node in self._modes_of:
            for number in _written_by(node):
                if number in inputs:
                    raise UnsupportedError(
                        f"the model writes in its forward to a buffer or an input ('{inputs[number].name}', "
                        f"{_name_of(node)}{describe_place(node)}), which with schedule='rounds' only one rank would see; "
                        "write the result to a new tensor, or leave schedule out, which shards the model (ZeRO stage 3)"
                    )
                if node not in self._repeated and stages[number] != self._stage_of[node]:
                    raise UnsupportedError(
                        f"{_name_of(node)}{describe_place(node)} writes in place to what an earlier stage has computed, "
                        "which may be on another rank with schedule='rounds'; write the result to a new tensor, or leave "
                        "schedule out"
                    )

    def _check_crossing(self, node: fx.Node) -> None:
        value = value_of(node)
        if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
            raise UnsupportedError(
                f"{node.name}{describe_place(node)} passes from one stage to the next, and is no tensor of a fixed size: "
                "schedule='rounds' can send tensors only; leave schedule out, which shards the model (ZeRO stage 3)"
            )


def _find_stages(graph: fx.Graph, inputs: RoundInputs) -> list[_Stage]:
    """Return the stages of a torch-level graph, in the order of the program."""
    stages: list[_Stage] = []
    before: list[fx.Node] = []  # the first parameter
    stage_of: dict[fx.Node, _Stage] = {}
    for node in graph.nodes:
        if node.op in (*_INPUTS, "output") or node.target in _MODES:
            continue
        if node.target in _GATHERS:
            owner = inputs.owners[node.args[1]]
            if not stages or stages[-1].owner != owner:
                stages.append(_Stage(owner, before if not stages else []))
        nodes = stages[-1].nodes if stages else before
        if node.target is operator.getitem and node.args[0] in stage_of:  # results are unpacked where they are computed
            nodes = stage_of[node.args[0]].nodes
        nodes.append(node)
        if stages:
            stage_of |= dict.fromkeys(before, stages[-1])
            before = []
            stage_of[node] = next(stage for stage in stages if stage.nodes is nodes)
    return stages


def _find_modes(graph: fx.Graph) -> dict[fx.Node, _Modes]:
    """Return the modes of every call but those that enter and leave them, in the order of the program."""
    modes_of: dict[fx.Node, _Modes] = {}
    modes = _Modes()
    for node in graph.nodes:
        if node.target is _enter_autocast:
            modes = modes._replace(autocasts=(*modes.autocasts, node))
        elif node.target is _exit_autocast:
            modes = modes._replace(autocasts=tuple(each for each in modes.autocasts if each is not node.args[0]))
        elif node.target is torch._C._set_grad_enabled:
            modes = modes._replace(has_grad=node.args[0])
        elif node.op not in (*_INPUTS, "output"):
            modes_of[node] = modes
    return modes_of


def _find_repeated(graph: fx.Graph, inputs: RoundInputs) -> dict[fx.Node, None]:
    """Return what follows from inputs alone, in the order of the program: each rank computes it for itself."""
    shared: set[int] = set()  # storages to which stages write, or that they read before the last write
    while True:
        repeated = _find_repeated_outside(graph, inputs, shared)
        last = {number: node for node in repeated for number in _written_by(node)}
        found: set[int] = set()
        for node in graph.nodes:
            if node.op in _INPUTS:
                continue
            if node in repeated:
                last = {number: each for number, each in last.items() if each is not node}
                continue
            found |= _written_by(node)
            found |= {number for used in node.all_input_nodes for number in _storages_of(used)} & last.keys()
        if found <= shared:
            return repeated
        shared |= found


def _find_repeated_outside(graph: fx.Graph, inputs: RoundInputs, shared: set[int]) -> dict[fx.Node, None]:
    """Return what follows from inputs alone and from none of some storages."""
    repeated: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or node.target in _GATHERS:
            continue
        is_repeated = (
            all(
                used in repeated or (used.op in _INPUTS and used.name not in inputs.own)
                for used in node.all_input_nodes
            )
            and not any(word in _name_of(node) for word in _DRAWS)
            and (_writes(node) or find_barrier(node, node.next) is None)
            and not _is_trained(value_of(node))
            and shared.isdisjoint(_storages_of(node) | _written_by(node))
        )
        if is_repeated:
            repeated[node] = None
    return repeated


def _writes(node: fx.Node) -> bool:
    """Return whether a call writes to what it reads."""
    return bool(_written_by(node))


def _written_by(node: fx.Node) -> set[int]:
    """Return the storages that a call writes to: of its first operand, or of what it was told to write to."""
    if node.op not in ("call_function", "call_method") or node.target in _GATHERS or not may_write(node):
        return set()
    given = tree_leaves(node.kwargs["out"] if "out" in node.kwargs else node.args[:1])
    return {number for each in given if isinstance(each, fx.Node) for number in _storages_of(each)}


def _storages_of(node: fx.Node) -> set[int]:
    """Return numbers of the storages of a node's fake value, which views share."""
    values = tree_leaves(value_of(node))
    return {value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)}


def _name_of(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _find_read_again(graph: fx.Graph) -> frozenset[int]:
    """Return the numbers of the parameters that are read several times for a batch, as a tied embedding is."""
    reads = Counter(
        node.args[1] for node in graph.nodes if node.target in _GATHERS for _ in range(max(1, len(node.users)))
    )
    return frozenset(number for number, count in reads.items() if count > 1)


def _is_trained(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_trained, value))
    return isinstance(value, Tensor) and value.requires_grad


def _place_of(node: fx.Node) -> dict[str, Any]:
    """Return where a node is in the model, for messages and blocks."""
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace", "source_fn_stack") if key in node.meta}


WORK_IN_ROUNDS: Pass[RoundInputs] = Pass(name="work_in_rounds", run=_run)
