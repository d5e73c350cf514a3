#include "csrc/ops/attention/flex.h"

#include <mutex>
#include <unordered_set>

#include "csrc/problem/strides.h"

namespace metal_attn {
namespace {

constexpr int64_t kSmallestBlock = 8;
constexpr int64_t kLargestBlock = 1024;

// Returns a copy that is never freed, because launches and compiled specialisations point to it.
const char* intern(const std::string& text) {
  static std::mutex mutex;
  static auto* const texts = new std::unordered_set<std::string>;
  const std::lock_guard lock(mutex);
  return texts->insert(text).first->c_str();
}

std::vector<int64_t> ranks_of(const FlexOptions& flex) {
  std::vector<int64_t> ranks;
  for (const Tensor& tensor : flex.captures) { ranks.push_back(tensor.dim()); }
  return ranks;
}

const char* check_text(ArgumentName name, const std::string& text,
                       const std::vector<int64_t>& ranks) {
  check_flex_text(name, text, ranks);
  return intern(text);
}

const char* check_text_if_any(ArgumentName name, const std::string& text,
                              const std::vector<int64_t>& ranks) {
  return text.empty() ? nullptr : check_text(name, text, ranks);
}

// The Metal type of a captured tensor's elements.
const char* capture_element(const std::string& name, const Tensor& tensor) {
  constexpr char kAllowed[] =
      "bool, int8, uint8, int16, int32, int64, float32, float16 or bfloat16";
  check_known_dtype(name.c_str(), tensor, kAllowed);
  const char* element = metal_element(tensor);
  check(element != nullptr, name, " has dtype ", dtype_text(tensor), "; it must be ", kAllowed);
  return element;
}

// Checks the captured tensors. Returns the kernel's declarations of them.
std::string check_captures(const FlexOptions& flex, const Tensor& q) {
  check(flex.captures.size() <= FLEX_CAPTURES_MAX, "captures has ", flex.captures.size(),
        " tensors; Metal has buffers for at most ", FLEX_CAPTURES_MAX);
  std::string declarations;
  int64_t dimensions = 0;
  for (std::size_t i = 0; i < flex.captures.size(); ++i) {
    const Tensor& tensor = flex.captures[i];
    const std::string name = "captures[" + std::to_string(i) + "]";
    check_same_device(name.c_str(), tensor, "q", q);
    const std::string number = std::to_string(i);
    declarations += std::string("X(const device ") + capture_element(name, tensor) + "*, capture_" +
                    number + ", " + std::to_string(FLEX_FIRST_CAPTURE + i) + ") ";
    check(tensor.numel() > 0, name, " has shape ", shape_text(tensor), "; it must not be empty");
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      check(tensor.size(dim) <= std::numeric_limits<int32_t>::max(), name, " has shape ",
            shape_text(tensor), "; each size must be below 2^31");
    }
    check_storage(name.c_str(), tensor);
    dimensions += tensor.dim();
  }
  check(dimensions <= FLEX_DIMENSIONS_MAX, "captures have ", dimensions,
        " dimensions in all; they may have at most ", FLEX_DIMENSIONS_MAX);
  return declarations;
}

struct List {
  ArgumentName counts_name;
  ArgumentName indices_name;
  const OptionalTensor& counts;
  const OptionalTensor& indices;
};

std::array<List, 2> lists_of(const FlexOptions& f, FlexWalk walk) {
  if (walk == FlexWalk::kOverKeys) {
    return {{{"kv_num_blocks", "kv_indices", f.kv_num_blocks, f.kv_indices},
             {"full_kv_num_blocks", "full_kv_indices", f.full_kv_num_blocks, f.full_kv_indices}}};
  }
  return {{{"q_num_blocks", "q_indices", f.q_num_blocks, f.q_indices},
           {"full_q_num_blocks", "full_q_indices", f.full_q_num_blocks, f.full_q_indices}}};
}

void check_list_shape(ArgumentName name, const Tensor& tensor, int64_t rank, int64_t rows,
                      const Tensor& q, const FlashFwdCall& call) {
  check_same_device(name, tensor, "q", q);
  check_dtype(name, tensor, {ScalarType::Int});
  check(tensor.dim() == rank && (tensor.size(0) == 1 || tensor.size(0) == call.batch) &&
            (tensor.size(1) == 1 || tensor.size(1) == call.heads) && tensor.size(2) == rows,
        name, " has shape ", shape_text(tensor), "; it must be (1 or ", call.batch, ", 1 or ",
        call.heads, ", ", rows, rank == 4 ? ", blocks)" : ")");
  check(rank == 3 || tensor.size(3) <= std::numeric_limits<int32_t>::max(), name, " has shape ",
        shape_text(tensor), "; lists must be shorter than 2^31");
  check_storage(name, tensor);
}

RowStrides list_strides(const Tensor& lists) {
  return {broadcast_stride(lists, 0), broadcast_stride(lists, 1), broadcast_stride(lists, 2)};
}

// Checks that counts and entries on the CPU are in range.
void check_list_values(const List& list, int64_t blocks) {
  if (!list.counts->is_cpu() || list.counts->numel() == 0) { return; }
  const Tensor& counts = *list.counts;
  const Tensor& indices = *list.indices;
  const auto* count = static_cast<const int32_t*>(counts.const_data_ptr());
  const auto* index = static_cast<const int32_t*>(indices.const_data_ptr());
  const RowStrides count_strides = list_strides(counts);
  const RowStrides index_strides = list_strides(indices);
  const auto at = [](const RowStrides& strides, int64_t b, int64_t h, int64_t row) {
    return b * strides.batch + h * strides.head + row * strides.row;
  };
  const int64_t batch = std::max(counts.size(0), indices.size(0));
  const int64_t heads = std::max(counts.size(1), indices.size(1));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t row = 0; row < counts.size(2); ++row) {
        const int32_t n = count[at(count_strides, b, h, row)];
        check(0 <= n && n <= indices.size(3), list.counts_name, " has the count ", n, " for block ",
              row, "; it must be in 0..", indices.size(3));
        const int32_t* entries = index + at(index_strides, b, h, row);
        for (int64_t i = 0; i < n; ++i) {
          const int32_t entry = entries[i * indices.stride(3)];
          check(0 <= entry && entry < blocks, list.indices_name, " lists block ", entry,
                " for block ", row, "; an entry must be at least 0 and less than ", blocks);
        }
      }
    }
  }
}

