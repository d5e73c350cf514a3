#include "csrc/tiles/shared.h"

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
         rotates_by_chunks(problem.element, rotary.first, rotary.dim, rotary.interleaved);
}

Load load_of(const FlashFwdFeatures& f) {
  if (f.rotary) {
    return Load::kRotary;
  }
  const bool heavy = f.dropout || f.bias || f.flex || f.unpaired_keys() || f.cache.page_size > 0 ||
                     f.cache.formats.quantised();
  return heavy ? Load::kHeavy : Load::kLight;
}

std::string row_text(const TileConditions* row) {
  if (row == nullptr) {
    return "a tile of a tuned table";
  }
  const int registers = recorded_registers(row);
  std::string text = registers == 0 ? "registers not measured"
                                    : "at most " + std::to_string(registers) +
                                          " registers a thread, of which M1 has 128";
  text += std::string(", by the row for ") + std::to_string(row->bits) + " bits, head dims up to " +
          std::to_string(row->columns);
  text += row->queries != kAny ? ", " + std::to_string(row->queries) + " queries" : "";
  text += row->load == Load::kLight ? ", light features" : "";
  return text + (row->family > kM1 ? ", M3 and later" : "");
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
    if (f.rotary->first > 0) {
      define("ROTARY_FIRST", f.rotary->first);
    }
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
  if (f.cache.formats.quantised()) {
    define("KV_FORMAT", static_cast<int>(f.cache.formats.k));
    if (f.cache.formats.v != f.cache.formats.k) {
      define("V_FORMAT", static_cast<int>(f.cache.formats.v));
    }
    feature("K_SCALE", f.cache.k_scale);
    feature("V_SCALE", f.cache.v_scale);
    if (f.cache.hadamard > 0) {
      define("HADAMARD", f.cache.hadamard);
    }
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
