"""Checks that the program trains a Python model on Python data, both named in a configuration, without a script."""

import pytest
from conftest import DONE, USAGE
from records import losses_of

MODELS = '''
import torch


class Line(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x, y):
        return {"loss": (x @ self.weight - y).square().mean()}


def make(width):
    return Line(int(width))


def nothing():
    return 7


def points():
    generator = torch.Generator().manual_seed(1)
    while True:
        x = torch.randn(3, generator=generator)
        yield {"x": x, "y": x.sum()}
'''

CONFIG = """\
nprocs: 2
batch_size_per_device: 8
runners: {threads: 1}
model: {kind: python, factory: "FACTORY", options: {OPTIONS}}
data: {kind: python, factory: "lines:points", epochs: 1}
optimizer: {kind: sgd, learning_rate: 0.2, warmup_updates: 0}
train: {steps: 20}
"""


def write(person, factory="lines:make", options='width: "3"'):
    person.file("lines.py").write_text(MODELS)
    person.file("line.yaml").write_text(CONFIG.replace("FACTORY", factory).replace("OPTIONS", options))


def test_a_configuration_trains_it(person):
    write(person)
    ended = person.types("accelmgr train -c line.yaml --log line.jsonl --checkpoint-dir ck")
    assert ended.code == DONE, ended.text
    losses = losses_of(person.file("line.jsonl"))
    assert len(losses) == 20 and losses[20] < losses[1] / 10, losses
    ended = person.types(
        "accelmgr train -c line.yaml --steps 25 --log line.jsonl --checkpoint-dir ck --resume latest"
    )
    assert ended.code == DONE, ended.text
    assert len(losses_of(person.file("line.jsonl"))) == 25


@pytest.mark.parametrize("command", ["train -c line.yaml", "serve -c line.yaml --socket ./socket"])
@pytest.mark.parametrize(("factory", "said"), [("lines:made", "has no 'made'"), ("lines:nothing", "it must return a")])
def test_a_factory_that_is_wrong_is_named(person, command, factory, said):
    write(person, factory, "" if factory == "lines:nothing" else 'width: "3"')
    ended = person.types(f"accelmgr {command}")
    assert ended.code == USAGE, ended.text
    assert said in ended.err, ended.text
    assert not person.file("socket").exists()


def test_a_configuration_is_served(person):
    write(person)
    service = person.begins("accelmgr serve -c line.yaml --socket ./socket")
    assert service.stdout.readline().startswith("ready: model 'python', 2 runners"), service.communicate()
    ended = person.types("accelmgr step --count 3 --socket ./socket")
    assert ended.code == DONE and ended.out.startswith("step 1: loss "), ended.text
    assert person.types("accelmgr stop --socket ./socket").code == DONE
    _, err = service.communicate(timeout=60)
    assert (service.returncode, err) == (DONE, "")


def test_held_out_data_of_python_is_not_evaluated(person):
    write(person)
    ended = person.types("accelmgr train -c line.yaml --set train.evaluate_every=5")
    assert ended.code == USAGE, ended.text
    assert "train.evaluate_every is 5" in ended.err
