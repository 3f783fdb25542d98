"""Checks that check_floors.py accepts a correct tree, and names place and reason of each error planted in it."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

CHECK_FLOORS = pathlib.Path(__file__).with_name("check_floors.py")

RIGHT_TREE = {
    "CMakeLists.txt": "set(ACCELMGR_FLOORS base base/config engine/session launcher/launch)\n"
    "set(ACCELMGR_TORCH_FLOORS libtorch/tensor)\n",
    "include/accelmgr/errors.hpp": "#include <string>\n",
    "include/accelmgr/config.hpp": '#include "accelmgr/errors.hpp"\n',
    "src/base/CMakeLists.txt": "accelmgr_floor(base SOURCES log.cpp)\n",
    "src/base/log.cpp": '#include "base/log.hpp"\n#include <spdlog/spdlog.h>\n#include "accelmgr/errors.hpp"\n',
    "src/base/log.hpp": "#include <string>\n",
    "src/base/config/CMakeLists.txt": "accelmgr_floor(config SOURCES parse.cpp FLOORS base LIBRARIES yaml-cpp)\n",
    "src/base/config/parse.cpp": '#include "accelmgr/config.hpp"\n#include "base/log.hpp"\n',
    "src/libtorch/tensor/CMakeLists.txt": "accelmgr_floor(tensor\n  SOURCES master.cpp\n  FLOORS config TORCH)\n",
    "src/libtorch/tensor/master.cpp": "#include <ATen/core/Tensor.h>\n"
    '#include "accelmgr/config.hpp"\n#include "base/log.hpp"\n',
}


class CheckFloors(unittest.TestCase):
    def run_with(self, changed: dict[str, str]) -> tuple[int, list[str]]:
        """Exit code and printed lines of check_floors.py for RIGHT_TREE with the given files changed or added."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (RIGHT_TREE | changed).items():
                file = pathlib.Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            command = [sys.executable, CHECK_FLOORS, folder]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            return done.returncode, done.stdout.splitlines()

    def assert_only_violation(self, line: str, changed: dict[str, str]) -> None:
        self.assertEqual(self.run_with(changed), (1, [line]))

    def test_a_right_tree_passes(self):
        self.assertEqual(self.run_with({}), (0, []))

    def test_a_private_header_of_a_floor_above_is_found(self):
        self.assert_only_violation(
            "src/base/log.hpp:2: floor base includes libtorch/tensor/master.hpp of floor libtorch/tensor, "
            "which stands above it",
            {"src/base/log.hpp": '#include <string>\n#include "libtorch/tensor/master.hpp"\n'},
        )

    def test_angle_brackets_do_not_hide_an_include(self):
        self.assert_only_violation(
            "src/base/log.hpp:1: floor base includes base/config/parse.hpp of floor base/config, which stands above it",
            {"src/base/log.hpp": "  #  include <base/config/parse.hpp>\n"},
        )

    def test_folders_that_include_each_other_are_found(self):
        self.assert_only_violation(
            "folders of floor launcher/launch include each other in a circle: "
            "src/launcher/launch/compat/names.cpp:1 includes launcher/launch/run, "
            "src/launcher/launch/run/run.hpp:1 includes launcher/launch/plan, "
            "src/launcher/launch/plan/spec.hpp:1 includes launcher/launch/compat",
            {
                "src/launcher/launch/plan/spec.hpp": '#include "launcher/launch/compat/names.hpp"\n',
                "src/launcher/launch/compat/names.cpp": '#include "launcher/launch/run/run.hpp"\n',
                "src/launcher/launch/run/run.hpp": '#include "launcher/launch/plan/spec.hpp"\n',
            },
        )

    def test_a_public_header_of_a_floor_above_is_found(self):
        self.assert_only_violation(
            "src/base/log.cpp:1: floor base includes accelmgr/config.hpp of floor base/config, which stands above it",
            {"src/base/log.cpp": '#include "accelmgr/config.hpp"\n'},
        )

    def test_a_header_of_a_wing_that_this_one_may_not_use_is_found(self):
        self.assert_only_violation(
            "src/launcher/launch/spawn.cpp:1: floor launcher/launch includes engine/session/session.hpp; "
            "its wing may not use the wing engine",
            {"src/launcher/launch/spawn.cpp": '#include "engine/session/session.hpp"\n'}
            | {"src/launcher/launch/CMakeLists.txt": "accelmgr_floor(launch SOURCES spawn.cpp FLOORS session)\n"}
            | {"src/engine/session/CMakeLists.txt": "accelmgr_floor(session SOURCES session.cpp)\n"},
        )

    def test_torch_in_a_floor_built_without_it_is_found(self):
        self.assert_only_violation(
            "src/base/config/parse.cpp:2: floor base/config is built without torch and includes c10/core/Device.h",
            {"src/base/config/parse.cpp": '#include "base/log.hpp"\n#include <c10/core/Device.h>\n'},
        )

    def test_a_private_header_in_a_public_one_is_found(self):
        self.assert_only_violation(
            "include/accelmgr/config.hpp:1: a public header includes base/log.hpp, which is not installed",
            {"include/accelmgr/config.hpp": '#include "base/log.hpp"\n'},
        )

    def test_a_public_header_without_a_floor_is_found(self):
        self.assert_only_violation(
            "include/accelmgr/unheard_of.hpp: has no floor in FLOOR_OF_PUBLIC_HEADER of check_floors.py",
            {"include/accelmgr/unheard_of.hpp": ""},
        )

    def test_a_file_outside_of_the_floors_is_found(self):
        self.assert_only_violation(
            "src/misc/tools.cpp: is in no floor of CMakeLists.txt", {"src/misc/tools.cpp": "#include <string>\n"}
        )

    def test_an_include_that_names_no_floor_is_found(self):
        self.assert_only_violation(
            "src/base/log.cpp:1: log.hpp names no floor; ours are included as floor/file.hpp or accelmgr/file.hpp",
            {"src/base/log.cpp": '#include "log.hpp"\n'},
        )

    def test_a_linked_floor_that_stands_above_is_found(self):
        self.assert_only_violation(
            "src/base/CMakeLists.txt: FLOORS names config, which does not stand below base",
            {"src/base/CMakeLists.txt": "accelmgr_floor(base SOURCES log.cpp FLOORS config)\n"},
        )

    def test_a_linked_floor_that_is_not_used_is_found(self):
        self.assert_only_violation(
            "src/libtorch/tensor/CMakeLists.txt: FLOORS names base, of which tensor includes nothing",
            {
                "src/libtorch/tensor/CMakeLists.txt": "accelmgr_floor(tensor SOURCES m.cpp FLOORS base config TORCH)\n",
                "src/libtorch/tensor/master.cpp": '#include "accelmgr/config.hpp"\n',
            },
        )

    def test_a_used_floor_that_is_not_linked_is_found(self):
        self.assert_only_violation(
            "src/libtorch/tensor/master.cpp:1: base is missing in FLOORS of src/libtorch/tensor/CMakeLists.txt",
            {
                "src/libtorch/tensor/CMakeLists.txt": "accelmgr_floor(tensor SOURCES master.cpp TORCH)\n",
                "src/libtorch/tensor/master.cpp": '#include "base/log.hpp"\n',
            },
        )


if __name__ == "__main__":
    unittest.main()
