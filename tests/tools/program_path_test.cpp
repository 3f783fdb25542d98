#include "program_path.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::program {
namespace {

using test::message_of;
using testing::ElementsAre;
using testing::HasSubstr;

class ProgramPath : public testing::Test {
 protected:
  std::string file(const std::string& name, bool executable) {
    const auto path = temporary.write(name, "#!/bin/sh\n");
    using enum std::filesystem::perms;
    std::filesystem::permissions(path, executable ? owner_all : owner_read | owner_write);
    return path;
  }

  const test::TemporaryFolder temporary;
  const std::filesystem::path& folder = temporary.path();
  const std::map<std::string, std::string> environment{{"PATH", "/nowhere:" + folder.string()}};
};

TEST_F(ProgramPath, AProgramIsExecutedAsItIs) {
  const auto program = file("program", true);
  EXPECT_THAT(resolve_program({program, "a", "-b"}, environment), ElementsAre(program, "a", "-b"));
  EXPECT_THAT(resolve_program({"program"}, environment), ElementsAre("program"));
}

TEST_F(ProgramPath, AFileOfPythonIsRunByPython3) {
  const auto script = file("script.py", false);
  file("python3", true);
  EXPECT_THAT(resolve_program({script, "a"}, environment), ElementsAre("python3", script, "a"));
}

TEST_F(ProgramPath, WithoutPythonAFileOfItIsAProgram) {
  const auto script = file("script.py", true);
  EXPECT_THAT(resolve_program({script}, environment, false), ElementsAre(script));
}

TEST_F(ProgramPath, WhatIsNotThereIsNamedWithWhereItWasLookedFor) {
  EXPECT_THAT(message_of<ConfigError>([&] { resolve_program({"nothing"}, environment); }),
              testing::AllOf(HasSubstr("'nothing'"), HasSubstr(folder.string())));
  const auto missing = (folder / "nothing").string();
  EXPECT_THAT(message_of<ConfigError>([&] { resolve_program({missing}, environment); }),
              testing::AllOf(HasSubstr(missing), HasSubstr("No such file")));
  const auto script = (folder / "nothing.py").string();
  EXPECT_THAT(message_of<ConfigError>([&] { resolve_program({script}, environment); }),
              testing::AllOf(HasSubstr(script), HasSubstr("No such file")));
}

TEST_F(ProgramPath, WhatCannotBeExecutedIsNamed) {
  const auto text = file("text", false);
  EXPECT_THAT(message_of<ConfigError>([&] { resolve_program({text}, environment); }),
              testing::AllOf(HasSubstr(text), HasSubstr("Permission denied")));
  EXPECT_THAT(message_of<ConfigError>([&] { resolve_program({"text"}, environment); }),
              testing::AllOf(HasSubstr(text), HasSubstr("Permission denied")));
  EXPECT_THAT(message_of<ConfigError>([&] { resolve_program({folder.string()}, environment); }),
              testing::AllOf(HasSubstr(folder.string()), HasSubstr("Is a directory")));
}

}  // namespace
}  // namespace accelmgr::program
