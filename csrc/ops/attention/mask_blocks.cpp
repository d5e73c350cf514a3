#include "csrc/ops/attention/mask_blocks.h"

#include "csrc/ops/attention/fill.h"
#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/recorder.h"
#include "shaders/params/mask_blocks.h"

namespace metal_attn {
namespace {

// The elements that a lane reads at a time.
constexpr int kWord = 8;

// With fewer scores, attention takes no longer than the additional launch.
constexpr double kManyScores = 1 << 20;

// The most loads of the pre-pass, relative to those of a forward that hides nothing.
constexpr double kMostLoads = 0.25;

// The number of queries in most tiles of the forward.
constexpr int kTileQueries = 64;

// True if lanes can read kWord neighbouring keys together.
bool reads_words(const FlashFwdCall& call) {
  const Tensor& mask = *call.mask;
  const int64_t last = mask.dim() - 1;
  return last >= 0 && call.kv_length % kWord == 0 && mask.size(last) == call.kv_length &&
         mask.stride(last) == 1 && rows_aligned(mask, kWord);
}

int64_t size_unless(int64_t stride, int64_t size) { return stride == 0 ? 1 : size; }

// The elements that the mask has in memory.
double mask_elements(const FlashFwdCall& call) {
  const MaskStrides s = mask_strides(call.mask);
  return double(size_unless(s.batch, call.batch)) * double(size_unless(s.head, call.heads)) *
         double(size_unless(s.query, call.q_length)) * double(size_unless(s.key, call.kv_length));
}

double scores(const FlashFwdCall& call) {
  return double(call.batch) * call.heads * call.q_length * call.kv_length;
}

// The loads per key of a forward's tile: 16 bytes of k or v each, or 1 or 2 elements of the mask.
double forward_loads(const FlashFwdProblem& problem, int queries) {
  const double columns = problem.head_dim_qk + problem.head_dim_v;
  return columns * element_bytes(problem.element) / 16 +
         double(queries) / (problem.features.mask->pairs ? 2 : 1);
}

struct ListShape {
  int64_t batch;
  int64_t heads;
  int64_t lists;   // lists of a head
  int64_t blocks;  // the most entries of a list
};

ListShape shape_of(const FlashFwdCall& call, const MaskTile& tile) {
  const MaskStrides s = mask_strides(call.mask);
  const int64_t query_tiles = divide_up(call.q_length, tile.queries);
  const int64_t key_tiles = divide_up(call.kv_length, tile.keys);
  const bool over_keys = tile.walk == FlexWalk::kOverKeys;
  return {size_unless(s.batch, call.batch), size_unless(s.head, call.heads),
          over_keys ? size_unless(s.query, query_tiles) : size_unless(s.key, key_tiles),
          over_keys ? key_tiles : query_tiles};
}

Launch launch_of(const FlashFwdCall& call, const MaskTile& tile) {
  const ListShape shape = shape_of(call, tile);
  const MaskStrides s = mask_strides(call.mask);
  Launch launch("mask_blocks", {{"WORD", reads_words(call) ? "uint2" : "uchar"}});
  launch.set_params(MASK_BLOCKS_PARAMS,
                    MaskBlocksParams{s.batch, s.head, s.query, s.key, call.q_length, call.kv_length,
                                     tile.queries, tile.keys, tile.walk == FlexWalk::kOverKeys,
                                     static_cast<int32_t>(shape.blocks)});
  launch.threadgroups = extent(shape.lists, shape.heads, shape.batch);
  launch.threads = {kSimdgroupThreads * MASK_BLOCKS_SIMDGROUPS, 1, 1};
  return launch;
}

// The reason not to skip blocks that the mask hides, or null.
const char* no_mask_blocks(const FlashFwdCall& call) {
  const FlashFwdFeatures& f = call.problem.features;
  if (f.band || f.chunk || f.varlen || f.seqused_k || f.leftpad_k || f.cache.page_size > 0 ||
      f.cache.batch_idx) {
    return "as causality, windows, chunks, lengths or pages also hide keys";
  }
  if (call.kv_length < kManyRows || scores(call) < kManyScores) { return "as the call is short"; }
  const int queries = std::min(call.q_length, kTileQueries);
  const double loads =
      queries * mask_elements(call) / scores(call) / (reads_words(call) ? kWord : 1);
  return loads <= kMostLoads * forward_loads(call.problem, queries)
             ? nullptr
             : "as a pre-pass would read too much of the mask";
}

}  // namespace

bool skips_mask_blocks(const FlashFwdCall& call) {
  return call.mask && no_mask_blocks(call) == nullptr;
}

std::optional<MaskBlocks> list_mask_blocks(const FlashFwdCall& call,
                                           const FlashFwdFeatures& features, const MaskTile& tile,
                                           Backend& backend) {
  if (!features.mask_blocks) { return std::nullopt; }
  const ListShape shape = shape_of(call, tile);
  MaskBlocks lists{
      new_empty(*call.mask, Dims{shape.batch, shape.heads, shape.lists}, ScalarType::Int),
      new_empty(*call.mask, Dims{shape.batch, shape.heads, shape.lists, shape.blocks},
                ScalarType::Int)};
  Launch launch = launch_of(call, tile);
  launch.buffers = {{MASK_BLOCKS_MASK, *call.mask, false},
                    {MASK_BLOCKS_COUNTS, lists.counts, true},
                    {MASK_BLOCKS_ENTRIES, lists.entries, true}};
  note(backend, [] {
    return JsonObject().add("threadgroup_bytes", int64_t{kSimdgroupThreads * sizeof(uint32_t)});
  });
  backend.run(launch);
  return lists;
}

void bind_mask_blocks(const std::optional<MaskBlocks>& lists, Buffers& buffers,
                      FlashParams& problem) {
  if (!lists) { return; }
  buffers.push_back({FLEX_BLOCK_COUNTS, lists->counts, false});
  buffers.push_back({FLEX_BLOCK_INDICES, lists->entries, false});
  problem.flex.partial = block_list_params(lists->counts, lists->entries);
}

std::string describe_mask_blocks(const FlashFwdCall& call, const MaskTile& tile) {
  if (!call.mask) { return ""; }
  if (const char* reason = no_mask_blocks(call)) {
    return std::string("blocks that attn_mask hides are computed, ") + reason;
  }
  const auto [batch, heads, lists, blocks] = shape_of(call, tile);
  return "blocks of " + std::to_string(tile.queries) + " queries and " + std::to_string(tile.keys) +
         " keys that attn_mask hides are skipped: mask_blocks reads " +
         std::to_string(int64_t(mask_elements(call))) + " bytes of the mask and writes " +
         std::to_string(batch * heads * lists * (blocks + 1) * int64_t{sizeof(int32_t)}) +
         " bytes of lists";
}

}  // namespace metal_attn
