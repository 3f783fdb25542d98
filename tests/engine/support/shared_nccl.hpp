// NCCL behind its table, for ranks that are processes: a team shares a memfd, whose place is in its id. An
// operation is a kernel on a stream of the FakeCuda of each process; it hands the contribution of its rank to
// the others and waits for theirs. What happens to a rank is not told to the others: they wait until they
// abort. FakeNccl knows more, with all ranks in one process.
#pragma once

#include "base/cuda/nccl.hpp"

namespace accelmgr::test {

/// The table. It has reduce-scatter and all-gather; other operations fail. A process whose operation is not
/// that of the others ends with SIGABRT. The FakeCuda must execute in threads.
device::Nccl shared_nccl();
/// Sums that this process has queued.
int shared_nccl_sums();

}  // namespace accelmgr::test
