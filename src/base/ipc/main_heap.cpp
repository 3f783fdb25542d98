#include "base/ipc/main_heap.hpp"

#include <malloc.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "base/ipc/proc_file.hpp"
#include "base/ipc/process.hpp"

namespace accelmgr::ipc {
namespace {

/// Where the main heap begins. It ends at the break of the program. Beyond every address if there is none.
std::uintptr_t main_heap_begin() {
  const auto mappings = read_proc("/proc/self/maps").value_or("");
  const auto name = mappings.find("[heap]\n");
  if (name == mappings.npos) return UINTPTR_MAX;
  return std::stoull(mappings.substr(mappings.rfind('\n', name) + 1), nullptr, 16);
}

/// At least as many as there are threads to be had that keep a heap of the process as it is now.
int heap_count() {
  char* text = nullptr;
  std::size_t bytes = 0;
  FILE* stream = open_memstream(&text, &bytes);
  if (stream == nullptr) return 1;
  malloc_info(0, stream);
  std::fclose(stream);
  const std::unique_ptr<char, decltype(&std::free)> owned(text, &std::free);
  const std::string_view info(text, bytes);
  int count = 0;
  for (auto at = info.find("<heap "); at != info.npos; at = info.find("<heap ", at + 1)) ++count;
  return count;
}

bool allocates_from(std::uintptr_t begin) {
  const std::unique_ptr<void, decltype(&std::free)> block(std::malloc(1), &std::free);
  const auto address = reinterpret_cast<std::uintptr_t>(block.get());
  return address >= begin && address < reinterpret_cast<std::uintptr_t>(sbrk(0));
}

/// Each thread holds the heap that it got while the next one begins.
void call(const std::function<void()>& body, std::uintptr_t begin, int threads_left) {
  if (threads_left == 0 || allocates_from(begin)) return body();
  on_new_thread([&, threads_left] { call(body, begin, threads_left - 1); });
}

}  // namespace

void on_main_heap(const std::function<void()>& body) { call(body, main_heap_begin(), heap_count()); }

}  // namespace accelmgr::ipc
