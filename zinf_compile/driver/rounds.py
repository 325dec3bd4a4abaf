"""Ranks that work in rounds: one batch of each rank goes through all stages, and each rank has the parameters of its own.

What a rank stores, plans, runs and updates is what a process would that trains its stages alone, on all batches. What is
between stages passes from rank to rank (``runtime/ranks/messages.py``).
"""

import fnmatch
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Module, Parameter

from zinf_compile.ir.config import Config
from zinf_compile.ir.errors import ConfigError, UnsupportedError
from zinf_compile.ir.glossary import dtype_name
from zinf_compile.passes.analysis.modules import block_of, is_repeated
from zinf_compile.passes.contract import RoundInputs
from zinf_compile.passes.fx_edit import copy_graph_module
from zinf_compile.passes.pipeline import work_in_rounds
from zinf_compile.passes.planner.schedule.rounds import Deal, Dealt, deal_stages
from zinf_compile.passes.transforms.prepare.work_in_rounds import (
    find_gathered,
    inline_checkpoints,
    refuse_values_of_parameters,
)
from zinf_compile.runtime.params.copies import Seat
from zinf_compile.runtime.params.numbers import new_id
from zinf_compile.runtime.params.records import mark_replaced
from zinf_compile.runtime.params.remote import Elsewhere, RemoteParameter
from zinf_compile.runtime.ranks.messages import Messages
from zinf_compile.runtime.ranks.ranks import Ranks, Worker, describe, hash_of
from zinf_compile.runtime.storage.slots import torch_dtype
from zinf_compile.runtime.store.store import Store


def check_rounds(config: Config, ranks: Ranks, *, has_init: bool, is_distributed: bool) -> None:
    """Raise ConfigError or UnsupportedError for what does not go with ``schedule="rounds"``."""
    if ranks.is_alone:
        raise ConfigError(
            "schedule='rounds' deals the stages of a model out to ranks, and this process trains alone; start several with "
            "torchrun and call torch.distributed.init_process_group() first, or leave it out"
        )
    if ranks.num_replicas > 1:
        raise ConfigError(
            f"schedule='rounds' takes a mesh of one dimension, and this one has {ranks.num_replicas} replicas; give one "
            "dimension of it, or leave schedule out"
        )
    refused = {
        "init": has_init,
        "a model with DTensors": is_distributed,
        "capture=False": not config.capture,
        f"stage={config.stage}": config.stage != 3,
        "step_in_backward=True": config.step_in_backward,
    }
    for what, is_given in refused.items():
        if is_given:
            raise UnsupportedError(
                f"schedule='rounds' does not go with {what} in this version; leave one of them out: without schedule the "
                "model is sharded (ZeRO stage 3)"
            )


def deal_parameters(parameters: Mapping[str, Parameter], num_ranks: int) -> Deal:
    """Return the stages of a model with these parameters. ConfigError for fewer blocks than ranks."""
    return deal_stages(
        [Dealt(name, _repeated_block(name), each.numel()) for name, each in parameters.items()], num_ranks
    )


