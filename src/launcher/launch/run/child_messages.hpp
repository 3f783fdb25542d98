// Messages between a launched child and the process that launched it, as CBOR:
//
//   -> Order   read by the forked child: descriptors, environment, and what it executes or calls
//   -> Call    a call of a registered function, the same for all ranks; read by the forked child, or by this
//              program if the child has executed it
//   <- Report  the result or the failure
#pragma once

#include <string>
#include <vector>

#include "launcher/launch/run/spawner.hpp"

namespace accelmgr::launch {

struct Order {
  int rank = 0;
  std::map<std::string, std::string> environment;
  std::vector<int> targets;  ///< The numbers that the descriptors of the request get in the child.
  std::vector<std::string> program;
  bool execute_self = false;
  bool call = false;  ///< A Call follows. Without it and without `program` the child calls the callable.
};

struct Call {
  std::string setup;  ///< May be empty.
  std::string function;
  Value args = Value::array();
};

std::string encode(const Order& order);
std::string encode(const Call& call);
std::string encode(const Report& report);
// These throw SessionError if the text is not such a message.
Order decode_order(const std::string& text);
Call decode_call(const std::string& text);
Report decode_report(const std::string& text);

}  // namespace accelmgr::launch
