"""Which ops move bytes at about one rate, by their names."""

from zinf_compile.hardware import OpKind

_ELEMENTWISE = {"add", "sub", "mul", "div", "neg", "where", "maximum", "minimum", "relu", "threshold_backward", "rsub"}
_TRANSCENDENTAL = {
    *("gelu", "gelu_backward", "silu", "silu_backward", "sigmoid", "sigmoid_backward", "tanh", "tanh_backward"),
    *("exp", "log", "erf", "sin", "cos", "softplus", "softplus_backward"),
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
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


def kind_of(op: str) -> OpKind | None:
    """Return the kind of ``"aten.gelu.default"``; None for copies, and for ops nobody has sorted."""
    namespace, _, rest = op.partition(".")
    return _KINDS.get(rest.partition(".")[0]) if namespace == "aten" else None


def is_called(op: str) -> bool:
    """Return whether a node calls something, if only to make a view. Inputs and results are only looked up."""
    return op.startswith(("aten.", "zinf."))