// Checks the lists. Returns true if there are lists of full blocks.
bool check_lists(const FlexOptions& flex, FlexWalk walk, const Tensor& q,
                 const FlashFwdCall& call) {
  const bool over_keys = walk == FlexWalk::kOverKeys;
  const int64_t queries = divide_up(call.q_length, flex.q_block_size);
  const int64_t keys = divide_up(call.kv_length, flex.kv_block_size);
  const std::array<List, 2> lists = lists_of(flex, walk);
  for (const List& list : lists) {
    check(list.counts.has_value() == list.indices.has_value(), "only one of ", list.counts_name,
          " and ", list.indices_name, " is given; give both or neither");
    if (list.counts) {
      check(lists[0].counts.has_value(), list.counts_name, " is given and ", lists[0].counts_name,
            " is not; lists of full blocks need lists of partial blocks");
      const int64_t rows = over_keys ? queries : keys;
      check_list_shape(list.counts_name, *list.counts, 3, rows, q, call);
      check_list_shape(list.indices_name, *list.indices, 4, rows, q, call);
      check_list_values(list, over_keys ? keys : queries);
    }
  }
  return lists[1].counts.has_value();
}

const OptionalTensor& order_of(const FlexOptions& flex, FlexWalk walk) {
  return walk == FlexWalk::kOverKeys ? flex.kv_order : flex.q_order;
}

