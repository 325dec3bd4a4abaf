"""The tests of libraries that fail with optimized models, each with the reason and the error."""

from fnmatch import fnmatchcase
from typing import NamedTuple

from torch.multiprocessing.spawn import ProcessRaisedException

from zinf_compile.ir.errors import UnsupportedError


class Expected(NamedTuple):
    """Tests that fail, by a pattern of their ids."""

    pattern: str  # * stands for any text
    raises: type[BaseException]
    reason: str

    def matches(self, nodeid: str) -> bool:
        """Return whether a test is one of these."""
        return fnmatchcase(nodeid, self.pattern.replace("[", "[[]"))


EXPECTED = {
    "peft": (
        Expected(
            "*[MHA ? LoRA-MHA-LoraConfig-*",
            UnsupportedError,
            "peft merges LoRA of torch.nn.MultiheadAttention into the weight in every forward, which torch cannot capture",
        ),
        Expected(
            "*using nn.Parameter LoRA*",
            UnsupportedError,
            "adapters of target_parameters are parametrizations, which remove the weight from its module in every forward",
        ),
    ),
    "accelerate": (
        Expected(
            "*::test_gradient_sync_cpu_multi",
            ProcessRaisedException,
            "its parameters have no dimension, and ranks cannot divide them",
        ),
        Expected(
            "*::test_accumulation",
            ProcessRaisedException,
            "with several ranks an optimizer has to be made after optimize, and prepare gets both",
        ),
        Expected("*::test_can_unwrap_model", UnsupportedError, "an optimized model cannot be pickled"),
    ),
}
