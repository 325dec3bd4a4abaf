from collections.abc import Callable
from pathlib import Path

import pytest

from zinf_compile.cli.main import main

TEXT = "".join(f"the square of {number} is {number * number};\n" for number in range(200))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words of a quick `zinf train`."""
    text = tmp_path_factory.mktemp("text") / "squares.txt"
    text.write_text(TEXT)
    return ["train", "--preset", "tiny", "--seq", "16", "--sample", "0", "--text", str(text)]


@pytest.fixture
def refused(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Return ``refused(message, *options, model=None)``: `zinf train` must end with one sentence, and status 2."""

    def check(message: str, *options: str | Path, model: str | None = None) -> None:
        assert main([tiny[0], *([] if model is None else [model]), *tiny[1:], *map(str, options)]) == 2
        err = capsys.readouterr().err
        assert err.startswith("zinf train: ")
        assert message in err
        assert err.count("\n") == 1

    return check
