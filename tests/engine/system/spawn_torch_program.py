"""A plain program of torch.distributed, which knows of its launcher only the environment."""
import datetime

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
tensor = torch.ones(4) * (dist.get_rank() + 1)
dist.all_reduce(tensor)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: sum {tensor[0].item()}")
dist.barrier()
dist.destroy_process_group()
