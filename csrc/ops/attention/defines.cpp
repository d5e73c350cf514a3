#include "csrc/ops/attention/defines.h"

#include <utility>

namespace metal_attn {

void define_features(Defines& defines, const FlashFwdFeatures& f, bool wide_rotary) {
  const auto define = [&defines](const char* name, auto value) {
    defines.push_back({name, value});
  };
#define DEFINE_FLAG(NAME, DEFINE, KEY) define_if(f.NAME, defines, #DEFINE);
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
    define_if(f.rotary->q, defines, "Q_ROTARY", 1);
    define_if(f.rotary->k, defines, "K_ROTARY", 1);
    define("ROTARY_ELEMENT", element_name(f.rotary->element));
    define("ROTARY_DIM", f.rotary->dim);
    define_if(f.rotary->first > 0, defines, "ROTARY_FIRST", f.rotary->first);
    define("ROTARY_INTERLEAVED", f.rotary->interleaved);
    define_if(wide_rotary, defines, "WIDE_ROTARY", 1);
  }
  const CacheFeatures& cache = f.cache;
  define_if(cache.page_size > 0, defines, "PAGE_SIZE", cache.page_size);
  define_if(cache.batch_idx, defines, "CACHE_BATCH_IDX", 1);
  if (cache.element) { define("KV_ELEMENT", element_name(*cache.element)); }
  if (cache.formats.quantised()) {
    const auto [k, v] = cache.formats;
    define("KV_FORMAT", static_cast<int>(k));
    define_if(v != k, defines, "V_FORMAT", static_cast<int>(v));
    define_if(cache.k_scale, defines, "K_SCALE", 1);
    define_if(cache.v_scale, defines, "V_SCALE", 1);
    define_if(cache.hadamard > 0, defines, "HADAMARD", cache.hadamard);
  }
  if (f.flex) {
    const FlexFeatures& flex = *f.flex;
    define("FLEX", 1);
    define("FLEX_CAPTURES(X)", flex.captures);
    const std::pair<const char*, const char*> texts[] = {{"FLEX_SCORE", flex.score},
                                                         {"FLEX_SLOPE", flex.slope},
                                                         {"FLEX_MASK", flex.mask},
                                                         {"FLEX_SHARE", flex.share},
                                                         {"FLEX_PLACE", flex.place}};
    for (const auto& [name, text] : texts) {
      if (text != nullptr) { define(name, text); }
    }
    if (flex.q_block > 0) {
      define("FLEX_Q_BLOCK", flex.q_block);
      define("FLEX_KV_BLOCK", flex.kv_block);
      define_if(flex.full_blocks, defines, "FLEX_FULL_BLOCKS", 1);
      define_if(flex.ordered, defines, "FLEX_ORDER", 1);
    }
  }
}

}  // namespace metal_attn
