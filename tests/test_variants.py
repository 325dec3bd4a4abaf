"""The variants of a test that `make test` runs, and those of a long test that `make test-long` runs."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.variants import choose_variants, is_in_part


def test_each_value_of_each_parameter_occurs() -> None:
    models, placements, ways = ("mlp", "gpt", "bert", "vit"), ("host", "nvme", "mixed"), ("aten", "inductor")
    variants = {
        f"test[{model}-{placement}-{way}]": {"model": model, "placement": placement, "way": way}
        for model, placement, way in itertools.product(models, placements, ways)
    }
    chosen = choose_variants(variants)
    assert len(chosen) < len(variants) / 2
    for parameter, values in (("model", models), ("placement", placements), ("way", ways)):
        assert {variants[name][parameter] for name in chosen} == set(values)


def test_a_test_of_one_parameter_keeps_all_of_its_variants() -> None:
    variants = {f"test[{seed}]": {"seed": seed} for seed in range(9)}
    assert set(choose_variants(variants)) == variants.keys()


def test_the_order_in_which_variants_come_does_not_matter() -> None:
    variants = {f"test[{a}-{b}]": {"a": a, "b": b} for a, b in itertools.product(range(4), range(5))}
    assert choose_variants(variants) == choose_variants(dict(reversed(variants.items())))


GRID = """
import pytest

@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("column", range(5))
def test_grid(row, column): ...
"""


@pytest.mark.parametrize(
    ("words", "num_tests"), [("not long", range(5, 10)), ("long", range(11, 16)), ("", range(20, 21))]
)
def test_variants_with_values_of_others_are_long(words: str, num_tests: range, tmp_path: Path) -> None:
    """They run in `make test-long`, which takes all of them."""
    (tmp_path / "test_grid.py").write_text(GRID)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.variants", "-m", words, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "ZINF_VARIANTS": "few"}
    printed = subprocess.run(
        command, env=environment, cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    assert int(printed.splitlines()[-1].split()[0]) in num_tests


def test_each_test_runs_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZINF_PART", raising=False)
    names = [f"tests/test_grid.py::test_grid[{number}]" for number in range(300)]
    assert all(map(is_in_part, names)), "all of them, if no part was asked for"
    parts = []
    for part in ("1/3", "2/3", "3/3"):
        monkeypatch.setenv("ZINF_PART", part)
        parts.append([name for name in names if is_in_part(name)])
    assert sorted(itertools.chain(*parts)) == sorted(names)
    assert all(80 < len(part) < 120 for part in parts)


@pytest.mark.hypothesis
def test_properties_have_the_examples_that_are_asked_for(request: pytest.FixtureRequest) -> None:
    assert settings.get_current_profile_name() == (request.config.getoption("--hypothesis-profile") or "short")
    assert settings().deadline is None
