#include "tensor/master.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "accelmgr/errors.hpp"

namespace accelmgr::tensor {
namespace {

at::Tensor parameter(std::vector<std::int64_t> shape, at::ScalarType dtype = at::kFloat) {
  return at::ones(shape, at::TensorOptions().dtype(dtype)).requires_grad_();
}

std::string message_of(const std::vector<NamedTensor>& parameters) {
  try {
    describe(parameters, {});
  } catch (const ModelError& error) {
    return error.what();
  }
  return {};
}

struct Bound {
  explicit Bound(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers = {})
      : model(describe(parameters, buffers)),
        manifest(model.manifest),
        session(make(manifest, model.element)) {}
  static session::Session make(session::Manifest& manifest, session::Element element) {
    session::Extent extent{.ranks = 1, .element = element};
    extent.elements = manifest.place_tensors(element);
    extent.tensors = manifest.tensors.size();
    extent.buffer_bytes = manifest.place_buffers();
    extent.manifest_bytes = session::manifest_bytes(manifest);
    return session::Session::create(extent, extent.ranks, 1);
  }
  ModelTensors model;
  session::Manifest manifest;
  session::Session session;
};

TEST(Describe, ListsTiedWeightsOnceWithAllTheirNames) {
  const auto tied = parameter({4, 3});
  const auto model = describe({{"embedding", tied}, {"bias", parameter({4})}, {"head", tied}}, {});
  ASSERT_EQ(model.manifest.tensors.size(), 2u);
  EXPECT_EQ(model.manifest.tensors[0].name, "embedding");
  EXPECT_EQ(model.manifest.tensors[0].aliases, std::vector<std::string>{"head"});
}

TEST(Describe, GroupsByWhatAnOptimizerDoes) {
  const auto frozen = parameter({2, 2}).requires_grad_(false);
  const auto model =
      describe({{"matrix", parameter({2, 2})}, {"norm", parameter({2})}, {"frozen", frozen}}, {});
  EXPECT_EQ(model.manifest.tensors[0].group, session::Group::decay);
  EXPECT_EQ(model.manifest.tensors[1].group, session::Group::no_decay);
  EXPECT_EQ(model.manifest.tensors[2].group, session::Group::frozen);
}

TEST(Describe, RefusesByNameWhatItCannotHold) {
  EXPECT_NE(message_of({}).find("no parameters"), std::string::npos);
  EXPECT_NE(message_of({{"half", parameter({2}, at::kHalf)}}).find("'half' is Half"), std::string::npos);
  EXPECT_NE(message_of({{"a", parameter({2})}, {"b", parameter({2}, at::kDouble)}})
                .find("'b' is Double, but 'a' is Float"),
            std::string::npos);
  EXPECT_NE(message_of({{"product", parameter({2}).mul(2)}}).find("'product' is computed"),
            std::string::npos);
  EXPECT_NE(message_of({{"nothing", at::Tensor()}}).find("'nothing' is undefined"), std::string::npos);
}

TEST(Bind, TheMasterIsTheModelsMemoryAndTheLeafStaysItself) {
  const auto weight = parameter({3, 5});
  Bound bound({{"weight", weight}});
  auto master = master_view(bound.session.parameters(), bound.model.element, bound.manifest.tensors[0]);
  master.fill_(7);
  bind_parameters(bound.model, bound.session, bound.manifest);
  EXPECT_EQ(weight.const_data_ptr(), bound.session.parameters());
  EXPECT_TRUE(weight.is_leaf() && weight.requires_grad());
  EXPECT_EQ(weight.sum().item().toFloat(), 7 * 15);
  EXPECT_NO_THROW(check_aliases(bound.model, bound.session, bound.manifest));
}

TEST(Bind, AModelThatReplacesAParameterIsNamed) {
  const auto weight = parameter({3});
  Bound bound({{"weight", weight}});
  bind_parameters(bound.model, bound.session, bound.manifest);
  weight.set_data(at::zeros({3}));
  EXPECT_THROW(check_aliases(bound.model, bound.session, bound.manifest), ModelError);
}

TEST(Bind, AnotherModelThanTheMastersIsRefused) {
  Bound bound({{"weight", parameter({3})}});
  const auto other = describe({{"weight", parameter({4})}}, {});
  EXPECT_THROW(bind_parameters(other, bound.session, bound.manifest), ModelError);
}

TEST(Buffers, EveryDtypeComesBackAsItWas) {
  const auto mean = at::ones({3}).mul(2.5);
  const auto count = at::ones({}, at::TensorOptions().dtype(at::kLong)).mul(9);
  const auto flags = at::ones({5}, at::TensorOptions().dtype(at::kBool));
  Bound bound({{"weight", parameter({3})}}, {{"mean", mean}, {"count", count}, {"flags", flags}});
  store_buffers(bound.model, bound.manifest, bound.session.buffers(0, 0));
  mean.zero_();
  count.zero_();
  flags.zero_();
  load_buffers(bound.model, bound.manifest, bound.session.buffers(0, 0));
  EXPECT_EQ(mean.sum().item().toFloat(), 7.5f);
  EXPECT_EQ(count.item().toLong(), 9);
  EXPECT_EQ(flags.sum().item().toLong(), 5);
}

}  // namespace
}  // namespace accelmgr::tensor
