#!/usr/bin/env python3
"""Checks that every floor of src/ uses only floors below it, and none of a wing that its own may not use.

That holds for its includes, and for the FLOORS of its CMakeLists.txt. The folders within a floor include each other in
no circle.

    check_floors.py CHECKOUT

CHECKOUT/CMakeLists.txt lists the folders of the floors in their order; the first part of a folder is the wing. Prints a
line for each violation; exits with 1 if there is one.
"""

import dataclasses
import graphlib
import itertools
import pathlib
import re
import sys

# What each wing may use beside itself.
WINGS = {
    "base": set(),
    "engine": {"base"},
    "launcher": {"base"},
    "libtorch": {"base", "engine", "launcher"},
    "python": {"base", "engine", "launcher"},
}
# The floor that implements a public header. That floor and those above it may include the header.
FLOOR_OF_PUBLIC_HEADER = {
    "dtype.hpp": "base",
    "errors.hpp": "base",
    "failure.hpp": "base",
    "reduce_op.hpp": "base",
    "config.hpp": "base/config",
    "step_result.hpp": "engine/session",
    "pending_steps.hpp": "engine/client",
    "named_tensor.hpp": "libtorch/tensor",
    "model.hpp": "libtorch/model",
    "torch_module.hpp": "libtorch/model",
    "batch_source.hpp": "engine/data",
    "init.hpp": "engine/manager",
    "communicator.hpp": "launcher/collective",
    "launch.hpp": "launcher/launch",
    "checkpoint.hpp": "engine/client",
    "statistics.hpp": "engine/client",
    "evaluator.hpp": "libtorch/handle",
    "manager.hpp": "libtorch/handle",
    "observer.hpp": "libtorch/handle",
    "optimizer.hpp": "libtorch/handle",
    "distributed_context.hpp": "launcher/distributed",
    "multiprocess_launch.hpp": "launcher/distributed",
    "distributed.hpp": "libtorch/distributed",
    "multiprocess.hpp": "libtorch/distributed",
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
    folder: str  # in src/
    order: int
    has_torch: bool
    private: list[Include] = dataclasses.field(default_factory=list)  # in src/
    public: list[Include] = dataclasses.field(default_factory=list)  # in include/
    name: str = ""  # in CMake
    links: set[str] = dataclasses.field(default_factory=set)  # FLOORS of its CMakeLists.txt

    @property
    def wing(self) -> str:
        return self.folder.partition("/")[0]


def cmake_list(text: str, name: str) -> list[str]:
    found = re.search(rf"^set\({name}\s+([^)]*)\)", text, re.MULTILINE)
    if found is None:
        sys.exit(f"CMakeLists.txt: no set({name} ...), the order of the floors")
    return found.group(1).split()


def read_order(checkout: pathlib.Path) -> dict[str, Floor]:
    """The floors by their folders."""
    text = (checkout / "CMakeLists.txt").read_text()
    plain = cmake_list(text, "ACCELMGR_FLOORS")
    torch = cmake_list(text, "ACCELMGR_TORCH_FLOORS")
    return {folder: Floor(folder, order, folder in torch) for order, folder in enumerate(plain + torch)}


def floor_of(path: str, floors: dict[str, Floor]) -> Floor | None:
    """The floor in whose folder a path below src/ lies: the innermost one."""
    folders = (str(folder) for folder in pathlib.PurePosixPath(path).parents)
    return next((floors[folder] for folder in folders if folder in floors), None)


def includes_of(file: pathlib.Path, checkout: pathlib.Path) -> list[Include]:
    lines = enumerate(file.read_text().splitlines(), start=1)
    matches = ((number, INCLUDE.match(line)) for number, line in lines)
    name = file.relative_to(checkout)
    return [Include(f"{name}:{number}", match[2], match[1] == '"') for number, match in matches if match]


def read_cmake(cmake_file: pathlib.Path, floor: Floor) -> None:
    floor.name = floor.folder
    if not cmake_file.exists():
        return
    declaration = re.search(r"accelmgr_(?:use_)?floors?\(([^)]*)\)", cmake_file.read_text())
    words = declaration.group(1).split() if declaration else []
    if words:
        floor.name = words[0]
    if "FLOORS" not in words:
        return
    rest = words[words.index("FLOORS") + 1 :]
    keyword = next((i for i, word in enumerate(rest) if word.isupper()), len(rest))
    floor.links = set(rest[:keyword])


def read_tree(checkout: pathlib.Path, floors: dict[str, Floor]) -> list[str]:
    """Fills in the floors. Returns a line for each file that belongs to no floor."""
    strays = []
    for file in sorted(path for path in (checkout / "src").rglob("*") if path.suffix in SOURCE_SUFFIXES):
        path = file.relative_to(checkout / "src").as_posix()
        if floor := floor_of(path, floors):
            floor.private += includes_of(file, checkout)
        else:
            strays.append(f"{file.relative_to(checkout)}: is in no floor of CMakeLists.txt")
    for file in sorted((checkout / "include" / "accelmgr").glob("*.hpp")):
        if floor := floors.get(FLOOR_OF_PUBLIC_HEADER.get(file.name, "")):
            floor.public += includes_of(file, checkout)
        else:
            strays.append(f"{file.relative_to(checkout)}: has no floor in FLOOR_OF_PUBLIC_HEADER of check_floors.py")
    for floor in floors.values():
        read_cmake(checkout / "src" / floor.folder / "CMakeLists.txt", floor)
    return strays


def included_floor(include: Include, floors: dict[str, Floor]) -> Floor | None:
    folder, _, rest = include.path.partition("/")
    return floors.get(FLOOR_OF_PUBLIC_HEADER.get(rest, "")) if folder == "accelmgr" else floor_of(include.path, floors)


def include_violation(user: Floor, include: Include, is_public: bool, floors: dict[str, Floor]) -> str | None:
    folder = include.path.partition("/")[0]
    used = included_floor(include, floors)
    if folder in TORCH_FOLDERS:
        return None if user.has_torch else f"floor {user.folder} is built without torch and includes {include.path}"
    if used is None:
        if include.quoted or folder == "accelmgr":
            return f"{include.path} names no floor; ours are included as floor/file.hpp or accelmgr/file.hpp"
        return None
    if is_public and folder != "accelmgr":
        return f"a public header includes {include.path}, which is not installed"
    if used.order > user.order:
        return f"floor {user.folder} includes {include.path} of floor {used.folder}, which stands above it"
    if used.wing not in WINGS[user.wing] | {user.wing}:
        return f"floor {user.folder} includes {include.path}; its wing may not use the wing {used.wing}"
    return None


def links_of(floor: Floor, named: dict[str, Floor]) -> set[str]:
    """The names of all floors that a floor links, directly or through another floor."""
    found = set(floor.links)
    for name in floor.links & named.keys():
        if named[name].order < floor.order:
            found |= links_of(named[name], named)
    return found


def link_violations(user: Floor, floors: dict[str, Floor]) -> list[str]:
    place = f"src/{user.folder}/CMakeLists.txt"
    named = {floor.name: floor for floor in floors.values()}
    includes = user.private + user.public
    used = {floor.name: include for include in includes if (floor := included_floor(include, floors))}
    problems = []
    for name in sorted(user.links):
        if name not in named:
            problems.append(f"{place}: FLOORS names {name}, which is no floor")
        elif named[name].order >= user.order:
            problems.append(f"{place}: FLOORS names {name}, which does not stand below {user.name}")
        elif name not in used:
            problems.append(f"{place}: FLOORS names {name}, of which {user.name} includes nothing")
    for name in sorted(used.keys() - links_of(user, named)):
        if named[name].order < user.order:
            problems.append(f"{used[name].place}: {name} is missing in FLOORS of {place}")
    return problems


def circle(floor: Floor) -> str | None:
    """A circle of folders of this floor that include each other."""
    places: dict[str, dict[str, str]] = {}  # By the folder that includes, and the included one.
    for include in floor.private:
        user = pathlib.PurePosixPath(include.place).parent.relative_to("src").as_posix()
        used = pathlib.PurePosixPath(include.path).parent.as_posix()
        if used != user and used.startswith(floor.folder):
            places.setdefault(user, {}).setdefault(used, include.place)
    try:
        graphlib.TopologicalSorter(places).prepare()
    except graphlib.CycleError as error:
        folders = error.args[1][::-1]
        steps = [f"{places[user][used]} includes {used}" for user, used in itertools.pairwise(folders)]
        return f"folders of floor {floor.folder} include each other in a circle: {', '.join(steps)}"
    return None


def violations(checkout: pathlib.Path) -> list[str]:
    floors = read_order(checkout)
    problems = read_tree(checkout, floors)
    for floor in floors.values():
        includes = [(include, False) for include in floor.private] + [(include, True) for include in floor.public]
        for include, is_public in includes:
            if problem := include_violation(floor, include, is_public, floors):
                problems.append(f"{include.place}: {problem}")
        problems += link_violations(floor, floors)
        if problem := circle(floor):
            problems.append(problem)
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
