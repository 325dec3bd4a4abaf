"""Groups ops, by name, into kinds that move bytes at about the same rate."""

from zinf_compile.ir.facts import OpFact
from zinf_compile.ir.hardware import OpKind

_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "neg", "pow", "where", "maximum", "minimum", "rsub", "eq", "bitwise_and"),
    *("relu", "threshold_backward", "native_dropout_backward"),
}
_TRANSCENDENTAL = {
    *("gelu", "gelu_backward", "silu", "silu_backward", "sigmoid", "sigmoid_backward", "tanh", "tanh_backward"),
    *("exp", "log", "erf", "sin", "cos", "softplus", "softplus_backward"),
    *("_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
}
_REDUCTION = {
    *("sum", "mean", "amax", "amin", "var", "var_mean", "linalg_vector_norm"),
    *("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
    *("native_group_norm", "native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward"),
}
_RANDOM = {"native_dropout", "bernoulli", "rand", "rand_like", "randn", "randn_like", "uniform", "normal_functional"}
_KINDS = {
    **dict.fromkeys(_ELEMENTWISE, OpKind.ELEMENTWISE),
    **dict.fromkeys(_TRANSCENDENTAL, OpKind.TRANSCENDENTAL),
    **dict.fromkeys(_REDUCTION, OpKind.REDUCTION),
    **dict.fromkeys(_RANDOM, OpKind.RANDOM),
}

_TP_COLLECTIVES = ("zinf.all_reduce.default", "zinf.all_gather_columns.default")
_FUNCTIONAL, _WAITS = "_c10d_functional.", "_c10d_functional.wait_tensor."
_MESSAGE = "zinf.receive.default"

# The overhead of finding a parameter and its homes, without moving bytes, in calls of a small op. Measured 60 and 250
# microseconds, where a call took 19.
_STORE_CALLS = {"gather": 3, "store_grad": 12}


def kind_of(op: str) -> OpKind | None:
    """Return the kind of ``"aten.gelu.default"``; None for copies and for ops of no known kind."""
    namespace, _, rest = op.partition(".")
    return _KINDS.get(rest.partition(".")[0]) if namespace == "aten" else None


def is_collective(op: str) -> bool:
    """Return whether an op is a tensor-parallel collective, or one of the user's: its bytes go over device links."""
    return op in _TP_COLLECTIVES or (op.startswith(_FUNCTIONAL) and not op.startswith(_WAITS))


def is_message(op: str) -> bool:
    """Return whether an op waits for what another rank has sent: its bytes go over the links of a device."""
    return op == _MESSAGE


def keeps_kernels(op: OpFact) -> bool:
    """Return whether an op calls kernels whose shapes depend on values; on a CPU oneDNN caches one for each shape.

    There each expert is one matrix product, with as many rows as are routed to it. MKL, used for float32, caches none.
    """
    return op.op.startswith("aten._grouped_mm.") and op.dtype in ("bfloat16", "float16")


def num_calls(op: str) -> int:
    """Return the launch overhead of a node, in calls of small ops; 0 for placeholders and outputs."""
    if op.startswith("zinf."):
        return _STORE_CALLS.get(op.partition(".")[2].partition(".")[0], 1)
    return 1 if op.startswith("aten.") else 0