// Does not check the values of an order: kernels process every row even if the values are wrong.
void check_order(const FlexOptions& flex, FlexWalk walk, const Tensor& q,
                 const FlashFwdCall& call) {
  const OptionalTensor& order = order_of(flex, walk);
  if (!order) { return; }
  const bool over_keys = walk == FlexWalk::kOverKeys;
  ArgumentName name = over_keys ? "kv_order" : "q_order";
  check(lists_of(flex, walk)[0].counts.has_value(), name, " is given and ",
        lists_of(flex, walk)[0].counts_name, " is not; an order needs the lists of a BlockMask");
  check_same_device(name, *order, "q", q);
  check_dtype(name, *order, {ScalarType::Int});
  const int64_t heads = over_keys ? call.heads : call.kv_heads;
  const int64_t rows = lists_of(flex, walk)[0].counts->size(2);
  check(order->dim() == 4 && order->size(0) == 2 &&
            (order->size(1) == 1 || order->size(1) == call.batch) &&
            (order->size(2) == 1 || order->size(2) == heads) && order->size(3) == rows,
        name, " has shape ", shape_text(*order), "; it must be (2, 1 or ", call.batch, ", 1 or ",
        heads, ", ", rows, ")");
  check_contiguous(name, *order);
  check_storage(name, *order);
}

void check_block_size(ArgumentName name, int64_t size) {
  check(kSmallestBlock <= size && size <= kLargestBlock && size % 8 == 0, name, " is ", size,
        "; it must be a multiple of 8 in ", kSmallestBlock, "..", kLargestBlock);
}

BlockListParams list_params(const List& list) {
  return list.counts ? block_list_params(*list.counts, *list.indices) : BlockListParams{};
}

}  // namespace

FlexFeatures check_flex(const FlexOptions& flex, const Tensor& q, const FlashFwdCall& call) {
  FlexFeatures features{};
  features.captures = intern(check_captures(flex, q));
  const std::vector<int64_t> ranks = ranks_of(flex);
  features.score = check_text_if_any("score", flex.score, ranks);
  features.slope = check_text_if_any("slope", flex.slope, ranks);
  features.mask = check_text_if_any("mask", flex.mask, ranks);
  if (!flex.kv_num_blocks) {
    bool no_block_mask =
        flex.q_block_size == 0 && flex.kv_block_size == 0 && !flex.kv_order && !flex.q_order;
    for (const FlexWalk walk : {FlexWalk::kOverKeys, FlexWalk::kOverQueries}) {
      for (const List& list : lists_of(flex, walk)) {
        no_block_mask = no_block_mask && !list.counts && !list.indices;
      }
    }
    check(no_block_mask,
          "block sizes, lists or an order are given and `kv_num_blocks` is not; give it and "
          "`kv_indices` too");
    return features;
  }
  check_block_size("q_block_size", flex.q_block_size);
  check_block_size("kv_block_size", flex.kv_block_size);
  features.q_block = static_cast<int>(flex.q_block_size);
  features.kv_block = static_cast<int>(flex.kv_block_size);
  features.full_blocks = check_lists(flex, FlexWalk::kOverKeys, q, call);
  const bool full_queries = check_lists(flex, FlexWalk::kOverQueries, q, call);
  check_order(flex, FlexWalk::kOverKeys, q, call);
  check_order(flex, FlexWalk::kOverQueries, q, call);
  features.ordered = starts_in_order(flex, FlexWalk::kOverKeys);
  check(!flex.q_num_blocks || full_queries == features.full_blocks, "`full_q_num_blocks` is ",
        full_queries ? "given" : "None", " and `full_kv_num_blocks` is ",
        features.full_blocks ? "given" : "None", "; give both or neither");
  return features;
}

void check_flex_gradients(const FlexOptions& flex) {
  check(
      !flex.kv_num_blocks || flex.q_num_blocks,
      "`q_num_blocks` is None; the gradients of a call with a BlockMask need its transposed lists: "
      "BlockMask.from_kv_blocks makes them with compute_q_blocks=True");
  check(flex.score.empty() == flex.slope.empty(), "score is ",
        flex.score.empty() ? "empty" : "given", " and slope is ",
        flex.slope.empty() ? "empty" : "given", "; give both or neither");
}

void check_shares(const FlexOptions& flex) {
  check(flex.places.size() == flex.shares.size() &&
            flex.share_captures.size() == flex.shares.size() &&
            flex.share_owners.size() == flex.shares.size(),
        "`shares`, `places`, `share_captures` and `share_owners` have ", flex.shares.size(), ", ",
        flex.places.size(), ", ", flex.share_captures.size(), " and ", flex.share_owners.size(),
        " entries; they must have the same length");
}

