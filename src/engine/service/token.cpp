#include "engine/service/token.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/algorithm/string/predicate.hpp>
#include <cerrno>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::service {
namespace {

constexpr std::size_t shortest = 16, longest = 512;

[[noreturn]] void refuse_token(const std::string& path, const std::string& why) {
  throw ConfigError(fmt::format("--token-file '{}': {}", path, why), "--token-file");
}

}  // namespace

Token Token::from_file(const std::string& path) {
  // O_NONBLOCK: a FIFO would block.
  const base::UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat found {};
  if (!fd || fstat(fd.get(), &found) != 0) refuse_token(path, std::strerror(errno));
  if (!S_ISREG(found.st_mode)) refuse_token(path, "it is not a regular file");
  if ((found.st_mode & (S_IRWXG | S_IRWXO)) != 0)
    refuse_token(path, fmt::format("other users may read it or write to it; chmod 600 '{}'", path));
  if (found.st_uid != geteuid() && found.st_uid != 0)
    refuse_token(path, fmt::format("it belongs to user {}, who may change it; chown {} '{}'", found.st_uid,
                                   geteuid(), path));
  std::array<char, longest + 2> text{};
  const auto bytes = read(fd.get(), text.data(), text.size());
  if (bytes < 0) refuse_token(path, std::strerror(errno));
  std::string_view line(text.data(), static_cast<std::size_t>(bytes));
  line = line.substr(0, line.find('\n'));
  if (line.size() < shortest || line.size() > longest)
    refuse_token(path, fmt::format("a token has {} to {} characters; `openssl rand -hex 32` makes one",
                                   shortest, longest));
  if (std::ranges::any_of(line, [](char c) { return c <= ' ' || c > '~'; }))
    refuse_token(path,
                 "a token has printable ASCII characters and no spaces; `openssl rand -hex 32` makes one");
  return Token(std::string(line));
}

bool Token::is_stated_by(std::string_view authorization) const noexcept {
  constexpr std::string_view scheme = "bearer ";  // In any case (RFC 9110, 11.1).
  if (!boost::algorithm::iequals(authorization.substr(0, scheme.size()), scheme)) return false;
  const auto given = authorization.substr(scheme.size());
  unsigned differs = given.size() == secret_.size() ? 0 : 1;
  for (std::size_t i = 0; i < secret_.size(); ++i)
    differs |= static_cast<unsigned>(secret_[i] ^ (i < given.size() ? given[i] : '\0'));
  return differs == 0;
}

}  // namespace accelmgr::service
