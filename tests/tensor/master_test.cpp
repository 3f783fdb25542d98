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

TEST(Describe, ParametersWithinAnotherShareItsValues) {
  const auto matrix = parameter({3, 4});
  const auto transposed = matrix.detach().t().requires_grad_(), row = matrix.detach()[1].requires_grad_();
  const auto model = describe({{"row", row}, {"transposed", transposed}, {"matrix", matrix}}, {});
  const auto& tensors = model.manifest.tensors;
  EXPECT_EQ(tensors[0].shares, 2);
  EXPECT_EQ(tensors[0].shared_offset, 4u);
  EXPECT_EQ(tensors[1].shares, 2);
  EXPECT_EQ(tensors[1].strides, (std::vector<std::int64_t>{1, 4}));
  EXPECT_EQ(tensors[2].shares, -1);
}

TEST(Describe, ParametersThatOverlapInPartAreRefused) {
  const auto memory = at::ones({6});
  const auto one = memory.narrow(0, 0, 4).detach().requires_grad_(),
             other = memory.narrow(0, 2, 4).detach().requires_grad_();
  EXPECT_NE(message_of({{"one", one}, {"other", other}}).find("'one' and 'other' overlap"),
            std::string::npos);
}

TEST(Describe, BuffersHaveAllTheirNamesAndSayWhetherTheyAreKept) {
  const auto shared = at::ones({2});
  const auto model = describe({{"weight", parameter({2})}},
                              {{"one", shared}, {"scratch", at::ones({3})}, {"two", shared}}, {"scratch"});
  ASSERT_EQ(model.manifest.buffers.size(), 2u);
  EXPECT_EQ(model.manifest.buffers[0].aliases, std::vector<std::string>{"two"});
  EXPECT_TRUE(model.manifest.buffers[0].persistent);
  EXPECT_FALSE(model.manifest.buffers[1].persistent);
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
  EXPECT_NO_THROW(check_aliases(bound.model, bound.model.parameters, bound.session, bound.manifest));
}

TEST(Bind, AModelThatReplacesAParameterIsNamed) {
  const auto weight = parameter({3});
  Bound bound({{"weight", weight}});
  bind_parameters(bound.model, bound.session, bound.manifest);
  weight.set_data(at::zeros({3}));
  EXPECT_THROW(check_aliases(bound.model, bound.model.parameters, bound.session, bound.manifest), ModelError);
}

TEST(Bind, AParameterThatTheModelReplacedIsNamed) {
  Bound bound({{"one", parameter({3})}, {"weight", parameter({3})}});
  bind_parameters(bound.model, bound.session, bound.manifest);
  auto current = bound.model.parameters;
  current[1].tensor = parameter({3});
  try {
    check_aliases(bound.model, current, bound.session, bound.manifest);
    FAIL();
  } catch (const ModelError& error) {
    EXPECT_NE(std::string(error.what()).find("'weight' was replaced"), std::string::npos) << error.what();
  }
}

TEST(Bind, AParameterWithoutElementsIsNotMissed) {
  Bound bound({{"empty", parameter({0, 3})}, {"weight", parameter({3})}});
  bind_parameters(bound.model, bound.session, bound.manifest);
  EXPECT_NO_THROW(check_aliases(bound.model, bound.model.parameters, bound.session, bound.manifest));
}

TEST(Bind, ParametersThatShareMemoryDoSoInTheMaster) {
  const auto matrix = parameter({3, 4});
  const auto transposed = matrix.detach().t().requires_grad_();
  Bound bound({{"transposed", transposed}, {"matrix", matrix}});
  bind_parameters(bound.model, bound.session, bound.manifest);
  matrix.detach().fill_(1)[0][2] = 7;
  EXPECT_EQ(transposed[2][0].item().toFloat(), 7);
  EXPECT_NO_THROW(check_aliases(bound.model, bound.model.parameters, bound.session, bound.manifest));
  gather_shared_parameters(bound.session, bound.manifest);
  matrix.detach().zero_();
  scatter_shared_parameters(bound.session, bound.manifest);
  EXPECT_EQ(matrix[0][2].item().toFloat(), 7);
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
