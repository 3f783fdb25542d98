// The input is a safetensors file. The tensors of one that is accepted fill it, without a gap and without an
// overlap.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <span>

#include "accelmgr/errors.hpp"
#include "engine/checkpoint/safetensors_file.hpp"
#include "engine/checkpoint/safetensors_header.hpp"
#include "fuzz_target.hpp"

using namespace accelmgr;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto header = checkpoint::read_safetensors_header(std::as_bytes(std::span(data, size)), "input");
    static const int file = memfd_create("safetensors", MFD_CLOEXEC);
    fuzz::expect(ftruncate(file, 0) == 0 && pwrite(file, data, size, 0) == static_cast<ssize_t>(size),
                 "a file");
    const checkpoint::SafetensorsFile mapped(file, "input");
    std::uint64_t bytes = 0;
    for (const auto& name : mapped.names()) {
      const auto& tensor = mapped.tensor(name);
      const auto& place = header.tensors.at(name);
      bytes += tensor.bytes.size();
      fuzz::expect(place.begin <= size && tensor.bytes.size() <= size - place.begin, "a tensor in the file",
                   name);
      fuzz::expect(std::memcmp(tensor.bytes.data(), data + place.begin, tensor.bytes.size()) == 0,
                   "the bytes of a tensor", name);
    }
    std::uint64_t length = 0;
    std::memcpy(&length, data, sizeof length);
    fuzz::expect(sizeof length + length + bytes == size, "tensors that fill the file");
  } catch (const CheckpointError& error) {
    fuzz::expect(std::string_view(error.what()).starts_with("'input'"), "an error names the file",
                 error.what());
  }
  return 0;
}
