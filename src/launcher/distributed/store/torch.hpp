// The interface to torch, which this floor does not link. A floor that has torch (libtorch, or the one of
// Python) registers an implementation.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/ipc/tcp.hpp"

namespace accelmgr::distributed {

/// A client of torch's TCPStore. One thread at a time. Throws any std::exception if the store cannot be
/// reached; the first line of its text says why.
class StoreClient {
 public:
  virtual ~StoreClient() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Blocks until the key is set. nullopt if that takes longer than `patience`.
  virtual std::optional<std::string> get(const std::string& key, std::chrono::milliseconds patience) = 0;
  virtual bool has(const std::string& key) = 0;
  virtual std::int64_t add(const std::string& key, std::int64_t amount) = 0;
  virtual std::vector<std::string> keys() = 0;
  virtual void erase(const std::string& key) = 0;
};

class Torch {
 public:
  virtual ~Torch() = default;
  /// Connects to a store at `peer`. Unless listening_fd is -1, first serves the store on that socket, in a
  /// thread that ends with the client; takes ownership of the descriptor. Throws ConfigError if this torch
  /// has no TCPStore, and any std::exception as StoreClient does.
  virtual std::unique_ptr<StoreClient> open_store(const ipc::HostPort& peer, int listening_fd,
                                                  std::chrono::milliseconds timeout) = 0;
  /// The number of CUDA devices that this process sees.
  virtual int cuda_device_count() = 0;
  /// Makes device `index` the current one of this thread. Throws any std::exception.
  virtual void use_cuda_device(int index) = 0;
};

/// `torch` must live as long as the process. A later registration replaces an earlier one.
void register_torch(Torch& torch) noexcept;
/// Null if none is registered.
Torch* registered_torch() noexcept;

/// The local rank modulo the number of devices that torch sees in this process. A process that sees one GPU
/// thus uses device 0, whatever its local rank. nullopt if torch sees none.
std::optional<int> cuda_device(int local_rank);

/// Makes cuda_device() the current device of this thread; does nothing if there is none. Throws SessionError,
/// which names the device.
void use_cuda_device(int local_rank);

}  // namespace accelmgr::distributed
