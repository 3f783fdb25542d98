// Writes and reads safetensors files with the code of accelmgr. official_package_test.py runs it, and reads
// and writes the same files with the official package.
//
//   checkpoint_files write DIRECTORY   writes a checkpoint with a tensor of every dtype, through write()
//   checkpoint_files read FILE         prints its metadata and tensors as JSON, bytes in base64
#include <fcntl.h>

#include <cstdio>
#include <string>
#include <vector>

#include "engine/checkpoint/base64.hpp"
#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/safetensors_header.hpp"
#include "engine/checkpoint/safetensors_layout.hpp"
#include "engine/checkpoint/storage.hpp"

namespace accelmgr::checkpoint {
namespace {

/// The bytes of a safetensors file of `tensors`. Those of each tensor count up from 1; those of a BOOL tensor
/// alternate between 0 and 1.
std::vector<std::byte> image_of(const std::vector<TensorDescription>& tensors) {
  const SafetensorsLayout layout(tensors, {{"format", "pt"}});
  std::vector<std::byte> image(layout.total_bytes());
  layout.write_header(image.data());
  for (std::size_t i = 0; i < tensors.size(); ++i)
    for (std::size_t k = 0; k < tensors[i].bytes; ++k)
      image[layout.offset(i) + k] = std::byte(tensors[i].dtype == "BOOL" ? k % 2 : k + 1);
  return image;
}

std::vector<TensorDescription> one_of_each_dtype() {
  std::vector<TensorDescription> tensors;
  for (const std::string dtype : {"BOOL", "U8", "I8", "I16", "I32", "I64", "BF16", "F16", "F32", "F64"})
    tensors.push_back({"of/" + dtype, dtype, {3, 1, 5}, tensor_bytes("", dtype, {3, 1, 5}), {}});
  tensors.push_back({"scalar", "I64", {}, 8, {}});
  tensors.push_back({"empty", "F32", {0, 3}, 0, {}});
  return tensors;
}

/// The state dict of torch.nn.Linear(3, 2), with an alias of its weight.
std::vector<TensorDescription> linear() {
  return {{"weight", "F32", {2, 3}, 24, {"tied.weight"}}, {"bias", "F32", {2}, 8, {}}};
}

void write_checkpoint(const std::string& directory) {
  const auto model = image_of(linear()), training = image_of(one_of_each_dtype());
  write(directory, {.step = 1, .metric = {}, .model = model, .training = training}, 1);
}

void print(const SafetensorsFile& file) {
  nlohmann::json tensors = nlohmann::json::object();
  for (const auto& name : file.names()) {
    const auto& tensor = file.tensor(name);
    tensors[name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"bytes", encode_base64(tensor.bytes)}};
  }
  std::puts(nlohmann::json{{"metadata", file.metadata()}, {"tensors", tensors}}.dump().c_str());
}

int run(const std::string& command, const std::string& path) {
  if (command == "write") {
    write_checkpoint(path);
  } else if (command == "read") {
    print(SafetensorsFile(open_regular_file(AT_FDCWD, path, path).get(), path));
  } else {
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace accelmgr::checkpoint

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    return accelmgr::checkpoint::run(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
