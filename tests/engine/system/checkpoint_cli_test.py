"""Tests of checkpoints and error reports of the program: checkpoint_cli_test.py PROGRAM [unittest arguments]."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

import cli_test
from cli_test import FAILED, INTERRUPTED, SLOW, ProgramTest, RunningProgram

NOBODY = 65534

# Twenty steps in ten updates, with a checkpoint every five steps: two checkpoints fall within an update.
TRAIN = ["--set", "optimizer.steps_per_update=2", "--checkpoint-every", "5"]
IN_CK = [*TRAIN, "--checkpoint-dir", "ck"]
LINE = r"(?m)^checkpoint {}: \d+\.\d MiB; held up training for \d+\.\d ms, written in \d+\.\d ms$"


def folder_of(step):
    return f"step-{step:08}"


def faults(*words):
    return ["--set", "faults=" + ",".join(words)]


class CheckpointTest(ProgramTest):
    undisturbed = {}

    def steps_in(self, directory):
        return sorted(int(entry.name.removeprefix("step-")) for entry in (self.folder / directory).glob("step-*"))

    def tensors(self, directory, step):
        """The files from which a later run goes on, except counters and the data cursor."""
        return {name: (self.folder / directory / folder_of(step) / name).read_bytes()
                for name in ("model.safetensors", "training.safetensors")}

    def assert_ends_as_undisturbed(self, directory):
        if not CheckpointTest.undisturbed:
            self.train(*TRAIN, "--checkpoint-dir", "whole")
            CheckpointTest.undisturbed = self.tensors("whole", 20)
        self.assertEqual(self.tensors(directory, 20), CheckpointTest.undisturbed)

    def truncate(self, file):
        os.truncate(self.folder / file, (self.folder / file).stat().st_size - 1)


class WrittenTest(CheckpointTest):
    def test_the_last_and_the_best_are_kept_and_each_tells_how_long_it_held_up_training(self):
        out, err = self.train("--steps", "19", "--checkpoint-dir", "ck", "--checkpoint-every", "2", "--keep", "2",
                              "--log", "log.jsonl")
        self.assertEqual(err, "")
        written = [*range(2, 19, 2), 19]
        for step in written:
            self.assertRegex(out, LINE.format(f"ck/{folder_of(step)}"))
        losses = {step["step"]: step["loss"] for step in self.read_log("log.jsonl")[0]}
        best = min(written, key=losses.get)
        self.assertNotIn(best, (18, 19), "it would be kept anyway")
        self.assertEqual(self.steps_in("ck"), [best, 18, 19])

    def test_the_last_step_always_has_one(self):
        self.train("--steps", "3", "--checkpoint-dir", "new/ck")
        self.assertEqual(self.steps_in("new/ck"), [3])
        self.train("--set", "data.elements=24", "--set", "data.epochs=1", "--checkpoint-dir", "ck")
        self.assertEqual(self.steps_in("ck"), [3], "the data ended")

    def test_a_failed_run_leaves_one_of_its_last_good_step(self):
        self.train(*IN_CK, *faults("rank=0 step=8 phase=backward fault=kill"), "--set", "runners.on_loss=fail",
                   exits=FAILED)
        self.assertEqual(self.steps_in("ck"), [5, 7])
        self.train(*IN_CK, "--resume", "latest")
        self.assert_ends_as_undisturbed("ck")

    def test_the_official_package_opens_them(self):
        try:
            import safetensors.numpy
        except ImportError as missing:
            self.skipTest(f"{sys.executable} has no {missing.name}")
        self.train("--steps", "2", "--checkpoint-dir", "ck")
        model, training = (safetensors.numpy.load_file(self.folder / "ck" / folder_of(2) / name)
                           for name in ("model.safetensors", "training.safetensors"))
        self.assertEqual(model["hidden.0.weight"].shape, (32, 16))
        self.assertTrue((model["hidden.0.weight"] != 0).any())
        for name, tensor in model.items():
            self.assertEqual(training[f"gradients/{name}"].shape, tensor.shape)
        self.assertEqual(training["optimizer/updates"].item(), 2)
        self.assertTrue((training["optimizer/decay/exp_avg"] != 0).any())


class ResumeTest(CheckpointTest):
    def test_a_run_killed_in_a_step_and_resumed_ends_with_the_same_bits(self):
        run = RunningProgram(self, *IN_CK, *faults("rank=1 step=14 phase=forward fault=hang"))
        run.read_until("step 13/")
        while 10 not in self.steps_in("ck"):  # It is written while steps go on.
            os.sched_yield()
        run.process.kill()
        run.process.communicate()
        self.assertEqual(self.steps_in("ck"), [5, 10])
        out, err = self.train(*IN_CK, "--resume", "latest", *faults("rank=0 step=12 phase=reduced fault=kill"))
        self.assert_contains(out, f"resumed from {self.folder.resolve()}/ck/{folder_of(10)} at step 10", "step 11/20")
        self.assertNotIn("step 10/20", out)
        self.assertIn("runner 0", err, "it was not replaced")
        self.assert_ends_as_undisturbed("ck")

    def test_a_run_killed_while_it_writes_leaves_the_checkpoint_before(self):
        # Each checkpoint reaches the phase four times: after each of its three files, and before it gets its name.
        run = RunningProgram(self, *IN_CK, *faults("rank=manager phase=checkpoint occurrence=10 fault=hang"))
        run.read_until(f"checkpoint ck/{folder_of(10)}")
        while not list((self.folder / "ck").glob(f".{folder_of(15)}.tmp-*/training.safetensors")):
            os.sched_yield()
        run.process.kill()
        run.process.communicate()
        self.assertEqual(self.steps_in("ck"), [5, 10])
        with self.assertRaises(ChildProcessError, msg="the manager lives on without its host"):
            while True:
                os.waitpid(-1, 0)
        out, _ = self.train(*IN_CK, "--resume", "latest")
        self.assertIn("at step 10\n", out)
        self.assertEqual({entry.name for entry in (self.folder / "ck").iterdir()},
                         {folder_of(step) for step in (10, 15, 20)} | {folder_of(self.best("ck"))})
        self.assert_ends_as_undisturbed("ck")

    def best(self, directory):
        metric = {step: json.loads((self.folder / directory / folder_of(step) / "state.json").read_text())
                  ["state"]["metric"] for step in self.steps_in(directory)}
        return min(metric, key=metric.get)

    def test_of_a_torn_latest_the_reason_is_told_and_the_one_before_is_taken(self):
        self.train(*IN_CK)
        self.truncate(f"ck/{folder_of(20)}/training.safetensors")
        out, _ = self.train(*IN_CK, "--resume", "latest")
        self.assertIn(f"ck/{folder_of(20)}/training.safetensors' is torn", out)
        self.assertIn(f"ck/{folder_of(15)} at step 15", out)
        self.assert_ends_as_undisturbed("ck")

    def test_a_path_is_gone_on_from_as_latest_is(self):
        self.train(*IN_CK)
        out, _ = self.train(*TRAIN, "--checkpoint-dir", "other", "--resume", f"ck/{folder_of(15)}")
        self.assertIn(f"ck/{folder_of(15)} at step 15", out)
        self.assert_ends_as_undisturbed("other")

    def test_what_is_no_good_checkpoint_is_refused_with_the_reason(self):
        self.train(*IN_CK, "--steps", "5")
        good = self.folder / "ck" / folder_of(5)
        (self.folder / "foreign").mkdir()
        shutil.copy(good / "model.safetensors", self.folder / "foreign")
        for name in ("torn", "flipped"):
            shutil.copytree(good, self.folder / name)
        self.truncate("torn/model.safetensors")
        with open(self.folder / "flipped/training.safetensors", "r+b") as file:
            file.seek(-9, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-9, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        for path, parts in {"torn": ["torn/model.safetensors' is torn", "bytes instead of"],
                            "flipped": ["flipped/training.safetensors' is damaged", "checksum"],
                            "foreign": ["'foreign' is not a checkpoint", "state.json"],
                            "small.yaml": ["'small.yaml' is not a directory"],
                            "nowhere": ["'nowhere' does not exist"],
                            "ck": ["'ck' is not a checkpoint, but a directory of checkpoints", folder_of(5)]}.items():
            with self.subTest(path=path):
                self.assert_contains(
                    self.refusal("train", "--config", "small.yaml", "--resume", path, exits=FAILED), *parts)
        shutil.rmtree(good)
        (self.folder / "torn").rename(good)
        self.assert_contains(
            self.refusal("train", "--config", "small.yaml", *IN_CK, "--resume", "latest", exits=FAILED),
            "'ck' holds no good checkpoint", "is torn")

    def test_a_checkpoint_of_another_model_is_refused_with_the_tensor(self):
        self.train("--steps", "1", "--checkpoint-dir", "ck")
        self.assert_contains(
            self.refusal("train", "--config", "small.yaml", "--resume", f"ck/{folder_of(1)}", "--set",
                         "model.mlp.hidden_size=16", exits=FAILED),
            "'hidden.0.weight'", "[32, 16]", "[16, 16]", "another model")

    def test_latest_of_an_empty_folder_begins_a_new_run_with_a_warning(self):
        (self.folder / "ck").mkdir()
        _, err = self.train(*IN_CK, "--resume", "latest")
        self.assert_contains(err, "warning", "no checkpoint in 'ck'", "a new run begins")
        self.assert_ends_as_undisturbed("ck")

    def test_a_run_that_was_at_its_end_is_done(self):
        self.train("--steps", "2", "--checkpoint-dir", "ck")
        out, err = self.train("--steps", "2", "--checkpoint-dir", "ck", "--resume", "latest")
        self.assert_contains(out, "at step 2\n", "nothing to do: the checkpoint is at step 2, train.steps is 2\n")
        self.assertNotIn("nan", out)
        self.assertEqual((err, self.steps_in("ck")), ("", [2]))

    def test_ctrl_c_leaves_a_checkpoint(self):
        run = RunningProgram(self, *SLOW, "--checkpoint-dir", "ck")
        run.read_until("step 1/")
        run.ctrl_c()
        out, err = run.process.communicate()
        self.assertEqual((run.process.returncode, err), (INTERRUPTED, ""))
        steps = int(re.match(r"interrupted: (\d+) steps", out.splitlines()[-1])[1])
        self.assertEqual(self.steps_in("ck"), [steps])
        self.assertRegex(out, LINE.format(f"ck/{folder_of(steps)}"))
        out, _ = self.train("--checkpoint-dir", "ck", "--resume", "latest", "--steps", str(steps + 1))
        self.assert_contains(out, f"at step {steps}\n", f"step {steps + 1}/{steps + 1}")


class UnwritableTest(CheckpointTest):
    def run_command(self, *command, exits):
        done = subprocess.run(command, cwd=self.folder, env=cli_test.environment({}), text=True, capture_output=True,
                              check=False)
        self.assertEqual(done.returncode, exits, done.stdout + done.stderr)
        return done.stdout, done.stderr

    def test_a_full_disk_is_told_and_training_goes_on(self):
        self.train(*IN_CK, "--steps", "5")
        blocks = sum(-(-entry.stat().st_size // 4096) for entry in (self.folder / "ck" / folder_of(5)).iterdir())
        shutil.rmtree(self.folder / "ck")
        (self.folder / "disk").mkdir()
        mount = f"mount -t tmpfs -o size={6 * blocks}k,nr_inodes=100 none disk"  # Room for one and a half checkpoints.
        refused = subprocess.run(["unshare", "-rm", "sh", "-c", mount], cwd=self.folder, text=True, capture_output=True,
                                 check=False)
        if refused.returncode != 0:
            self.skipTest(f"no disk of one's own to be mounted here: {refused.stderr.strip()}")
        train = [cli_test.PROGRAM, "train", "--config", "small.yaml", *TRAIN, "--checkpoint-dir", "disk"]
        out, err = self.run_command("unshare", "-rm", "sh", "-c",
                                    mount + ' && { "$@"; code=$?; cp -r disk ck; exit $code; }', "sh", *train,
                                    exits=FAILED)
        self.assert_contains(out, f"checkpoint disk/{folder_of(5)}", "step 20/20", "done: 20 steps")
        for step in (10, 15, 20):
            self.assertRegex(err, rf"(?m)^accelmgr: the checkpoint of step {step} was not written: "
                                  rf".*{folder_of(step)}.*No space left on device")
        self.assertRegex(err, rf"(?m)^accelmgr: the checkpoint of step 20 is in {self.folder.resolve()}/\S+/"
                              rf"{folder_of(20)} instead")
        self.assertEqual([entry.name for entry in (self.folder / "ck").iterdir()], [folder_of(5)])
        self.train(*IN_CK, "--resume", "latest")
        self.assert_ends_as_undisturbed("ck")

    def test_a_folder_that_may_not_be_written_is_named(self):
        (self.folder / "ck").mkdir()
        (self.folder / "ck").chmod(0o555)
        self.folder.chmod(0o755)
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.getuid() == 0 else []
        train = [*user, cli_test.PROGRAM, "train", "--config", "small.yaml", "--steps", "2", "--checkpoint-dir"]
        if user and subprocess.run([*user, cli_test.PROGRAM, "--version"], capture_output=True, check=False).returncode:
            self.skipTest(f"{cli_test.PROGRAM} may be run by root alone")
        for path in ("ck", "ck/new"):
            with self.subTest(path=path):
                out, err = self.run_command(*train, path, exits=FAILED)
                self.assertNotIn("step 1/", out)
                self.assertRegex(err, rf"(?m)^accelmgr: checkpoints cannot be written to '{path}': .*Permission denied")
        self.assertEqual(list((self.folder / "ck").iterdir()), [])


class ErrorReportTest(ProgramTest):
    FAIL = ["--log", "logs/log.jsonl", "--set", "runners.on_loss=fail"]
    # With a fault in every generation the run ends after three restarts.
    CRASH_LOOP = ["--log", "logs/log.jsonl", "--set", "runners.restarts_per_window=3", "--set",
                  "runners.restart_window=600", "--set", "runners.restart_backoff=0"]

    def setUp(self):
        super().setUp()
        (self.folder / "logs").mkdir()

    def report(self):
        return json.loads((self.folder / "logs/accelmgr-error.json").read_text())

    def assert_lost_to_boom(self, cause):
        self.assertEqual((cause["rank"], cause["phase"], cause["step"], cause["exit"], cause["what"]),
                         (1, "forward", 3, "exit code 17", "boom"))
        self.assertRegex(cause["time"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")
        self.assertEqual(len(cause["log"]), 2, "the lines of this process alone")
        self.assertRegex(cause["log"][-1], r"info \[rank 1 step 3\] boom$")

    def test_a_failed_run_leaves_its_cause_beside_the_log(self):
        fault = faults("rank=1 step=3 phase=forward fault=exception:boom")
        _, err = self.train(*self.FAIL, *fault, exits=FAILED)
        report = self.report()
        self.assertEqual((report["status"], report["step"], report["attempt"]), ("runner_lost", 3, 3))
        self.assertEqual(len(report["causes"]), 1)
        self.assert_lost_to_boom(report["causes"][0])
        self.assertIn(f"pid {report['causes'][0]['pid']}", report["error"])
        self.assertIn(report["error"], err)
        steps, _ = self.read_log("logs/log.jsonl")
        self.assertEqual(steps[-1]["error"], report["error"])

    def test_a_crash_loop_leaves_its_last_three_causes_the_first_first(self):
        fault = faults("rank=1 step=3 phase=forward generation=any fault=exception:boom")
        _, err = self.train(*self.CRASH_LOOP, *fault, exits=FAILED)
        report = self.report()
        self.assert_contains(report["error"], "3 restarts within 600 s", "runners.restarts_per_window")
        causes = report["causes"]
        self.assertEqual(len(causes), 3)
        for cause in causes:
            self.assert_lost_to_boom(cause)
            self.assertIn(f"pid {cause['pid']}", err)
        self.assertEqual(sorted(causes, key=lambda cause: (cause["time"], cause["attempt"])), causes)
        self.assertEqual(len({cause["pid"] for cause in causes}), 3)

    def test_a_later_run_removes_it(self):
        self.train(*self.FAIL, *faults("rank=1 step=1 phase=vote fault=kill"), exits=FAILED)
        self.assertEqual(self.report()["causes"][0]["exit"], "killed by signal 9 (KILL)")
        self.train("--steps", "1", "--log", "logs/log.jsonl", "--overwrite")
        self.assertEqual([entry.name for entry in (self.folder / "logs").iterdir()], ["log.jsonl"])


if __name__ == "__main__":
    cli_test.PROGRAM = str(pathlib.Path(sys.argv.pop(1)).resolve())
    cli_test.become_subreaper()
    unittest.main(verbosity=2)
