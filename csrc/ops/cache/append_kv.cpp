#include "csrc/ops/cache/append_kv.h"

#include <array>

#include "csrc/ops/cache/check_append_kv.h"
#include "csrc/ops/cache/choose.h"
#include "csrc/ops/cache/fill.h"
#include "csrc/ops/common/json.h"

namespace metal_attn {

void append_kv(const AppendKvArguments& a, Backend& backend) {
  const AppendKvProblem p = check_append_kv(a);
  if (p.writes() || p.rotates_q()) {
    backend.run(append_kv_launch(a, p, choose_append_kv(a, p)));
  }
}

PackedText append_kv_explain(const AppendKvArguments& a) {
  const AppendKvProblem p = check_append_kv(a);
  const AppendKvSpecialisation s = choose_append_kv(a, p);
  const bool launches = p.writes() || p.rotates_q();
  return JsonObject()
      .add("kernel", "append_kv")
      .add("defines", append_kv_defines(a, p, s))
      .add("grid", s.threadgroups)
      .add("threads", std::array<uint32_t, 3>{s.threads, 1, 1})
      .add("threadgroup_bytes", int64_t{0})
      .add("backend", a.k.is_cpu() ? "simulator" : "mps")
      .add("reason", launches
                         ? std::to_string(s.block_rows) + " new rows of a KV head a threadgroup"
                         : "nothing to write or to rotate: no kernel is launched")
      .packed();
}

}  // namespace metal_attn
