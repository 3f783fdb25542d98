// A fixture of tests that run a process one instruction at a time, in the preset where that is fast enough.
#pragma once

#include <gtest/gtest.h>

#include <cerrno>

#include "accelmgr/errors.hpp"
#include "stepped_process.hpp"

namespace accelmgr::session {

class ByInstruction : public testing::Test {
 protected:
  void SetUp() override {
#if !defined(__OPTIMIZE__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "unoptimized code has ten times more instructions, sanitized code still more";
#endif
    try {
      SteppedProcess child([] {});
    } catch (const SystemError& error) {
      if (error.code() != EPERM) throw;
      GTEST_SKIP() << "the kernel refuses ptrace of a child";
    }
  }

 private:
  OnOneCore on_one_core_;
};

}  // namespace accelmgr::session
