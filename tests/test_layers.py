"""No circular imports, not even under TYPE_CHECKING, and no import that a contract is configured to ignore."""

import functools
import tomllib
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).parent.parent


@functools.cache
def _find_circles() -> list[set[str]]:
    imports = grimp.build_graph("zinf_compile", exclude_type_checking_imports=False, cache_dir=None)
    graph = nx.DiGraph(
        (importer, imported)
        for importer in imports.modules
        for imported in imports.find_modules_directly_imported_by(importer)
    )
    components = [each for each in nx.strongly_connected_components(graph) if len(each) > 1]
    return [{module.removeprefix("zinf_compile.") for module in each} for each in components]


def test_imports_form_no_circles() -> None:
    """Imports under TYPE_CHECKING count as well."""
    assert _find_circles() == []


def test_no_contract_overlooks_an_import() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [contract["name"] for contract in contracts if contract.get("ignore_imports")] == []
