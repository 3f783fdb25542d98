// One process that computes alone what N runners compute together. It has a replica for each rank, because
// each rank has its own BatchNorm statistics. Element i of the same data goes to rank i mod N.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "support.hpp"

namespace accelmgr::test {

class Reference {
 public:
  struct Step {
    double loss = 0;
    std::uint64_t samples = 0;  ///< 0: the data has ended.
    std::map<std::string, double> scalars{};
    Tensors gradients{};  ///< In the order of the manifest.
  };

  explicit Reference(const Config& config);
  ~Reference();

  /// The mean over the next N x A micro-batches, or over those that are left, with these parameters.
  Step step(const Tensors& parameters);
  /// The buffers of a rank's replica, one after the other.
  std::vector<std::byte> buffers(int rank);

 private:
  struct MicroBatch;
  struct Bound;
  std::vector<MicroBatch> next_micro_batches();
  bool read_element(MicroBatch& into);

  Config config_;
  std::unique_ptr<BatchSource> source_;
  std::vector<std::unique_ptr<Bound>> replicas_;
};

}  // namespace accelmgr::test
