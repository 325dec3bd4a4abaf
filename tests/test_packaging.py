"""The wheel has everything in the repository, under one name each, and plans can be read without torch."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import networkx
import pytest

import zinf_compile

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("passes", "runtime", "cuda")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _run_python(code: str) -> None:
    """Run code in a fresh interpreter; the assertion shows its errors."""
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def _packages_under(folder: Path, name: str) -> set[str]:
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    return {
        ".".join((name, *path.relative_to(folder).parts))
        for path in folders
        if any(path.glob("*.py")) and not set(path.relative_to(folder).parts) & {"__pycache__", *LINKED}
    }


def test_every_folder_is_a_package_of_the_wheel() -> None:
    """A subpackage that is not listed is silently missing from the wheel."""
    packages = PYPROJECT["tool"]["setuptools"]["packages"]
    found = _packages_under(ROOT / "zinf_compile", "zinf_compile")
    for name in LINKED:
        found |= _packages_under(ROOT / name, f"zinf_compile.{name}")
    assert len(set(packages)) == len(packages)
    assert set(packages) == found | {"zinf_compile.cuda"}  # cuda has sources to install, but no Python


def test_folders_do_not_import_each_other_in_circles() -> None:
    """A file belongs to its folder. Those of ``passes/`` itself are levels of their own, which import-linter orders."""
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("zinf_compile", exclude_type_checking_imports=True, cache_dir=None)
    packages = {module for module in graph.modules if graph.find_children(module)}

    def folder_of(module: str) -> str:
        parent = module.rpartition(".")[0]
        return module if module in packages or parent == "zinf_compile.passes" else parent

    folders = networkx.DiGraph()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            if folder_of(module) != folder_of(imported):
                folders.add_edge(folder_of(module), folder_of(imported), because=f"{module} imports {imported}")
    assert folders.has_edge("zinf_compile.passes.planner.memory", "zinf_compile.passes.planner.cost")
    circles = [circle for circle in networkx.strongly_connected_components(folders) if len(circle) > 1]
    assert [
        because for circle in circles for _, _, because in sorted(folders.subgraph(circle).edges(data="because"))
    ] == []


def test_every_package_has_an_init() -> None:
    folders = PYPROJECT["tool"]["setuptools"]["package-dir"]
    for package in PYPROJECT["tool"]["setuptools"]["packages"]:
        if package == "zinf_compile.cuda":
            continue
        top = max((name for name in folders if package == name or package.startswith(f"{name}.")), key=len)
        path = ROOT / folders[top] / package.removeprefix(top).replace(".", "/").lstrip("/")
        assert (path / "__init__.py").is_file(), package


def test_every_hardware_profile_is_in_the_wheel() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["zinf_compile.hardware"]
    folder = ROOT / "zinf_compile" / "hardware"
    installed = {path for pattern in patterns for path in folder.glob(pattern)}
    profiles = {path for path in (folder / "profiles").iterdir() if path.is_file()}
    assert profiles
    assert profiles <= installed


def test_the_style_and_script_of_pages_are_in_the_wheel() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["zinf_compile.inspect.html"]
    folder = ROOT / "zinf_compile" / "inspect" / "html"
    installed = {path.name for pattern in patterns for path in folder.glob(pattern)}
    assert installed == {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    assert installed == {"page.css", "page.js"}


def test_every_source_that_is_compiled_at_run_time_is_in_the_wheel() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["zinf_compile.runtime.native"]
    folder = ROOT / "runtime" / "native"
    installed = {path for pattern in patterns for path in folder.glob(pattern)}
    assert {path for path in folder.iterdir() if path.is_file() and path.suffix != ".py"} == installed
    assert installed


@pytest.mark.parametrize("name", LINKED)
def test_the_link_into_the_package_is_there(name: str) -> None:
    link = ROOT / "zinf_compile" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert PYPROJECT["tool"]["setuptools"]["package-dir"][f"zinf_compile.{name}"] == name


def test_the_links_are_committed_as_links() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout")
    command = ["git", "ls-files", "--stage", *(f"zinf_compile/{name}" for name in LINKED)]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert sorted((line.split()[0], line.split()[-1]) for line in listed) == sorted(
        ("120000", f"zinf_compile/{name}") for name in LINKED
    )


def test_there_is_no_python_in_cuda() -> None:
    """With an ``__init__.py`` it would shadow NVIDIA's own ``cuda`` package at the root of the repository."""
    assert not list((ROOT / "cuda").rglob("*.py"))


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_a_second_copy_of_a_package_is_refused(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / name / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=f"'zinf_compile.{name}', but it was imported as '{name}'"):
        spec.loader.exec_module(ModuleType(name))


@pytest.mark.parametrize(
    "statement",
    [
        "import zinf_compile",
        "from zinf_compile import Plan, Report, CapacityError",
        "import zinf_compile; dir(zinf_compile)",
        "import zinf_compile.ir.config, zinf_compile.inspect.printing",
        "import zinf_compile.passes.planner.search.verify, zinf_compile.passes.planner.simulator.simulate",
        "import zinf_compile.inspect.chrome_trace",
        "import zinf_compile.cli.main, zinf_compile.cli.show, zinf_compile.cli.diff",
    ],
)
def test_looking_at_a_plan_needs_no_torch(statement: str) -> None:
    _run_python(f"{statement}\nimport sys\nassert 'torch' not in sys.modules, 'torch was imported'")


def test_public_names_load() -> None:
    _run_python(
        "import zinf_compile\n"
        "for name in zinf_compile.__all__:\n"
        "    value = getattr(zinf_compile, name)\n"
        "    assert value.__module__ in zinf_compile._HOMES[name], name\n"
        "    assert name in dir(zinf_compile)\n"
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'zinf_compile' has no attribute 'optimise'"):
        zinf_compile.optimise  # noqa: B018  # tests that the attribute access raises


def test_the_type_checker_sees_every_public_name() -> None:
    """``__init__`` names each public name twice: for the type checker, and for loading it lazily."""
    source = (ROOT / "zinf_compile" / "__init__.py").read_text()
    for name, home in zinf_compile._HOMES.items():
        module, _, defined = home.partition(":")
        line = f"from {module} import {name} as {name}\n" if not defined else f"    {name} = {defined}\n"
        assert line in source


def test_the_console_script_and_the_backend_are_there() -> None:
    project = PYPROJECT["project"]
    for target in (*project["scripts"].values(), *project["entry-points"]["torch_dynamo_backends"].values()):
        module, _, name = target.partition(":")
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        assert f"def {name}(" in Path(spec.origin).read_text()
