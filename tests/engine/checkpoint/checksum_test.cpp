#include "engine/checkpoint/checksum.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <span>
#include <string>

#include "accelmgr/errors.hpp"
#include "base/unique_fd.hpp"
#include "support.hpp"

namespace accelmgr::checkpoint::test {
namespace {

std::string checksum(const std::string& text) { return checksum_of(std::as_bytes(std::span(text))); }

// The expected values are what `xxhsum -H2` prints for the same bytes.
TEST(Checksum, IsThatOfXxhsum) {
  EXPECT_EQ(checksum(""), "xxh3-128:99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(checksum("accelmgr"), "xxh3-128:477f0dd423594ce8ba77cc25cc8450a9");
}

TEST(Checksum, OfAFileIsThatOfItsBytes) {
  const TemporaryFolder directory;
  for (const std::size_t bytes : {0u, 1u, 4096u, 1u << 20, (5u << 19) + 3}) {
    std::string text(bytes, '\0');
    for (std::size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i * 2654435761u >> 24);
    write_text(directory / "file", text);
    const base::UniqueFd fd(::open((directory / "file").c_str(), O_RDONLY));
    EXPECT_EQ(checksum_of_file(fd.get(), bytes, "file"), checksum(text)) << bytes;
  }
}

TEST(Checksum, OfAFileThatCannotBeReadIsAnError) {
  const TemporaryFolder directory;
  const base::UniqueFd fd(::open(directory.path().c_str(), O_RDONLY | O_DIRECTORY));
  const auto message = message_of<SystemError>([&] { checksum_of_file(fd.get(), 10, "the/file"); });
  EXPECT_NE(message.find("'the/file' at byte 0"), std::string::npos) << message;
}

}  // namespace
}  // namespace accelmgr::checkpoint::test
