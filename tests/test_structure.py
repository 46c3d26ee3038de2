"""The structure of the project: no import circles between files, and each test in a stage that CI runs.

Imports are read from the syntax tree. Imports inside functions and under `if TYPE_CHECKING:` do not run when a module
is loaded, so they cannot make a circle of loading; the service and what is below it are free of such circles, too.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from tests.stages import FAST, GPU_SIM, ONLY_FAST, SYSTEM, TARGETS, is_never_fast, stage_of

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = {
    "draftwood_errors": "strategies/draftwood_errors",
    "draftwood_strategies": "strategies/draftwood_strategies",
    "draftwood_memory": "memory/draftwood_memory",
    "draftwood_tenants": "tenants/draftwood_tenants",
    "draftwood_model_runner": "model_runner/draftwood_model_runner",
    "draftwood_service": "service/draftwood_service",
    "draftwood_benchmarks": "benchmarks/draftwood_benchmarks",
    "tools": "tools",
    "draftwood_client": "clients/python/draftwood_client",
    "draftwood_vllm": "plugins/vllm/draftwood_vllm",
    "draftwood_sglang": "plugins/sglang/draftwood_sglang",
    "draftwood_phrase_book": "examples/phrase_book/draftwood_phrase_book",
}
"""Our packages, and the folders that they are in."""

WITHOUT_ANY_CIRCLE = (
    "draftwood_errors",
    "draftwood_strategies",
    "draftwood_memory",
    "draftwood_tenants",
    "draftwood_model_runner",
    "draftwood_service",
)
"""Packages whose files do not know each other in a circle either: by types alone, or by imports in functions."""

_TYPE_CHECKING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")

Graph = dict[str, set[str]]
"""The modules that each module imports while it is loaded."""


def modules_in(root: Path, packages: Mapping[str, str]) -> dict[str, Path]:
    """The files of the packages, by module name; `packages` maps names to folders under `root`."""
    found = {}
    for package, folder in packages.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = (package, *path.relative_to(root / folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_at_load(body: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements that run when the statements of a module do."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) in _TYPE_CHECKING:
            yield from imports_at_load(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            yield from imports_at_load(ast.iter_child_nodes(node))


def all_imports(body: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements anywhere in a module."""
    for statement in body:
        yield from (node for node in ast.walk(statement) if isinstance(node, ast.Import | ast.ImportFrom))


def import_graph(
    modules: Mapping[str, Path],
    imports: Callable[[Iterable[ast.AST]], Iterator[ast.Import | ast.ImportFrom]] = imports_at_load,
) -> Graph:
    """An edge for each import between files; `from p import name` leads to `p.name` if that is a module, else to `p`.

    Loading `p.name` loads `p` first, which is no edge: else each package that imports its modules would be a circle.
    """
    graph: Graph = {name: set() for name in modules}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for statement in imports(ast.parse(path.read_text(encoding="utf-8")).body):
            if isinstance(statement, ast.Import):
                targets = [alias.name for alias in statement.names]
            else:
                above = package.split(".")[: len(package.split(".")) - statement.level + 1] if statement.level else []
                base = ".".join([*above, *filter(None, [statement.module])])
                inner = [f"{base}.{alias.name}" for alias in statement.names]
                targets = [each if each in modules else base for each in inner]
            graph[name].update(target for target in targets if target in modules and target != name)
    return graph


def circle_in(graph: Graph) -> list[str] | None:
    """Modules that import each other in a circle, the first one again at the end; None if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return None


@pytest.mark.parametrize(
    ("packages", "imports"),
    [(tuple(PACKAGES), imports_at_load), (WITHOUT_ANY_CIRCLE, all_imports)],
    ids=["loading", "knowing"],
)
def test_no_files_import_each_other_in_a_circle(packages: tuple[str, ...], imports: Any) -> None:
    modules = modules_in(REPOSITORY, {name: PACKAGES[name] for name in packages})
    assert len(modules) > 100
    assert circle_in(import_graph(modules, imports)) is None


def write(root: Path, files: Mapping[str, str]) -> dict[str, Path]:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return modules_in(root, {"p": "p"})


def test_a_circle_is_found_however_it_is_written(tmp_path: Path) -> None:
    modules = write(
        tmp_path,
        {
            "p/__init__.py": "",
            "p/a.py": "import json\nfrom p import b\n",
            "p/b.py": "try:\n    import p.c.d\nexcept ImportError:\n    raise\n",
            "p/c/__init__.py": "",
            "p/c/d.py": "class D:\n    from ..a import x\n",
        },
    )
    graph = import_graph(modules)
    assert graph == {"p": set(), "p.a": {"p.b"}, "p.b": {"p.c.d"}, "p.c": set(), "p.c.d": {"p.a"}}
    assert {*(circle_in(graph) or ())} == {"p.a", "p.b", "p.c.d"}


def test_imports_in_functions_and_for_type_checking_make_no_circle(tmp_path: Path) -> None:
    modules = write(
        tmp_path,
        {
            "p/__init__.py": "from p.a import f\n",
            "p/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.b\ndef f():\n    import p.b\n",
            "p/b.py": "import p.a\n",
        },
    )
    graph = import_graph(modules)
    assert graph == {"p": {"p.a"}, "p.a": set(), "p.b": {"p.a"}}
    assert circle_in(graph) is None
    assert {*(circle_in(import_graph(modules, all_imports)) or ())} == {"p.a", "p.b"}


def test_every_stage_of_the_tests_has_a_target_that_ci_runs() -> None:
    """Slow tests are the nightly run's; `make test` deselects what the other targets select."""
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    recipes = dict(re.findall(r"^(test[a-z-]*):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    for mark, target in TARGETS.items():
        if mark not in (FAST, "sglang"):  # SGLang's tests have a configuration of their own
            assert f" -m {mark}" in recipes[target]
    assert " -m " not in recipes["test"].replace("python -m pytest", "")
    configuration = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
    deselected = re.search(r"-m '(.*)'", configuration["ini_options"]["addopts"])
    assert deselected is not None
    assert deselected[1] == ONLY_FAST
    run = re.findall(r"\btest(?:-[a-z]+)*\b", (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8"))
    assert sorted({*run, "test-slow"}) == sorted(TARGETS.values())


def test_a_test_is_in_one_stage() -> None:
    """A mark of its own decides before its folder, and that before its parameters."""
    cuda, new, other = "tests/model_runner/runners/cuda/test_exact.py", "tests/engines/test_new.py", "tests/test_x.py"
    assert [is_never_fast(path) for path in (cuda, new, other)] == [True, True, False]
    cases: list[tuple[str, list[str], dict[str, str], str]] = [
        (other, ["asyncio"], {}, FAST),
        (other, ["system"], {}, "system"),
        (cuda, [], {"family": "phi"}, "gpu_sim"),
        (cuda, ["slow"], {}, "slow"),
        (new, [], {}, "system"),
        (other, [], {"family": "llama"}, FAST),
        (other, [], {"family": "phi"}, "system"),
        (other, [], {"family": "qwen3", "runner": "openvino"}, FAST),
        (other, [], {"family": "qwen3", "runner": "torch"}, "system"),
        (other, [], {"family": "llama", "runner": "cuda"}, "gpu_sim"),
    ]
    for path, marks, parameters, stage in cases:
        assert stage_of(path, marks, parameters) == stage
    with pytest.raises(ValueError, match="marked slow and system"):
        stage_of(other, ["slow", "system"], {})


def test_the_stages_name_folders_and_files_that_exist() -> None:
    assert [place for place in (*SYSTEM, *GPU_SIM) if not (REPOSITORY / place).exists()] == []
