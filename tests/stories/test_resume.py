"""Checks resuming from a checkpoint: its messages, and that one command serves the first start and every restart."""

import os

from conftest import DONE, FAILED, USAGE
from records import checkpoint, checkpoints_in, contents_of, lines_of, numbers_of, steps_of, tensors_of

TRAIN = "accelmgr train -c small.yaml --checkpoint-dir ck"


def test_the_same_command_begins_and_goes_on(person):
    command = f"{TRAIN} --resume latest --log l.jsonl"
    first = person.types(command)
    assert first.code == DONE, first.err
    assert "there is no checkpoint in 'ck' yet; a new run begins" in first.err
    log = person.file("l.jsonl").read_text()
    second = person.types(f"{command} --steps 12")
    assert second.code == DONE, second.err
    assert second.err == ""
    assert f"resumed from {person.folder.resolve()}/ck/step-00000010 at step 10\n" in second.out
    assert numbers_of(person.file("l.jsonl")) == list(range(1, 13))
    assert person.file("l.jsonl").read_text().startswith(log)
    assert len({line["run_id"] for line in steps_of(person.file("l.jsonl"))}) == 1
    assert lines_of(person.file("l.jsonl"))[-1]["run"]["steps"] == 12


def test_a_run_that_is_at_its_end_has_nothing_to_do(person):
    assert person.types(f"{TRAIN} --log l.jsonl").code == DONE
    before, log = contents_of(person.file("ck")), person.file("l.jsonl").read_bytes()
    for steps in (10, 4):
        ended = person.types(f"{TRAIN} --resume latest --steps {steps}")
        assert ended.code == DONE, ended.err
        assert f"nothing to do: the checkpoint is at step 10, train.steps is {steps}" in ended.out
        assert ended.err == "" and "done:" not in ended.out
    assert person.types(f"{TRAIN} --resume latest --log l.jsonl").code == DONE
    assert contents_of(person.file("ck")) == before
    assert person.file("l.jsonl").read_bytes() == log


def test_another_optimizer_is_refused_by_name(person):
    assert person.types(f"{TRAIN} --set optimizer.kind=adamw").code == DONE
    ended = person.types(f"{TRAIN} --resume latest --steps 12 --set optimizer.kind=sgd")
    assert ended.code == USAGE
    assert "the optimizer of the checkpoint is adamw, that of this run sgd (optimizer.kind)" in ended.err
    assert checkpoints_in(person.file("ck")) == [10]


def test_another_configuration_is_told_once(person):
    assert person.types(f"{TRAIN} --set seed_base=1").code == DONE
    changed = "--set seed_base=2 --set optimizer.learning_rate=0.5 --set step_timeout=99 --set model.options.depth=3"
    ended = person.types(f"{TRAIN} --resume latest --steps 20 {changed} --checkpoint-every 2")
    assert ended.code == DONE, ended.err
    (line,) = ended.err.splitlines()
    assert line.startswith("accelmgr: warning: the configuration differs from the checkpoint: seed_base 1 -> 2, ")
    assert "optimizer.learning_rate 0.001 -> 0.5" in line and 'model.options.depth (none) -> "3"' in line
    assert "step_timeout" not in line and "checkpoint.every" not in line and "train.steps" not in line


def test_of_a_torn_latest_checkpoint_the_reason_is_told_and_the_one_before_is_taken(person):
    assert person.types(f"{TRAIN} --checkpoint-every 5").code == DONE
    latest = checkpoint(person.file("ck"), 10)
    before = tensors_of(latest)
    os.truncate(latest / "training.safetensors", len(before["training.safetensors"]) - 1)
    ended = person.types(f"{TRAIN} --resume latest")
    assert ended.code == DONE, ended.err
    assert "ck/step-00000010/training.safetensors' is torn" in ended.out and "ck/step-00000005 at step 5" in ended.out
    assert tensors_of(latest) == before
    for step in (5, 10):
        os.truncate(checkpoint(person.file("ck"), step) / "model.safetensors", 100)
    ended = person.types(f"{TRAIN} --resume latest")
    assert ended.code == FAILED
    assert "'ck' holds no good checkpoint" in ended.err and "model.safetensors' is torn" in ended.err
    assert "step 1/" not in ended.out
