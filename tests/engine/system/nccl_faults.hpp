// NCCL between the processes of a run, with a fault of one rank.
#pragma once

#include "accelmgr/config.hpp"
#include "base/cuda/nccl.hpp"

namespace accelmgr::test {

/// The table of FakeNccl. `model.options["nccl_fault"]` is a rank and a fault, "1:hang_join":
///
///   refuse_id    ncclGetUniqueId fails
///   refuse_join, kill_join, hang_join   in ncclCommInitRankConfig: it fails, KILL, it does not return
///   absent       the rank joins another team, where it waits for ever
///   fail_sum, kill_sum      in ncclReduceScatter: it fails, KILL
///   break_sum    ncclReduceScatter fails because the device breaks
///   fail_gather, kill_gather  in ncclAllGather, likewise
///   hang_abort   ncclCommAbort does not return, and ends nothing
///
/// A fault strikes once: it makes the file `nccl_fault_once` then. With `nccl_fault_spreads` the devices of
/// the other ranks break when they look at their communicators, or abort them, after that; each rank's does
/// so once.
device::Nccl nccl_of_rank(const Config& config, int rank);

}  // namespace accelmgr::test
