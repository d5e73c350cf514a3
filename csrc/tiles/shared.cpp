#include "csrc/tiles/shared.h"

#include <algorithm>
#include <cmath>

#include "csrc/problem/rope.h"

namespace metal_attn {

bool wide_loads(const FlashFwdProblem& problem) {
  return problem.aligned && problem.head_dim_qk % 8 == 0 && problem.head_dim_v % 8 == 0;
}

bool wide_rotary(const FlashFwdProblem& problem) {
  if (!problem.features.rotary) {
    return false;
  }
  const FusedRotary& rotary = *problem.features.rotary;
  return wide_loads(problem) && rotary.aligned &&
         rotates_by_chunks(problem.element, rotary.dim, rotary.interleaved);
}

double idle_factor(double simdgroups, bool banded, const Gpu& gpu) {
  if (simdgroups == 0.0) {
    return 1.0;
  }
  // Two thirds of the SIMD groups still do more than two thirds of the work (replay.md).
  constexpr double kExponent = 0.85;
  const double waves = simdgroups / double(kSimdgroupsPerCore * gpu.cores);
  const double uneven = banded ? 1.0 + std::max(2.0 - waves, 0.0) / 2 : 1.0;
  return uneven / std::pow(std::min(waves, 1.0), kExponent);
}

int feature_registers(const FlashFwdFeatures& f) {
  const bool unpaired_keys = (f.mask && !f.mask->pairs) || (f.bias && !f.bias->pairs);
  // What score_mod and mask_mod hold is not known; by judgement.
  return (f.band || f.chunk ? 3 : 0) + (unpaired_keys ? 14 : 0) + (f.flex ? 16 : 0);
}

void append_features(Defines& defines, const FlashFwdFeatures& f, bool wide_rotary) {
  const auto define = [&defines](const char* name, auto value) {
    defines.push_back({name, value});
  };
  // A feature that is off is not defined, which the preprocessor takes for 0.
  const auto feature = [&define](const char* name, bool on) {
    if (on) {
      define(name, 1);
    }
  };
#define DEFINE_FLAG(NAME, DEFINE) feature(#DEFINE, f.NAME);
  FLASH_FLAGS(DEFINE_FLAG)
#undef DEFINE_FLAG
  if (f.mask) {
    define("MASK", 1);
    define("MASK_PAIRS", f.mask->pairs);
  }
  if (f.bias) {
    define("BIAS", 1);
    define("BIAS_PAIRS", f.bias->pairs);
    define("BIAS_ELEMENT", element_name(f.bias->element));
  }
  if (f.sink) {
    define("SINK", 1);
    define("SINK_ELEMENT", element_name(*f.sink));
  }
  if (f.rotary) {
    feature("Q_ROTARY", f.rotary->q);
    feature("K_ROTARY", f.rotary->k);
    define("ROTARY_ELEMENT", element_name(f.rotary->element));
    define("ROTARY_DIM", f.rotary->dim);
    define("ROTARY_INTERLEAVED", f.rotary->interleaved);
    feature("WIDE_ROTARY", wide_rotary);
  }
  if (f.cache.page_size > 0) {
    define("PAGE_SIZE", f.cache.page_size);
  }
  feature("CACHE_BATCH_IDX", f.cache.batch_idx);
  if (f.cache.element) {
    define("KV_ELEMENT", element_name(*f.cache.element));
  }
  if (f.cache.format != KvFormat::kPlain) {
    define("KV_FORMAT", static_cast<int>(f.cache.format));
    feature("K_SCALE", f.cache.k_scale);
    feature("V_SCALE", f.cache.v_scale);
  }
  if (f.flex) {
    const auto text = [&define](const char* name, const char* given) {
      if (given != nullptr) {
        define(name, given);
      }
    };
    define("FLEX", 1);
    define("FLEX_CAPTURES(X)", f.flex->captures);
    text("FLEX_SCORE", f.flex->score);
    text("FLEX_SLOPE", f.flex->slope);
    text("FLEX_MASK", f.flex->mask);
    text("FLEX_SHARE", f.flex->share);
    text("FLEX_PLACE", f.flex->place);
    if (f.flex->q_block > 0) {
      define("FLEX_Q_BLOCK", f.flex->q_block);
      define("FLEX_KV_BLOCK", f.flex->kv_block);
      feature("FLEX_FULL_BLOCKS", f.flex->full_blocks);
      feature("FLEX_ORDER", f.flex->ordered);
    }
  }
}

}  // namespace metal_attn
