#include "engine/checkpoint/safetensors_file.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include "engine/checkpoint/storage.hpp"
#include "support.hpp"

namespace accelmgr::checkpoint::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string with_length(std::uint64_t length, const std::string& rest) {
  return std::string(reinterpret_cast<const char*>(&length), 8) + rest;
}

SafetensorsFile open_file(const fs::path& path) {
  return as_checkpoint_error(
      [&] { return SafetensorsFile(open_regular_file(AT_FDCWD, path, path.string()).get(), path.string()); });
}

class SafetensorsFileTest : public ::testing::Test {
 protected:
  /// Writes a file of this header and `data` bytes of data, and opens it.
  SafetensorsFile open_of(const std::string& header, std::size_t data) {
    return open_bytes(with_length(header.size(), header + std::string(data, '\1')));
  }
  SafetensorsFile open_bytes(const std::string& bytes) {
    write_text(path_, bytes);
    return open_file(path_);
  }
  std::string refusal_of(const std::string& header, std::size_t data) {
    return message_of<CheckpointError>([&] { open_of(header, data); });
  }
  std::string refusal_of_bytes(const std::string& bytes) {
    return message_of<CheckpointError>([&] { open_bytes(bytes); });
  }

  const TemporaryFolder directory_;
  const fs::path path_ = directory_ / "file.safetensors";
};

TEST_F(SafetensorsFileTest, GivesWhatWasLaidOut) {
  const SafetensorsLayout layout(
      {{"bytes", "U8", {2}, 2, {}}, {"weight", "F32", {1, 2}, 8, {"head"}}, {"none", "F64", {0}, 0, {}}},
      {{"kind", "test"}});
  std::string image(layout.total_bytes(), 'x');
  layout.write_header(reinterpret_cast<std::byte*>(image.data()));
  image.replace(layout.offset(0), 2, "ab");
  image.replace(layout.offset(1), 8, "cdefghij");
  auto opened = open_bytes(image);
  const auto file = std::move(opened);  // The tensors' bytes stay where they are.
  EXPECT_THAT(file.names(), ElementsAre("bytes", "none", "weight"));
  const auto text_of = [&](const char* name) {
    const auto bytes = file.tensor(name).bytes;
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  EXPECT_EQ(text_of("bytes"), "ab");
  EXPECT_EQ(text_of("weight"), "cdefghij");
  EXPECT_EQ(text_of("none"), "");
  EXPECT_EQ(file.tensor("weight").dtype, "F32");
  EXPECT_THAT(file.tensor("weight").shape, ElementsAre(1, 2));
  EXPECT_TRUE(file.contains("weight"));
  EXPECT_FALSE(file.contains("head"));
  EXPECT_THAT(file.metadata(), ElementsAre(std::pair("head", "weight"), std::pair("kind", "test")));
  EXPECT_THAT(
      message_of<CheckpointError>([&] { file.tensor("wieght"); }),
      ::testing::AllOf(HasSubstr("file.safetensors' has no tensor 'wieght'"), HasSubstr("mean 'weight'")));
}

TEST_F(SafetensorsFileTest, OpensAHeaderWithoutPaddingAndInAnyOrder) {
  const auto file = open_of(
      R"({"b":{"data_offsets":[1,2],"shape":[],"dtype":"U8"},"a":{"dtype":"I8","shape":[1,1],"data_offsets":[0,1]}})",
      2);
  EXPECT_THAT(file.names(), ElementsAre("a", "b"));
  EXPECT_TRUE(open_of("{}", 0).names().empty());
}

TEST_F(SafetensorsFileTest, CannotOpenWhatIsNoFile) {
  EXPECT_THAT(message_of<CheckpointError>([&] { open_file(path_); }),
              HasSubstr("file.safetensors': No such file or directory"));
  EXPECT_THAT(message_of<CheckpointError>([&] { open_file(directory_.path()); }),
              HasSubstr("is not a regular file"));
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);  // open() of a FIFO would wait for a writer.
  EXPECT_THAT(message_of<CheckpointError>([&] { open_file(path_); }), HasSubstr("not a regular file"));
}

TEST_F(SafetensorsFileTest, RefusesALengthThatTheFileDoesNotHave) {
  EXPECT_THAT(refusal_of_bytes(""), HasSubstr("it has 0 bytes"));
  EXPECT_THAT(refusal_of_bytes("1234567"), HasSubstr("it has 7 bytes"));
  EXPECT_THAT(refusal_of_bytes(with_length(0, "")), HasSubstr("does not begin with '{'"));
  EXPECT_THAT(refusal_of_bytes(with_length(3, "{}")),
              HasSubstr("would be 3 bytes long, but only 2 bytes follow"));
  EXPECT_THAT(refusal_of_bytes(with_length(100'000'001, "{}")), HasSubstr("the format allows 100000000"));
  EXPECT_THAT(refusal_of_bytes(with_length(~0ull, "{}")), HasSubstr("the format allows 100000000"));
}

