"""Checks that check_behaviours.py accepts a right table and names each error planted in it."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

CHECK_BEHAVIOURS = pathlib.Path(__file__).with_name("check_behaviours.py")

FILES = {
    "test_a.py": "def test_one() -> None:\n    pass\n",
    "b_test.cpp": "TEST(Suite, Name) {}\nTEST_P(Table, Row) {}\n",
}
HEADER = "| behaviour | tests |\n|---|---|\n"


class CheckBehaviours(unittest.TestCase):
    def run_with(self, row: str) -> tuple[int, list[str]]:
        """Exit code and printed lines for a table of this row."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (FILES | {"README.md": HEADER + row + "\n"}).items():
                pathlib.Path(folder, name).write_text(text)
            command = [sys.executable, CHECK_BEHAVIOURS, pathlib.Path(folder, "README.md")]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            return done.returncode, done.stdout.splitlines()

    def test_tests_that_exist_pass(self):
        row = "| `spawn()` works | [test_a.py](test_a.py) `test_one`; [b](b_test.cpp) `Suite.Name`, `Table.Row` |"
        self.assertEqual(self.run_with(row), (0, []))

    def test_what_does_not_exist_is_found(self):
        for tests, line in {
            "[a](test_a.py) `test_on`": "there is no test test_on in test_a.py",
            "[b](b_test.cpp) `Suite.Nam`": "there is no test Suite.Nam in b_test.cpp",
            "[c](c_test.cpp) `Suite.Name`": "there is no test Suite.Name in c_test.cpp",
            "[b](b_test.cpp) `test_one`": "there is no test test_one in b_test.cpp",
            "`test_one`": "there is no test test_one in any file: a link is missing before it",
            "[a](test_a.py)": "names no test",
        }.items():
            with self.subTest(tests):
                self.assertEqual(self.run_with(f"| `spawn()` works | {tests} |"), (1, [f"README.md:3: {line}"]))

    def test_a_file_without_a_table_is_found(self):
        self.assertEqual(self.run_with(""), (1, ["README.md: has no table"]))


if __name__ == "__main__":
    unittest.main()
