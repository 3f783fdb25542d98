"""What tools/bench/gpu and the report of an archive say of the machine."""

import contextlib
import json
import os
import shutil
import subprocess

from contestants import ROOT, Failure, cpu_model

IN_ARCHIVE = (ROOT / "libexec").is_dir()


def output_of(*command):
    """The standard output of a command; empty if it fails or is not there."""
    with contextlib.suppress(OSError):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def python():
    own = ROOT / ".venv" / "bin" / "python"
    chosen = os.environ.get("ACCELMGR_PYTHON") or (own if own.exists() else "python3")
    if shutil.which(chosen) is None:
        raise Failure(f"there is no {chosen}; ACCELMGR_PYTHON should name a Python")
    return chosen


ABOUT_TORCH = """
import json, pathlib, sys
about = {"python": sys.version.split()[0]}
try:
    import torch
    about |= {"site_packages": str(pathlib.Path(torch.__file__).parents[1])}
    about |= {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "has_gpu": torch.cuda.is_available()}
    about |= {"cudnn": torch.backends.cudnn.version(), "nccl": torch.cuda.nccl.version() if about["has_gpu"] else None}
except ImportError as error:
    about["why_no_torch"] = str(error)
print(json.dumps(about))
"""


def about_torch():
    told = output_of(python(), "-c", ABOUT_TORCH)
    if not told:
        raise Failure(f"{python()} cannot be run; ACCELMGR_PYTHON should name a Python")
    return json.loads(told.splitlines()[-1])


def about_machine():
    commit = ROOT / "COMMIT"  # of the archive
    query = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm"
    return {
        "node": os.uname().nodename,
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": os.uname().release,
        "load": os.getloadavg()[0],
        "nvidia_smi": output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
        "commit": commit.read_text().strip() if IN_ARCHIVE else output_of("git", "-C", ROOT, "describe", "--always"),
    }
