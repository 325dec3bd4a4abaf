"""What a parameter knows of its updates."""

from types import SimpleNamespace
from typing import Any

from zinf_compile.runtime.params.home import torn_error
from zinf_compile.runtime.params.update_state import UpdateState


def test_half_an_update_says_which_error_came() -> None:
    update = UpdateState()
    record: Any = SimpleNamespace(name="layer.weight", update=update)
    update.tear()
    assert str(torn_error(record)).startswith(
        "parameter 'layer.weight' was being updated when an error came, and holds"
    )
    update.tear("OSError: no space left")
    update.tear()  # a later chunk does not forget it
    assert "when an error came (OSError: no space left), and holds neither" in str(torn_error(record))
    update.mend()
    assert update.why_torn is None
