// Tests of worker strings in both forms, and of the processes that they stand for.
#include "launcher/launch/compat/workers.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>

#include "launcher/launch/nodes.hpp"

namespace accelmgr::launch {
namespace {

using List = std::vector<Worker>;

TEST(Workers, AreReadInTheWorkerForm) {
  EXPECT_EQ(parse_workers("worker:0;ismz9:25822"),
            (WorkerList{WorkerForm::worker, {{"worker", 0, {"ismz9", 25822}}}}));
  EXPECT_EQ(
      parse_workers("a:0;grpc://10.0.0.1:5000|b_2:7;[fd00::2]:6000|a:1;node-3.cluster:1"),
      (WorkerList{
          WorkerForm::worker,
          {{"a", 0, {"10.0.0.1", 5000}}, {"b_2", 7, {"fd00::2", 6000}}, {"a", 1, {"node-3.cluster", 1}}}}));
}

TEST(Workers, AreWrittenInBothForms) {
  const List workers = {{"a", 0, {"h", 1}}, {"a", 1, {"::1", 2}}};
  EXPECT_EQ(text(workers, WorkerForm::worker), "a:0;grpc://h:1|a:1;grpc://[::1]:2");
  EXPECT_EQ(text(workers, WorkerForm::tpu), "a;0;h:1|a;1;[::1]:2");
}

TEST(BadWorkers, AreRefusedWithThePart) {
  const auto expect_bad = [](const std::string& written, const std::string& part, const std::string& reason) {
    SCOPED_TRACE("'" + written + "'");
    const auto [text, key] = refusal([&] { parse_workers(written); });
    EXPECT_TRUE(says(text, {"Bad worker syntax: " + part, reason}));
    EXPECT_EQ(key, "workers");
  };
  const std::string worker_form = "name:ordinal;host:port", tpu_form = "name;ordinal;host:port";
  for (const auto* part : {"", "a", "a:0"}) expect_bad(part, part, worker_form);
  expect_bad("a:0;h:1|", "", worker_form);
  expect_bad("|a:0;h:1", "", worker_form);
  expect_bad("a:0;h:1|a;1;h:2", "a;1;h:2", worker_form);
  expect_bad("a;0", "a;0", tpu_form);
  expect_bad("a;0;h:1|a:1;h:2", "a:1;h:2", tpu_form);
  expect_bad("a:x;h:1", "a:x;h:1", "'x' is not an ordinal");
  expect_bad("a:-1;h:1", "a:-1;h:1", "'-1'");
  expect_bad("a:;h:1", "a:;h:1", "'' is not an ordinal");
  expect_bad(":0;h:1", ":0;h:1", "'' is not the name of a worker");
  expect_bad("a b:0;h:1", "a b:0;h:1", "'a b'");
  expect_bad("a:0;h:1|a:1;h:2x", "a:1;h:2x", "Bad worker HOST:PORT format: h:2x: ");
  for (const std::string host : {"h", "", "h:0", "h:1;more", "http://h:1", "::1:5"})
    expect_bad("a:0;" + host, "a:0;" + host, "HOST:PORT format: " + host + ": ");
  expect_bad("a:0;grpc://h", "a:0;grpc://h", "HOST:PORT format: h: ");
  for (const std::string host : {"grpc://h:1", "h:1 "})
    expect_bad("t;0;" + host, "t;0;" + host, "HOST:PORT format: " + host + ": ");
}

TEST(Workers, AreThereOnceEach) {
  EXPECT_TRUE(says(refusal([] { parse_workers("a:0;h:1|a:0;h:2"); }).text, {"worker a:0", "twice"}));
  EXPECT_NO_THROW(parse_workers("a:0;h:1|b:0;h:2"));
}

TEST(LocalWorker, IsNameAndOrdinalAndNothingElse) {
  EXPECT_EQ(parse_local_worker("a:3"), (Worker{"a", 3, {}}));
  for (const auto* bad : {"", "a", "a:", ":1", "a:1x", "a:1;h:2", "a;1"})
    EXPECT_TRUE(
        says(refusal([&] { parse_local_worker(bad); }).text, {std::string("Bad worker syntax: ") + bad}));
}

TEST(Workers, StandForTheirDevicesAtPortsInARow) {
  const List nodes = {{"a", 0, {"h1", 5000}}, {"b", 1, {"h2", 6000}}};
  EXPECT_EQ(
      expand_workers(nodes, 2),
      (List{{"a", 0, {"h1", 5000}}, {"a", 1, {"h1", 5001}}, {"b", 2, {"h2", 6000}}, {"b", 3, {"h2", 6001}}}));
  EXPECT_EQ(expand_workers(List{{"a", 0, {"h", 65534}}}, 2).back().address.port, 65535);
}

TEST(Workers, ThatWouldPassTheHighestPortAreRefused) {
  const List nodes = {{"a", 0, {"h", 65534}}};
  EXPECT_TRUE(
      says(refusal([&] { expand_workers(nodes, 3); }).text, {"a:0 at h:65534", "3", "65536", "65535"}));
}

TEST(Workers, OfOneNodeWhosePortsOverlapAreRefused) {
  const List nodes = {{"a", 0, {"h", 5000}}, {"a", 1, {"h", 5001}}};
  EXPECT_TRUE(
      says(refusal([&] { expand_workers(nodes, 2); }).text, {"processes 1 and 2", "h:5001", "2 ports"}));
  EXPECT_NO_THROW(expand_workers(nodes, 1));
}

TEST(Workers, OfOneNodeAreMadeOfItsPorts) {
  const std::vector<int> ports = {41, 7};
  EXPECT_EQ(local_workers("node1", ports),
            (List{{"localservice", 0, {"node1", 41}}, {"localservice", 1, {"node1", 7}}}));
}

TEST(DeviceMap, NamesEveryDeviceOfEveryNode) {
  const auto processes = expand_workers(List{{"a", 0, {"h1", 1}}, {"b", 1, {"h2", 1}}}, 1);
  EXPECT_EQ(device_map(processes, "GPU"),
            "GPU:0;/job:localservice/replica:0/task:0/device:XLA_GPU:0|GPU:1;/job:localservice/replica:0/"
            "task:1/device:XLA_GPU:0");
  EXPECT_EQ(device_map({}, "CPU"), "");
}

std::string any_word(const char* letters, int longest) {
  const std::string all = letters;
  std::string word;
  for (int count = *rc::gen::inRange(1, longest + 1); count > 0; --count)
    word += all[*rc::gen::inRange<std::size_t>(0, all.size())];
  return word;
}

List any_workers() {
  List workers;
  const int count = *rc::gen::inRange(1, 6);
  while (static_cast<int>(workers.size()) < count) {
    auto host =
        *rc::gen::arbitrary<bool>() ? any_word("abz019.-_", 12) : any_word("0123456789abcdef:", 12) + ":";
    Worker worker{any_word("abcXYZ_019", 8), *rc::gen::inRange(0, 1000), {host, *rc::gen::inRange(1, 65536)}};
    const bool is_new = std::ranges::none_of(workers, [&](const Worker& other) {
      return other.name == worker.name && other.ordinal == worker.ordinal;
    });
    if (is_new) workers.push_back(std::move(worker));
  }
  return workers;
}

RC_GTEST_PROP(Workers, AreReadBackAsTheyWereWritten, ()) {
  const auto workers = any_workers();
  for (const auto form : {WorkerForm::worker, WorkerForm::tpu})
    RC_ASSERT(parse_workers(text(workers, form)) == (WorkerList{form, workers}));
}

RC_GTEST_PROP(Workers, AreReadOrRefusedWhateverIsWritten, ()) {
  auto written = text(any_workers(), *rc::gen::element(WorkerForm::worker, WorkerForm::tpu));
  for (int changes = *rc::gen::inRange(1, 4); changes > 0; --changes)
    written[*rc::gen::inRange<std::size_t>(0, written.size())] =
        *rc::gen::element('a', '0', ':', ';', '|', '[', ' ');
  try {
    const auto read = parse_workers(written);
    RC_ASSERT(parse_workers(text(read.nodes, read.form)) == read);
  } catch (const ConfigError& error) {
    RC_ASSERT(error.key() == "workers");
  }
}

}  // namespace
}  // namespace accelmgr::launch
