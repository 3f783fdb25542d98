// Implements the libtorch interface of the floor `distributed`: c10d's store, CUDA devices.
#include "launcher/distributed/store/torch.hpp"
#include "base/unmovable.hpp"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Logging.h>

#include <mutex>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "libtorch/tensor/torch_versions.hpp"

namespace accelmgr::distributed {
namespace {

using std::chrono::milliseconds;

/// While one exists, torch logs no warnings. torch would log a stack of twenty lines when a store answers
/// late or is gone; the caller of accelmgr gets an exception instead. The log level belongs to the whole
/// process: the first object raises it to errors, the last one restores it.
class MutedWarnings : base::Unmovable {
 public:
  MutedWarnings() {
    const std::lock_guard lock(mutex);
    if (count++ > 0) return;
    level_before = FLAGS_caffe2_log_level;
    if (level_before < errors_only) FLAGS_caffe2_log_level = errors_only;
  }
  ~MutedWarnings() {
    const std::lock_guard lock(mutex);
    if (--count == 0) FLAGS_caffe2_log_level = level_before;
  }

 private:
  static constexpr int errors_only = 2;
  static inline std::mutex mutex;
  static inline int count = 0;
  static inline int level_before = 0;
};

/// Runs `call`, without torch's warnings, and without stacks in its errors.
template <class Call>
auto quietly(Call&& call) {
  const MutedWarnings quiet;
  try {
    return call();
  } catch (const c10::DistStoreError&) {
    throw;
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  }
}

class LibtorchClient final : public StoreClient {
 public:
  explicit LibtorchClient(c10::intrusive_ptr<c10d::TCPStore> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    quietly([&] { store_->set(key, std::vector<std::uint8_t>(value.begin(), value.end())); });
  }
  std::optional<std::string> get(const std::string& key, milliseconds patience) override {
    try {
      return quietly([&] {
        store_->wait({key}, patience);
        const auto value = store_->get(key);
        return std::string(value.begin(), value.end());
      });
    } catch (const c10::DistStoreError&) {
      return std::nullopt;  // Not there in time; client and store can go on.
    }
  }
  bool has(const std::string& key) override {
    return quietly([&] { return store_->check({key}); });
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return quietly([&] { return store_->add(key, amount); });
  }
  std::vector<std::string> keys() override {
    return quietly([&] { return tensor::keys_of(*store_); });
  }
  void erase(const std::string& key) override {
    quietly([&] { store_->deleteKey(key); });
  }

 private:
  c10::intrusive_ptr<c10d::TCPStore> store_;
};

class Libtorch final : public Torch {
 public:
  std::unique_ptr<StoreClient> open_store(const ipc::HostPort& peer, int listening_fd,
                                          milliseconds timeout) override {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(peer.port);
    options.waitWorkers = false;
    options.timeout = timeout;
    if (listening_fd >= 0) {
      options.isServer = true;
      options.masterListenFd = listening_fd;
      options.useLibUV = tensor::libuv_takes_sockets;
    }
    return quietly([&] {
      return std::make_unique<LibtorchClient>(c10::make_intrusive<c10d::TCPStore>(peer.host, options));
    });
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
