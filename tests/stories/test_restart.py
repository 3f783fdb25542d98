"""Checks that a run which is killed many times, and restarted by the same command, ends as an undisturbed run does."""

import os
import random
import signal
import subprocess

from conftest import BOUND_S, DONE, GONE_S
from records import checkpoint, checkpoints_in, contents_of, losses_of, numbers_of

KILLS = 20
STARTING = 5  # How many of the kills come at a random time up to 0.5 s, most likely before the first step.
STEPS = 200
SEED = int(os.environ.get("ACCELMGR_STORY_SEED", "13"))
# A step takes some milliseconds. Every other checkpoint is between the two steps of an update.
COMMAND = (
    f"accelmgr train -c small.yaml --steps {STEPS} --log {{0}}.jsonl --checkpoint-dir {{0}} --checkpoint-every 7 "
    "--resume latest --set optimizer.steps_per_update=2 --set grad_accumulation_steps=40 --set batch_size_per_device=1"
)


def ends_within(run, seconds):
    try:
        run.communicate(timeout=seconds)
        return True
    except subprocess.TimeoutExpired:
        return False


def reaches(run, step):
    """Reads the output until the run has made the step. False if the run ends before."""
    for line in run.stdout:
        if line.startswith("step ") and int(line.split()[1].partition("/")[0]) >= step:
            return True
    return False


def test_a_run_killed_at_20_random_moments_ends_as_one_that_never_was(person):
    print(f"ACCELMGR_STORY_SEED={SEED}")
    chance = random.Random(SEED)
    undisturbed = person.types(COMMAND.format("whole"))
    assert undisturbed.code == DONE, undisturbed.err

    # All kills are in the first half of the run, so that even a late one finds it running.
    moments = [("step", step) for step in sorted(chance.sample(range(1, STEPS // 2), KILLS - STARTING))]
    for _ in range(STARTING):
        moments.insert(chance.randrange(len(moments) + 1), ("time", chance.uniform(0, 0.5)))
    # These runs wait before their end, so that even a late kill finds them.
    killed_one = COMMAND.format("killed") + f" --set 'faults=rank=1 step={STEPS - 10} phase=forward fault=hang'"
    for what, moment in moments:
        run = person.begins(killed_one)
        # Kills within 30 ms of a step, when the run may be writing a checkpoint, or at a random time of the start.
        alive = reaches(run, moment) and not ends_within(run, chance.uniform(0, 0.03)) if what == "step" else (
            not ends_within(run, moment))
        assert alive, f"it ended by itself before it could be killed at {what} {moment}: {run.communicate()}"
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate(timeout=GONE_S)
    ended = person.begins(COMMAND.format("killed"))
    out, err = ended.communicate(timeout=BOUND_S)
    assert ended.returncode == DONE, out + err
    assert "differs" not in err and "lacks" not in err

    whole, killed = person.file("whole.jsonl"), person.file("killed.jsonl")
    assert numbers_of(killed) == list(range(1, STEPS + 1))
    assert losses_of(killed) == losses_of(whole)
    assert checkpoints_in(person.file("killed")) == checkpoints_in(person.file("whole"))
    for step in checkpoints_in(person.file("whole")):
        one, other = (contents_of(checkpoint(person.file(name), step)) for name in ("whole", "killed"))
        for name in ("model.safetensors", "training.safetensors"):
            assert one[name] == other[name], f"{name} of step {step}"
    assert {entry.name for entry in person.file("killed").iterdir()} == {
        entry.name for entry in person.file("whole").iterdir()
    }