TEST_F(SafetensorsFileTest, RefusesWhatIsNotTheJsonOfTheFormat) {
  const auto with = [](const std::string& entry) { return "{\"w\":" + entry + "}"; };
  EXPECT_THAT(refusal_of(" {}", 0), HasSubstr("does not begin with '{'"));
  EXPECT_THAT(refusal_of("{\"w\":", 0), HasSubstr("not JSON: the error is at byte"));
  EXPECT_THAT(refusal_of("{}x", 0), HasSubstr("not JSON: the error is at byte 3 of 3"));
  EXPECT_THAT(refusal_of("{\"\xff\":1}", 0), HasSubstr("not JSON"));
  for (const auto* entry : {"[]", "{}"})
    EXPECT_THAT(refusal_of(with(entry), 0), HasSubstr("tensor 'w' must have a dtype, a shape"));
  for (const auto* entry : {R"({"dtype":1,"shape":[],"data_offsets":[0,1]})",
                            R"({"dtype":"U8","shape":[],"data_offsets":[0,1],"x":1})"})
    EXPECT_THAT(refusal_of(with(entry), 1), HasSubstr("tensor 'w' must have"));
  const auto of_shape = [&](const std::string& shape) {
    return refusal_of(with(R"({"dtype":"U8","data_offsets":[0,1],"shape":)" + shape + "}"), 1);
  };
  for (const auto* shape : {"1", "[-1]", "[1.0]", "[18446744073709551615]"})
    EXPECT_THAT(of_shape(shape), HasSubstr("the shape of")) << shape;
  EXPECT_THAT(of_shape("[1e999]"), HasSubstr("a number"));
  EXPECT_THAT(of_shape("[[[1]]]"), HasSubstr("deeper"));
  EXPECT_THAT(refusal_of(R"({"__metadata__":[]})", 0), HasSubstr("__metadata__ is not a JSON object"));
  EXPECT_THAT(refusal_of(R"({"__metadata__":{"k":1}})", 0), HasSubstr("'k' in __metadata__ is not a string"));
}

TEST_F(SafetensorsFileTest, RefusesANameGivenTwice) {
  const std::string entry = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_THAT(refusal_of("{\"w\":" + entry + ",\"w\":" + entry + "}", 1), HasSubstr("has \"w\" twice"));
  EXPECT_THAT(refusal_of(R"({"w":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
              HasSubstr("has \"dtype\" twice"));
}

TEST_F(SafetensorsFileTest, RefusesBytesThatAreNotThoseOfShapeAndDtype) {
  const auto of = [&](const std::string& dtype, const std::string& shape, const std::string& range) {
    return refusal_of(
        "{\"w\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + range + "}}", 8);
  };
  EXPECT_THAT(of("F32", "[3]", "[0,8]"), HasSubstr("tensor 'w', F32 [3], needs 12 bytes but has 8"));
  EXPECT_THAT(of("Q32", "[2]", "[0,8]"), HasSubstr("tensor 'w': unknown dtype 'Q32'"));
  EXPECT_THAT(of("F32", "[4611686018427387904,4]", "[0,8]"), HasSubstr("more bytes than a file can have"));
  EXPECT_THAT(of("F32", "[2]", "[8,0]"), HasSubstr("[8, 0]; they must be [begin, end]"));
  for (const auto* range : {"[0]", "[0,4,8]"})
    EXPECT_THAT(of("F32", "[2]", range), HasSubstr("[begin, end]"));
}

TEST_F(SafetensorsFileTest, RefusesGapsOverlapsAndWhatIsOutsideOfTheFile) {
  const auto of = [&](const std::string& a, const std::string& b, std::size_t data) {
    const std::string head = R"({"dtype":"U8","shape":[4],"data_offsets":)";
    return refusal_of("{\"a\":" + head + a + "},\"b\":" + head + b + "}}", data);
  };
  EXPECT_THAT(of("[0,4]", "[5,9]", 9),
              HasSubstr("'b' begins at byte 5 of the data, but the data before it end at byte 4"));
  EXPECT_THAT(of("[0,4]", "[3,7]", 7), HasSubstr("'b' begins at byte 3"));
  EXPECT_THAT(of("[0,4]", "[0,4]", 4), HasSubstr("'b' begins at byte 0"));
  EXPECT_THAT(of("[1,5]", "[5,9]", 9), HasSubstr("'a' begins at byte 1"));
  EXPECT_THAT(of("[4,8]", "[0,4]", 7),
              HasSubstr("'a' ends at byte 8 of the data, but there are only 7 bytes"));
  EXPECT_THAT(of("[4,8]", "[0,4]", 9),
              HasSubstr("its tensors end at byte 8 of the data, but there are 9 bytes"));
}

}  // namespace
}  // namespace accelmgr::checkpoint::test
