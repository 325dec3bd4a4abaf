"""Which ops are called."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CalledOps(TorchDispatchMode):
    """A block whose ops are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))
