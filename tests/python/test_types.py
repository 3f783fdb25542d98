"""The package is typed, and its stubs say what the extension module has."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import accelmgr._native

ROOT = pathlib.Path(__file__).resolve().parents[2]
Members = dict[str, list[tuple[str, bool]] | None]


def members_of(body: list[ast.stmt]) -> Members:
    """Name of each function, and of its arguments whether they have a default; positional ones go by no name."""
    members: Members = {}
    for node in body:
        if not isinstance(node, ast.FunctionDef):
            continue
        if any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list):
            members[node.name] = None
            continue
        plain = node.args.posonlyargs + node.args.args
        defaults = [False] * (len(plain) - len(node.args.defaults)) + [True] * len(node.args.defaults)
        names = ["" for _ in node.args.posonlyargs] + [argument.arg for argument in node.args.args]
        members[node.name] = list(zip(names, defaults, strict=True))
    return members


def structure_of(stub: str) -> dict[str, Members]:
    tree = ast.parse(stub)
    classes = {node.name: members_of(node.body) for node in tree.body if isinstance(node, ast.ClassDef)}
    for members in classes.values():
        members.pop("__repr__", None)
    return classes | {"": members_of(tree.body)}


def test_the_stub_is_that_of_the_extension_module() -> None:
    from nanobind.stubgen import StubGen

    generated = StubGen(accelmgr._native)
    generated.put(accelmgr._native)
    stub = (ROOT / "src/python/accelmgr/_native.pyi").read_text()
    assert structure_of(stub) == structure_of(generated.get())


def test_the_package_is_typed_strictly() -> None:
    command = [sys.executable, "-m", "mypy", "--no-error-summary"]  # pyproject.toml says what, and how.
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stdout + checked.stderr
