// config_key_of(): the key of the ConfigError that a call throws.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "accelmgr/errors.hpp"

namespace accelmgr::test {

/// The test fails if `call` throws no ConfigError.
template <typename Call>
std::string config_key_of(Call&& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.key();
  }
  ADD_FAILURE() << "no ConfigError";
  return {};
}

}  // namespace accelmgr::test
