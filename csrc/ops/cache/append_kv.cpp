#include "csrc/ops/cache/append_kv.h"

#include <array>

#include "csrc/ops/cache/check_append_kv.h"
#include "csrc/ops/cache/choose.h"
#include "csrc/ops/cache/fill.h"
#include "csrc/ops/common/recorder.h"

namespace metal_attn {

void append_kv(const AppendKvArguments& a, Backend& backend) {
  const AppendKvProblem p = check_append_kv(a);
  if (p.writes() || p.rotates_q()) {
    const AppendKvSpecialisation s = choose_append_kv(a, p);
    note(backend, [&s] {
      return JsonObject().add(
          "reason", std::to_string(s.block_rows) + " new rows of a KV head a threadgroup");
    });
    backend.run(append_kv_launch(a, p, s));
  }
}

}  // namespace metal_attn
