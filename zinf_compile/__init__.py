"""ZeRO-Infinity as a PyTorch compiler: train models that do not fit the device, in plain PyTorch code.

Names load when they are first used, so that looking at a plan does not import torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zinf_compile.api import close as close
    from zinf_compile.api import full_parameters as full_parameters
    from zinf_compile.api import optimize as optimize
    from zinf_compile.api import record as record
    from zinf_compile.api import report as report
    from zinf_compile.api import synchronize as synchronize
    from zinf_compile.checkpoint.load import load as load
    from zinf_compile.checkpoint.save import save as save
    from zinf_compile.errors import CapacityError as CapacityError
    from zinf_compile.errors import CheckpointError as CheckpointError
    from zinf_compile.errors import ConfigError as ConfigError
    from zinf_compile.errors import PlanFileError as PlanFileError
    from zinf_compile.errors import StoreError as StoreError
    from zinf_compile.errors import UnsupportedError as UnsupportedError
    from zinf_compile.errors import VerifyError as VerifyError
    from zinf_compile.errors import ZinfError as ZinfError
    from zinf_compile.offline import plan as plan
    from zinf_compile.plans import Plan as Plan
    from zinf_compile.recordings import Recording as Recording
    from zinf_compile.reports import Report as Report
    from zinf_compile.weights.export import export as export

_HOMES = {
    "optimize": "zinf_compile.api",
    "record": "zinf_compile.api",
    "report": "zinf_compile.api",
    "close": "zinf_compile.api",
    "full_parameters": "zinf_compile.api",
    "export": "zinf_compile.weights.export",
    "plan": "zinf_compile.offline",
    "synchronize": "zinf_compile.api",
    "save": "zinf_compile.checkpoint.save",
    "load": "zinf_compile.checkpoint.load",
    "Plan": "zinf_compile.plans",
    "Recording": "zinf_compile.recordings",
    "Report": "zinf_compile.reports",
    "ZinfError": "zinf_compile.errors",
    "CheckpointError": "zinf_compile.errors",
    "ConfigError": "zinf_compile.errors",
    "UnsupportedError": "zinf_compile.errors",
    "CapacityError": "zinf_compile.errors",
    "StoreError": "zinf_compile.errors",
    "PlanFileError": "zinf_compile.errors",
    "VerifyError": "zinf_compile.errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
