#include "torchrun_options.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "base/ipc/cores.hpp"

namespace accelmgr::program {
namespace {

constexpr const char* group = "As torchrun names them";
constexpr const char* master_port = "29500";  // torchrun's defaults.
constexpr const char* rendezvous_port = "29400";

struct Refused {
  const char* names;
  const char* instead;
};
constexpr Refused refused[] = {
    {"-r,--redirects", "use --log-dir DIR: the output of each rank goes to files there, and to the terminal"},
    {"-t,--tee", "use --log-dir DIR: the output of each rank goes to files there, and to the terminal"},
    {"--local-ranks-filter", "use --log-dir DIR: the output of each rank has a file of its own there"},
    {"--duplicate-stdout-filters", "use --log-dir DIR, and grep in the files there"},
    {"--duplicate-stderr-filters", "use --log-dir DIR, and grep in the files there"},
    {"--logs-specs", "use --log-dir DIR"},
    {"--rdzv-conf", "use --rendezvous-timeout S"},
    {"--monitor-interval", "leave it out: the end of a process is seen at once"},
    {"--event-log-handler", "leave it out: a failure is reported in accelmgr-error.json"},
    {"--role", "leave it out: all processes have the role `default`"},
    {"--run-path", "leave it out: python3 runs a PROGRAM that ends in .py"},
    {"--local-addr", "leave it out: nodes meet at the address that --rendezvous names"},
    {"--numa-binding", "put numactl in front of PROGRAM"},
    {"--signals-to-handle",
     "leave it out: SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 and others are forwarded"},
    {"--virtual-local-rank", "leave it out: the GPU of a process has the number LOCAL_RANK"},
};

void add_refused(CLI::App& command) {
  for (const auto& [names, instead] : refused) {
    const auto flag = std::string(names).substr(std::string(names).find("--"));
    const auto refuse = [flag, instead = instead](const std::string&) {
      throw ConfigError(
          fmt::format("{} is an option of torchrun that accelmgr spawn does not have: {}", flag, instead));
    };
    add_text_option(command, both_spellings(names), refuse, "")->expected(0, 1)->group("");
  }
}

std::string nprocs_of(const std::string& text) {
  if (text == "auto" || text == "gpu") return "-1";
  return text == "cpu" ? std::to_string(ipc::allowed_cores()) : text;
}

std::string with_port(const std::string& endpoint, const std::string& port) {
  const auto colon = endpoint.rfind(':');
  const bool has_port = colon != std::string::npos && endpoint.find(']', colon) == std::string::npos;
  return has_port ? endpoint : endpoint + ":" + port;
}

void check_backend(const std::string& backend) {
  if (backend != "c10d" && backend != "static")
    throw ConfigError(
        fmt::format("--rdzv-backend is '{}'; nodes meet at node 0, as with c10d and static: leave it "
                    "out, and use --rendezvous HOST:PORT",
                    backend));
}

}  // namespace

std::string both_spellings(const std::string& name) {
  const auto begin = name.find("--");
  auto underscores = name.substr(begin);
  std::replace(underscores.begin() + 2, underscores.end(), '-', '_');
  return underscores == name.substr(begin) ? name : name + "," + underscores;
}

void add_torchrun_options(CLI::App& command, ConfigArguments& config, TorchrunArguments& arguments) {
  const auto option = [&](const std::string& name, std::function<void(const std::string&)> take,
                          const std::string& help) {
    return add_text_option(command, both_spellings(name), std::move(take), help)->group(group);
  };
  const auto set = [&config](const std::string& key, const std::string& flag, const std::string& value) {
    config.settings.push_back({.assignment = key + "=" + value, .flag = flag});
  };
  command.add_flag("-m,--module", arguments.module, "PROGRAM is a Python module, as for python3 -m")
      ->group(group);
  command.add_flag("--standalone", arguments.standalone, "One node and a free port, as without this option")
      ->group(group);
  option(
      "--nproc-per-node",
      [set](const std::string& n) { set("launch.nprocs", "--nproc-per-node", nprocs_of(n)); },
      "The same as --nprocs; auto and gpu: -1, cpu: one for each core")
      ->type_name("N");
  option(
      "--rdzv-endpoint",
      [set, &arguments](const std::string& endpoint) {
        arguments.asks_for_place = true;
        set("launch.rendezvous", "--rdzv-endpoint", with_port(endpoint, rendezvous_port));
      },
      "The same as --rendezvous; with several nodes each also needs its --node-rank")
      ->type_name("HOST[:PORT]");
  option(
      "--rdzv-id", [&arguments](const std::string& id) { arguments.run_id = id; },
      "TORCHELASTIC_RUN_ID of the ranks")
      ->type_name("ID");
  option("--rdzv-backend", check_backend, "c10d or static: both use the rendezvous of accelmgr")
      ->type_name("B");
  option(
      "--master-addr", [&arguments](const std::string& host) { arguments.master_addr = host; },
      "The host name of --rendezvous, with --master-port")
      ->type_name("HOST");
  option(
      "--master-port", [&arguments](const std::string& port) { arguments.master_port = port; },
      "The port of --rendezvous, with --master-addr")
      ->type_name("PORT");
  add_refused(command);
}

ConfigArguments with_torchrun(ConfigArguments config, const TorchrunArguments& arguments) {
  const auto meet = [&](const std::string& flag, const std::string& address) {
    config.settings.push_back({.assignment = "launch.rendezvous=" + address, .flag = flag});
  };
  std::string least;
  for (auto& setting : config.settings) {
    const auto colon = setting.assignment.find(':');
    if (setting.flag != "--nnodes" || colon == std::string::npos) continue;
    const auto equals = setting.assignment.find('=') + 1;
    least = setting.assignment.substr(equals, colon - equals);
    setting.assignment.erase(equals, colon + 1 - equals);
  }
  if (!least.empty())
    config.settings.push_back({.assignment = "launch.min_nodes=" + least, .flag = "--nnodes"});
  if (arguments.standalone) {
    meet("--standalone", "127.0.0.1:0");
  } else if (!arguments.master_addr.empty() || !arguments.master_port.empty()) {
    auto host = arguments.master_addr.empty() ? "127.0.0.1" : arguments.master_addr;
    if (host.find(':') != std::string::npos && !host.starts_with('[')) host = "[" + host + "]";
    meet(arguments.master_addr.empty() ? "--master-port" : "--master-addr",
         host + ":" + (arguments.master_port.empty() ? master_port : arguments.master_port));
  }
  return config;
}

void check_torchrun(const TorchrunArguments& arguments, const config::LoadedConfig& loaded) {
  const auto nnodes = loaded.config.launch.nnodes;
  if (arguments.standalone && nnodes > 1)
    throw ConfigError(
        fmt::format("--standalone is for one node, but {} is {}", loaded.name("launch.nnodes"), nnodes));
  if (arguments.asks_for_place && nnodes > 1 && loaded.sources.at("launch.node_rank") == "default")
    throw ConfigError(
        fmt::format("--node-rank is missing: each of the {} nodes that meet at --rdzv-endpoint needs its "
                    "number, from 0; node 0 is the node with that address",
                    nnodes));
}

}  // namespace accelmgr::program
