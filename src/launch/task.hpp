// What goes over the socket between a launched child and who launched it, as CBOR:
//
//   -> Order   read by the forked child: its descriptors and environment, what it is to become
//   -> Call    of a registered function; the same for all ranks, read by whoever calls it: the forked child,
//              or this program executed by it
//   <- Report  of a function
#pragma once

#include <string>
#include <vector>

#include "launch/spawner.hpp"

namespace accelmgr::launch {

struct Order {
  int rank = 0;
  std::map<std::string, std::string> environment;
  std::vector<int> targets;  ///< Numbers of the descriptors that came with the request.
  std::vector<std::string> program;
  bool execute_self = false;
  bool call = false;  ///< One follows; without, and without program, it is the callable.
};

struct Call {
  std::string setup;  ///< May be empty.
  std::string function;
  Value args = Value::array();
};

std::string encode(const Order& order);
std::string encode(const Call& call);
std::string encode(const Report& report);
// Throw SessionError for what is no such thing.
Order decode_order(const std::string& text);
Call decode_call(const std::string& text);
Report decode_report(const std::string& text);

}  // namespace accelmgr::launch
