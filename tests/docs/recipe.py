"""The edits for two new score options, as docs/adding-a-kernel.md explains them.

`temperature` is a tensor (H,) with a gradient: a factor of each head's scores, before the other
rules. `score_clamp` is a number c > 0: scores are clamped to -c..c after the other rules, with
slope 0 beyond. test_recipe.py makes the edits in a copy of the sources, builds it and runs
recipe_case.py with it. temperature shares a buffer slot with the gradient of a bias.
"""

import ast
import re

# Each edit is a line `file: place`, then the lines to add, or the text after `+`. Places:
# `list X`, the end of the macro list X; `end X Y`, the end of block Y in block X, before a last
# `return`; `start X Y`; `before X`, the line before the constant X; `value X`, the end of its
# value; `parameter X`, the end of the function's parameters. Blocks of .py files are classes and
# functions; blocks of other files are enclosed by braces.
TEMPERATURE = """
csrc/problem/options.h: list FLASH_OPTIONS
  X(OptionalTensor, temperature, None, STEP)
csrc/problem/attention.h: list FLASH_FLAGS
  X(temperature, TEMPERATURE, IN_KEY)
csrc/ops/attention/check.cpp: end check_score_options
  if (const std::optional<Tensor>& temperature = a.options.temperature) {
    check_operand("temperature", *temperature, "q", a.q, {ScalarType::Float}, {{call.heads}});
    check(!call.bias, "`temperature` is given and so is a bias; give one of them");
    features.temperature = true;
  }
csrc/ops/attention/fill.cpp: end flash_inputs
  read_optional(FLASH_TEMPERATURE, o.temperature);
shaders/params/attention.h: end FlashBuffer
  FLASH_TEMPERATURE = 24,
shaders/features.h: before SCORE_DERIVATIVES
FEATURE(TEMPERATURE)
shaders/features.h: value SCORE_DERIVATIVES +  || TEMPERATURE
shaders/inputs.h: list FLASH_INPUTS
  X(TEMPERATURE, const device float*, temperature, FLASH_TEMPERATURE)
shaders/scores.h: start ScoreRules
  float temperature;  // TEMPERATURE
shaders/scores.h: end ScoreRules reset
    if (TEMPERATURE) {
      temperature = inputs.temperature[head];
    }
shaders/scores.h: start ScoreRules apply_rules
    if (TEMPERATURE) {
      score = score * temperature;
      slope = slope * temperature;
    }
torch_metal_attn/reference.py: parameter transformed + , temperature: Tensor | None = None
torch_metal_attn/reference.py: start transformed
    if temperature is not None:
        scores = scores * temperature.to(scores.dtype)[:, None, None]
torch_metal_attn/call/options.py: end NewerOptions
    temperature: Tensor | None
torch_metal_attn/ops/flash_fwd_autograd.py: end _gradients
    # A score is temperature times a product of q.
    if needed.get("temperature"):
        products = (gradients["q"].float() * q.float()).sum(-1).sum(0 if packed else (0, 2))
        gradients["temperature"] = products / arguments["temperature"]
"""
SCORE_CLAMP = """
csrc/problem/options.h: list FLASH_OPTIONS
  X(Number, score_clamp, 0.0, STEP)
csrc/problem/attention.h: list FLASH_FLAGS
  X(score_clamp, SCORE_CLAMP, IN_KEY)
csrc/ops/attention/check.cpp: end check_score_options
  const double limit = a.options.score_clamp;
  check(limit >= 0.0 && std::isfinite(static_cast<float>(limit * std::numbers::log2e)),
        "`score_clamp` is ", limit, "; it must be 0 (off) or positive and finite");
  features.score_clamp = limit > 0.0;
csrc/ops/attention/fill.cpp: end flash_problem
  params.clamp_log2 = static_cast<float>(o.score_clamp * std::numbers::log2e);
shaders/params/attention.h: end FlashParams
  float clamp_log2;  // SCORE_CLAMP
shaders/features.h: before SCORE_DERIVATIVES
FEATURE(SCORE_CLAMP)
shaders/features.h: value SCORE_DERIVATIVES +  || SCORE_CLAMP
shaders/scores.h: end ScoreRules apply_rules
    if (SCORE_CLAMP) {
      // Comparisons keep NaN, which clamp() does not.
      const float limit = params.clamp_log2;
      UNROLL
      for (short e = 0; e < 2; e++) {
        slope[e] = fabs(score[e]) > limit ? 0.0f : slope[e];
        score[e] = score[e] > limit ? limit : score[e] < -limit ? -limit : score[e];
      }
    }
torch_metal_attn/reference.py: parameter transformed + , score_clamp: float = 0.0
torch_metal_attn/reference.py: end transformed
    if score_clamp > 0:
        scores = scores.clamp(-score_clamp, score_clamp)
torch_metal_attn/call/options.py: end NewerOptions
    score_clamp: float
torch_metal_attn/testing/attention.py: end Attention
    score_clamp: float = field(0.0, one_of(0.0, 0.5, 2.0), calls=_SCORED, least=0, feature=1.0)
"""
OPTIONS = {"temperature": TEMPERATURE, "score_clamp": SCORE_CLAMP}
EDIT = re.compile(
    r"^([\w/]+\.\w+): (\w+) ([\w ]+?)(?: \+ ?(.*)\n|\n((?:(?![\w/]+\.\w+: ).*\n)*))", re.M
)


def apply(root, option):
    edits = EDIT.findall(OPTIONS[option])
    for name, place, names, more, lines in edits:
        path, added = root / name, more or lines
        text = path.read_text(encoding="utf-8")
        at = (python_offset if path.suffix == ".py" else offset)(text, place, names.split())
        if place == "list":
            added = " \\\n" + added.rstrip("\n")
        path.write_text(text[:at] + added + text[at:], encoding="utf-8")
    return {name for name, *_ in edits}


def offset(text, place, names):
    patterns = {
        "list": rf"^#define {names[0]}\(X\)(?:.*\\\n)*.*",
        "value": rf"\b{names[0]} = [^;]*",
        "before": rf"^(?=.*\b{names[0]} =)",
    }
    if place in patterns:
        (found,) = re.finditer(patterns[place], text, re.M)
        return found.end()
    begin, end = 0, len(text)
    for name in names:  # each block is inside the previous one
        found = re.compile(rf"\b{name}\b(?:\([^{{;]*\))?[^;{{}}()]*\{{\n").search(text, begin, end)
        assert found, f"no block {name}"
        begin = end = found.end()
        depth = 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        end = text.rindex("\n", begin, end) + 1
    last = re.search(r"^ *return [^;]*;\n\Z", text[begin:end], re.M)
    return begin if place == "start" else begin + last.start() if last else end


def python_offset(text, place, names):
    nodes = {node.name: node for node in ast.walk(ast.parse(text)) if hasattr(node, "name")}
    node, lines = nodes[names[-1]], text.splitlines(keepends=True)
    if place == "parameter":
        last = node.args.kw_defaults[-1]
        return sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset
    last = node.body[0 if place == "start" else -1]  # the docstring or the last statement
    before = isinstance(last, ast.Return)
    return sum(map(len, lines[: last.lineno - 1 if before else last.end_lineno]))
