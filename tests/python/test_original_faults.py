"""Checks each fault of the original TPUManager in one run of a manager that the original would not survive.

| fault of the original | test |
|---|---|
| set_host_parameters() copies the master into the new parameters | test_new_parameters_reach_the_runners |
| unequal lengths pass the check | test_a_wrong_number_of_parameters_is_refused |
| the end of the data hangs the host | test_the_end_of_the_data_is_an_answer |
| a dead runner hangs the host | test_a_dead_runner_is_an_answer |
| should_load_parameters splits the runners | test_all_runners_compute_with_one_version, and test_handle.py |
| gradients are handed out unlocked | test_gradients_are_not_handed_out_during_a_step |
| the number of samples is a product of constants | test_samples_are_those_that_took_part |
| buffers are never synchronized | test_buffers_reach_the_host |
| NaN goes unnoticed | test_a_nan_is_noticed_and_not_added |
| no shutdown | test_nothing_runs_after_terminate |
| no save or restore | test_a_second_manager_goes_on_where_the_first_saved |
"""

import os
import threading

import pytest
import torch
from gate import Told
from torch import nn

import accelmgr


class Normed(Told):
    """Has buffers, and returns a value of the parameters with which a runner computed."""

    def __init__(self, folder):
        super().__init__(folder)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        loss = super().forward(x)
        own = self.weight[0].detach()
        rows = x.repeat(2, 1)  # BatchNorm refuses a batch of one.
        return {"loss": loss + 0.0 * self.norm(rows).mean(), "weight": own, "square": own**2}


ELEMENTS = [torch.tensor([float(i), 1.0]) for i in range(19)]  # Each step takes four; the last takes three.


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """Runs a manager through all faults and returns what it saw, by name. The tests below check that."""
    folder = tmp_path_factory.mktemp("life")
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "DATA__DROP_LAST": "false",
            "LOSS_SCALING": "samples",
            "CHECKPOINT__DIRECTORY": str(folder / "checkpoints"),
            "RUNNERS__THREADS": "1",
        }.items():
            patch.setenv(f"ACCELMGR_{name}", value)
        model = Normed(folder)
        shape = {"nprocs": 2, "batch_size_per_device": 2}
        manager = accelmgr.TPUManager(model, ELEMENTS, **shape, start=True)
        # 1. New parameters that are not the master's tensors; then too few of them.
        new = [torch.full_like(p, 3.0 + i) for i, p in enumerate(model.parameters())]
        manager.update_model_parameters(new)
        seen["new"] = [p.unique().tolist() for p in new], [p.unique().tolist() for p in model.parameters()]
        seen["loaded"] = manager.step()
        seen["buffers"] = manager.buffers()
        try:
            manager.update_model_parameters(new[:-1])
        except accelmgr.ModelError as error:
            seen["refused"] = str(error), [p.unique().tolist() for p in model.parameters()]
        # 2. A step with NaN, and a step in which a runner dies while another thread asks for the gradients.
        model.tell("nan")
        before = [gradient.clone() for gradient in manager.get_aggregated_gradients()]
        seen["nan"] = manager.step()
        seen["unchanged"] = all(map(torch.equal, before, manager.get_aggregated_gradients()))
        manager.zero_grad()
        model.gate.shut()
        given = []
        stepping = threading.Thread(target=lambda: given.append(manager.step()))
        asking = threading.Thread(target=lambda: given.append([g.clone() for g in manager.get_aggregated_gradients()]))
        stepping.start()
        with model.gate.held():
            asking.start()
            model.tell("die")
        stepping.join()
        asking.join()
        seen["died"], seen["asked"] = sorted(given, key=lambda one: isinstance(one, list))
        # 3. A checkpoint, the steps after it up to the end of the data, and the end of the manager.
        manager.zero_grad()
        manager.save_checkpoint()
        seen["written"] = manager.checkpoints_written(wait=120)
        seen["before"] = [manager.step(), manager.step()]
        seen["last"] = manager.step()
        seen["end"] = manager.step()
        own = [manager.pid, *(runner.pid for runner in manager.statistics().runners)]
        manager.terminate()
        manager.join()
        seen["running"] = [pid for pid in own if os.path.exists(f"/proc/{pid}")], manager.is_alive()
        # 4. A second manager resumes from the checkpoint, as a later process would.
        patch.setenv("ACCELMGR_CHECKPOINT__RESUME", "latest")
        model = Normed(folder)
        with accelmgr.TPUManager(model, ELEMENTS, **shape, start=False) as again:
            seen["after"] = [again.step(), again.step()]
    return seen


def test_new_parameters_reach_the_runners(life):
    assert life["new"] == ([[3.0], [4.0], [5.0]], [[3.0], [4.0], [5.0]])
    assert life["loaded"].scalars["weight"] == 3.0


def test_a_wrong_number_of_parameters_is_refused(life):
    message, parameters = life["refused"]
    assert "2 tensors for 3 parameters; nothing was changed" in message
    assert parameters == [[3.0], [4.0], [5.0]]


def test_all_runners_compute_with_one_version(life):
    scalars = life["loaded"].scalars
    assert scalars["square"] == scalars["weight"] ** 2, "the variance over the runners is zero"
    assert life["loaded"].parameter_version > 0 and life["loaded"].parameter_version % 2 == 0


def test_a_nan_is_noticed_and_not_added(life):
    assert (life["nan"].status, life["nan"].samples, life["unchanged"]) == ("nonfinite", 0, True)


def test_a_dead_runner_is_an_answer(life):
    assert (life["died"].status, life["died"].tries, life["died"].samples) == ("ok", 2, 4)


def test_gradients_are_not_handed_out_during_a_step(life):
    mean = sum(range(4, 8)) / 4  # Elements 4 to 7, each once, although a runner died with them.
    assert life["asked"][0].tolist() == [mean / 2, 0.5]


def test_samples_are_those_that_took_part(life):
    assert [one.samples for one in (life["loaded"], life["last"])] == [4, 3]


def test_buffers_reach_the_host(life):
    assert int(life["buffers"]["norm.num_batches_tracked"]) == 1
    assert life["buffers"]["norm.running_mean"].tolist() == pytest.approx([0.1 * (0 + 2) / 2, 0.1])


def test_the_end_of_the_data_is_an_answer(life):
    assert (life["end"].status, life["end"].counted) == ("data_end", False)


def test_nothing_runs_after_terminate(life):
    assert life["running"] == ([], False)


def test_a_second_manager_goes_on_where_the_first_saved(life):
    assert [one.error for one in life["written"]] == [""]
    assert [one.step for one in life["after"]] == [one.step for one in life["before"]] == [3, 4]
    assert [one.loss for one in life["after"]] == [one.loss for one in life["before"]]
