#include "base/simd/variants.hpp"

#include <gtest/gtest.h>

namespace accelmgr::base::simd {
namespace {

struct Table {};
struct Kernels {
  Isa isa;
  const Table* table;
};

const Table portable, avx2, avx512;

TEST(Variants, TheBestIsTheLastThatTheMachineHas) {
  const Variants<Kernels> all(&portable, &avx2, &avx512);
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
    EXPECT_EQ(all.find(isa) != nullptr, machine_has(isa));
    if (machine_has(isa)) {
      EXPECT_EQ(all.find(isa)->isa, isa);
      EXPECT_GE(all.best().isa, isa);
    }
  }
  EXPECT_EQ(all.find(all.best().isa), &all.best());
}

TEST(Variants, WhatTheCompilerLacksIsNotChosen) {
  const Variants<Kernels> one(&portable, nullptr, nullptr);
  EXPECT_EQ(one.find(Isa::avx2), nullptr);
  EXPECT_EQ(one.find(Isa::avx512), nullptr);
  EXPECT_EQ(one.best().table, &portable);
}

}  // namespace
}  // namespace accelmgr::base::simd
