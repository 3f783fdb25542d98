// Byte-level language modelling: windows of text files, and the bytes that follow.
#pragma once

#include <memory>

#include "accelmgr/batch_source.hpp"

namespace accelmgr::data {

/// Makes a source of the documents of `config.data.files`. Fields: "input" int64 [T], bytes t .. t+T-1 of a
/// document, and "target" int64 [T], bytes t+1 .. t+T, where T is `data.sequence_length`. No window crosses
/// from one document into another.
///
/// In each epoch every document is cut into consecutive windows from a random phase in [0, T) on, so that
/// windows of different epochs differ. Then all windows are shuffled. Both depend on (`data.seed`, epoch)
/// alone. At most T - 1 bytes at either end of a document are left out of an epoch, so the number of windows
/// differs a little between epochs.
///
/// held_out() gives the consecutive windows of the held-out documents from their first bytes on, once, in the
/// order of paths.
///
/// Throws ConfigError (no files, values out of range, a `gpt` whose context or vocabulary is too small) and
/// DataError (see text_corpus.hpp; a file shorter than T + 1 bytes).
std::unique_ptr<BatchSource> text_source(const Config& config);

}  // namespace accelmgr::data
