// Checks that a call with invalid arguments is refused on the rank that makes it, before anything is sent:
// the other ranks do not notice.
#include <array>

#include "call.hpp"
#include "contract.hpp"
#include "message_of.hpp"

namespace accelmgr::collective::contract {
namespace {

using test::message_of;

void expect_usable(Rank& self) {
  EXPECT_EQ(perform({.kind = CallKind::all_reduce, .dtype = DType::int32, .count = 100}, self.world), "");
}

bool is_chosen(const Rank& self) { return self.world.rank() == self.world.size() - 1; }

}  // namespace

CONTRACT(Reductions, ThatMakeNoSenseAreRefusedByName) {
  if (is_chosen(self))
    for (const auto dtype : all_dtypes)
      for (const auto op : all_ops) {
        if (makes_sense(dtype, op)) continue;
        std::array<std::byte, 512> memory{};
        const auto untouched = memory;
        const auto said = std::string(name_of(op)) + " of " + std::string(name_of(dtype));
        const auto of_reduce = message_of<UsageError>(
            [&] { self.world.all_reduce(memory.data(), memory.data(), 2, dtype, op); });
        EXPECT_NE(of_reduce.find(said), std::string::npos) << of_reduce;
        const auto of_scatter = message_of<UsageError>(
            [&] { self.world.reduce_scatter(memory.data(), memory.data(), 2, dtype, op); });
        EXPECT_NE(of_scatter.find(said), std::string::npos) << of_scatter;
        EXPECT_TRUE(memory == untouched);
      }
  expect_usable(self);
}

CONTRACT(Roots, OutOfRangeAreRefused) {
  if (is_chosen(self))
    for (const int root : {-1, self.world.size()}) {
      std::uint8_t data = 42;
      const auto of_data =
          message_of<UsageError>([&] { self.world.broadcast(&data, 1, DType::uint8, root); });
      EXPECT_NE(of_data.find(std::to_string(root)), std::string::npos) << of_data;
      EXPECT_EQ(data, 42);
      const auto of_object = message_of<UsageError>([&] { self.world.broadcast_object("x", root); });
      EXPECT_NE(of_object.find(std::to_string(root)), std::string::npos) << of_object;
    }
  expect_usable(self);
}

}  // namespace accelmgr::collective::contract
