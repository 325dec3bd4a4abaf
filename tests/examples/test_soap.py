"""The example of SOAP trains, within its budgets."""

import re
from pathlib import Path

import pytest

from examples import soap


def test_soap_trains_within_its_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    soap.main()
    printed = capsys.readouterr().out
    losses = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if ": loss " in line]
    assert len(losses) == 10
    assert losses[-1] < 0.9 * losses[0]
    assert "planned again" in printed
    # Of the host: the first plan does not know what SOAP keeps, so what is held may be more than predicted.
    budget, _, measured = re.findall(
        r"([\d.]+) MiB", next(line for line in printed.splitlines() if line.startswith("host "))
    )
    assert 0 < float(measured) <= float(budget)
    assert not list(tmp_path.iterdir())
