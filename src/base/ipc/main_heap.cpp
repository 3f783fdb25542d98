#include "base/ipc/main_heap.hpp"

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

#include "base/ipc/proc_file.hpp"
#include "base/ipc/process.hpp"
#include "base/unmovable.hpp"

namespace accelmgr::ipc {
namespace {

/// Where the main heap begins. It ends at the break of the program. Beyond every address if there is none.
std::uintptr_t main_heap_begin() {
  const auto mappings = read_proc("/proc/self/maps").value_or("");
  const auto name = mappings.find("[heap]\n");
  if (name == std::string::npos) return UINTPTR_MAX;
  return std::stoull(mappings.substr(mappings.rfind('\n', name) + 1), nullptr, 16);
}

/// How many heaps malloc has; at least 1.
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
  for (auto at = info.find("<heap "); at != std::string_view::npos; at = info.find("<heap ", at + 1)) ++count;
  return std::max(count, 1);
}

bool allocates_from(std::uintptr_t begin) {
  const std::unique_ptr<void, decltype(&std::free)> block(std::malloc(1), &std::free);
  const auto address = reinterpret_cast<std::uintptr_t>(block.get());
  return address >= begin && address < reinterpret_cast<std::uintptr_t>(sbrk(0));
}

/// A thread that has a heap, and keeps it from other threads until it is destroyed.
class Holder : base::Unmovable {
 public:
  explicit Holder(std::uintptr_t begin)
      : thread_([this, begin] {
          took_.set_value(allocates_from(begin));
          end_.get_future().wait();
        }),
        has_main_heap_(took_.get_future().get()) {}
  ~Holder() { end_.set_value(); }

  bool has_main_heap() const noexcept { return has_main_heap_; }

 private:
  std::promise<bool> took_;
  std::promise<void> end_;
  std::jthread thread_;
  bool has_main_heap_;
};

}  // namespace

void on_main_heap(const std::function<void()>& body) {
  const auto begin = main_heap_begin();
  if (allocates_from(begin)) return body();
  std::list<Holder> holders;
  try {
    for (int left = heap_count(); left > 0; --left)
      if (holders.emplace_back(begin).has_main_heap()) break;
  } catch (const std::system_error&) {
    // No more threads can be started. `body` then gets another heap.
  }
  if (!holders.empty()) holders.pop_back();  // The next thread gets the heap that was given back last.
  on_new_thread([&] {
    allocates_from(begin);  // The first allocation takes the heap.
    holders.clear();
    body();
  });
}

}  // namespace accelmgr::ipc
