"""Colours of roles and of lane events, the same on every chart and table, and distinguishable with colour blindness.

Those of roles are from Okabe and Ito, "Color Universal Design" (2008), with a grey for reserved memory.
"""

from zinf_compile.passes.planner.simulator.memory import MemoryRole

ROLE_COLORS = {
    MemoryRole.PARAMETER: "#0072b2",
    MemoryRole.GRADIENT: "#e69f00",
    MemoryRole.OPTIMIZER_STATE: "#009e73",
    MemoryRole.ACTIVATION: "#56b4e9",
    MemoryRole.STAGING: "#cc79a7",
    MemoryRole.RESERVE: "#b4b4b4",
}
COMPUTE_COLOR = "#64748b"
STALL_COLOR = "#d55e00"
BUDGET_COLOR = "#d55e00"


def role_name(role: MemoryRole) -> str:
    """Return a role as a person reads it: ``optimizer state``."""
    return str(role).replace("_", " ")