FlexFeatures with_share(FlexFeatures features, const FlexOptions& flex, std::size_t share) {
  const int64_t number = flex.share_captures[share];
  check(0 <= number && number < static_cast<int64_t>(flex.captures.size()), "`share_captures`[",
        share, "] is ", number, "; it must be the index of one of ", flex.captures.size(),
        " captures");
  constexpr int64_t kOwners = kOwnBatch | kOwnHead | kOwnQuery | kOwnKey;
  check((flex.share_owners[share] & ~kOwners) == 0, "`share_owners`[", share, "] is ",
        flex.share_owners[share], "; it must be in 0..", kOwners);
  const std::vector<int64_t> ranks = ranks_of(flex);
  features.slope = nullptr;
  features.share = check_text("shares", flex.shares[share], ranks);
  features.place = check_text("places", flex.places[share], ranks);
  return features;
}

bool starts_in_order(const FlexOptions& flex, FlexWalk walk) {
  return order_of(flex, walk).has_value();
}

bool has_long_lists(const FlexOptions& flex) {
  bool is_long = false;
  for (const FlexWalk walk : {FlexWalk::kOverKeys, FlexWalk::kOverQueries}) {
    for (const List& list : lists_of(flex, walk)) {
      is_long = is_long || has_long_offsets(list.counts) || has_long_offsets(list.indices);
    }
  }
  return is_long;
}

int64_t listed_rows(const FlexOptions& flex, FlexWalk walk) {
  int64_t longest = 0;
  for (const List& list : lists_of(flex, walk)) {
    longest += list.indices ? list.indices->size(3) : 0;
  }
  return longest * (walk == FlexWalk::kOverKeys ? flex.kv_block_size : flex.q_block_size);
}

BlockListParams block_list_params(const OptionalTensor& counts, const Tensor& indices) {
  const auto [batch, head, row] = list_strides(indices);
  return {counts ? list_strides(*counts) : RowStrides{},
          {batch, head, row, indices.stride(3)},
          static_cast<int32_t>(indices.size(3))};
}

FlexParams flex_params(const FlexOptions& flex, FlexWalk walk) {
  FlexParams params{};
  std::size_t i = 0;
  for (const Tensor& tensor : flex.captures) {
    for (int64_t dim = 0; dim < tensor.dim(); ++dim, ++i) {
      params.capture_strides[i] = tensor.stride(dim);
      params.capture_sizes[i] = static_cast<int32_t>(tensor.size(dim));
    }
  }
  const std::array<List, 2> lists = lists_of(flex, walk);
  params.partial = list_params(lists[0]);
  params.full = list_params(lists[1]);
  if (const OptionalTensor& order = order_of(flex, walk)) {
    params.order_batches = static_cast<int32_t>(order->size(1));
    params.order_heads = static_cast<int32_t>(order->size(2));
  }
  return params;
}

void append_block_lists(Buffers& buffers, const FlashFwdArguments& a, FlexWalk walk) {
  if (!a.flex) { return; }
  const std::array<List, 2> lists = lists_of(*a.flex, walk);
  const std::array<uint32_t, 4> slots{FLEX_BLOCK_COUNTS, FLEX_BLOCK_INDICES, FLEX_FULL_BLOCK_COUNTS,
                                      FLEX_FULL_BLOCK_INDICES};
  for (std::size_t i = 0; i < lists.size(); ++i) {
    if (lists[i].counts) {
      // Lists of length 0 have no memory, and kernels do not read them.
      const Tensor& indices = *lists[i].indices;
      buffers.push_back({slots[2 * i], *lists[i].counts, false});
      buffers.push_back(
          {slots[2 * i + 1], indices.numel() > 0 ? indices : *lists[i].counts, false});
    }
  }
}

void append_block_order(Launch& launch, const FlashFwdArguments& a, FlexWalk walk) {
  if (!a.flex || !starts_in_order(*a.flex, walk)) { return; }
  const auto [x, y, z] = launch.threadgroups;
  check(double(x) * y * z <= double(std::numeric_limits<uint32_t>::max()),
        walk == FlexWalk::kOverKeys ? "`kv_order`" : "`q_order`", " is given for a grid of ", x,
        " x ", y, " x ", z, " threadgroups; there must be fewer than 2^32");
  launch.buffers.push_back({FLEX_BLOCK_ORDER, *order_of(*a.flex, walk), false});
}

}  // namespace metal_attn
