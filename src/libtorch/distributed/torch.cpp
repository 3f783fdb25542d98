// Implements the libtorch interface of the floor `distributed`: c10d's store, CUDA devices.
#include "launcher/distributed/context/torch.hpp"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fmt/format.h>

#include <algorithm>
#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "base/timing.hpp"
#include "libtorch/distributed/muted_warnings.hpp"

namespace accelmgr::distributed {
namespace {

using std::chrono::milliseconds;
using Store = c10::intrusive_ptr<c10d::TCPStore>;

constexpr milliseconds answer_time(static_cast<std::int64_t>(timing::store_answer_s * 1000));

/// Returns call(), without torch's warnings, and without stacks in its errors. `call` must own what it uses.
template <class Call>
auto answered(Call call, milliseconds patience = answer_time) {
  std::packaged_task<std::invoke_result_t<Call>()> task([call = std::move(call)] {
    const MutedWarnings quiet;
    return call();
  });
  auto answer = task.get_future();
  std::thread asking(std::move(task));
  if (answer.wait_for(patience) != std::future_status::ready) {
    asking.detach();
    throw std::runtime_error(
        fmt::format("no answer within {:.3g} s", std::chrono::duration<double>(patience).count()));
  }
  asking.join();
  try {
    return answer.get();
  } catch (const c10::DistStoreError&) {
    throw;
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  }
}

class LibtorchClient final : public StoreClient {
 public:
  explicit LibtorchClient(Store store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    answered([store = store_, key, bytes = std::vector<std::uint8_t>(value.begin(), value.end())] {
      store->set(key, bytes);
    });
  }
  std::optional<std::string> get(const std::string& key, milliseconds patience) override {
    try {
      return answered(
          [store = store_, key, patience] {
            store->wait({key}, patience);
            const auto value = store->get(key);
            return std::string(value.begin(), value.end());
          },
          patience + answer_time);
    } catch (const c10::DistStoreError&) {
      return std::nullopt;  // Not there in time; client and store can go on.
    }
  }
  bool has(const std::string& key) override {
    return answered([store = store_, key] { return store->check({key}); });
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return answered([store = store_, key, amount] { return store->add(key, amount); });
  }
  std::vector<std::string> keys() override {
    return answered([store = store_] { return store->listKeys(); });
  }
  void erase(const std::string& key) override {
    answered([store = store_, key] { store->deleteKey(key); });
  }

 private:
  Store store_;
};

class Libtorch final : public Torch {
 public:
  std::unique_ptr<StoreClient> open_store(const ipc::HostPort& peer, int listening_fd,
                                          milliseconds timeout) override {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(peer.port);
    options.waitWorkers = false;
    // torch counts whole seconds.
    options.timeout = std::max(timeout, milliseconds(1000));
    if (listening_fd >= 0) {
      options.isServer = true;
      options.masterListenFd = listening_fd;
    }
    return std::make_unique<LibtorchClient>(answered(
        [host = peer.host, options] { return c10::make_intrusive<c10d::TCPStore>(host, options); }, timeout));
  }
  int cuda_device_count() override {
    if (!c10::impl::hasDeviceGuardImpl(at::kCUDA)) return 0;
    return c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount();
  }
  void use_cuda_device(int index) override {
    c10::impl::getDeviceGuardImpl(at::kCUDA)->setDevice(
        at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index)));
  }
};

const bool registered = [] {
  static Libtorch libtorch;
  register_torch(libtorch);
  return true;
}();

}  // namespace

/// CMakeLists.txt makes the linker of every program with this floor look for this name, so that the linker
/// includes this file.
extern "C" bool accelmgr_libtorch_distributed_registered() { return registered; }

}  // namespace accelmgr::distributed
