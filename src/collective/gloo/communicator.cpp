// All ranks in one mesh. Every collective begins with the exchange of what it was called with.
#include <fmt/format.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "collective/address.hpp"
#include "collective/gloo/algorithms.hpp"
#include "collective/gloo/factory.hpp"
#include "collective/gloo/load.hpp"
#include "collective/networked.hpp"

namespace accelmgr::collective::gloo {
namespace {

std::shared_ptr<Communicator> make(Networked::Setup setup, Mesh* parent);

class Flat final : public Networked {
 public:
  Flat(Setup setup, Mesh* parent)
      : Networked(std::move(setup)),
        mesh_(*this->setup().store,
              {this->setup().name, this->setup().rank, this->setup().ranks, this->setup().address, parent},
              this->setup().connect_timeout_s, this->setup().connect_by) {}

  void all_reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                  const CallOptions& options) override {
    check_reduction(dtype, op);
    run(begin(CallKind::all_reduce, count, dtype, op, 0, options), [&](base::Deadline deadline) {
      gloo::all_reduce(mesh_, in, out, count, dtype, op, world(), deadline);
    });
  }

  void reduce_scatter(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                      const CallOptions& options) override {
    check_reduction(dtype, op);
    run(begin(CallKind::reduce_scatter, count, dtype, op, 0, options), [&](base::Deadline deadline) {
      gloo::reduce_scatter(mesh_, in, out, std::vector(world(), count), dtype, op, world(), deadline);
    });
  }

  void all_gather(const void* in, void* out, std::size_t count, DType dtype,
                  const CallOptions& options) override {
    run(begin(CallKind::all_gather, count, dtype, ReduceOp::sum, 0, options), [&](base::Deadline deadline) {
      const auto bytes = count * size_of(dtype);
      if (bytes != 0)
        std::memmove(static_cast<std::byte*>(out) + bytes * static_cast<std::size_t>(rank()), in, bytes);
      gloo::all_gather(mesh_, out, std::vector(world(), bytes), deadline);
    });
  }

  void broadcast(void* data, std::size_t count, DType dtype, int root, const CallOptions& options) override {
    check_member(root, "root");
    run(begin(CallKind::broadcast, count, dtype, ReduceOp::sum, root, options), [&](base::Deadline deadline) {
      gloo::broadcast(mesh_, data, count * size_of(dtype), root, deadline);
    });
  }

  void all_to_all(const void* in, void* out, std::size_t count, DType dtype,
                  const CallOptions& options) override {
    run(begin(CallKind::all_to_all, count, dtype, ReduceOp::sum, 0, options), [&](base::Deadline deadline) {
      const auto bytes = count * size_of(dtype);
      const std::vector lengths(world(), bytes);
      std::vector<std::byte> copy;
      if (in == out && bytes != 0) {
        const auto* first = static_cast<const std::byte*>(in);
        copy.assign(first, first + bytes * world());
        in = copy.data();
      }
      gloo::all_to_all(mesh_, in, lengths, out, lengths, deadline);
    });
  }

  void barrier(const CallOptions& options) override {
    run(begin(CallKind::barrier, 0, options), [](base::Deadline) {});
  }

  std::vector<std::string> all_gather_objects(std::string_view object, const CallOptions& options) override {
    return run(begin(CallKind::all_gather_objects, 0, options),
               [&](base::Deadline deadline) { return gloo::all_gather_objects(mesh_, object, deadline); });
  }

  std::string broadcast_object(std::string_view object, int root, const CallOptions& options) override {
    check_member(root, "root");
    return run(begin(CallKind::broadcast_object, root, options), [&](base::Deadline deadline) {
      return gloo::broadcast_object(mesh_, object, root, deadline);
    });
  }

  void send(std::string_view object, int to, const CallOptions& options) override {
    check_peer(to);
    send_over_network(object, to, options);
  }

  std::string receive(int from, const CallOptions& options) override {
    check_peer(from);
    return receive_over_network(from, options);
  }

  std::shared_ptr<Communicator> group(std::span<const int> ranks, const CallOptions& options) override {
    return make(setup_of_group(ranks, options), &mesh_);
  }

 private:
  void leave(const Failure& why) noexcept override { mesh_.abandon(why); }

  /// Checks that all have called the same, then does it.
  template <class Body>
  std::invoke_result_t<Body, base::Deadline> run(const Call& call, Body&& body) {
    try {
      std::vector<Signature> signatures(world());
      signatures[static_cast<std::size_t>(rank())] = call.signature;
      gloo::all_gather(mesh_, signatures.data(), std::vector(world(), sizeof(Signature)), call.deadline);
      check_agreement(call, signatures);
      return body(call.deadline);
    } catch (const ExchangeError& error) {
      fail(call, error.failure());
    }
  }

  Mesh mesh_;
};

std::shared_ptr<Communicator> make(Networked::Setup setup, Mesh* parent) {
  return std::make_shared<Flat>(std::move(setup), parent);
}

}  // namespace

std::shared_ptr<Communicator> connect(Store& store, const std::string& name, int rank, int size,
                                      const Options& options) {
  plugin();
  if (size < 1 || rank < 0 || rank >= size)
    throw UsageError(fmt::format("there is no rank {} among {}", rank, size));
  Networked::Setup setup{std::make_shared<SharedStore>(store),
                         name,
                         rank,
                         {},
                         local_address(options.interface),
                         options.timeout_s,
                         options.timeout_s,
                         base::Deadline::in_seconds(options.timeout_s),
                         name};
  for (int i = 0; i < size; ++i) setup.ranks.push_back(i);
  return make(std::move(setup), nullptr);
}

}  // namespace accelmgr::collective::gloo
