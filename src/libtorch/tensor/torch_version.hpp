// The libtorch that this process has loaded must be the one that accelmgr was built against: its C++
// interface has no stable ABI.
#pragma once

#include <string>
#include <string_view>

namespace accelmgr::tensor {

/// The version of torch in the text of at::show_config(), for example "2.11.0"; "unknown" if there is none.
std::string torch_version_of(std::string_view show_config);

/// Throws UsageError, which names both versions, when the loaded library and the headers have different ones.
void check_torch_version();

}  // namespace accelmgr::tensor
