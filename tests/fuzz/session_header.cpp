// The input is damage to the header of a session: each nine bytes are the number of a word and what is
// written there. All of a session whose header is accepted can be used.
#include "accelmgr/errors.hpp"
#include "engine/session/used_session.hpp"
#include "fuzz_target.hpp"

using namespace accelmgr;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static auto manifest = session::some_manifest();
  static auto made = session::session_of(manifest, 2);
  static const std::vector<std::byte> header(session::memory_of(made),
                                             session::memory_of(made) + sizeof(session::Header));
  std::copy(header.begin(), header.end(), session::memory_of(made));
  constexpr std::size_t word = sizeof(std::uint64_t);
  for (; size > word; data += word + 1, size -= word + 1)
    std::memcpy(session::memory_of(made) + *data % (sizeof(session::Header) / word) * word, data + 1, word);
  std::vector<base::UniqueFd> fds;
  for (const int fd : made.fds()) fds.push_back(base::duplicate(fd));
  try {
    auto attached = session::Session::attach(std::move(fds));
    session::use(attached);
  } catch (const SessionError& error) {
    ++fuzz::refused;
    fuzz::expect(*error.what() != 0, "an error says what is wrong");
  }
  return 0;
}
