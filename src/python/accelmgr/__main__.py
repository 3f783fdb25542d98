"""`python -m accelmgr`: what the package does from a command line."""

from __future__ import annotations

import argparse
import sys

from accelmgr.plot import add_arguments, run


def main() -> None:
    parser = argparse.ArgumentParser(prog="accelmgr", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add_arguments(commands.add_parser("plot", help="a picture of a training run"))
    sys.exit(run(parser.parse_args()))


if __name__ == "__main__":
    main()
