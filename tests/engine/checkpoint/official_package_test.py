"""Checks that the official safetensors package reads the files of accelmgr, and accelmgr the files of the package.

    official_package_test.py PROGRAM [unittest arguments]

PROGRAM is checkpoint_files. Without safetensors or torch the test exits with 77: ctest counts it as skipped.
"""
import base64
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import safetensors
    import safetensors.torch
    import torch
except ImportError as missing:
    print(f"skipped: {sys.executable} has no {missing.name}")
    sys.exit(77)

PROGRAM = ""

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


def raw(tensor):
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b""


class OfficialPackage(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_program(self, *arguments):
        done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def read(self, file):
        return json.loads(self.run_program("read", file))

    def write_checkpoint(self):
        self.run_program("write", self.folder)
        return self.folder / "step-00000001"

    def test_opens_ours_with_every_dtype_shape_and_byte(self):
        tensors = safetensors.torch.load_file(self.write_checkpoint() / "training.safetensors")
        self.assertEqual(len(tensors), len(DTYPES) + 2)
        for name, dtype in DTYPES.items():
            tensor = tensors[f"of/{name}"]
            self.assertEqual((tensor.dtype, tensor.shape), (dtype, (3, 1, 5)))
            expected = bytes(k % 2 if name == "BOOL" else k + 1 for k in range(15 * dtype.itemsize))
            self.assertEqual(raw(tensor), expected, name)
        self.assertEqual((tensors["scalar"].shape, tensors["scalar"].item()), ((), 0x0807060504030201))
        self.assertEqual((tensors["empty"].shape, tensors["empty"].dtype), ((0, 3), torch.float32))

    def test_loads_our_model_as_a_state_dict(self):
        file = self.write_checkpoint() / "model.safetensors"
        linear = torch.nn.Linear(3, 2)
        linear.load_state_dict(safetensors.torch.load_file(file))
        self.assertEqual(raw(linear.weight.detach()), bytes(range(1, 25)))
        with safetensors.safe_open(file, framework="pt") as opened:
            self.assertEqual(opened.metadata(), {"format": "pt", "tied.weight": "weight"})

    def test_writes_what_we_open(self):
        tensors = {name: torch.arange(12).reshape(2, 3, 2).to(dtype) for name, dtype in DTYPES.items()}
        tensors |= {"scalar": torch.tensor(0.1), "empty": torch.empty(2, 0), "names with \"ä\\/\n": torch.ones(1)}
        file = self.folder / "official.safetensors"
        safetensors.torch.save_file(tensors, file, metadata={"key": "ä", "other": ""})
        read = self.read(file)
        self.assertEqual(read["metadata"], {"key": "ä", "other": ""})
        self.assertEqual(set(read["tensors"]), set(tensors))
        for name, tensor in tensors.items():
            entry = read["tensors"][name]
            self.assertEqual(DTYPES[entry["dtype"]], tensor.dtype)
            self.assertEqual(entry["shape"], list(tensor.shape))
            self.assertEqual(base64.b64decode(entry["bytes"], validate=True), raw(tensor), name)

    def test_writes_no_tensors_and_we_open_that(self):
        file = self.folder / "empty.safetensors"
        safetensors.torch.save_file({}, file)
        self.assertEqual(self.read(file), {"metadata": {}, "tensors": {}})

    def test_marks_aliases_as_we_do(self):
        class Tied(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first = torch.nn.Parameter(torch.ones(2))
                self.second = self.first

        file = self.folder / "tied.safetensors"
        safetensors.torch.save_model(Tied(), file)
        read = self.read(file)
        self.assertEqual(list(read["tensors"]), ["first"])
        self.assertEqual(read["metadata"].get("second"), "first")


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
