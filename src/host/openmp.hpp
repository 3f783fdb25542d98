// The host's OpenMP threads, which torch's operators leave behind.
#pragma once

namespace accelmgr::host {

/// Ends the idle threads of this thread's OpenMP pool; its next parallel region makes them anew. libgomp lets
/// idle threads spin for milliseconds by default, on the cores where the runners are to compute (measured:
/// steps take 2 to 4 times as long). Does nothing where the library loaded has no such call, or inside a
/// parallel region.
void release_idle_threads() noexcept;

}  // namespace accelmgr::host
