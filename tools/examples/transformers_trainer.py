"""transformers.Trainer over a manager: runners compute forward and backward, the Trainer does everything else.

Each batch of the Trainer is split over the runners, so `per_device_train_batch_size` counts the samples of all of them.
The model computes its loss itself.
"""

import queue
from typing import Any

import torch
import transformers
from licence_gpt import Sequences

import accelmgr


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = torch.utils.data.default_collate(rows)
    return batch | {name: batch[name][0] for name in batch if name == "num_items_in_batch"}


class ManagedTrainer(transformers.Trainer):
    def __init__(self, *arguments: Any, nprocs: int = 2, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.nprocs, self.batch_size = nprocs, self.args.train_batch_size // nprocs
        if not self.args.dataloader_drop_last or self.batch_size * nprocs != self.args.train_batch_size:
            raise ValueError(f"{nprocs} runners must be able to divide the batch size; set dataloader_drop_last=True")
        if self.args.gradient_accumulation_steps > 1 and not self.model_accepts_loss_kwargs:
            raise ValueError("for this model use grad_accumulation_steps of the manager")

    def train(self, *arguments: Any, **options: Any) -> Any:
        self.manager, self.rows = None, queue.SimpleQueue()
        try:
            return super().train(*arguments, **options)
        finally:
            self.rows.put(None)  # Ends the data.
            if self.manager is not None:
                self.manager.stop()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        items = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch / self.nprocs}
        for index in range(self.args.train_batch_size):
            self.rows.put({name: value[index] for name, value in inputs.items()} | items)
        if self.manager is None:  # It looks at the first row when it starts.
            options = {"nprocs": self.nprocs, "batch_size_per_device": self.batch_size}
            self.manager = accelmgr.Manager(self.model, iter(self.rows.get, None), collate_fn=collate, **options)
        result = self.manager.step()
        result.raise_for_status()
        return torch.tensor(result.loss)


if __name__ == "__main__":
    sizes = {"vocab_size": 256, "n_positions": 128, "n_embd": 128, "n_layer": 4, "n_head": 4}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    sequences = Sequences(4096, 128)
    rows = [{"input_ids": sequences[i]["input"], "labels": sequences[i]["input"]} for i in range(len(sequences))]
    options = {"learning_rate": 2e-3, "max_steps": 100, "logging_steps": 20, "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(per_device_train_batch_size=16, dataloader_drop_last=True, **options)
    ManagedTrainer(model, arguments, train_dataset=rows).train()
