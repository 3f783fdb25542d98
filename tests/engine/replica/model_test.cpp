#include "engine/replica/model.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "engine/session/session_support.hpp"
#include "engine/session/strided.hpp"
#include "message_of.hpp"

namespace accelmgr::replica {
namespace {

/// Owns the memory of several tensors.
class Values {
 public:
  /// A tensor with its own memory; every element is `value`.
  Tensor parameter(const std::string& name, std::vector<std::int64_t> shape, float value = 1) {
    std::int64_t count = 1;
    for (const auto size : shape) count *= size;
    auto& memory = memories_.emplace_back(static_cast<std::size_t>(count) + 1, value);
    return tensor(name, memory.data(), std::move(shape));
  }
  static Tensor tensor(const std::string& name, float* data, std::vector<std::int64_t> shape,
                       std::vector<std::int64_t> strides = {}) {
    static std::uintptr_t identities = 0;
    if (strides.empty()) strides = session::dense_strides(shape);
    return {.name = name,
            .dtype = DType::float32,
            .shape = std::move(shape),
            .strides = std::move(strides),
            .data = reinterpret_cast<std::byte*>(data),
            .identity = ++identities};
  }
  static Tensor renamed(Tensor tensor, const std::string& name) {
    tensor.name = name;
    return tensor;
  }

