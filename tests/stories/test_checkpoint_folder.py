"""Checks the folder of checkpoints: it belongs to one run, is checked before the first step, and has a fallback."""

import os
import re
import shutil
import signal

from conftest import DONE, FAILED, GONE_S, USAGE
from records import checkpoint, checkpoints_in, contents_of, run_of, tensors_of

TRAIN = "accelmgr train -c small.yaml --checkpoint-dir ck --checkpoint-every 5"
ENDLESS = f"{TRAIN} --steps 1000000 --set grad_accumulation_steps=50"
LAST = "accelmgr train -c small.yaml --checkpoint-dir ck --set grad_accumulation_steps=50"  # Only the last checkpoint.


def test_a_new_run_replaces_checkpoints_only_if_it_is_told_to_and_when_it_begins(person):
    assert person.types(TRAIN).code == DONE
    assert {entry.name for entry in person.file("ck").iterdir()} == {"step-00000005", "step-00000010"}
    before, first = contents_of(person.file("ck")), run_of(checkpoint(person.file("ck"), 10))
    ended = person.types(f"{TRAIN} --steps 20")
    assert ended.code == USAGE
    assert "'ck/step-00000010' is of another run" in ended.err
    assert "--resume latest" in ended.err and "--overwrite" in ended.err
    assert "step 1/" not in ended.out
    ended = person.types(f"{TRAIN} --overwrite --set model.kind=mpl")
    assert ended.code != DONE and "mpl" in ended.err
    assert contents_of(person.file("ck")) == before
    ended = person.types(f"{TRAIN} --overwrite --steps 6 --set seed_base=2")
    assert ended.code == DONE, ended.err
    assert checkpoints_in(person.file("ck")) == [5, 6]
    assert run_of(checkpoint(person.file("ck"), 6)) != first


def test_a_run_keeps_its_id_through_restarts(person):
    assert person.types(TRAIN).code == DONE
    assert person.types(f"{TRAIN} --steps 15 --resume latest").code == DONE
    ended = person.types(
        f"accelmgr train -c small.yaml --steps 20 --resume {checkpoint(person.file('ck'), 15)} --checkpoint-dir other"
    )
    assert ended.code == DONE, ended.err
    runs = {run_of(path) for path in [*person.file("ck").glob("step-*"), *person.file("other").glob("step-*")]}
    assert len(runs) == 1 and re.fullmatch("[0-9a-f]{16}", runs.pop())


def test_a_run_does_not_go_on_in_the_folder_of_another(person):
    assert person.types(TRAIN).code == DONE
    assert person.types("accelmgr train -c small.yaml --checkpoint-dir other").code == DONE
    before = contents_of(person.file("other"))
    command = "accelmgr train -c small.yaml --steps 15 --checkpoint-dir other --resume ck/step-00000010"
    ended = person.types(command)
    assert ended.code == USAGE
    assert "'other/step-00000010' is of another run" in ended.err and "--overwrite" in ended.err
    assert contents_of(person.file("other")) == before
    assert person.types(f"{command} --overwrite").code == DONE
    assert checkpoints_in(person.file("other")) == [15]
    assert run_of(checkpoint(person.file("other"), 15)) == run_of(checkpoint(person.file("ck"), 10))


def test_two_runs_at_once_are_one_too_many(person):
    first = person.trains(ENDLESS)
    for option in ("--resume latest", "--overwrite"):
        ended = person.types(f"{TRAIN} {option}")
        assert ended.code == FAILED
        assert f"'ck' is in use by process {first.pid}: " in ended.err
        assert "step 1/" not in ended.out
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(GONE_S)
    ended = person.types(f"{TRAIN} --resume latest --steps 1 --set grad_accumulation_steps=50")
    assert ended.code == DONE, ended.err


def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(person):
    person.file("taken").write_text("a file")
    reasons = {"taken": "Not a directory", "taken/ck": "Not a directory", "/proc/ck": "No such file"}
    for folder, reason in reasons.items():
        ended = person.types(f"accelmgr train -c small.yaml --checkpoint-dir {folder}")
        assert ended.code == FAILED
        assert f"checkpoints cannot be written to '{folder}'" in ended.err and reason in ended.err
        assert "step 1/" not in ended.out
    assert person.files() == {"taken"}


def lose_folder(person):
    """Replaces the folder of checkpoints with a file."""
    shutil.rmtree(person.file("ck"))
    person.file("ck").write_text("in the way")


def ends_elsewhere(person, command):
    """Loses the folder of a run, then stops it with Ctrl-C. Returns the folder where it wrote its last checkpoint."""
    run = person.trains(command)
    lose_folder(person)
    os.kill(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == FAILED, out + err
    step = re.search(r"interrupted: (\d+) steps", out)[1]
    assert re.search(rf"the checkpoint of step {step} was not written: .*'ck.*Not a directory", err)
    found = re.search(rf"the checkpoint of step {step} is in (\S+) instead; .*--resume (\S+) goes on", err)
    assert found[1] == found[2] and found[1].endswith(f"/step-{int(step):08}")
    return found[1]


def test_a_last_checkpoint_that_fails_is_written_elsewhere(person):
    person.file("logs").mkdir()
    command = f"{LAST} --log logs/l.jsonl"
    where = ends_elsewhere(person, f"{command} --steps 1000000")
    assert where.startswith(f"{person.folder}/logs/accelmgr-checkpoints-")
    step = int(where[-8:])
    person.file("ck").unlink()
    ended = person.types(f"{command} --resume {where} --steps {step + 2}")
    assert ended.code == DONE, ended.err
    assert checkpoints_in(person.file("ck"))[-1] == step + 2


def test_a_fallback_may_be_named(person):
    where = ends_elsewhere(person, f"{LAST} --steps 1000000 --checkpoint-fallback spare")
    assert where.startswith(f"{person.folder}/spare/accelmgr-checkpoints-")
    assert set(tensors_of(person.file(where))) == {"model.safetensors", "training.safetensors"}


def test_a_fallback_without_checkpoints_is_a_mistake(person):
    ended = person.types("accelmgr train -c small.yaml --checkpoint-fallback spare")
    assert ended.code == USAGE
    assert "--checkpoint-fallback without --checkpoint-dir" in ended.err
    assert person.files() == set()
