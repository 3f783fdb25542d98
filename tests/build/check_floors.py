#!/usr/bin/env python3
"""Checks that every floor of src/ uses only floors below it: in its includes and in the FLOORS of its CMakeLists.txt.

    check_floors.py CHECKOUT

CHECKOUT/CMakeLists.txt lists the floors in their order. Prints a line for each violation; exits with 1 if there is one.
"""

import dataclasses
import pathlib
import re
import sys

# The floor that implements a public header. That floor and those above it may include the header.
FLOOR_OF_PUBLIC_HEADER = {
    "dtype.hpp": "base",
    "errors.hpp": "base",
    "config.hpp": "config",
    "step_result.hpp": "session",
    "named_tensor.hpp": "tensor",
    "model.hpp": "model",
    "torch_module.hpp": "model",
    "batch_source.hpp": "data",
    "init.hpp": "manager",
    "communicator.hpp": "collective",
    "launch.hpp": "launch",
    "checkpoint.hpp": "client",
    "statistics.hpp": "client",
    "evaluator.hpp": "libtorch",
    "manager.hpp": "libtorch",
    "observer.hpp": "libtorch",
    "optimizer.hpp": "libtorch",
    "distributed_context.hpp": "distributed",
    "multiprocess_launch.hpp": "distributed",
    "distributed.hpp": "libtorch_distributed",
    "multiprocess.hpp": "libtorch_distributed",
}
TORCH_FOLDERS = {"ATen", "c10", "caffe2", "torch"}
SOURCE_SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".hpp"}
INCLUDE = re.compile(r'\s*#\s*include\s*(["<])([^">]+)[">]')


@dataclasses.dataclass(frozen=True)
class Include:
    place: str  # file:line
    path: str
    quoted: bool


@dataclasses.dataclass
class Floor:
    name: str
    order: int
    has_torch: bool
    private: list[Include] = dataclasses.field(default_factory=list)  # in src/
    public: list[Include] = dataclasses.field(default_factory=list)  # in include/
    links: set[str] = dataclasses.field(default_factory=set)  # FLOORS of its CMakeLists.txt


def cmake_list(text: str, name: str) -> list[str]:
    found = re.search(rf"^set\({name}\s+([^)]*)\)", text, re.MULTILINE)
    if found is None:
        sys.exit(f"CMakeLists.txt: no set({name} ...), the order of the floors")
    return found.group(1).split()


def read_order(checkout: pathlib.Path) -> dict[str, Floor]:
    text = (checkout / "CMakeLists.txt").read_text()
    plain = cmake_list(text, "ACCELMGR_FLOORS")
    torch = cmake_list(text, "ACCELMGR_TORCH_FLOORS")
    return {name: Floor(name, order, name in torch) for order, name in enumerate(plain + torch)}


def includes_of(file: pathlib.Path, checkout: pathlib.Path) -> list[Include]:
    lines = enumerate(file.read_text().splitlines(), start=1)
    matches = ((number, INCLUDE.match(line)) for number, line in lines)
    name = file.relative_to(checkout)
    return [Include(f"{name}:{number}", match[2], match[1] == '"') for number, match in matches if match]


def read_links(cmake_file: pathlib.Path) -> set[str]:
    if not cmake_file.exists():
        return set()
    declaration = re.search(r"accelmgr_(?:use_)?floors?\(([^)]*)\)", cmake_file.read_text())
    words = declaration.group(1).split() if declaration else []
    if "FLOORS" not in words:
        return set()
    rest = words[words.index("FLOORS") + 1 :]
    keyword = next((i for i, word in enumerate(rest) if word.isupper()), len(rest))
    return set(rest[:keyword])


def read_tree(checkout: pathlib.Path, floors: dict[str, Floor]) -> list[str]:
    """Fills in the floors. Returns a line for each file that belongs to no floor."""
    strays = []
    for file in sorted(path for path in (checkout / "src").rglob("*") if path.suffix in SOURCE_SUFFIXES):
        folder = file.relative_to(checkout / "src").parts[0]
        if folder in floors:
            floors[folder].private += includes_of(file, checkout)
        else:
            strays.append(f"{file.relative_to(checkout)}: is in no floor of CMakeLists.txt")
    for file in sorted((checkout / "include" / "accelmgr").glob("*.hpp")):
        floor = FLOOR_OF_PUBLIC_HEADER.get(file.name)
        if floor in floors:
            floors[floor].public += includes_of(file, checkout)
        else:
            strays.append(f"{file.relative_to(checkout)}: has no floor in FLOOR_OF_PUBLIC_HEADER of check_floors.py")
    for floor in floors.values():
        floor.links = read_links(checkout / "src" / floor.name / "CMakeLists.txt")
    return strays


def included_floor(include: Include, floors: dict[str, Floor]) -> Floor | None:
    folder, _, rest = include.path.partition("/")
    name = FLOOR_OF_PUBLIC_HEADER.get(rest) if folder == "accelmgr" else folder
    return floors.get(name)


def include_violation(user: Floor, include: Include, is_public: bool, floors: dict[str, Floor]) -> str | None:
    folder = include.path.partition("/")[0]
    used = included_floor(include, floors)
    if folder in TORCH_FOLDERS:
        return None if user.has_torch else f"floor {user.name} is built without torch and includes {include.path}"
    if used is None:
        if include.quoted or folder == "accelmgr":
            return f"{include.path} names no floor; ours are included as floor/file.hpp or accelmgr/file.hpp"
        return None
    if is_public and folder != "accelmgr":
        return f"a public header includes {include.path}, which is not installed"
    if used.order > user.order:
        return f"floor {user.name} includes {include.path} of floor {used.name}, which stands above it"
    return None


def links_of(floor: Floor, floors: dict[str, Floor]) -> set[str]:
    """All floors that a floor links, directly or through another floor."""
    found = set(floor.links)
    for name in floor.links & floors.keys():
        if floors[name].order < floor.order:
            found |= links_of(floors[name], floors)
    return found


def link_violations(user: Floor, floors: dict[str, Floor]) -> list[str]:
    place = f"src/{user.name}/CMakeLists.txt"
    includes = user.private + user.public
    used = {floor.name: include for include in includes if (floor := included_floor(include, floors))}
    problems = []
    for name in sorted(user.links):
        if name not in floors:
            problems.append(f"{place}: FLOORS names {name}, which is no floor")
        elif floors[name].order >= user.order:
            problems.append(f"{place}: FLOORS names {name}, which does not stand below {user.name}")
        elif name not in used:
            problems.append(f"{place}: FLOORS names {name}, of which {user.name} includes nothing")
    for name in sorted(used.keys() - links_of(user, floors)):
        if floors[name].order < user.order:
            problems.append(f"{used[name].place}: {name} is missing in FLOORS of {place}")
    return problems


def violations(checkout: pathlib.Path) -> list[str]:
    floors = read_order(checkout)
    problems = read_tree(checkout, floors)
    for floor in floors.values():
        includes = [(include, False) for include in floor.private] + [(include, True) for include in floor.public]
        for include, is_public in includes:
            if problem := include_violation(floor, include, is_public, floors):
                problems.append(f"{include.place}: {problem}")
        problems += link_violations(floor, floors)
    return problems


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    problems = violations(pathlib.Path(sys.argv[1]).resolve())
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
