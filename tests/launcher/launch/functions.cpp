#include "functions.hpp"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>

#include "base/ipc/processes.hpp"

namespace accelmgr::launch::test {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

Value tell(int rank, const Value& args) {
  return {{"rank", rank},
          {"args", args},
          {"RANK", variable("RANK")},
          {"LOCAL_RANK", variable("LOCAL_RANK")},
          {"WORLD_SIZE", variable("WORLD_SIZE")},
          {"OURS", variable("OURS")},
          {"PREPARED", variable("PREPARED")},
          {"http_proxy", variable("http_proxy")},
          {"directory", std::filesystem::current_path().string()},
          {"own group", getpgrp() == getpid()},
          {"pid", getpid()}};
}

[[noreturn]] void throw_nested(int depth) {
  if (depth == 0) throw std::out_of_range("the cause");
  try {
    throw_nested(depth - 1);
  } catch (...) {
    std::throw_with_nested(std::runtime_error("level " + std::to_string(depth)));
  }
}

int number_in(const std::string& how) { return std::stoi(how.substr(how.find(' ') + 1)); }

}  // namespace

Value obey(const std::string& how) {
  if (how == "throw") throw std::runtime_error("as ordered");
  if (how == "throw int") throw 5;
  if (how == "throw nothing") throw std::runtime_error("");
  if (how == "throw torch")  // The format of c10::Error::what().
    throw std::runtime_error(
        "shapes differ\nException raised from f at g.cpp:3 (most recent call first):\nframe #0: f");
  if (how.starts_with("throw nested")) throw_nested(number_in(how.substr(6)));
  if (how.starts_with("exit")) _exit(number_in(how));
  if (how.starts_with("kill")) raise(number_in(how));
  if (how == "hang") ipc::test::hang();
  return how;
}

void register_functions() {
  register_function("tell", tell);
  register_function("obey", [](int rank, const Value& args) {
    return obey(args.at(static_cast<std::size_t>(rank)).get<std::string>());
  });
  register_function(
      "bytes", [](int, const Value& args) { return Value(std::string(args.at(0).get<std::size_t>(), 'x')); });
  register_function("prepare", [](int, const Value&) {
    setenv("PREPARED", "yes", 1);
    return Value();
  });
}

}  // namespace accelmgr::launch::test
