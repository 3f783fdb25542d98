"""`python -m accelmgr`, and the command `accelmgr` of the wheel: what the package does from a command line."""

from __future__ import annotations

import argparse
import sys

from accelmgr.plot import add_arguments, run

# The wheel has no libtorch to link, so it does not have the program.
OF_THE_PROGRAM = ("train", "spawn", "config", "info")


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in OF_THE_PROGRAM:
        sys.exit(
            f"accelmgr {sys.argv[1]} is a command of the C++ program, which links libtorch and is not part of the "
            "Python package; in a checkout of accelmgr, tools/run builds it as build/release/tools/accelmgr"
        )
    parser = argparse.ArgumentParser(prog="accelmgr", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add_arguments(commands.add_parser("plot", help="a picture of a training run"))
    sys.exit(run(parser.parse_args()))


if __name__ == "__main__":
    main()
