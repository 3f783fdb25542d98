// Gives the floor `distributed` the torch of Python, through accelmgr/_launch/torch_store.py.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <utility>

#include "accelmgr/errors.hpp"
#include "launcher/distributed/store/torch.hpp"
#include "python/interpreter.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

using distributed::StoreClient;
using std::chrono::milliseconds;

[[noreturn]] void rethrow(const nb::python_error& error) {
  auto text = nb::cast<std::string>(nb::str(error.value()));
  if (error.matches(nb::module_::import_("accelmgr.errors").attr("ConfigError"))) throw ConfigError(text);
  // Lets the enclosing wait see the signal again. Last, because the next Python code would raise it.
  if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
  throw std::runtime_error(text);
}

/// Runs `body` with the interpreter's lock, also in a process that was just forked.
template <class Body>
auto in_interpreter(Body&& body) {
  see_fork();
  const Locked lock;
  try {
    return body();
  } catch (const nb::python_error& error) {
    rethrow(error);
  }
}

nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

class PythonClient final : public StoreClient {
 public:
  explicit PythonClient(nb::object client) : client_(std::move(client)) {}
  ~PythonClient() override {
    if (Py_IsInitialized() == 0) {  // The client of a context may outlive it.
      static_cast<void>(client_.release());
      return;
    }
    const Locked lock;
    client_.reset();
  }

  void set(const std::string& key, const std::string& value) override {
    in_interpreter([&] { client_.attr("set")(key, bytes_of(value)); });
  }
  std::optional<std::string> get(const std::string& key, milliseconds patience) override {
    return in_interpreter([&]() -> std::optional<std::string> {
      const nb::object value = client_.attr("get")(key, patience.count());
      if (value.is_none()) return std::nullopt;
      const auto bytes = nb::cast<nb::bytes>(value);
      return std::string(bytes.c_str(), bytes.size());
    });
  }
  bool has(const std::string& key) override {
    return in_interpreter([&] { return nb::cast<bool>(client_.attr("has")(key)); });
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return in_interpreter([&] { return nb::cast<std::int64_t>(client_.attr("add")(key, amount)); });
  }
  std::vector<std::string> keys() override {
    return in_interpreter([&] { return nb::cast<std::vector<std::string>>(client_.attr("keys")()); });
  }
  void erase(const std::string& key) override {
    in_interpreter([&] { client_.attr("erase")(key); });
  }

 private:
  nb::object client_;
};

nb::module_ torch_store() { return nb::module_::import_("accelmgr._launch.torch_store"); }

class PythonTorch final : public distributed::Torch {
 public:
  std::unique_ptr<StoreClient> open_store(const ipc::HostPort& peer, int listening_fd,
                                          milliseconds timeout) override {
    return in_interpreter([&] {
      const auto fd = listening_fd >= 0 ? nb::object(nb::int_(listening_fd)) : nb::object(nb::none());
      return std::make_unique<PythonClient>(
          torch_store().attr("Client")(peer.host, peer.port, fd, timeout.count()));
    });
  }
  int cuda_device_count() override {
    return in_interpreter([] { return nb::cast<int>(torch_store().attr("cuda_device_count")()); });
  }
  void use_cuda_device(int index) override {
    in_interpreter([&] { torch_store().attr("use_cuda_device")(index); });
  }
};

}  // namespace

void register_torch() {
  static PythonTorch torch;
  distributed::register_torch(torch);
}

}  // namespace accelmgr::python
