#include "libtorch/model/checked_forward.hpp"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "base/exception_text.hpp"
#include "libtorch/tensor/device_failure.hpp"

namespace accelmgr::model {
namespace {

/// Names, dtypes and shapes, for example "input Float [4, 16], target Long [4]".
std::string fields_of(const Batch& batch) {
  std::string text;
  for (const auto& [name, tensor] : batch.fields())
    text += fmt::format("{}{} {} [{}]", text.empty() ? "" : ", ", name, c10::toString(tensor.scalar_type()),
                        fmt::join(tensor.sizes(), ", "));
  return text;
}

}  // namespace

Outputs checked_forward(Model& model, const Batch& batch) {
  try {
    return model.forward(batch);
  } catch (const c10::Error&) {
    tensor::rethrow_device_failure();
    auto text = base::current_exception_text();
    text.insert(std::min(text.find('\n'), text.size()),
                fmt::format(" (forward() was given {})", fields_of(batch)));
    throw ModelError(text);
  }
}

}  // namespace accelmgr::model