 private:
  std::vector<std::vector<float>> memories_;
};

float* floats(std::byte* memory) { return reinterpret_cast<float*>(memory); }

struct Stored {
  explicit Stored(const Description& description)
      : model(tensors_of(description)), manifest(model.manifest), session(session::session_of(manifest, 2)) {
    store_initial(model, session, manifest);
  }
  ModelTensors model;
  session::Manifest manifest;
  session::Session session;
};

/// Expects a model that cannot be held, with an error that says so.
void expect_refused(const Description& description, const char* part) {
  const auto what = test::message_of<ModelError>([&] { tensors_of(description); });
  EXPECT_NE(what.find(part), std::string::npos) << what;
}

class ModelTest : public testing::Test {
 protected:
  Values values;
};

TEST_F(ModelTest, ParametersWithinAnotherShareItsValues) {
  std::array<float, 12> memory{};
  const auto matrix = Values::tensor("matrix", memory.data(), {3, 4});
  const auto transposed = Values::tensor("transposed", memory.data(), {4, 3}, {1, 4});
  const auto row = Values::tensor("row", memory.data() + 4, {4});
  const auto column = Values::tensor("column", memory.data() + 1, {3, 1}, {4, 1});
  Stored stored({{row, transposed, matrix, column}, {}});
  const auto& tensors = stored.manifest.tensors;
  EXPECT_EQ(tensors[0].shares, 2);
  EXPECT_EQ(tensors[0].shared_offset, 4u);
  EXPECT_EQ(tensors[1].shares, 2);
  EXPECT_EQ(tensors[1].strides, (std::vector<std::int64_t>{1, 4}));
  EXPECT_EQ(tensors[2].shares, -1);
  EXPECT_EQ(tensors[1].gradient_strides(), (std::vector<std::int64_t>{1, 4}));
  EXPECT_EQ(tensors[3].gradient_strides(), (std::vector<std::int64_t>{1, 1})) << "row-major";
  const auto places = places_of(stored.session.parameters(), stored.manifest);
  EXPECT_EQ(places[1].data, places[2].data);
  EXPECT_EQ(floats(places[0].data), floats(places[2].data) + 4);
}

TEST_F(ModelTest, WhatIsTiedIsListedOnceWithAllItsNamesAndBuffersSayWhetherTheyAreKept) {
  const auto tied = values.parameter("embedding", {4, 3});
  const auto shared = values.parameter("one", {2});
  auto scratch = values.parameter("scratch", {3});
  scratch.persistent = false;
  const auto model = tensors_of({{tied, values.parameter("weight", {2}), Values::renamed(tied, "head")},
                                 {shared, scratch, Values::renamed(shared, "two")}});
  ASSERT_EQ(model.manifest.tensors.size(), 2u);
  EXPECT_EQ(model.manifest.tensors[0].name, "embedding");
  EXPECT_EQ(model.manifest.tensors[0].aliases, std::vector<std::string>{"head"});
  ASSERT_EQ(model.manifest.buffers.size(), 2u);
  EXPECT_EQ(model.manifest.buffers[0].aliases, std::vector<std::string>{"two"});
  EXPECT_TRUE(model.manifest.buffers[0].persistent);
  EXPECT_FALSE(model.manifest.buffers[1].persistent);
}

TEST_F(ModelTest, GroupsAreByWhatAnOptimizerDoes) {
  auto frozen = values.parameter("frozen", {2, 2});
  frozen.requires_grad = false;
  const auto model =
      tensors_of({{values.parameter("matrix", {2, 2}), values.parameter("norm", {2}), frozen}, {}});
  EXPECT_EQ(model.manifest.tensors[0].group, session::Group::decay);
  EXPECT_EQ(model.manifest.tensors[1].group, session::Group::no_decay);
  EXPECT_EQ(model.manifest.tensors[2].group, session::Group::frozen);
}

TEST_F(ModelTest, WhatCannotBeHeldIsRefusedByName) {
  const auto weight = values.parameter("weight", {2});
  expect_refused({}, "no parameters");
  auto codes = values.parameter("codes", {2});
  codes.dtype = DType::int8;
  expect_refused({{weight, codes}, {}}, "'codes' is int8 and requires a gradient");
  expect_refused({{weight, values.parameter("weight", {2})}, {}},
                 "two parameters of the model are called 'weight'");
  expect_refused({{weight}, {values.parameter("b", {1}), values.parameter("b", {1})}},
                 "two buffers of the model are called 'b'");
  expect_refused({{values.parameter("", {2})}, {}}, "has no name");
  expect_refused({{Values::tensor("nothing", nullptr, {2})}, {}}, "'nothing' has no memory");
  auto bent = weight;
  bent.strides = {1, 1};
  expect_refused({{bent}, {}}, "1 dimensions and 2 strides");
  bent = weight;
  bent.shape = {-2};
  expect_refused({{bent}, {}}, "'weight' has the shape [-2]");
  std::array<float, 6> memory{};
  expect_refused(
      {{Values::tensor("one", memory.data(), {4}), Values::tensor("other", memory.data() + 2, {4})}, {}},
      "'one' and 'other' overlap");
  auto bits = Values::tensor("bits", memory.data(), {6});
  bits.dtype = DType::int32;
  bits.requires_grad = false;
  expect_refused({{Values::tensor("all", memory.data(), {6}), bits}, {}}, "overlap in memory");
}

TEST_F(ModelTest, ParametersHaveADtypeEach) {
  std::array<std::uint16_t, 3> half{0x3f80, 0x4000, 0x4040};
  std::array<std::int64_t, 2> codes{7, -9};
  auto trained = Values::tensor("half", reinterpret_cast<float*>(half.data()), {3});
  trained.dtype = DType::bfloat16;
  auto frozen = Values::tensor("codes", reinterpret_cast<float*>(codes.data()), {2});
  frozen.dtype = DType::int64;
  frozen.requires_grad = false;
  Stored stored({{frozen, values.parameter("weight", {2}, 5), trained}, {}});
  const auto places = places_of(stored.session.parameters(), stored.manifest);
  EXPECT_EQ(std::memcmp(places[0].data, codes.data(), sizeof codes), 0);
  EXPECT_EQ(floats(places[1].data)[1], 5);
  EXPECT_EQ(std::memcmp(places[2].data, half.data(), sizeof half), 0);
  EXPECT_EQ(stored.manifest.tensors[2].dtype, DType::bfloat16);
  EXPECT_FALSE(stored.manifest.tensors[0].has_room());
}

TEST_F(ModelTest, AParameterKeepsItsOrderInMemoryButNoGaps) {
  std::array<float, 12> memory{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  std::array<float, 6> other{};
  Stored stored({{Values::tensor("last", other.data(), {1, 3, 2, 1}, {6, 1, 3, 3}),
                  Values::tensor("gaps", memory.data(), {2, 3}, {2, 4})},
                 {}});
  const auto& last = stored.manifest.tensors[0];
  EXPECT_EQ(last.value_strides(), (std::vector<std::int64_t>{6, 1, 3, 3}));
  EXPECT_EQ(last.gradient_strides(), last.value_strides());
  const auto place = places_of(stored.session.parameters(), stored.manifest)[1];
  EXPECT_EQ(place.strides, (std::vector<std::int64_t>{3, 1}));
  EXPECT_EQ(std::vector<float>(floats(place.data), floats(place.data) + 6),
            (std::vector<float>{0, 4, 8, 2, 6, 10}));
}

TEST_F(ModelTest, AFrozenParameterThatIsExpandedHasTheMemoryOfItsStorage) {
  std::array<float, 3> memory{1, 2, 3};
  auto frozen = Values::tensor("frozen", memory.data(), {1000, 3}, {0, 1});
  auto trained = frozen;
  trained.name = "trained";
  frozen.requires_grad = false;
  Stored stored({{frozen}, {}});
  EXPECT_EQ(stored.manifest.tensors[0].count, 3u);
  EXPECT_EQ(places_of(stored.session.parameters(), stored.manifest)[0].strides, frozen.strides);
  EXPECT_EQ(floats(stored.session.parameters())[2], 3);
  EXPECT_EQ(tensors_of({{trained}, {}}).manifest.tensors[0].count, 3000u) << "it could not be written to";
}

TEST_F(ModelTest, AnotherModelThanTheMastersIsRefused) {
  Stored stored({{values.parameter("weight", {3})}, {values.parameter("mean", {2})}});
  const auto expect_other = [&](const Description& other, const char* part) {
    const auto what = test::message_of<ModelError>([&] { check_same(tensors_of(other), stored.manifest); });
    EXPECT_NE(what.find(part), std::string::npos) << what;
  };
  const auto weight = values.parameter("weight", {3}), mean = values.parameter("mean", {2});
  check_same(tensors_of({{weight}, {mean}}), stored.manifest);
  expect_other({{values.parameter("weight", {4})}, {mean}}, "'weight' float32 [4] here");
  expect_other({{values.parameter("bias", {3})}, {mean}}, "'bias' float32 [3] here");
  auto half = weight;
  half.dtype = DType::float16;
  expect_other({{half}, {mean}}, "'weight' float16 [3] here");
  expect_other({{weight, values.parameter("more", {1})}, {mean}}, "2 parameters, but the master has 1");
  expect_other({{weight}, {}}, "0 buffers, but the master has 1");
  expect_other({{weight}, {values.parameter("mean", {5})}}, "'mean' float32 [5] here");
}

TEST_F(ModelTest, BuffersComeBackAsTheyWere) {
  std::array<std::int64_t, 1> count{9};
  std::array<float, 6> strided{1, 0, 2, 0, 3, 0};
  auto counter = Values::tensor("count", reinterpret_cast<float*>(count.data()), {});
  counter.dtype = DType::int64;
  Stored stored(
      {{values.parameter("weight", {3})}, {counter, Values::tensor("mean", strided.data(), {3}, {2})}});
  for (auto* copy :
       {stored.session.buffers(0, 0), stored.session.buffers(0, 1), stored.session.result_buffers(0)})
    EXPECT_EQ(std::memcmp(copy, count.data(), sizeof count), 0);
  count[0] = 0;
  strided = {-1, -1, -1, -1, -1, -1};
  load_buffers(stored.model.buffers, stored.manifest, stored.session.buffers(0, 0));
  EXPECT_EQ(count[0], 9);
  EXPECT_EQ(strided, (std::array<float, 6>{1, -1, 2, -1, 3, -1}));
}

}  // namespace
}  // namespace accelmgr::replica
