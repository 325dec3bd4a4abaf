"""Parameters that another rank has: what asks for their values is refused there, and everything else goes on."""

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zinf_compile
from tests.distributed.test_rounds import build_deep
from tests.distributed.test_rounds_state import OPTIONS, make, step
from tests.distributed.workloads import optimize
from tests.support.rank_pool import RankPool
from zinf_compile.ir.errors import UnsupportedError

_WEIGHTS = {"deep.embed.weight": 0, "deep.blocks.1.up.weight": 1}  # and the ranks that have them


def _assign_data(parameter: nn.Parameter) -> None:
    parameter.data = torch.zeros(parameter.shape)


def _multiply_lists(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        torch._foreach_mul_([torch.zeros(3), parameter], 1.0)


NEEDS_VALUE: Mapping[str, Callable[[nn.Parameter], object]] = {
    "add": lambda parameter: parameter + 1,
    "mul": lambda parameter: 2 * parameter,
    "linalg_vector_norm": lambda parameter: parameter.norm(),
    "sum": torch.sum,
    "mean": lambda parameter: parameter.data.mean(),
    "eq": lambda parameter: parameter == parameter,
    "equal": lambda parameter: torch.equal(parameter, parameter),
    "_to_copy": lambda parameter: parameter.half(),
    "making it torch.float64": lambda parameter: parameter.to("cpu", torch.float64),
    "clone": lambda parameter: parameter.detach().clone(),
    "view": lambda parameter: nn.utils.parameters_to_vector([parameter]),
    "select": lambda parameter: parameter[0],
    "_foreach_norm": lambda parameter: torch._foreach_norm([torch.zeros(3), parameter]),
    "copy_": lambda parameter: torch.zeros(parameter.shape).copy_(parameter.detach()),
    "numpy": lambda parameter: parameter.detach().numpy(),
    "tolist": lambda parameter: parameter.tolist(),
    "saving": lambda parameter: torch.save(parameter, io.BytesIO()),
    "t": lambda parameter: nn.functional.linear(torch.zeros(1, parameter.shape[1]), parameter),
    "mul_": lambda parameter: parameter.data.mul_(1.0),
    "fill_": lambda parameter: nn.init.constant_(parameter, 0.0),
    "normal_": lambda parameter: nn.init.normal_(parameter.data),
    "zero_": lambda parameter: parameter.data.zero_(),
    "_foreach_mul_": _multiply_lists,
    "an assignment to data": _assign_data,
}


def ask_for_values() -> dict[str, dict[str, str]]:
    """Return the errors of what asks for the values of two parameters, by what it is."""
    model, optimizer = make()
    step(model, optimizer, 0)
    errors: dict[str, dict[str, str]] = {}
    for name in _WEIGHTS:
        for what, ask in NEEDS_VALUE.items():
            try:
                ask(model.get_parameter(name))
                message = ""
            except UnsupportedError as error:
                message = str(error)
            errors.setdefault(what, {})[name] = message
    zinf_compile.close(model)
    return errors


def test_what_needs_a_value_is_refused_where_it_is_not(two: RankPool) -> None:
    for rank, errors in enumerate(two.run(ask_for_values)):
        assert errors.keys() == NEEDS_VALUE.keys()
        for what, of_weights in errors.items():
            for name, owner in _WEIGHTS.items():
                if owner == rank:
                    assert not of_weights[name]
                    continue
                assert f"the value of '{name}' is on rank {owner}" in of_weights[name], what
                assert f"and {what} would read or write it on this rank" in of_weights[name]
                assert f"do that on rank {owner}" in of_weights[name]


def send_value() -> str:
    """Return the error of a collective on a value, which would leave the other rank waiting without it."""
    model, _ = make()
    weight = model.get_parameter("deep.embed.weight")
    error = ""
    if dist.get_rank() == 1:
        with pytest.raises(UnsupportedError) as raised:
            dist.all_reduce(weight.data)
        error = str(raised.value)
    zinf_compile.close(model)
    return error


def test_a_collective_on_a_remote_parameter_is_refused(two: RankPool) -> None:
    assert "and allreduce_ would read or write it on this rank" in two.run(send_value)[1]


def describe(parameter: nn.Parameter) -> dict[str, Any]:
    """Return what can be known of a parameter without its value."""
    copied = copy.deepcopy([parameter, parameter.data])
    like = torch.zeros_like(parameter, device="cpu")
    return {
        "shape": (tuple(parameter.shape), parameter.size(0), parameter.dim(), parameter.numel(), len(parameter)),
        "dtype": (parameter.dtype, parameter.element_size(), parameter.nbytes, parameter.is_floating_point()),
        "kind": (isinstance(parameter, nn.Parameter), parameter.is_leaf, parameter.requires_grad, parameter.grad_fn),
        "memory": (parameter.is_contiguous(), parameter.stride(), parameter.layout, parameter.is_sparse),
        "detached": (parameter.detach().shape, parameter.data.dtype, parameter.detach().requires_grad),
        "same": (parameter.float() is parameter, parameter.to(torch.float32) is parameter, parameter in {parameter}),
        "like": (like.shape, like.dtype, int(like.count_nonzero()), parameter.new_ones(2).shape),
        "copied": (copied[0].shape, isinstance(copied[0], nn.Parameter), copied[0].requires_grad, copied[1].dtype),
        "made": (nn.Parameter(parameter.data, requires_grad=False).requires_grad, parameter.requires_grad),
    }


def look_around() -> tuple[list[dict[str, Any]], list[str]]:
    """Return what is known of all parameters, and how those of other ranks are printed."""
    model, optimizer = make()
    step(model, optimizer, 0)
    found = [describe(parameter) for parameter in model.parameters()]
    before = list(model.parameters())
    for moved in (model.float(), model.to("cpu"), model.to(torch.empty(0)), model.cpu()):  # as training libraries do
        assert moved is model
        assert all(one is other for one, other in zip(before, moved.parameters(), strict=True))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient)
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    torch.optim.AdamW(model.parameters(), fused=True)
    step(model, optimizer, 1)
    shown = [f"{each}, {each.data}" for each in model.parameters() if each.is_meta]
    zinf_compile.close(model)
    return found, shown


def test_what_needs_no_value_is_the_same_on_each_rank(two: RankPool) -> None:
    (first, shown), (second, _) = two.run(look_around)
    assert first == second
    assert len(first) > 20
    name = "'deep.blocks.1.norm.weight', (24,), on rank 1"
    assert shown[0] == f"RemoteParameter({name}), RemoteValue({name})"


class AsksParameters(nn.Module):
    """A model whose forward asks its own parameters what they are."""

    def __init__(self, deep: nn.Module) -> None:
        super().__init__()
        self.deep = deep

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.deep(tokens, targets)
        num_trained = sum(each.numel() for each in self.parameters() if each.requires_grad)
        return loss.to(next(self.parameters()).dtype) * (num_trained / num_trained)


def train(asks: bool) -> list[float]:
    """Return the losses of a rank."""
    model = build_deep()
    model = optimize(AsksParameters(model) if asks else model, {**OPTIONS, "schedule": "rounds"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [step(model, optimizer, number) for number in range(2)]
    zinf_compile.close(model)
    return losses


def test_a_forward_may_ask_what_parameters_are(two: RankPool) -> None:
    assert two.run(train, True) == two.run(train, False)
