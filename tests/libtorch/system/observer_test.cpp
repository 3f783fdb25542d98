// The tensors of an Observer. What observers may do and what they see is tested in tests/engine/system.
#include "accelmgr/observer.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <gtest/gtest.h>

#include "service_process.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

TEST(Observer, HasTheParametersAsTheHostHasThem) {
  const ServiceProcess service;
  auto observer = Observer::attach(service.socket());
  std::vector<std::string> names;
  {
    auto manager = Manager::attach(service.socket());
    expect_ok(manager);
    const at::NoGradGuard no_grad;
    for (const auto& [name, tensor] : manager.parameters()) {
      tensor.fill_(static_cast<double>(names.size()));
      names.push_back(name);
    }
  }
  const auto copy = observer.parameters(60);
  EXPECT_EQ(copy.step, 1u);
  ASSERT_EQ(copy.tensors.size(), names.size());
  auto manager = Manager::attach(service.socket());
  for (std::size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(copy.tensors[i].name, names[i]);
    EXPECT_TRUE(copy.tensors[i].tensor.equal(manager.parameters()[i].tensor.detach()));
    EXPECT_TRUE(copy.tensors[i].tensor.equal(at::full_like(copy.tensors[i].tensor, double(i))));
  }
}

}  // namespace
}  // namespace accelmgr::test
