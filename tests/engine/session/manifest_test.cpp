// Tests of where tensors lie, of as what they are stored, and of manifests that another process made.
#include "engine/session/manifest.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <tuple>
#include <utility>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"
#include "refusal.hpp"
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
  const auto of_tensor = [](const TensorEntry& t) {
    return std::tuple(t.name, t.aliases, t.shape, t.dtype, t.runner_dtype, t.count, t.group, t.shares,
                      t.shared_offset, t.strides, t.persistent, t.types, t.offset, t.gradient, t.slab);
  };
  const auto of_buffer = [](const BufferEntry& b) {
    return std::tuple(b.name, b.aliases, b.shape, b.dtype, b.offset, b.bytes, b.persistent, b.of_model);
  };
  const auto of_field = [](const FieldEntry& f) {
    return std::tuple(f.name, f.shape, f.dtype, f.offset, f.element_bytes);
  };
  EXPECT_TRUE(std::ranges::equal(read.tensors, manifest.tensors, {}, of_tensor, of_tensor));
  EXPECT_TRUE(std::ranges::equal(read.buffers, manifest.buffers, {}, of_buffer, of_buffer));
  EXPECT_TRUE(std::ranges::equal(read.fields, manifest.fields, {}, of_field, of_field));
  EXPECT_FALSE(read.tensors[3].has_room()) << "an expanded tensor cannot be trained";
}

TEST(Manifest, StridesThatLeaveTheValuesOfATensorAreRefused) {
  const auto read = [](std::vector<std::int64_t> strides, Group group) {
    Manifest manifest;
    manifest.tensors = {{.name = "w",
                         .aliases = {},
                         .shape = {2, 3},
                         .count = group == Group::frozen && strides.at(0) == 0 ? 3u : 6u,
                         .group = group,
                         .strides = strides}};
    manifest.set_precision({});
    read_manifest(session_of(manifest, 1));
  };
  const auto refusal = [&](std::vector<std::int64_t> strides, Group group) {
    return test::message_of<SessionError>([&] { read(std::move(strides), group); });
  };
  EXPECT_NO_THROW(read({1, 2}, Group::decay));
  EXPECT_NO_THROW(read({0, 1}, Group::frozen));
  EXPECT_TRUE(
      test::says(refusal({4, 1}, Group::decay), {"tensor 'w': the end of its values is 7; it must be 6"}));
  EXPECT_TRUE(test::says(refusal({1}, Group::decay), {"the number of strides is 1; it must be 2"}));
  EXPECT_THROW(read({0, 1}, Group::decay), SessionError);
  EXPECT_THROW(read({1, 1}, Group::frozen), SessionError);
  EXPECT_THROW(read({0}, Group::frozen), SessionError);
}

TEST(Manifest, TensorsOfAGroupLieTogetherByTheirDtypesAndWhatCannotBeTrainedLast) {
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

TEST(Manifest, OfTensorsThatTheSessionCannotHaveIsRefused) {
  constexpr std::int64_t huge = std::int64_t{1} << 61, large = std::int64_t{1} << 33;
  const std::pair<std::function<void(Manifest&)>, const char*> changes[] = {
      {[](Manifest& m) { m.tensors[2].group = Group::decay; },
       "dtype is 1; it must be one of which there are gradients"},
      {[](Manifest& m) { m.tensors[0].group = Group::frozen; }, "lists tensors of"},
      {[](Manifest& m) { m.tensors[0].shape = {50}; }, "lists tensors of"},
      {[](Manifest& m) { m.precision.bf16_slabs = true; }, "lists tensors of"},
      {[](Manifest& m) { m.tensors[1].dtype = DType::complex128; }, "small enough to end within"},
      {[](Manifest& m) { m.tensors[0].shape = {huge}; }, "small enough to end within"},
      {[](Manifest& m) { m.tensors[1].shape = {huge}; }, "small enough to end within"},
      {[](Manifest& m) { m.tensors[2].shape = {huge}; }, "small enough to end within"},
      {[](Manifest& m) {
         m.tensors[1].shape = {large, large};
       },  // 2^66
       "count is 18446744073709551615; it must be small enough to end within"}};
  for (const auto& [change, part] : changes) EXPECT_TRUE(test::says(refusal(change), {part}));
}

}  // namespace
}  // namespace accelmgr::session
