#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>

#include "accelmgr/multiprocess.hpp"
#include "launcher/distributed/ranks.hpp"
#include "message_of.hpp"

namespace accelmgr {
namespace {

using test::expect_on_ranks;
using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

class TwoWeights : public Model {
 public:
  std::vector<NamedTensor> parameters() override { return {{"weight", weight}, {"tied", weight}}; }
  std::vector<NamedTensor> buffers() override { return {{"mean", mean}}; }
  Outputs forward(const Batch&) override { return {}; }
  void train(bool) override {}

  at::Tensor weight = at::randn({3, 3}).requires_grad_(true), mean = at::ones({3});
};

TEST(ModelWrapper, OnTheHostKeepsTheParameters) {
  auto model = std::make_shared<TwoWeights>();
  const auto* before = model->weight.const_data_ptr();
  ModelWrapper wrapper(model);
  EXPECT_EQ(&wrapper.to(at::kCPU), model.get());
  EXPECT_EQ(model->weight.const_data_ptr(), before);
  EXPECT_EQ(message_of<UsageError>([] { ModelWrapper none(nullptr); }), "ModelWrapper: no model was passed");
}

TEST(ModelWrapper, ADeviceThatIsNotThereIsNamedAndNothingIsMoved) {
  auto model = std::make_shared<TwoWeights>();
  ModelWrapper wrapper(model);
  EXPECT_THAT(message_of<ModelError>([&] { wrapper.to(at::Device(at::kCUDA, 99)); }),
              AllOf(HasSubstr("'weight'"), HasSubstr("cuda:99")));
  EXPECT_TRUE(model->weight.is_cpu());
  EXPECT_TRUE(model->mean.is_cpu());
}

TEST(ModelWrapper, OfAForkedWorldIsUsedByEachRank) {
  auto model = std::make_shared<TwoWeights>();
  ModelWrapper wrapper(model);
  expect_on_ranks(3, [&](int) {
    auto& here = wrapper.to(distributed::device());
    EXPECT_EQ(distributed::all_gather(here.parameters()[0].tensor.detach()).size(0), 9);
  });
}

}  // namespace
}  // namespace accelmgr
