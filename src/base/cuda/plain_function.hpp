// Compares the functions of a library, as its header declares them, with our tables of them.
#pragma once

#include <type_traits>
#include <utility>

namespace accelmgr::device {

/// True if a member of a table points to functions as `Function`. Plain::of(T) returns what the table has in
/// place of the library's own T.
template <class Plain, class Member, class Function>
constexpr bool is_plain = false;
template <class Plain, class Table, class Pointer, class Result, class... Arguments>
constexpr bool is_plain<Plain, Pointer Table::*, Result(Arguments...)> =
    std::is_same_v<Pointer, decltype(Plain::of(std::declval<Result>())) (*)(
                                decltype(Plain::of(std::declval<Arguments>()))...)>;

}  // namespace accelmgr::device
