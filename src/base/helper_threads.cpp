#include "base/helper_threads.hpp"

#include <signal.h>

#include <system_error>

namespace accelmgr::base {

Helpers::Helpers(int threads) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // Threads inherit it.
  try {
    while (static_cast<int>(threads_.size()) + 1 < threads) threads_.emplace_back(&Helpers::help, this);
  } catch (const std::system_error&) {
    // There are as many as the system gives.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Helpers::~Helpers() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  called_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Helpers::take_part(const Job& job) noexcept {
  for (int index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < job.count;)
    job.call(job.context, index);
}

void Helpers::share(const Job& job) noexcept {
  {
    const std::lock_guard lock(mutex_);
    next_.store(0, std::memory_order_relaxed);
    job_ = job;
    ++jobs_;
    open_ = true;
  }
  called_.notify_all();
  take_part(job);
  std::unique_lock lock(mutex_);
  open_ = false;
  done_.wait(lock, [&] { return busy_ == 0; });
}

void Helpers::help() noexcept {
  std::unique_lock lock(mutex_);
  for (unsigned done = 0;;) {
    called_.wait(lock, [&] { return ends_ || jobs_ != done; });
    if (ends_) return;
    done = jobs_;
    if (!open_) continue;
    ++busy_;
    const auto job = job_;
    lock.unlock();
    take_part(job);
    lock.lock();
    if (--busy_ == 0) done_.notify_one();
  }
}

}  // namespace accelmgr::base
