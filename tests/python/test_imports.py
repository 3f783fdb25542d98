"""Checks that the modules of the package do not import each other in a circle."""

from __future__ import annotations

import ast
import graphlib
import pathlib
from collections.abc import Iterator

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "src/python/accelmgr"
Graph = dict[str, set[str]]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that may run, those in functions included, but not those under `if TYPE_CHECKING`."""
    yield node
    for child in node.orelse if isinstance(node, ast.If) and is_type_checking(node) else ast.iter_child_nodes(node):
        yield from executed(child)


def imported(node: ast.AST, package: str) -> list[str]:
    """Dotted names of an import in a module of `package`. `from x import y` gives `x.y`, which may be no module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    source = ".".join([*above, *([node.module] if node.module else [])])
    return [f"{source}.{alias.name}" for alias in node.names]


def with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def graph_of(folder: pathlib.Path, extensions: tuple[str, ...] = ()) -> Graph:
    """Maps each module to those that it imports. Importing `a.b.c` imports `a.b` too, unless that is under way."""
    files = {}
    for file in folder.rglob("*.py"):
        parts = file.relative_to(folder.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph: Graph = {name: set() for name in extensions}
    for module, file in files.items():
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        names = {name for node in executed(ast.parse(file.read_text())) for name in imported(node, package)}
        graph[module] = set()
        for name in names:
            known = [each for each in with_parents(name) if each in files or each in extensions]
            graph[module] |= (set(known[:-1]) - set(with_parents(package))) | set(known[-1:])
    return graph


def circle_of(graph: Graph) -> set[str]:
    """The modules of an import circle, if there is one."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return set(error.args[1])
    return set()


def test_no_module_of_the_package_imports_itself_by_way_of_others() -> None:
    graph = graph_of(PACKAGE, ("accelmgr._native",))
    assert "accelmgr.manager" in graph["accelmgr"]  # The graph has edges.
    assert not circle_of(graph)


# What the modules of each folder may import of the package.
SHARED = {"_memory", "_serialization", "_process", "_data", "_model", "_changes", "_updates"}
ROOMS = {
    "_memory": set(),
    "_serialization": {"_memory"},
    "_process": {"_serialization"},
    "_data": {"_memory", "_serialization"},
    "_model": {"_memory", "_serialization"},
    "_changes": {"_memory", "_serialization", "_model"},
    "_updates": {"_memory", "_serialization"},
    "_host": SHARED,
    "_runner": SHARED,
    "_common": {"_host"},  # A former name, which scripts of users import.
}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def forbidden(graph: Graph) -> list[str]:
    """Imports of a room that it may not make, as "importer > imported"."""
    return [
        f"{module} > {other}"
        for module, others in sorted(graph.items())
        for other in sorted(others)
        if room_of(module) in ROOMS
        and room_of(other) not in ROOMS[room_of(module)] | {room_of(module), "_native", "errors"}
    ]


def test_each_room_imports_those_below_it_and_host_and_runners_not_each_other() -> None:
    graph = graph_of(PACKAGE, ("accelmgr._native",))
    assert {room_of(module) for module in graph} > set(ROOMS)
    assert forbidden(graph) == []
    graph["accelmgr._host.binding"].add("accelmgr._runner.replica")
    graph["accelmgr._memory.tensors"].add("accelmgr._data.reading")
    assert forbidden(graph) == [
        "accelmgr._host.binding > accelmgr._runner.replica",
        "accelmgr._memory.tensors > accelmgr._data.reading",
    ]


def test_scripts_find_states_under_their_former_name() -> None:
    from accelmgr._common import checkpoint_state
    from accelmgr._host.checkpoint_state import collected, restored

    assert (checkpoint_state.collected, checkpoint_state.restored) == (collected, restored)


def test_each_file_of_a_room_says_which_processes_run_it() -> None:
    files = [file for room in ROOMS for file in (PACKAGE / room).glob("*.py") if file.name != "__init__.py"]
    assert files
    assert [file.name for file in files if not file.read_text().startswith("# Runs in: ")] == []


def test_a_circle_is_found(tmp_path: pathlib.Path) -> None:
    package = tmp_path / "made"
    (package / "inner").mkdir(parents=True)
    for name, text in {
        "__init__.py": "from made import first",
        "first.py": "import made.second as other",
        "second.py": "def later():\n    from made.inner import leaf",
        "inner/__init__.py": "from .. import first",
        "inner/leaf.py": "from made.inner import twig",
        "inner/twig.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.inner import leaf",
    }.items():
        (package / name).write_text(text)
    assert circle_of(graph_of(package)) == {"made.first", "made.second", "made.inner"}
    (package / "inner/__init__.py").write_text("")
    assert not circle_of(graph_of(package))
    (package / "inner/twig.py").write_text("from . import leaf")
    assert circle_of(graph_of(package)) == {"made.inner.leaf", "made.inner.twig"}
