#include "engine/session/kernels_body.hpp"

namespace accelmgr::session {

const KernelTable* const portable_kernels = &table;

}  // namespace accelmgr::session
