"""Checks which checkpoints a training leaves: the last and the best, and one of its last good step however it ends."""

import json
import os
import re
import signal

import pytest
from conftest import DONE, FAILED, INTERRUPTED, PROGRAM
from records import checkpoint, checkpoints_in, losses_of, tensors_of

TRAIN = "accelmgr train -c small.yaml --checkpoint-dir {}"
# Twenty steps in ten updates, with a checkpoint every five steps: two checkpoints fall within an update.
UPDATES = f"{TRAIN} --steps 20 --checkpoint-every 5 --set optimizer.steps_per_update=2"
LINE = r"(?m)^checkpoint ck/step-{:08}: \d+\.\d MiB; held up training for \d+\.\d ms, written in \d+\.\d ms$"


def assert_goes_on_to_the_end_of_an_undisturbed_run(person):
    for command in (UPDATES.format("ck") + " --resume latest", UPDATES.format("whole")):
        ended = person.types(command)
        assert ended.code == DONE, ended.err
    one, other = (tensors_of(checkpoint(person.file(folder), 20)) for folder in ("ck", "whole"))
    assert one == other


def test_the_last_and_the_best_are_kept_and_each_tells_how_long_it_held_up_training(person):
    ended = person.types(f"{TRAIN.format('ck')} --steps 19 --checkpoint-every 2 --keep 2 --log l.jsonl")
    assert (ended.code, ended.err) == (DONE, "")
    written = [*range(2, 19, 2), 19]
    for step in written:
        assert re.search(LINE.format(step), ended.out), ended.out
    best = min(written, key=losses_of(person.file("l.jsonl")).get)
    assert best not in (18, 19), "it would be kept anyway"
    assert checkpoints_in(person.file("ck")) == [best, 18, 19]


@pytest.mark.parametrize("end", ["--steps 3", "--set data.elements=24 --set data.epochs=1"], ids=["steps", "data"])
def test_the_last_step_always_has_one(person, end):
    assert person.types(f"{TRAIN.format('new/ck')} {end}").code == DONE
    assert checkpoints_in(person.file("new/ck")) == [3]


def test_it_has_gradients_and_the_state_of_the_optimizer_by_the_names_of_parameters(person):
    assert person.types(f"{TRAIN.format('ck')} --steps 2").code == DONE
    files = tensors_of(checkpoint(person.file("ck"), 2))
    model, training = (
        {name: entry["shape"] for name, entry in json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")]).items()
         if name != "__metadata__"}
        for file in (files["model.safetensors"], files["training.safetensors"])
    )  # fmt: skip
    assert model["hidden.0.weight"] == [32, 16]
    assert {f"gradients/{name}": shape for name, shape in model.items()}.items() <= training.items()
    assert {"optimizer/updates", "optimizer/decay/exp_avg"} <= training.keys()


def test_a_failed_run_leaves_one_of_its_last_good_step(person):
    fault = "--set 'faults=rank=0 step=8 phase=backward fault=kill' --set runners.on_loss=fail"
    assert person.types(f"{UPDATES.format('ck')} {fault}").code == FAILED
    assert checkpoints_in(person.file("ck")) == [5, 7]
    assert_goes_on_to_the_end_of_an_undisturbed_run(person)


def test_ctrl_c_leaves_a_checkpoint(person):
    run = person.trains(f"{TRAIN.format('ck')} --steps 1000000 --set grad_accumulation_steps=500")
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (INTERRUPTED, "")
    steps = int(re.match(r"interrupted: (\d+) steps", out.splitlines()[-1])[1])
    assert checkpoints_in(person.file("ck")) == [steps]
    assert re.search(LINE.format(steps), out), out
    ended = person.types(f"{TRAIN.format('ck')} --resume latest --steps {steps + 1}")
    assert ended.code == DONE, ended.err
    assert f"at step {steps}\n" in ended.out and f"step {steps + 1}/{steps + 1}" in ended.out


def test_a_full_disk_is_told_and_training_goes_on(person):
    assert person.types(f"{TRAIN.format('one')} --steps 5").code == DONE
    files = checkpoint(person.file("one"), 5).iterdir()
    blocks = sum(-(-file.stat().st_size // 4096) for file in files)
    person.file("disk").mkdir()
    mount = f"mount -t tmpfs -o size={6 * blocks}k,nr_inodes=100 none disk"  # Room for one and a half checkpoints.
    refused = person.types(f"unshare -rm sh -c '{mount}'")
    if refused.code != 0:
        pytest.skip(f"no disk of one's own to be mounted here: {refused.err.strip()}")
    train = UPDATES.format("disk").replace("accelmgr", PROGRAM)
    ended = person.types(f"unshare -rm sh -c '{mount} && {{ {train}; code=$?; cp -r disk ck; exit $code; }}'")
    assert ended.code == FAILED, ended.text
    for part in ("checkpoint disk/step-00000005", "step 20/20", "done: 20 steps"):
        assert part in ended.out
    for step in (10, 15, 20):
        told = rf"(?m)^accelmgr: the checkpoint of step {step} was not written: .*step-{step:08}.*No space left on"
        assert re.search(told, ended.err), ended.err
    elsewhere = rf"{person.folder.resolve()}/\S+/step-00000020"
    assert re.search(rf"(?m)^accelmgr: the checkpoint of step 20 is in {elsewhere} instead", ended.err), ended.err
    assert [entry.name for entry in person.file("ck").iterdir()] == ["step-00000005"]
    assert_goes_on_to_the_end_of_an_undisturbed_run(person)
