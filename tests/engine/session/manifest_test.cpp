// Tests of where tensors lie, of as what they are stored, and of manifests that another process made.
#include "engine/session/manifest.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <tuple>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"
#include "session_support.hpp"

namespace accelmgr::session {
namespace {

TEST(Manifest, ReadsBackFromAnotherMapping) {
  Manifest manifest;
  manifest.tensors = {{.name = "w0",
                       .aliases = {"tied.a", "a name of more than fifteen characters"},
                       .shape = {2, 3},
                       .count = 6,
                       .strides = {1, 2}},
                      {.name = "w1",
                       .aliases = {},
                       .shape = {3},
                       .dtype = DType::complex64,
                       .count = 3,
                       .group = Group::frozen},
                      {.name = "w0.diagonal",
                       .aliases = {},
                       .shape = {2},
                       .count = 2,
                       .shares = 0,
                       .shared_offset = 0,
                       .strides = {4}},
                      {.name = "expanded",
                       .aliases = {},
                       .shape = {5, 3, 7},
                       .count = 3,
                       .group = Group::frozen,
                       .strides = {0, 1, 0},
                       .persistent = false}};
  manifest.set_precision({.bf16_runners = true, .bf16_slabs = true});
  manifest.buffers = {{.name = "mean", .shape = {2}, .bytes = 8},
                      {.name = "batches",
                       .aliases = {"count"},
                       .shape = {},
                       .dtype = DType::int64,
                       .bytes = 8,
                       .persistent = false}};
  manifest.fields = {{.name = "input", .shape = {128}, .dtype = DType::int64, .element_bytes = 1024},
                     {.name = "target", .shape = {}, .dtype = DType::uint8, .element_bytes = 1}};
  auto made = session_of(manifest, 2);
  const auto read = read_manifest(Session::attach(descriptors_of(made)));
  ASSERT_EQ(read.tensors.size(), 4u);
  EXPECT_EQ(read.tensors[0].name, "w0");
  EXPECT_EQ(read.tensors[0].aliases, manifest.tensors[0].aliases);
  EXPECT_EQ(read.tensors[0].shape, manifest.tensors[0].shape);
  EXPECT_EQ(read.tensors[0].strides, manifest.tensors[0].strides);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(read.tensors[i].dtype, manifest.tensors[i].dtype);
    EXPECT_EQ(read.tensors[i].runner_dtype, manifest.tensors[i].runner_dtype);
    EXPECT_EQ(read.tensors[i].types, manifest.tensors[i].types);
    EXPECT_EQ(read.tensors[i].offset, manifest.tensors[i].offset);
    EXPECT_EQ(read.tensors[i].gradient, manifest.tensors[i].gradient);
    EXPECT_EQ(read.tensors[i].slab, manifest.tensors[i].slab);
  }
  EXPECT_EQ(read.tensors[1].group, Group::frozen);
  EXPECT_EQ(read.tensors[1].shares, -1);
  EXPECT_EQ(read.tensors[2].shares, 0);
  EXPECT_EQ(read.tensors[2].strides, manifest.tensors[2].strides);
  EXPECT_TRUE(read.tensors[2].persistent);
  EXPECT_EQ(read.tensors[3].count, 3u);
  EXPECT_FALSE(read.tensors[3].has_room()) << "an expanded tensor cannot be trained";
  EXPECT_FALSE(read.tensors[3].persistent);
  EXPECT_EQ(read.buffers[1].name, "batches");
  EXPECT_EQ(read.buffers[1].aliases.at(0), "count");
  EXPECT_EQ(read.buffers[1].dtype, DType::int64);
  EXPECT_FALSE(read.buffers[1].persistent);
  EXPECT_TRUE(read.buffers[0].persistent);
  EXPECT_EQ(read.fields.at(0).element_bytes, 1024u);
  EXPECT_EQ(read.fields.at(1).offset, manifest.fields[1].offset);
}

TEST(Manifest, StridesThatLeaveTheValuesOfATensorAreRefused) {
  const auto refusal = [](std::vector<std::int64_t> strides, Group group) -> std::string {
    Manifest manifest;
    manifest.tensors = {{.name = "w",
                         .aliases = {},
                         .shape = {2, 3},
                         .count = group == Group::frozen && strides.at(0) == 0 ? 3u : 6u,
                         .group = group,
                         .strides = strides}};
    manifest.set_precision({});
    auto made = session_of(manifest, 1);
    try {
      read_manifest(Session::attach(descriptors_of(made)));
    } catch (const SessionError& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_EQ(refusal({1, 2}, Group::decay), "");
  EXPECT_EQ(refusal({0, 1}, Group::frozen), "");
  EXPECT_NE(refusal({4, 1}, Group::decay).find("tensor 'w': the end of its values is 7; it must be 6"),
            std::string::npos);
  EXPECT_NE(refusal({0, 1}, Group::decay), "");
  EXPECT_NE(refusal({1, 1}, Group::frozen), "");
  EXPECT_NE(refusal({0}, Group::frozen), "");
  EXPECT_NE(refusal({1}, Group::decay).find("the number of strides is 1; it must be 2"), std::string::npos);
}

TEST(Manifest, GroupsLieNextToEachOther) {
  Manifest m;
  for (auto group : {Group::frozen, Group::no_decay, Group::decay, Group::no_decay})
    m.tensors.push_back(tensor_of(5, DType::float32, group));
  EXPECT_EQ(m.place_tensors(), (TensorBytes{256, 192, 192, 256, 192, 256}));
  EXPECT_EQ(m.tensors[2].offset, 0u);
  EXPECT_EQ(m.tensors[1].offset, 64u);
  EXPECT_EQ(m.tensors[3].offset, 128u);
  EXPECT_EQ(m.tensors[0].offset, 192u);
}

TEST(Manifest, TensorsOfADtypeLieTogetherAndWhatCannotBeTrainedLast) {
  Manifest m;
  m.tensors = {tensor_of(5, DType::float32, Group::frozen),
               tensor_of(5, DType::bfloat16, Group::no_decay),
               tensor_of(5, DType::float32),
               tensor_of(5, DType::int8, Group::frozen),
               tensor_of(3, DType::complex64),
               tensor_of(5, DType::float16),
               tensor_of(5, DType::float32),
               tensor_of(5, DType::bfloat16, Group::frozen)};
  m.set_precision({.bf16_slabs = true, .float32_gradients = true});
  EXPECT_EQ(m.place_tensors(), (TensorBytes{.parameters = 512,
                                            .trained = 320,
                                            .gradients = 448,
                                            .gradient_room = 640,
                                            .slab = 256,
                                            .slab_room = 384}));
  const auto places = [&](std::size_t i) {
    return std::tuple{m.tensors[i].offset, m.tensors[i].gradient, m.tensors[i].slab};
  };
  EXPECT_EQ(places(5), std::tuple(0, 0, 0));
  EXPECT_EQ(places(2), std::tuple(64, 128, 64)) << "32 numbers of float16 take 64 bytes, their gradients 128";
  EXPECT_EQ(places(6), std::tuple(128, 192, 96)) << "16 numbers of bfloat16 take 32 bytes of a slab";
  EXPECT_EQ(places(4), std::tuple(192, 256, 128));
  EXPECT_EQ(places(1), std::tuple(256, 320, 192)) << "a dtype begins at a multiple of 64 bytes";
  EXPECT_EQ(places(7), std::tuple(320, 448, 256));
  EXPECT_EQ(places(0), std::tuple(384, 576, 320));
  EXPECT_EQ(m.tensors[3].offset, 448u);
}

TEST(Manifest, StoresGradientsAsThePrecisionSays) {
  using enum Element;
  const auto types = [](DType dtype, const Precision& precision) {
    Manifest m;
    m.tensors = {tensor_of(1, dtype)};
    m.set_precision(precision);
    return m.tensors[0];
  };
  EXPECT_EQ(types(DType::float32, {}).types, (ElementTypes{f32, f32, f32}));
  EXPECT_EQ(types(DType::float32, {.bf16_slabs = true}).types, (ElementTypes{f32, bf16, f32}));
  EXPECT_EQ(types(DType::float32, {.bf16_runners = true}).types, (ElementTypes{f32, bf16, bf16}));
  EXPECT_EQ(types(DType::float32, {.bf16_runners = true}).runner_dtype, DType::bfloat16);
  EXPECT_EQ(types(DType::complex64, {.bf16_runners = true}).runner_dtype, DType::complex64);
  EXPECT_EQ(types(DType::complex64, {.bf16_slabs = true}).types, (ElementTypes{f32, bf16, f32}));
  EXPECT_EQ(types(DType::complex128, {}).types, (ElementTypes{f64, f64, f64}));
  EXPECT_EQ(types(DType::float16, {.bf16_slabs = true}).types, (ElementTypes{f16, f16, f16}));
  EXPECT_EQ(types(DType::float16, {.float32_gradients = true}).types, (ElementTypes{f32, f16, f16}));
  EXPECT_EQ(types(DType::bfloat16, {.float32_gradients = true}).gradient_dtype(), DType::float32);
  EXPECT_EQ(types(DType::complex64, {.bf16_slabs = true}).gradient_dtype(), DType::complex64);
}

/// The error of a session whose manifest another process has changed.
std::string refusal(const std::function<void(Manifest&)>& change) {
  Manifest m;
  m.tensors = {tensor_of(100, DType::float32), tensor_of(100, DType::bfloat16),
               tensor_of(100, DType::int8, Group::frozen)};
  m.set_precision({});
  auto session = session_of(m, 1);
  change(m);
  write_manifest(m, session.manifest());
  return test::message_of<SessionError>([&] { read_manifest(session); });
}
bool says(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Manifest, OfATrainedTensorThatCannotBeTrainedIsRefused) {
  EXPECT_TRUE(says(refusal([](Manifest& m) { m.tensors[2].group = Group::decay; }),
                   "dtype is 1; it must be one of which there are gradients"));
}

TEST(Manifest, OfOtherTensorsThanTheSessionHasRoomForIsRefused) {
  EXPECT_TRUE(says(refusal([](Manifest& m) { m.tensors[0].group = Group::frozen; }), "lists tensors of"));
  EXPECT_TRUE(says(refusal([](Manifest& m) { m.tensors[0].shape = {50}; }), "lists tensors of"));
  EXPECT_TRUE(says(refusal([](Manifest& m) { m.precision.bf16_slabs = true; }), "lists tensors of"));
  EXPECT_TRUE(says(refusal([](Manifest& m) { m.tensors[1].dtype = DType::complex128; }),
                   "small enough to end within"));
}

TEST(Manifest, OfCountsThatOverflowIsRefused) {
  constexpr std::int64_t huge = std::int64_t{1} << 61, large = std::int64_t{1} << 33;
  for (const std::size_t i : {0, 1, 2}) {
    EXPECT_TRUE(
        says(refusal([=](Manifest& m) { m.tensors[i].shape = {huge}; }), "small enough to end within"));
    EXPECT_TRUE(says(refusal([=](Manifest& m) {
                       m.tensors[i].shape = {large, large};
                     }),  // 2^66
                     "count is 18446744073709551615; it must be small enough to end within"));
  }
}

}  // namespace
}  // namespace accelmgr::session
