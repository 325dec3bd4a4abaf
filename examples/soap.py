"""SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's matrices, whose shapes differ from their parameter's.

    python examples/soap.py

The optimizer is plain PyTorch. ``zinf_compile.optimize`` moves its matrices like any other state.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import zinf_compile

MOST_ROWS = 4096  # by default: a matrix of that many rows is 64 MiB


class SOAP(Optimizer):
    """Plain PyTorch: one parameter after another, each with matrices of its sides beside Adam's two moments."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        every: int = 10,
        staleness: int = 0,
        most_rows: int = MOST_ROWS,
    ) -> None:
        """``every`` is how many steps pass before bases are brought up to date, by a step of power iteration and QR.

        With ``staleness`` that is done in the background, and takes effect so many steps later. Dimensions longer than
        ``most_rows`` have no matrix.
        """
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "every": every, "staleness": staleness, "most_rows": most_rows})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        sides = [
            side for side, size in enumerate(parameter.shape) if parameter.dim() == 2 and size <= group["most_rows"]
        ]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            for side in sides:
                state[f"matrix_{side}"] = _outer(grad, side) * (1 - beta2)
                state[f"basis_{side}"] = _eigenvectors(state[f"matrix_{side}"])
            return  # the first gradient only finds the bases
        state["step"] += 1
        step = state["step"].item()
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).add_(_turned(grad, state, sides).square(), alpha=1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt().add_(group["eps"])
        direction = _turned(state["exp_avg"], state, sides) / (1 - beta1**step) / root
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(_turned(direction, state, sides, back=True), alpha=-group["lr"])
        for side in sides:
            state[f"matrix_{side}"].lerp_(_outer(grad, side), 1 - beta2)
        matrices, bases = [f"matrix_{side}" for side in sides], [f"basis_{side}" for side in sides]
        self.new_bases(state, reads=matrices + bases, writes=bases)

    @zinf_compile.every("every", staleness="staleness")
    def new_bases(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        bases = [key for key in state if key.startswith("basis_")]
        return {key: torch.linalg.qr(state[key.replace("basis", "matrix")] @ state[key])[0] for key in bases}


def _eigenvectors(matrix: Tensor) -> Tensor:
    """Return them in columns, those of large eigenvalues first. In float64: a matrix of few gradients has many zeros."""
    return torch.linalg.eigh(matrix.double())[1].flip(1).to(matrix.dtype).contiguous()


def _outer(grad: Tensor, side: int) -> Tensor:
    return grad @ grad.T if side == 0 else grad.T @ grad


def _turned(tensor: Tensor, state: dict[str, Any], sides: list[int], *, back: bool = False) -> Tensor:
    """Return a tensor in the bases of its sides, or from there."""
    for side in sides:
        basis = state[f"basis_{side}"] if back else state[f"basis_{side}"].T
        tensor = basis @ tensor if side == 0 else tensor @ basis.T
    return tensor


def main() -> None:
    """Train with SOAP, whose state is five times as large as the weights, within budgets of half of all that."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512), torch.nn.Tanh()]
    model = torch.nn.Sequential(*(layer for _ in range(8) for layer in copy.deepcopy(layers)))
    zinf_compile.optimize(model, device_memory="24MiB", host_memory="16MiB", nvme=".")
    optimizer = SOAP(model.parameters(), every=5)
    x = torch.randn(64, 512)
    for step in range(10):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    print(zinf_compile.report(model))
    zinf_compile.close(model)


if __name__ == "__main__":
    main()