class Rounds:
    """The rounds of one model."""

    def __init__(self, model: Module, parameters: Mapping[str, Parameter], ranks: Ranks, factor: float | None) -> None:
        """Decide which rank has which of the parameters. Changes nothing yet. ``factor`` divides gradients."""
        self._factor = factor
        self.ranks, self.worker = ranks, Worker(ranks)
        self.messages = Messages(ranks)
        self.deal = deal_parameters(parameters, ranks.size)
        owners = self.deal.owners
        self.mine = {name: each for name, each in parameters.items() if owners[name] == ranks.rank}
        self.elsewhere = Elsewhere(ranks=ranks, mine=self.mine)
        self._numbers = {name: new_id() for name in parameters if name not in self.mine}
        self._owners = {name: owners[name] for name in parameters}
        self._given = {id(each): name for name, each in parameters.items()}
        self.remote: dict[str, RemoteParameter] = {}
        self._model = model

    def take_place(self) -> list[tuple[Module, str, Parameter]]:
        """Register remote parameters in the place of those of other ranks; return where those were."""
        replaced = []
        for module in self._model.modules():
            for key, parameter in module._parameters.items():
                if parameter is None or (name := self._given.get(id(parameter))) is None or name in self.mine:
                    continue
                if name not in self.remote:
                    self.remote[name] = RemoteParameter.in_place_of(
                        parameter, name, self._owners[name], self._numbers[name], self.elsewhere
                    )
                    mark_replaced(parameter, self.remote[name])
                replaced.append((module, key, parameter))
                module._parameters[key] = self.remote[name]
        return replaced

    def options_of_rank(self, config: Config) -> Config:
        """Return the options without what they say of parameters by name that other ranks have."""

        def of_mine(patterns: Sequence[str]) -> tuple[str, ...]:
            return tuple(pattern for pattern in patterns if fnmatch.filter(self.mine, pattern))

        tiles = None if config.tiles is None else tuple(each for each in config.tiles if each[0] in self.mine)
        return replace(
            config,
            tiles=tiles,
            exact_state=of_mine(config.exact_state),
            exact_frozen=of_mine(config.exact_frozen),
        )

    @property
    def divisor(self) -> float:
        """Return what the sum of the gradients of all batches is divided by."""
        return self._factor or float(self.ranks.size)

    def seat(self, store: Store) -> None:
        """Let captured graphs read remote parameters as those of this rank, trained or frozen."""
        self.elsewhere.anchor = store.anchor
        computed = store.config.compute_dtype
        for each in self.remote.values():
            each.seat = Seat(store.anchor if each.requires_grad else store.frozen_anchor)
            each.gathered_dtype = each.dtype
            if computed is not None and each.dtype.is_floating_point:
                each.gathered_dtype = torch_dtype(computed)
            each.gathered_to = store.memory.torch_device

    def bind(
        self, name: str, store: Store, graph_module: fx.GraphModule, inputs: Sequence[Tensor]
    ) -> "BoundRounds | None":
        """Return the graph of this rank's stages, from that of the model; None if that reads no parameter."""
        try:
            refuse_values_of_parameters(graph_module.graph)
        except UnsupportedError as error:  # not on every rank at the same time: what was not captured differs
            self.ranks.fail(f"capture of {name}: {describe(error)}")
            raise
        buffers = {id(buffer) for buffer in self._model.buffers()}
        is_shared = [value is store.anchor or value is store.frozen_anchor or id(value) in buffers for value in inputs]
        different = [value for value, same in zip(inputs, is_shared, strict=True) if not same]
        self.meet(f"capture of {name}, {len(graph_module.graph.nodes)} nodes, of inputs", different)
        graph_module = copy_graph_module(graph_module)  # Dynamo still uses the original
        inline_checkpoints(graph_module)
        gathered = find_gathered(graph_module.graph)
        if not gathered:
            return None
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        shared, own = set(), set()
        for node, value, same in zip(placeholders, inputs, is_shared, strict=True):
            if same:
                shared.add(node.name)
            elif not isinstance(value, Tensor):
                raise UnsupportedError(
                    f"the input '{node.name}' of the model is of type {type(value).__name__}, and with schedule='rounds' "
                    "every rank gets the inputs of all: pass tensors, of the same shapes on each"
                )
            elif value.requires_grad:
                own.add(node.name)
        remote = {each.number: each.rank for each in self.remote.values()}
        given = RoundInputs(
            owners={number: remote.get(number, self.ranks.rank) for number in gathered},
            shared=shared,
            own=own,
            has_grad=torch.is_grad_enabled(),
            rank=self.ranks.rank,
            num_ranks=self.ranks.size,
            store_id=store.store_id,
        )
        work_in_rounds(graph_module, given)
        numbers = [number for number, node in enumerate(placeholders) if node.name not in shared | own]
        bound = BoundRounds(self, name, graph_module, numbers, frozenset(gathered))
        bound.inputs = bound.spread(inputs, [[inputs[number] for number in numbers]] * self.ranks.size)
        return bound

    def meet(self, what: str, inputs: Sequence[Any]) -> None:
        """Block until every rank is about to do the same with inputs of the same kinds. RankError if not."""
        kinds = "; ".join(map(_describe_input, inputs))
        self.ranks.meet(f"{what} {kinds}"[:_MOST] + f" {hash_of(kinds.encode()):x}")

    def note_backward(self, gathered: Container[int]) -> None:
        """Show that every rank has computed gradients of its parameters, of those with some numbers."""
        for each in self.remote.values():
            if each.number in gathered:
                each.note_gradient()


class BoundRounds:
    """A graph of this rank's stages, and what it is called with."""

    def __init__(
        self,
        rounds: Rounds,
        name: str,
        graph_module: fx.GraphModule,
        numbers: Sequence[int],
        gathered: frozenset[int],
    ) -> None:
        """``numbers`` are the inputs of the model's graph of which ranks have different ones, and ``gathered`` the
        parameters that it reads."""
        self.graph_module = graph_module
        self.inputs: list[Tensor] = []
        self._rounds, self._numbers, self._gathered = rounds, frozenset(numbers), gathered
        self._name = name
        self._leaf = torch.empty(0, requires_grad=True)

    def spread(self, args: Sequence[Any], given: Sequence[Sequence[Tensor]]) -> list[Any]:
        """Return the inputs of the graph from this rank's own and those of all ranks."""
        spread, of_ranks = [self._leaf], zip(*given, strict=True)
        for number, arg in enumerate(args):
            spread += next(of_ranks) if number in self._numbers else (arg,)
        return spread

    def arguments(self, args: Sequence[Any]) -> list[Any]:
        """Return what to call the graph with, for the batches of all ranks. All ranks call this at the same time."""
        mine = [args[number] for number in sorted(self._numbers)]
        kind = "training" if torch.is_grad_enabled() else "no gradients"
        try:
            self._rounds.meet(f"a forward in rounds of {self._name}, {kind}, of inputs", mine)
            spread = self.spread(args, self._rounds.messages.share("the inputs of all ranks", mine))
        except Exception:  # what every rank raises
            raise
        except BaseException as error:  # an interrupt, of this rank only
            self._rounds.ranks.fail(f"a forward broke off: {describe(error)}")
            raise
        if torch.is_grad_enabled():
            apply: Callable[..., Tensor] = _Backward.apply
            spread[0] = apply(self._leaf, self._rounds, self._gathered)
        return spread

    def results(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return what the model's graph returns, for this rank's batch."""
        *results, _ = outputs
        return results


_MOST = 120  # characters of shapes in a message that ranks compare


class _Backward(torch.autograd.Function):
    """The first token of a run: its gradient is complete when all of this rank's stages are."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, rounds: Rounds, gathered: frozenset[int]) -> Tensor:
        """Return a token."""
        ctx.rounds, ctx.gathered = rounds, gathered
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[None, None, None]:
        """Note that gradients are there."""
        ctx.rounds.note_backward(ctx.gathered)
        return None, None, None


def _describe_input(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)} {dtype_name(value.dtype)}{' with gradient' if value.requires_grad else ''}"


def _repeated_block(name: str) -> str:
    block = block_of(name)
    return block if is_repeated(block) else ""
