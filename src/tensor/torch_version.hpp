// The libtorch that this process has loaded must be the one that accelmgr was built against: its C++
// interface has no stable ABI.
#pragma once

#include <string>
#include <string_view>

namespace accelmgr::tensor {

/// "2.11.0", as the loaded library says it in at::show_config(); "unknown" if it does not.
std::string torch_version_of(std::string_view show_config);

/// Throws UsageError with both versions when the loaded library is another than the headers were.
void check_torch_version();

}  // namespace accelmgr::tensor
