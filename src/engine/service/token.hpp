// The secret that a client of a TCP port must know: `Authorization: Bearer TOKEN`.
#pragma once

#include <string>
#include <string_view>

namespace accelmgr::service {

class Token {
 public:
  /// Reads the first line of a file that other users may not read. Throws ConfigError: it cannot be read,
  /// others may read it, or it is shorter than 16 characters or not printable.
  static Token from_file(const std::string& path);

  /// Whether the value of the field `Authorization` states this token. Takes as long for each wrong token of
  /// one length.
  bool is_stated_by(std::string_view authorization) const noexcept;

 private:
  explicit Token(std::string secret) : secret_(std::move(secret)) {}
  std::string secret_;
};

}  // namespace accelmgr::service
