"""Layers of peft that replace a weight of the base model in every forward: refused before anything has moved."""

from torch.nn import Module

from zinf_compile.ir.errors import UnsupportedError

_LAYERS = "peft.tuners.lora.layer"


def refuse_replacing_layers(model: Module, *, capture: bool) -> None:
    """Raise UnsupportedError if the model has adapters that cannot be trained beside stored weights.

    Those of ``target_parameters`` are parametrizations, which remove the weight from its module for each forward. Those of
    ``torch.nn.MultiheadAttention`` are merged into the weight for each forward: eager code can do that, and a captured graph
    cannot, with torch's own backends either.
    """
    for path, module in model.named_modules():
        kind = type(module)
        if kind.__module__ != _LAYERS:
            continue
        if kind.__name__ == "ParamWrapper":
            raise UnsupportedError(
                f"'{path}' has adapters of target_parameters, which peft puts in the place of the weight in every forward, "
                "and the weight lives in a store after optimize(); adapt layers with target_modules instead"
            )
        if kind.__name__ == "MultiheadAttention" and capture:
            raise UnsupportedError(
                f"'{path}' is a torch.nn.MultiheadAttention with LoRA, which peft merges into the weight in every forward; "
                "torch captures no graph of that, so pass capture=False, or leave it out of target_modules"
            )
