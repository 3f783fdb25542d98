"""Services: `accelmgr serve` in a process of its own."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import time

from accelmgr import _native

PROGRAM = pathlib.Path(_native.__file__).parents[2] / "tools" / "accelmgr"

CONFIGURATION = """\
nprocs: 2
batch_size_per_device: 4
runners: {threads: 1}
model: {kind: mlp, mlp: {input_size: 16, hidden_size: 32}}
"""


class Service:
    def __init__(
        self, folder: pathlib.Path, configuration: str = CONFIGURATION, *settings: str, socket: str | None = None
    ) -> None:
        self.configuration = folder / "service.yaml"
        self.configuration.write_text(configuration)
        self.socket = folder / "socket"
        self.errors = folder / "errors"
        command = [
            os.fspath(PROGRAM),
            "serve",
            "--config",
            os.fspath(self.configuration),
            "--socket",
            socket or os.fspath(self.socket),
            *(word for setting in settings for word in ("--set", setting)),
        ]
        path = os.pathsep.join([os.fspath(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "PYTHONPATH": path}
            )
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        assert re.match("ready: model '(mlp|gpt|python)', [1-9] runners", ready), ready + self.errors.read_text()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def wait_until_it_says(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.errors.read_text():
            assert time.monotonic() < deadline, self.errors.read_text()
            assert self.process.poll() is None, self.errors.read_text()
